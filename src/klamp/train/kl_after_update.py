"""KL on a step's own tokens after its update, from as many of its sequences as the clamp needs.

Measuring is a forward pass. Batches differ more than a step changes them, so a share of the sequences says how KL
changed on the same tokens, which is known far better than its level; that change is carried to the whole batch. All
sequences are measured where the change is most of what there is: then its noise is the noise of a level.

Once the clamp has scaled the displacement from the reference by a little, a few sequences say what that made of KL:
near the reference it is the same factor on every token, so their ratio is known better than any change.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from klamp.masked import Unit, select
from klamp.train.metrics import Totals

SPARSE = 4
"""The share is one sequence in this many: two of a group of eight."""
FEWEST = 4
"""Sequences over all processes that tell whether the limit is far: their mean is good to a third or so."""
ENOUGH = 16
"""Sequences that the clamp acts on. The level that they read is good to a sixth or so, and the change is less than
:data:`STEADY` of it: an error of 4 % of the displacement at the most, and of 1 % where KL is steady."""
STEADY = 0.25
"""The largest change of sqrt(KL), as a share of sqrt(KL), that is carried from a share to the whole near the limit."""


FOLLOWED = 4
"""Sequences over all processes that tell what scaling the displacement made of KL."""
MILD = 0.15
"""The largest fall of KL, as a share of it, that they tell. Their ratio was within 0.2 to 2.1 % of that of all
sequences (root mean square; real runs of 32 and 64), where the first measurement, of a share, was off by 3 to 8 %."""


class Sums(NamedTuple):
    """Sum of a KL over all processes, and of how many."""

    total: float
    number: float

    @property
    def mean(self) -> float:
        """0 where nothing counted."""
        return self.total / self.number if self.number else 0.0


class KLMeasurement:
    """``measurement()``: KL of the policy as it is now on ``rows``, from the share that :meth:`first` settled on."""

    def __init__(
        self,
        rows: Tensor,
        sequences: int,
        before: Callable[[Tensor], Sums],
        now: Callable[[Tensor], Sums],
        last: Callable[[Tensor], Sums] | None = None,
    ) -> None:
        """``rows`` are this process's of ``sequences`` in all; the others give the KL of some of them.

        ``before`` the update, ``now``, and as it was ``last`` measured, or None where the clamp does not scale the
        displacement from the reference.
        """
        self.rows, self.sequences, self.before, self.now, self.last = rows, sequences, before, now, last
        self.updated = math.nan
        """KL of all rows after the update, where it was steady."""
        self.few = math.nan
        """KL after the update of the few rows that tell what scaling made of it."""
        self.stride = 1
        """One row in so many is measured."""
        self.known: dict[int, float] = {}
        """Mean KL before the update of the rows at a stride."""
        self.began: float | None = None
        """KL of all rows before the update; None until a share stands for them."""

    @property
    def share(self) -> float:
        """Share of the sequences that readings rest on."""
        return 1 / self.stride

    def __call__(self) -> float:
        few = self._few()
        if self.last is not None and math.isnan(self.few) and self.updated > 0:
            self.few = self.last(few).mean
        if self.few > 0:
            left = self.now(few).mean / self.few
            if 1 - MILD <= left <= 1:
                return self.updated * left
        return self._carried(self.now(self.rows[:: self.stride]))

    def _few(self) -> Tensor:
        """:data:`FOLLOWED` of the sequences that were measured, or a few more; all of fewer than :data:`ENOUGH`."""
        measured = self.sequences // self.stride
        halvings = (measured // FOLLOWED).bit_length() - 1 if measured >= ENOUGH else 0
        return self.rows[:: self.stride << halvings]

    def first(self, began: float, far: Callable[[float], bool]) -> float:
        """KL after the update, which began at ``began``; ``far`` says whether a KL is far below the limit.

        A few sequences tell where it is; near the limit :data:`ENOUGH` of them, and all where KL changed too much.
        """
        enough = stride_of(self.sequences, ENOUGH)
        few = stride_of(self.sequences, FEWEST) if far(began) else enough
        self.began, known, done = began, Sums(0.0, 0.0), self.rows[:0]
        for self.stride in sorted({few, enough, 1}, reverse=True):
            rows = self.rows[:: self.stride]
            new = self.now(rows[~torch.isin(rows, done)])
            known, done = Sums(known.total + new.total, known.number + new.number), rows
            own = self._carried(known)
            steady = self._steady(known)
            if far(own) or (self.stride <= enough and steady):
                break
        self.updated = own if steady else math.nan
        return own

    def _before(self) -> float:
        """KL of the share before the update."""
        if self.stride not in self.known:
            self.known[self.stride] = self.before(self.rows[:: self.stride]).mean
        return self.known[self.stride]

    def _carried(self, now: Sums) -> float:
        """KL of all rows where the share of them reads ``now``."""
        if self.stride == 1 or self.began is None:
            return now.mean
        return carried(self.began, self._before(), now.mean)

    def _steady(self, now: Sums) -> bool:
        """Whether a share's KL changed by little beside what it is."""
        before, after = self._before(), now.mean
        if not all(0 <= kl < math.inf for kl in (before, after)):
            return False
        return abs(math.sqrt(after) - math.sqrt(before)) <= STEADY * math.sqrt(after)


def stride_of(sequences: int, least: int) -> int:
    """One row in so many are ``least`` of ``sequences`` or more; a power of two up to :data:`SPARSE`.

    By the number over all processes: one process and two take the same sequences.
    """
    return min(SPARSE, 1 << max(0, (sequences // least).bit_length() - 1))


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
