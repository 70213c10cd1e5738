"""What a reward does wrong is said with the sample it did it to, or masked and counted."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from klamp.advantages import alike, group_advantages
from klamp.errors import ConfigError, RewardError
from klamp.train.config import RewardConfig
from klamp.train.metrics import without_signal
from klamp.train.rewards import Scorer

PROMPTS, COMPLETIONS = ["p"] * 4, ["good one", "fine", "bad", "last"]


def score(function: Any, **settings: Any) -> Any:
    return Scorer(RewardConfig(**settings), [function])(PROMPTS, COMPLETIONS, {})


def raises(prompts: list[str], completions: list[str]) -> list[float]:
    if "bad" in completions:
        raise KeyError("no such answer")
    return [1.0] * len(completions)


def nan(prompts: list[str], completions: list[str]) -> list[float]:
    return [math.nan if c == "bad" else 1.0 for c in completions]


def short(prompts: list[str], completions: list[str]) -> list[float]:
    return [1.0]


def hangs(prompts: list[str], completions: list[str]) -> list[float]:
    threading.Event().wait()
    return []


def whole_batch(prompts: list[str], completions: list[str]) -> list[float]:
    if len(completions) > 1:
        raise ValueError("one at a time")
    return [1.0]


def none(prompts: list[str], completions: list[str]) -> None:
    """As if its return had been forgotten."""


def none_inside(prompts: list[str], completions: list[str]) -> list[float | None]:
    return [None if c == "bad" else 1.0 for c in completions]


def words_inside(prompts: list[str], completions: list[str]) -> list[Any]:
    return ["0.5" if c == "bad" else 1.0 for c in completions]


def one_number(prompts: list[str], completions: list[str]) -> Any:
    return torch.tensor(0.5)


def a_dictionary(prompts: list[str], completions: list[str]) -> dict[str, float]:
    return dict.fromkeys(completions, 1.0)


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (none, r"returned None \(is its `return` missing\?\), not a list of 4 numbers"),
        (none_inside, r"is None for sample 2: prompt 'p', completion 'bad'\. Return a finite number"),
        (words_inside, r"is '0\.5' for sample 2"),
        (one_number, r"returned 0\.5, not a list of 4 numbers"),
        (a_dictionary, r"returned a dict, not a list of 4 numbers"),
        (raises, r"raised KeyError .*for sample 2: prompt 'p', completion 'bad'"),
        (nan, r"is nan for sample 2: prompt 'p', completion 'bad'"),
        (short, r"returned 1 rewards for 4 completions"),
        (whole_batch, r"raised ValueError for the batch and for none of its samples"),
    ],
)
def test_a_failure_names_its_sample_and_the_way_out(function: Any, says: str) -> None:
    with pytest.raises(RewardError, match=says) as error:
        score(function)
    assert "reward.on_error=mask" in str(error.value)


@pytest.mark.parametrize(
    ("function", "valid"),
    [
        (none, [False] * 4),
        (none_inside, [True, True, False, True]),
        (one_number, [False] * 4),
        (raises, [True, True, False, True]),
        (nan, [True, True, False, True]),
        (short, [False] * 4),
        (whole_batch, [False] * 4),
    ],
)
def test_or_it_is_masked(function: Any, valid: list[bool]) -> None:
    scored = score(function, on_error="mask")
    assert scored.valid.tolist() == valid
    assert scored.total.tolist() == [float(v) for v in valid]


def test_what_returned_nothing_did_not_raise() -> None:
    for function in (none, none_inside):
        with pytest.raises(RewardError) as error:
            score(function)
        assert "raised" not in str(error.value)
        assert error.value.__cause__ is None


def test_tensors_arrays_and_whole_numbers_are_taken() -> None:
    for found in (torch.ones(4), numpy.ones(4), (1, True, 1.0, numpy.float32(1)), iter([1, 1, 1, 1])):
        assert score(lambda prompts, completions, found=found: found).total.tolist() == [1.0] * 4


@pytest.mark.parametrize(
    "function", [lambda completions, **kwargs: [], lambda completions, prompts: [], lambda texts: []]
)
def test_a_function_that_cannot_be_called_is_refused_when_made(function: Any) -> None:
    with pytest.raises(ConfigError, match=r"is written f\(.*klamp calls f\(prompts, completions, \*\*columns\)"):
        Scorer(RewardConfig(), [function])


def test_a_column_that_is_missing_is_answered_with_those_that_are_there(trainer: Any, tmp_path: Path) -> None:
    def needs(prompts: list[str], completions: list[str], answer: list[str], hint: Any = None) -> list[float]:
        return [1.0] * len(completions)

    (tmp_path / "p.jsonl").write_text('{"prompt": "w1", "target": "w2", "level": 3}\n')
    with pytest.raises(ConfigError, match=r"'needs' needs the column 'answer', .* the columns 'level', 'target'"):
        trainer(rewards=needs, prompts=str(tmp_path / "p.jsonl"))
    with pytest.raises(ConfigError, match=r"'match:answer' needs the column 'answer', .* no column beside the prompt"):
        trainer(rewards=None, reward=RewardConfig(functions=("match:answer",)))


def test_a_reward_that_hangs_is_given_up() -> None:
    begun = time.monotonic()
    with pytest.raises(RewardError, match=r"took more than reward\.timeout=0\.2 s"):
        score(hangs, timeout=0.2)
    assert score(hangs, timeout=0.2, on_error="mask").valid.tolist() == [False] * 4
    assert time.monotonic() - begun < 10


@pytest.mark.slow
def test_a_reward_that_hangs_does_not_keep_the_process() -> None:
    code = (
        "import time\n"
        "from klamp.train.rewards import Scorer\n"
        "from klamp.train.config import RewardConfig\n"
        "def hangs(prompts, completions):\n    time.sleep(600)\n"
        "Scorer(RewardConfig(timeout=0.2), [hangs])(['p'], ['c'], {})\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "took more than reward.timeout=0.2 s" in done.stderr


def test_a_timeout_of_the_rewards_own_is_its_own() -> None:
    def own(prompts: list[str], completions: list[str]) -> list[float]:
        raise TimeoutError("the judge did not answer")

    with pytest.raises(RewardError, match="the judge did not answer"):
        score(own, timeout=5.0)


def test_weights_columns_and_parts() -> None:
    def answered(prompts: list[str], completions: list[str], answer: list[str]) -> list[float]:
        return [float(a == c) for a, c in zip(answer, completions, strict=True)]

    def long(prompts: list[str], completions: list[str], **_: Any) -> list[int]:
        return [len(c) for c in completions]

    config = RewardConfig(functions=("a", "b"), weights=(2.0, -0.5))
    scored = Scorer(config, [answered, long])(
        PROMPTS, COMPLETIONS, {"answer": ["x", "fine", "bad", "y"], "other": [1] * 4}
    )
    assert scored.parts["answered"].tolist() == [0, 1, 1, 0]
    assert scored.total.tolist() == [-4.0, 0.0, 0.5, -2.0]


def test_built_in_ones() -> None:
    config = RewardConfig(functions=("length:2", "regex:^b", "match:answer", "vader"))
    scored = Scorer(config)(PROMPTS, COMPLETIONS, {"answer": [" fine", "fine ", "no", "last"]})
    assert scored.parts["length:2"].tolist() == [0.0, -0.5, -0.5, -0.5]
    assert scored.parts["regex:^b"].tolist() == [0, 0, 1, 0]
    assert scored.parts["match:answer"].tolist() == [0, 1, 0, 1]
    assert scored.parts["vader"][0] > 0 > scored.parts["vader"][2]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("lenght:3", "no module"),
        ("vadr", "Did you mean|vader"),
        ("length:many", "a number of words"),
        ("regex:(", "not a regular expression"),
        ("math:no_such", "has no function"),
        ("my_rewards.short", "has no colon.* my_rewards:short"),
        ("my_rewards.py", r"as my_rewards\.py:function"),
        ("no/such.py:f", "no module 'no'"),
        ("/somewhere/own.py:f", "/somewhere/own.py is no file that can be imported from here"),
        ("../own.py:f", "is no file that can be imported from here"),
        ("v1.2/own.py:f", "is no file that can be imported from here"),
        ("C:\\own.py:f", "is no file that can be imported from here"),
    ],
)
def test_a_name_that_means_nothing_is_refused_when_made(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Scorer(RewardConfig(functions=(name,)))


def test_no_reward_function_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="no reward function"):
        Scorer(RewardConfig(), [])(PROMPTS, COMPLETIONS, {})


def test_a_file_does_as_well_as_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "by_hand").mkdir()
    (tmp_path / "by_hand" / "own_rewards.py").write_text(
        "def short(prompts, completions):\n    return [-float(len(c)) for c in completions]\n"
    )
    monkeypatch.chdir(tmp_path)
    scored = Scorer(RewardConfig(functions=("by_hand/own_rewards.py:short",)))(PROMPTS, COMPLETIONS, {})
    assert scored.total.tolist() == [-8.0, -4.0, -3.0, -4.0]


def test_a_reward_model(words_model: str, tmp_path: Path) -> None:
    """A sequence-classification model from a folder scores prompt and completion."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

    settings = LlamaConfig.from_pretrained(words_model, num_labels=1)
    LlamaForSequenceClassification(settings).save_pretrained(tmp_path / "judge")
    AutoTokenizer.from_pretrained(words_model).save_pretrained(tmp_path / "judge")
    scored = Scorer(RewardConfig(functions=(f"model:{tmp_path / 'judge'}",)))(["w1 "] * 2, ["w2 w3", "w4"], {})
    assert scored.valid.all()
    assert scored.total[0] != scored.total[1]


