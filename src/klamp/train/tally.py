"""Sums and counts by name, reduced over all processes in one go: means travel as (sum, count) until here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


class Tally:
    """Collects (sum, count) pairs; :meth:`totals` exchanges them once."""

    def __init__(self, reduce: Callable[[Tensor], Tensor]) -> None:
        self.reduce = reduce
        self.pairs: dict[str, tuple[Tensor, Tensor]] = {}

    def add(self, name: str, total: Tensor, count: Tensor) -> None:
        """Add to a name's sum and count."""
        pair = total.detach().double(), count.detach().double()
        old = self.pairs.get(name)
        self.pairs[name] = pair if old is None else (old[0] + pair[0].to(old[0]), old[1] + pair[1].to(old[1]))

    def totals(self) -> Totals:
        """Everything collected, over all processes; every process must have added the same names."""
        names = sorted(self.pairs)
        if not names:
            return Totals({})
        device = self.pairs[names[0]][0].device
        flat = torch.stack([x.to(device).reshape(()) for name in names for x in self.pairs[name]])
        both = self.reduce(flat).cpu().view(-1, 2).tolist()
        return Totals({name: (total, count) for name, (total, count) in zip(names, both, strict=True)})


@dataclass(frozen=True)
class Totals:
    """Global sums and counts."""

    pairs: dict[str, tuple[float, float]]

    def names(self) -> list[str]:
        """Every name that was added."""
        return sorted(self.pairs)

    def mean(self, name: str) -> float:
        """``sum / count``; 0 where nothing counted."""
        total, count = self.pairs.get(name, (0.0, 0.0))
        return total / count if count else 0.0

    def total(self, name: str) -> float:
        """The sum."""
        return self.pairs.get(name, (0.0, 0.0))[0]

    def count(self, name: str) -> float:
        """The count."""
        return self.pairs.get(name, (0.0, 0.0))[1]
