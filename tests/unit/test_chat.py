"""Prompts as lists of messages: through the chat template, to the rewards as they are, to people as text."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from klamp import models
from klamp.chat import as_text
from klamp.errors import ConfigError
from klamp.prompts import load_prompts

TEMPLATE = (
    "{% for m in messages %}w{{ loop.index0 }} {{ m.content }}{% if m.role != 'assistant' %} w9 {% endif %}{% endfor %}"
    "{% if add_generation_prompt %} w8{% endif %}"
)
TALK = [{"role": "system", "content": "w20 w21"}, {"role": "user", "content": "w22"}]
ASKED = [{"role": "user", "content": "w23"}]


@pytest.fixture(scope="module")
def chat_model(words_model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The small model with a chat template."""
    folder = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(words_model, folder)
    tokenizer = models.load_tokenizer(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def talk_file(tmp_path: Path) -> str:
    """The prompt column of a TRL data set, with another column, as `Dataset.to_json` writes it."""
    file = tmp_path / "talk.jsonl"
    rows = [{"prompt": TALK, "answer": "w1"}, {"prompt": ASKED, "answer": "w2"}, {"prompt": "w24", "answer": "w3"}]
    file.write_text("\n".join(map(json.dumps, rows)))
    return str(file)


def test_messages_go_through_the_template(chat_model: str) -> None:
    tokenizer = models.load_tokenizer(chat_model)
    reply = [*ASKED, {"role": "assistant", "content": "w24"}]
    encoded = models.encode_prompts(tokenizer, [TALK, ASKED, "w23", reply])
    talk, asked, text, continued = (tokenizer.decode(ids) for ids in encoded)
    assert talk == "w0 w20 w21 w9 w1 w22 w9 w8"
    assert asked == text == "w0 w23 w9 w8"  # text is one user turn
    assert continued == "w0 w23 w9 w1 w24"  # the assistant's turn goes on


def test_a_model_without_a_template_refuses_messages(
    trainer: Any, words_model: str, chat_model: str, talk_file: str
) -> None:
    with pytest.raises(ConfigError, match=r"prompts\[0\] is a list of messages, .*has no chat template.*instruct"):
        trainer(prompts=talk_file)
    with pytest.raises(ConfigError, match=r"prompts\[0\] is a list of messages, .*chat is False"):
        models.encode_prompts(models.load_tokenizer(chat_model), [TALK], chat=False)


def test_rewards_get_messages_as_they_are_and_samples_show_text(
    trainer: Any, chat_model: str, talk_file: str, tmp_path: Path
) -> None:
    seen: list[tuple[Any, str, str]] = []

    def reward(prompts: list[Any], completions: list[str], answer: list[str]) -> list[float]:
        seen.extend(zip(prompts, completions, answer, strict=True))
        return [float(len(c)) for c in completions]

    trainer(rewards=reward, model=chat_model, prompts=talk_file, steps=3).run()
    asked = {json.dumps(prompt): answer for prompt, _, answer in seen}
    assert asked == {json.dumps(TALK): "w1", json.dumps(ASKED): "w2", json.dumps("w24"): "w3"}
    assert all(isinstance(completion, str) for _, completion, _ in seen)
    lines = (tmp_path / "run" / "samples.jsonl").read_text().splitlines()
    assert {json.loads(line)["prompt"] for line in lines} <= {"system: w20 w21\nuser: w22", "w23", "w24"}


def test_messages_are_measured(chat_model: str, talk_file: str) -> None:
    from klamp.measure import measure_kl

    prompts = load_prompts(talk_file, chat_model).given
    found = measure_kl(chat_model, chat_model, prompts, max_tokens=4, maps=False)
    assert found.kl.mean == 0
    assert {p["text"] for p in found.top_prompts} == {as_text(p) for p in prompts}


def test_a_reward_model_reads_a_conversation(chat_model: str, words_model: str, tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForSequenceClassification

    from klamp.train.rewards import Classifier

    for name in (chat_model, words_model):
        folder = tmp_path / Path(name).parent.name
        settings = LlamaConfig.from_pretrained(name, num_labels=1)
        LlamaForSequenceClassification(settings).save_pretrained(folder)
        models.load_tokenizer(name).save_pretrained(folder)
        scores = Classifier(str(folder))([ASKED, ASKED, TALK], ["w1", "w2", "w1"])
        assert len(set(scores)) == 3


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ([], "the list of messages is empty"),
        (["hello"], "message 0 is 'hello', not an object"),
        ([{"role": "user", "text": "x"}], r'message 0 needs a "content" of text, got None \(it has "role", "text"\)'),
        ([*ASKED, {"content": "x"}], 'message 1 needs a "role" of text'),
        ([{"role": "user", "content": [{"type": "image"}]}], 'message 0 needs a "content" of text'),
    ],
)
def test_messages_that_are_none_are_refused_by_line(tmp_path: Path, prompt: Any, says: str) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(json.dumps({"prompt": "fine"}) + "\n" + json.dumps({"prompt": prompt}))
    with pytest.raises(ConfigError, match=f"line 2: .*{says}"):
        load_prompts(str(file), "tiny")


def test_a_wrong_key_is_answered_with_the_keys_that_are_there(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"question": "What is 3 + 4?", "answer": "7"}\n')
    with pytest.raises(ConfigError, match=r'there is no "prompt"\. The keys are "question", "answer"; rename the one'):
        load_prompts(str(file), "tiny")