def test_failures_are_counted_in_the_metrics(trainer: Any) -> None:
    from klamp.train.config import RewardConfig

    def sometimes(prompts: list[str], completions: list[str]) -> list[float]:
        return [math.nan if i % 4 == 0 else float(len(c)) for i, c in enumerate(completions)]

    made = trainer(rewards=sometimes, steps=1, reward=RewardConfig(on_error="mask"))
    last = made.run()
    assert last["reward/failed"] == 2.0
    assert last["policy/signal"] == 1.0, "of the completions that count"


def test_weighted_sums_that_are_equal_on_paper_are_equal() -> None:
    """Of rewards near 1000 that cancel out but for 0.1: float32 would leave 6e-5 of rounding between them."""
    base = [1000.7, 999.3, 1000.1, 998.9]

    def up(prompts: list[str], completions: list[str]) -> list[float]:
        return [x + 0.1 for x in base]

    def down(prompts: list[str], completions: list[str]) -> list[float]:
        return base

    scored = Scorer(RewardConfig(functions=("a", "b"), weights=(1.0, -1.0)), [up, down])(PROMPTS, COMPLETIONS, {})
    assert scored.total.unique().tolist() == pytest.approx([0.1])
    assert alike(scored.total[None], scored.valid[None]).all()


@pytest.mark.parametrize(
    ("rewards", "equal"), [([3e6, 3e6 + 1], False), ([1e6, 1e6 + 0.25], False), ([0.7, 0.7 + 1e-7], True)]
)
def test_a_group_has_a_signal_where_its_rewards_differ_by_more_than_rounding(rewards: list[float], equal: bool) -> None:
    given = torch.tensor(rewards)
    assert len(set(given.tolist())) == 2
    assert group_advantages(given, 2).any().item() is not equal
    assert without_signal(given, torch.ones(2, dtype=torch.bool), 2).tolist() == [equal], "the alarm asks the same"
