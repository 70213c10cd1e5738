"""The metrics of a step that follow from its rewards and lengths alone."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from klamp.masked import select
from klamp.train.batch import Rollout
from klamp.train.rewards import Scored
from klamp.train.tally import Tally


def reward_metrics(rollout: Rollout, scored: Scored, reduce: Callable[[Tensor], Tensor]) -> dict[str, float]:
    """``reward/*`` and ``length/*`` over all processes, and the tokens of the step."""
    tally = Tally(reduce)
    valid = scored.valid
    tally.add("reward/mean", scored.total[valid].double().sum(), valid.sum())
    tally.add("square", (scored.total[valid].double() ** 2).sum(), valid.sum())
    for name, part in scored.parts.items():
        tally.add(f"reward/{name}", part[valid].double().sum(), valid.sum())
    tally.add("reward/failed", (~valid).sum().double(), torch.ones(()))
    tally.add("length/mean", rollout.mask.sum().double(), torch.tensor(len(rollout)))
    if rollout.ended is not None:
        tally.add("length/ended", rollout.ended.sum().double(), torch.tensor(len(rollout)))
    sums = tally.totals()
    metrics = {name: sums.mean(name) for name in sums.names() if name != "square"}
    metrics["reward/std"] = math.sqrt(max(sums.mean("square") - metrics["reward/mean"] ** 2, 0.0))
    metrics["reward/failed"] = sums.total("reward/failed")
    metrics["train/tokens"] = sums.total("length/mean")
    return metrics


def sampler_gap(rollout: Rollout, logp: Tensor, counted: Tensor) -> Tensor:
    """[N] mean of |log μ − log π| over the counted tokens of a sequence whose sampler's log-prob is known."""
    known = counted & torch.isfinite(rollout.sampler_logp)
    return select((rollout.sampler_logp - logp).abs(), known).sum(1) / known.sum(1).clamp(min=1)


def band(kl: float, target: float | None) -> dict[str, float]:
    """The target, and whether KL is within a fifth of it; nothing without one."""
    if target is None:
        return {}
    return {"kl/target": target, "kl/in_band": float(abs(kl / target - 1) <= 0.2)}
