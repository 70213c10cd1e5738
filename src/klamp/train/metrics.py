"""The metrics of a step: sums and counts, reduced over all processes at once, and what follows from them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from klamp.advantages import alike
from klamp.control import Control
from klamp.masked import select
from klamp.monitor import BAND
from klamp.sampling.rollout import Rollout
from klamp.train.rewards import Scored


class Accumulator:
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


def reward_metrics(rollout: Rollout, scored: Scored, reduce: Callable[[Tensor], Tensor]) -> dict[str, float]:
    """``reward/*`` and ``length/*`` over all processes, and the tokens of the step."""
    added = Accumulator(reduce)
    valid = scored.valid
    added.add("reward/mean", scored.total[valid].double().sum(), valid.sum())
    added.add("square", (scored.total[valid].double() ** 2).sum(), valid.sum())
    for name, part in scored.parts.items():
        added.add(f"reward/{name}", part[valid].double().sum(), valid.sum())
    added.add("reward/failed", (~valid).sum().double(), torch.ones(()))
    if rollout.group_size > 1:
        same = without_signal(scored.total, valid, rollout.group_size)
        added.add("reward/no_signal", same.sum().double(), torch.tensor(len(same)))
    added.add("length/mean", rollout.mask.sum().double(), torch.tensor(len(rollout)))
    if rollout.ended is not None:
        added.add("length/ended", rollout.ended.sum().double(), torch.tensor(len(rollout)))
    sums = added.totals()
    metrics = {name: sums.mean(name) for name in sums.names() if name != "square"}
    metrics["reward/std"] = math.sqrt(max(sums.mean("square") - metrics["reward/mean"] ** 2, 0.0))
    metrics["reward/failed"] = sums.total("reward/failed")
    metrics["train/tokens"] = sums.total("length/mean")
    return metrics


def without_signal(rewards: Tensor, valid: Tensor, group_size: int) -> Tensor:
    """[groups with a valid reward] whether every valid completion of the group has the same one."""
    rewards, valid = rewards.view(-1, group_size), valid.view(-1, group_size)
    return alike(rewards, valid)[valid.any(1)]


def sampler_gap(rollout: Rollout, logp: Tensor, counted: Tensor) -> Tensor:
    """[N] mean of |log μ − log π| over the counted tokens of a sequence whose sampler's log-prob is known."""
    known = counted & torch.isfinite(rollout.sampler_logp)
    return select((rollout.sampler_logp - logp).abs(), known).sum(1) / known.sum(1).clamp(min=1)


def band(kl: float, target: float | None) -> dict[str, float]:
    """The target, and whether KL is within a fifth of it; nothing without one."""
    if target is None:
        return {}
    return {"kl/target": target, "kl/in_band": float(abs(kl / target - 1) <= BAND)}


def clamp_metrics(control: Control, share: float) -> dict[str, float]:
    """``kl/clamp/*`` of a step that the clamp looked at, on a ``share`` of its sequences; nothing of any other."""
    clamped = control.clamped
    if clamped is None:
        return {}
    return {
        "kl/clamp/before": clamped.kl_before,
        "kl/clamp/after": clamped.kl_after,
        "kl/clamp/effort": clamped.effort,
        "kl/clamp/limit": control.own_limit or 0.0,
        "kl/clamp/level": control.state.gauge.level,
        "kl/clamp/share": share,
    }


class Clock:
    """Seconds of the parts of a step."""

    def __init__(self) -> None:
        self.begun = self.last = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """The time since the last lap belongs to ``name``."""
        now = time.perf_counter()
        self.laps[name] = now - self.last
        self.last = now

    def metrics(self, tokens: float) -> dict[str, float]:
        """``time/*`` of the step."""
        total = self.last - self.begun
        return {
            **{f"time/{k}": v for k, v in self.laps.items()},
            "time/step": total,
            "time/tokens_per_second": tokens / total,
        }
