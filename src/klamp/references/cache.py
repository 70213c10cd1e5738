"""The reference's states of a step's rollout, computed once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from klamp.models.policy import ReferenceStates
from klamp.sampling.rollout import Part, Rollout, parts

CACHE_BYTES = 2 << 30
"""States of a step are kept up to this size."""


class ReferenceCache:
    """``cache(piece)``: the reference's states for any part of a rollout."""

    def __init__(
        self,
        states: Callable[[Part], ReferenceStates],
        rollout: Rollout,
        size: int,
        agree: Callable[[bool], bool],
    ) -> None:
        """``size``: sequences a forward pass. ``agree``: whether any process says yes, so that all do the same."""
        self.states, self.rollout, self.size, self.agree = states, rollout, size, agree
        self.kept: Tensor | None = None
        self.like: ReferenceStates | None = None
        """Any of the states kept: they all go through one head."""
        self.too_large = False

    def __call__(self, piece: Part) -> ReferenceStates:
        if self.kept is None and not self.too_large:
            self._fill()
        if self.kept is None:
            return self.states(piece)
        assert self.like is not None
        return self.like._replace(states=piece.of(self.kept))

    def _fill(self) -> None:
        rollout = self.rollout
        everything = torch.arange(len(rollout), device=rollout.ids.device)
        for piece in parts(rollout, everything, self.size):
            found = self.states(piece)
            states = found.states
            if self.kept is None:
                size = rollout.mask.numel() * states.shape[-1] * states.element_size()
                self.too_large = self.agree(size > CACHE_BYTES)
                if self.too_large:
                    return
                self.kept, self.like = states.new_zeros(*rollout.mask.shape, states.shape[-1]), found
            piece.put(self.kept, states)
