"""Perplexity is exact: equal to the chain rule token by token, whatever the batches and the padding."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from klamp import models
from klamp.errors import ConfigError
from klamp.experiments import perplexity as module
from klamp.experiments.perplexity import Text, heldout, perplexity


@pytest.fixture(scope="module")
def tiny() -> tuple[torch.nn.Module, object]:
    return models.load_model("tiny", dtype="float32"), models.load_tokenizer("tiny")


@torch.no_grad()
def by_the_chain_rule(model: torch.nn.Module, texts: list[Text]) -> float:
    total, count = 0.0, 0
    for text in texts:
        for t in range(max(text.first, 1), len(text.ids)):
            logits = model(torch.tensor([text.ids[:t]])).logits[0, -1].double()
            total -= float(logits.log_softmax(-1)[text.ids[t]])
            count += 1
    return math.exp(total / count)


def test_it_equals_the_chain_rule_one_token_at_a_time(tiny, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    model, tokenizer = tiny
    texts = heldout("tiny", tokenizer, None, 5)
    texts[1] = Text(texts[1].ids, 4)  # the first tokens of this one are a prompt
    texts[2] = Text(texts[2].ids[:2], 1)
    expected = by_the_chain_rule(model, texts)
    assert perplexity(model, texts) == pytest.approx(expected, rel=1e-5)  # float32 logits
    monkeypatch.setattr(module, "LOGITS", 1)  # one text a batch: no padding at all
    assert perplexity(model, texts) == pytest.approx(expected, rel=1e-5)


def test_tinys_own_sentences_end_and_others_stop(tiny, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    _, tokenizer = tiny
    assert all(t.ids[-1] == tokenizer.eos_token_id for t in heldout("tiny", tokenizer, None, 8))
    file = tmp_path / "text.txt"
    file.write_text("One fine day.\n\nAnother.\n")
    found = heldout("tiny", tokenizer, str(file), 8)
    assert len(found) == 2
    assert found[0].ids[-1] != tokenizer.eos_token_id
    assert len(heldout("elsewhere", tokenizer, None, 16)) == 16  # Python's own manual


def test_a_file_without_text_is_refused(tiny, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    _, tokenizer = tiny
    file = tmp_path / "text.txt"
    file.write_text("\n\n")
    with pytest.raises(ConfigError, match="no text"):
        heldout("tiny", tokenizer, str(file), 8)
    with pytest.raises(ConfigError, match="not a file"):
        heldout("tiny", tokenizer, str(tmp_path / "nowhere"), 8)
