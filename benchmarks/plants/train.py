"""Policy-gradient plants under a price, with or without the clamp beside it, and what came of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from klamp.clamp import Clamped, Gauge, clamp

from .policy import Runs, Training

Array = NDArray[np.float64]
Policy = Callable[[Array, Array, Array], Array]
"""Takes KL / target, the clamp's effort and the spread of every run, returns every run's next price."""

LIMIT = 1.1
"""The clamp's limit, in targets."""


@dataclass(frozen=True)
class Trace:
    """Each [steps, R]: true KL / target before the step, price, mean reward, effort."""

    kl: Array
    beta: Array
    reward: Array
    effort: Array


def train(runs: Runs, policy: Policy, beta0: Array, *, clamped: bool = False) -> Trace:
    """Train every run to the end of its horizon."""
    training, beta = Training(runs), np.array(beta0)
    guard = Clamps(runs) if clamped else None
    rows = []
    for _ in range(runs.steps):
        kl = training.true_kl() / runs.target
        measured, reward = training.step(beta)
        effort = guard(training, measured) if guard else np.zeros(len(runs))
        rows.append((kl, beta, reward, effort))
        beta = policy(measured / runs.target, effort, training.spread)
    return Trace(*(np.array(column) for column in zip(*rows, strict=True)))


class Clamps:
    """klamp's clamp and gauge after every update of every run."""

    def __init__(self, runs: Runs) -> None:
        self.gauge = Gauge()
        self.states = [self.gauge.init()] * len(runs)
        self.last: list[Clamped | None] = [None] * len(runs)

    def __call__(self, training: Training, measured: Array) -> Array:
        runs = training.runs
        effort = np.zeros(len(runs))
        for j in range(len(runs)):
            self.states[j] = self.gauge.update(self.states[j], float(measured[j]), self.last[j])
            own = training.own_kl(j, training.b[j])
            limit = self.gauge.limit(self.states[j], LIMIT * float(runs.target[j]), own)
            self.last[j] = result = self._clamp(training, j, limit, own)
            effort[j] = result.effort
        if effort.any():
            training.refresh()
        return effort

    @staticmethod
    def _clamp(training: Training, j: int, limit: float, own: float) -> Clamped:
        def scale(s: float) -> None:
            training.b[j] *= s

        return clamp(lambda: training.own_kl(j, training.b[j]), scale, limit, kl=own)


def in_band(kl: Array, band: float = 0.2) -> Array:
    """Per cent of steps within the band, from the first at or above its lower edge on; 0 where there is none. [R]."""
    inside, reached = np.abs(kl - 1) <= band, np.maximum.accumulate(kl >= 1 - band, 0)
    return 100 * (inside & reached).sum(0) / np.maximum(reached.sum(0), 1)


@dataclass(frozen=True)
class Constants:
    """What constant prices do on the same runs and noise: the oracle, and reward as a function of KL."""

    share: Array
    """In band [R, grid]."""
    kl: Array
    """Mean KL / target in the second half [R, grid]."""
    reward: Array
    """Mean reward in the second half [R, grid]."""
    before: Array
    """Reward of the reference [R]."""
    grid: Array
    """Multiples of the feed-forward."""

    @property
    def best(self) -> Array:
        """In band of each run's best constant, chosen in hindsight."""
        return self.share.max(1)

    def gain(self, trace: Trace) -> float:
        """Reward gained in the second half over what a constant gains at the same mean KL, minus 1, in per cent."""
        half = len(trace.kl) // 2
        kl, reward = trace.kl[half:].mean(0), trace.reward[half:].mean(0)
        order = np.argsort(self.kl, 1)
        x, y = np.take_along_axis(self.kl, order, 1), np.take_along_axis(self.reward, order, 1)
        at_kl = [np.interp(*row) for row in zip(kl, x, y, strict=True)]
        return float(100 * ((reward - self.before).sum() / (np.array(at_kl) - self.before).sum() - 1))


def constants(runs: Runs, points: int) -> Constants:
    """Try ``points`` constant prices from 0.15 to 3.5 of the feed-forward on every run."""
    grid = np.geomspace(0.15, 3.5, points)
    many, n = runs.repeat(points), len(runs)
    beta = many.feed_forward * np.tile(grid, n)
    trace = train(many, lambda *_: beta, beta)
    half = runs.steps // 2

    def mean(x: Array) -> Array:
        return x[half:].mean(0).reshape(n, points)

    return Constants(
        in_band(trace.kl).reshape(n, points),
        mean(trace.kl),
        mean(trace.reward),
        trace.reward[0].reshape(n, points)[:, 0],
        grid,
    )
