"""The reference's states of a step's rollout, computed once where they fit in memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from klamp.kernels import HeadSpec
from klamp.train.batch import Part, Rollout, parts
from klamp.train.policy import Anchor

CACHE_BYTES = 2 << 30
"""States of a step are kept up to this size."""


class Recall:
    """``recall(piece)``: the reference's states for any part of a rollout."""

    def __init__(
        self, states: Callable[[Part], Anchor], rollout: Rollout, size: int, agree: Callable[[bool], bool]
    ) -> None:
        """``size``: sequences a forward pass. ``agree``: whether any process says yes, so that all do the same."""
        self.states, self.rollout, self.size, self.agree = states, rollout, size, agree
        self.kept: Tensor | None = None
        self.head: HeadSpec | None = None
        self.too_large = False

    def __call__(self, piece: Part) -> Anchor:
        if self.kept is None and not self.too_large:
            self._fill()
        if self.kept is None:
            return self.states(piece)
        return Anchor(self.kept[piece.rows, piece.columns], self.head)

    def _fill(self) -> None:
        rollout = self.rollout
        everything = torch.arange(len(rollout), device=rollout.ids.device)
        for piece in parts(rollout, everything, self.size):
            states, head = self.states(piece)
            if self.kept is None:
                size = rollout.mask.numel() * states.shape[-1] * states.element_size()
                self.too_large = self.agree(size > CACHE_BYTES)
                if self.too_large:
                    return
                self.kept, self.head = states.new_zeros(*rollout.mask.shape, states.shape[-1]), head
            piece.put(self.kept, states)
