"""Sequences that share a prompt: which they are, and which of their tokens see which.

Shapes: n sequences, P distinct prompts, ``first`` columns of prompt, G tails a prompt at most, w columns of a tail.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Layout(NamedTuple):
    """Where the sequences of a part stand in the rows that share prompts."""

    rows: Tensor
    """[P] a sequence that has each distinct prompt."""
    which: Tensor
    """[n] the prompt of each sequence."""
    place: Tensor
    """[n] its place among the tails of that prompt."""
    tails: int
    """G."""


def layout(ids: Tensor, attention: Tensor) -> Layout:
    """Which of some prompts [n, first] are the same; padding does not count."""
    _, which = torch.unique(torch.where(attention, ids, -1), dim=0, return_inverse=True)
    order = torch.arange(len(ids), device=ids.device)
    rows = order.new_full((int(which.max()) + 1,), len(ids)).scatter_reduce_(0, which, order, "amin")
    place = ((which[:, None] == which) & (order[:, None] > order)).sum(1)
    return Layout(rows, which, place, int(place.max()) + 1)


def plain_cache(config: Any) -> Any:
    """An empty cache, or None for a model that does not attend to all that came before.

    Sliding windows keep less than all keys and values, recurrent states something else.
    """
    from transformers.cache_utils import DynamicCache, DynamicLayer

    cache: Any = DynamicCache(config=config)
    return cache if cache.layers and all(type(layer) is DynamicLayer for layer in cache.layers) else None


def sees(first: int, tails: int, width: int, real: Tensor) -> Tensor:
    """[P, 1, T, T] which token sees which: itself, and what is real and came before in its prompt and its tail."""
    order = torch.arange(first + tails * width, device=real.device)
    owner = torch.where(order < first, -1, (order - first) // max(width, 1))
    mine = (owner == -1) | (owner[:, None] == owner)
    # Padding sees itself, so that no row of the softmax is empty.
    return (mine & (order <= order[:, None]) & real) | (order == order[:, None])
