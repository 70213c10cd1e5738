"""The metrics of a step: sums and counts, reduced over all processes at once, and what a run shows of them.

A run shows a live line in a terminal, plain lines elsewhere.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from klamp.control import Control
from klamp.masked import select
from klamp.monitor import Alarm
from klamp.sampling.batch import Rollout
from klamp.train.config import TrainConfig
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


BAND = 0.2
"""How far from its target, relative to it, KL is still in its band."""


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
    highest = torch.where(valid, rewards, -math.inf).amax(1)
    lowest = torch.where(valid, rewards, math.inf).amin(1)
    return (highest == lowest)[valid.any(1)]


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


RECENT = 5
"""Steps whose mean a KL below its band must exceed to be on its way there: one step alone is noise."""


class Display:
    """Progress of a run. ``quiet`` shows nothing: for ranks other than the first, and for callers of the library."""

    def __init__(self, steps: int, *, quiet: bool = False) -> None:
        self.steps, self.quiet = steps, quiet
        self.terminal = sys.stderr.isatty() and not quiet
        self.progress: Any = None
        self.task: Any = None
        self.begun = time.monotonic()
        self.first: int | None = None
        self.recent: deque[float] = deque(maxlen=RECENT)
        self.alarms: Counter[str] = Counter()
        if not quiet:  # alarms are shown here; without a handler of its own logging would show them once more
            logging.getLogger("klamp").addHandler(logging.NullHandler())

    @contextlib.contextmanager
    def live(self, done: int) -> Iterator[None]:
        """Show progress until the block ends; ``done`` steps were done before."""
        self.first = done
        if not self.terminal:
            yield
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (MofNCompleteColumn(), BarColumn(20), TextColumn("{task.description}"), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True)) as self.progress:
            self.task = self.progress.add_task("starting", total=self.steps, completed=done)
            yield

    def say(self, text: str) -> None:
        """One line about the run itself."""
        if self.progress is not None:
            self.progress.console.print(text)
        elif not self.quiet:
            print(text, file=sys.stderr, flush=True)

    def step(self, step: int, metrics: dict[str, float], alarms: list[Alarm]) -> None:
        """A finished step."""
        if self.quiet:
            return
        text = summary(metrics, self.recent)
        self.recent.append(metrics["kl/steered"])
        if self.progress is not None:
            self.progress.update(self.task, completed=step, description=text)
        else:
            left = self._left(step)
            print(f"step {step}/{self.steps}  {text}  {left}", file=sys.stderr, flush=True)
        for alarm in alarms:
            self.alarms[alarm.kind] += 1
            if self.alarms[alarm.kind] == 1:
                self.say(f"alarm {alarm.kind} at step {alarm.step}: {alarm.message}")

    def repeated(self, file: object) -> None:
        """Say at the end which alarms came more than once, and where all of them are."""
        often = [f"{kind} {count} times" for kind, count in self.alarms.items() if count > 1]
        if often:
            self.say(f"alarms that came again: {', '.join(often)}. All are in {file}")

    def _left(self, step: int) -> str:
        done = step - (self.first or 0)
        seconds = (time.monotonic() - self.begun) / max(done, 1) * (self.steps - step)
        return f"{seconds:.0f} s left" if seconds < 120 else f"{seconds / 60:.0f} min left"


def opening(config: TrainConfig) -> str:
    """What a run is about to do, its usual values written out."""
    rollout, kl = config.rollout, config.kl
    batch = f"{rollout.prompts} × {rollout.group_size} completions of up to {rollout.max_tokens} tokens"
    aim = f"KL to {kl.target:g} nats per {kl.per}" if kl.controller != "fixed" else f"beta {kl.beta:g}"
    rewards = " + ".join(config.reward.functions)
    what = f"{config.model}, {config.algorithm.name}, {rewards}"
    return f"{what}: {config.steps} steps of {batch}, learning rate {config.optim.lr:g}, {aim}. Run: {config.run}"


def summary(metrics: dict[str, float], recent: Sequence[float] = ()) -> str:
    """Reward, KL against its target, beta and speed in one line; ``recent`` are the KLs of the steps before."""
    kl, beta, target = metrics["kl/steered"], metrics["kl/beta"], metrics.get("kl/target")
    band = "" if target is None else f" of {target:g} {place(kl, target, recent)}"
    rate = f"  {metrics['time/tokens_per_second']:.0f} tok/s" if "time/tokens_per_second" in metrics else ""
    return f"reward {metrics['reward/mean']:.3f}  KL {kl:.4f}{band}  beta {beta:.3g}{rate}"


def place(kl: float, target: float, recent: Sequence[float]) -> str:
    """Where KL is: in band (within a fifth of the target), above it, approaching it from below, or just below."""
    if not math.isfinite(kl):
        return "not measured"
    if abs(kl / target - 1) <= BAND:
        return "in band"
    if kl > target:
        return "above"
    known = [k for k in recent if math.isfinite(k)]
    return "approaching" if known and kl > sum(known) / len(known) else "below"
