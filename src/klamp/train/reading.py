"""KL on a step's own tokens after its update: of all sequences where the limit may be near, of a share where it is far.

The measurement is a forward pass. Far below the limit a share of the sequences tells what the clamp has to know, that
nothing is to be undone. Wherever the share leaves a doubt, the rest is measured before anything is decided.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from klamp.masked import Unit, select
from klamp.train.tally import Totals

SPARSE = 4
"""The share is one sequence in this many: two of a group of eight."""
FEWEST = 4
"""Sequences over all processes that a share has at the least: their mean is good to a third or so."""


class Sums(NamedTuple):
    """Sum of a KL over all processes, and of how many."""

    total: float
    number: float

    @property
    def mean(self) -> float:
        """0 where nothing counted."""
        return self.total / self.number if self.number else 0.0


class Reading:
    """``reading()``: KL of the policy as it is now on every one of ``rows``."""

    def __init__(
        self, rows: Tensor, sequences: int, before: Callable[[Tensor], Sums], now: Callable[[Tensor], Sums]
    ) -> None:
        """``rows`` are this process's of ``sequences`` in all; ``before`` and ``now`` give the KL of some of them."""
        self.rows, self.before, self.now = rows, before, now
        # By the number in all: one process and two take the same sequences.
        self.stride = max(1, min(SPARSE, sequences // FEWEST))
        self.share = 1.0
        """Share of the sequences that :meth:`first` rests on."""

    def __call__(self) -> float:
        return self.now(self.rows).mean

    def first(self, began: float, expected: float, far: Callable[[float], bool]) -> float:
        """KL after the update, which began at ``began``; from a share of the rows where the limit is ``far``.

        Far it must be from the KL that is ``expected`` and from what the share shows. Batches differ more than a step
        changes them, so the share says how KL changed on the same tokens.
        """
        if self.stride == 1 or not far(expected):
            return self()
        some = torch.arange(len(self.rows), device=self.rows.device) % self.stride == 0
        share = self.now(self.rows[some])
        own = carried(began, self.before(self.rows[some]).mean, share.mean)
        if far(own):
            self.share = 1 / self.stride
            return own
        rest = self.now(self.rows[~some])
        return Sums(share.total + rest.total, share.number + rest.number).mean


def carried(whole: float, before: float, after: float) -> float:
    """KL of a whole batch that read ``whole`` when its share went from ``before`` to ``after``.

    Near the reference sqrt(KL) is the length of the displacement, and a step adds to it alike on all tokens. From a KL
    of 0, of which no multiple says anything, this is what the share reads.
    """
    if not all(0 <= kl < math.inf for kl in (whole, before, after)):
        return math.nan
    return max(0.0, math.sqrt(whole) + math.sqrt(after) - math.sqrt(before)) ** 2


def moments(kl: Tensor, counted: Tensor, group_size: int, per: Unit) -> dict[str, Tensor]:
    """What the noise of a batch's KL is known by: second moments over its prompts of summed KL and of what it is per.

    Completions of one prompt are alike, so it is prompts that are drawn independently.
    """
    zero = torch.zeros((), dtype=torch.float64, device=kl.device)
    groups = len(kl) // group_size if group_size > 0 else 0
    if not groups:
        return {"noise/kk": zero, "noise/kc": zero, "noise/cc": zero, "noise/groups": zero}
    tokens = counted.sum(1).double()
    sums = select(kl.double(), counted).sum(1)
    each, count = {
        "token": (sums, tokens),
        "sequence": (sums, (tokens > 0).double()),
        "sequence_mean": (sums / tokens.clamp(min=1), (tokens > 0).double()),
    }[per]
    k, c = (x[: groups * group_size].view(groups, group_size).sum(1) for x in (each, count))
    return {
        "noise/kk": (k * k).sum(),
        "noise/kc": (k * c).sum(),
        "noise/cc": (c * c).sum(),
        "noise/groups": zero + groups,
    }


def relative_error(sums: Totals) -> float:
    """Standard error of the batch's KL over the KL, from :func:`moments`; 0 where it cannot be told."""
    kl, groups = sums.mean("kl"), sums.total("noise/groups")
    if kl <= 0 or groups < 2:
        return 0.0
    squares = sums.total("noise/kk") - 2 * kl * sums.total("noise/kc") + kl * kl * sums.total("noise/cc")
    error = math.sqrt(max(squares, 0.0) * groups / (groups - 1)) / sums.count("kl")
    return min(error / kl, 1.0)
