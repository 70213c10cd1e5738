"""Plants fitted to recorded runs of GRPO, one for each reward: how KL answered constant prices and Hold's own.

A run of 60 steps on ``tiny`` (32 completions of 24 tokens) is a random walk of KL that the price pulls back:

    KL <- KL + climb (1 - KL rho / rho*) + noise

One on SmolLM2 (128 completions of 48) is the model of ``klamp.controllers.hold``, with its own share of a step in the
pace (``momentum``) and of gradient noise (``walk``). KL is in units of the target, rho in those of the small tilt's
price, ``1 / sqrt(2 target per sequence)``; rho* grows by ``growth`` a step. Open loop, the prices of the runs put in,
the fits miss x = sqrt(KL) by 0.05 to 0.07 on ``tiny`` and 0.03 to 0.10 on SmolLM2. A reading of KL has 8 % of noise.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from statistics import fmean
from typing import NamedTuple

from klamp.controllers.hold import Hold

LENGTH = 24.0
STEPS = 60
Plant = Callable[[float], float]
"""KL / target of a step, from rho over the small tilt's price."""


class Walk(NamedTuple):
    """A fit to runs on ``tiny``."""

    climb: float
    best: float
    growth: float

    def start(self, seed: int) -> Plant:
        draw, kl, t = random.Random(seed), 0.0, 0

        def step(rho: float) -> float:
            nonlocal kl, t
            reading = kl * math.exp(draw.gauss(0, 0.08))
            pull = kl * rho / (self.best * math.exp(self.growth * t))
            kl, t = max(kl + self.climb * (1 - pull + draw.gauss(0, 0.3)), 0.0), t + 1
            return reading

        return step


class Pull(NamedTuple):
    """A fit to runs on SmolLM2."""

    momentum: float
    rate: float
    best: float
    growth: float
    walk: float

    def start(self, seed: int) -> Plant:
        draw, x, pace, t = random.Random(seed), 0.05, 0.0, 0

        def step(rho: float) -> float:
            nonlocal x, pace, t
            reading = (x * math.exp(draw.gauss(0, 0.04))) ** 2 if t else 0.0
            drive = self.best * math.exp(self.growth * t) / rho
            answer = self.rate * ((x + self.walk * (1 - x)) / x - x / drive)
            pace += self.momentum * (answer - pace) + draw.gauss(0, 0.02)
            x, t = max(x + min(pace, 0.6), 0.05), t + 1
            return reading

        return step


TINY = {
    "vowels": Walk(0.049, 1.12, 0.0132),
    "letters": Walk(0.048, 1.22, 0.0067),
    "sentiment": Walk(0.046, 1.19, 0.0067),
    "commas": Walk(0.057, 1.54, -0.0037),
    "format": Walk(0.055, 1.85, 0.0040),
}
SMOLLM2 = {
    "sentiment": Pull(0.61, 0.075, 0.52, 0.0024, 0.30),
    "vowels": Pull(0.84, 0.154, 0.83, 0.0007, 0.06),
    "format": Pull(0.59, 0.286, 0.87, 0.0030, 0.06),
    "commas": Pull(0.55, 0.067, 0.54, 0.0007, 0.42),
    "letters": Pull(0.69, 0.090, 0.71, 0.0016, 0.24),
    "word 2 %": Pull(0.95, 0.145, 0.55, 0.0043, 0.04),
}


class Result(NamedTuple):
    """Over runs of one plant, in units of the target."""

    late: float
    """KL of the last third."""
    highest: float
    """The mean over runs of their highest reading."""


def sequences(plant: Walk | Pull) -> int:
    """How many completions an update had in the runs that ``plant`` was fitted to."""
    return 32 if isinstance(plant, Walk) else 128


def run(plant: Walk | Pull, runs: int = 12) -> Result:
    """Hold without a clamp, from the price that it computes."""
    hold = Hold(0.05, "token")
    small_tilt = 1 / math.sqrt(2 * 0.05 * LENGTH)
    found = []
    for seed in range(runs):
        state, step, kls = hold.init(spread=1.0, length=LENGTH, n=sequences(plant)), plant.start(seed), []
        for _ in range(STEPS):
            kls.append(step(state.beta / small_tilt))
            state = hold.update(state, kls[-1] * 0.05, spread=1.0)
        found.append(kls)
    return Result(fmean(kl for kls in found for kl in kls[2 * STEPS // 3 :]), fmean(map(max, found)))
