"""A step's samples as tensors: whole sequences, and the tokens of them that count.

Shapes: N sequences, L their padded length, C = L - first the columns that hold counted tokens. Per-token tensors
(mask, log-probs, advantages, KL) are [N, C] and belong to ``tokens = ids[:, first:]``; the hidden state before a token
predicts it. Prompts are padded on the left, completions on the right; tool output may stand between, not counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from klamp.chat import Prompt
from klamp.errors import ConfigError


@dataclass(frozen=True)
class Rollout:
    """Sequences as they were sampled; tokens are never made from text again."""

    ids: Tensor
    """[N, L] token ids."""
    attention: Tensor
    """[N, L] True where a token is real."""
    mask: Tensor
    """[N, C] True where a token counts: it was drawn from the policy. The end token counts."""
    sampler_logp: Tensor
    """[N, C] log-prob under the sampler at the sampling temperature; NaN where it is not known."""
    first: int
    """Column of ``ids`` at which the per-token tensors begin."""
    group_size: int = 1
    """Consecutive sequences that share a prompt."""
    prompts: list[Prompt] = field(default_factory=list)
    """As they were given: text, or a list of messages."""
    completions: list[str] = field(default_factory=list)
    columns: dict[str, list[Any]] = field(default_factory=dict)
    """The dataset's other columns, one entry a sequence."""
    ended: Tensor | None = None
    """[N] True where the sequence ended by itself."""
    version: int | None = None
    """Updates that the weights it was drawn from had seen; None: those of the policy as it is."""
    left_out: tuple[int, ...] = ()
    """Prompts asked for that have no completions here: their requests failed."""

    @property
    def tokens(self) -> Tensor:
        """[N, C], the tokens that the per-token tensors speak of."""
        return self.ids[:, self.first :]

    def __len__(self) -> int:
        return self.ids.shape[0]

    def to(self, device: torch.device | str) -> Rollout:
        """The same with its tensors on ``device``."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        moved: dict[str, Any] = {name: v.to(device) for name, v in values.items() if isinstance(v, Tensor)}
        return replace(self, **moved)


@dataclass(frozen=True)
class Part:
    """Some rows of a rollout, cut to the columns they use."""

    rows: Tensor
    """[n] indices into the rollout."""
    columns: slice
    """Columns of the per-token tensors that are kept."""
    ids: Tensor
    attention: Tensor
    mask: Tensor
    first: int

    @property
    def tokens(self) -> Tensor:
        """[n, c]."""
        return self.ids[:, self.first :]

    def of(self, x: Tensor) -> Tensor:
        """These rows and columns of a per-token tensor [N, C]."""
        return x[self.rows, self.columns]

    def put(self, into: Tensor, values: Tensor) -> None:
        """Write per-token values [n, c] back to their place in [N, C]."""
        into[self.rows, self.columns] = values.to(into.dtype)


def part(rollout: Rollout, rows: Tensor) -> Part:
    """``rows`` of the rollout without the padding that none of them uses."""
    attention = rollout.attention[rows]
    used = attention.any(0)
    first = rollout.first
    real = used.nonzero().flatten()
    left = int(real[0]) if len(real) else 0
    right = max(int(real[-1]) + 1 if len(real) else first, first)
    left = min(left, first - 1)
    return Part(
        rows,
        slice(0, right - first),
        rollout.ids[rows, left:right],
        attention[:, left:right],
        rollout.mask[rows, : right - first],
        first - left,
    )


def parts(rollout: Rollout, rows: Tensor, size: int) -> Iterator[Part]:
    """``rows`` in pieces of ``size`` sequences (0: all at once)."""
    for chunk in torch.split(rows, size or max(1, len(rows))):
        yield part(rollout, chunk)


def collate(
    sequences: Sequence[Sequence[int]],
    counted: Sequence[Sequence[bool]],
    logps: Sequence[Sequence[float]],
    *,
    pad: int,
    group_size: int = 1,
    prompts: list[Prompt] | None = None,
    completions: list[str] | None = None,
) -> Rollout:
    """Recorded sequences as a rollout, aligned at their first counted token; ``counted`` and ``logps`` per token."""
    starts = [next((t for t, c in enumerate(row) if c), len(row)) for row in counted]
    for n, start in enumerate(starts):
        if start == 0:
            raise ConfigError(f"sequence {n} counts its first token, which nothing predicts. Put a prompt before it.")
    before = max(starts, default=1)
    after = max((len(s) - start for s, start in zip(sequences, starts, strict=True)), default=0)
    shape = (len(sequences), before + after)
    ids, attention = torch.full(shape, pad), torch.zeros(shape, dtype=torch.bool)
    mask = torch.zeros(shape[0], after, dtype=torch.bool)
    logp = torch.zeros(shape[0], after)
    for n, (sequence, start) in enumerate(zip(sequences, starts, strict=True)):
        left, size = before - start, len(sequence)
        ids[n, left : left + size] = torch.tensor(list(sequence))
        attention[n, left : left + size] = True
        mask[n, : size - start] = torch.tensor(list(counted[n][start:]), dtype=torch.bool)
        logp[n, : size - start] = torch.tensor(list(logps[n][start:]))
    return Rollout(ids, attention, mask, logp, before, group_size, prompts or [], completions or [])
