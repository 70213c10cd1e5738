"""What a sampler returns: whole sequences, and the tokens of them that count.

Shapes: N sequences, L their padded length, C = L - first the columns that hold counted tokens. Per-token tensors are
[N, C] and belong to ``tokens = ids[:, first:]``. Prompts are padded on the left, completions on the right.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from klamp.chat import Prompt


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
