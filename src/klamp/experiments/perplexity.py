"""Teacher-forced perplexity: ``exp(-mean log p(token | tokens before it))``, exact, at temperature 1."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from klamp import models
from klamp.errors import ConfigError
from klamp.prompts import read_lines

LOGITS = 1 << 26
"""Logits in memory at a time: 256 MiB in float32."""
LONGEST = 128
"""Tokens of a held-out text; what comes after is cut."""


@dataclass(frozen=True)
class Text:
    """Token ids, of which those from ``first`` on count."""

    ids: list[int]
    first: int


@torch.no_grad()
def perplexity(model: Any, texts: Sequence[Text]) -> float:
    """``exp(-sum log p / count)`` over the counted tokens of all texts under a plain causal LM."""
    total, count = 0.0, 0
    for batch in _batches(texts, int(model.config.get_text_config().vocab_size)):
        losses, counted = _losses(model, batch)
        total += float(losses[counted].double().sum())
        count += int(counted.sum())
    mean = total / max(count, 1)
    return math.exp(mean) if mean < 700 else math.inf


def heldout(model: str, tokenizer: Any, file: str | None, limit: int) -> list[Text]:
    """At most ``limit`` held-out texts, spread over the file or the built-in ones.

    The built-in model's own sentences end with EOS, as it was trained to end them; other texts just stop.
    """
    own = file is None and model == "tiny"
    lines = models.heldout(model) if file is None else [row["prompt"] for row in read_lines(_existing(file))]
    if not lines:
        raise ConfigError(f"--heldout {file!r} has no text in it. Give a text file, one passage a line.")
    stride = max(1, len(lines) // limit)
    texts = []
    for line in lines[::stride][:limit]:
        ids = [int(i) for i in tokenizer(line, truncation=False, verbose=False)["input_ids"]][:LONGEST]
        ids += [int(tokenizer.eos_token_id)] if own else []
        if len(ids) > 1:
            texts.append(Text(ids, 1))
    if not texts:
        raise ConfigError(f"--heldout {file!r}: every line is a single token, and the first is never predicted.")
    return texts


def _existing(file: str) -> Path:
    path = Path(file)
    if not path.is_file():
        raise ConfigError(f"--heldout {file!r} is not a file. Give a text file, one passage a line.")
    return path


def _batches(texts: Sequence[Text], vocabulary: int) -> list[list[Text]]:
    """Texts of about one length together, as many as keep the logits small."""
    batches: list[list[Text]] = [[]]
    width = 0
    for text in sorted(texts, key=lambda t: len(t.ids)):
        width = max(width, len(text.ids))
        if batches[-1] and (len(batches[-1]) + 1) * width * vocabulary > LOGITS:
            batches.append([])
            width = len(text.ids)
        batches[-1].append(text)
    return [b for b in batches if b]


def _losses(model: Any, batch: list[Text]) -> tuple[Tensor, Tensor]:
    """[n, L-1] minus log-probs, and which of them count. Padding is on the right, where nothing looks back at it."""
    width = max(len(t.ids) for t in batch)
    device = next(model.parameters()).device
    ids = torch.tensor([t.ids + [0] * (width - len(t.ids)) for t in batch], device=device)
    real = torch.tensor([[True] * len(t.ids) + [False] * (width - len(t.ids)) for t in batch], device=device)
    counted = real.clone()
    for row, text in enumerate(batch):
        counted[row, : max(text.first, 1)] = False
    logits = model(input_ids=ids, attention_mask=real.long(), use_cache=False).logits[:, :-1]
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
    return losses.view(ids.shape[0], width - 1), counted[:, 1:]
