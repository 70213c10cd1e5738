"""The other laws, vectorised over plants: each is made with its gains and called with the observed KLs.

Ziegler et al. 2019, the tutorial's exponential, PPO's doubling (2017), dual ascent, PID-Lagrangian (Stooke et al.
2020), a first log-PI, and a constant.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
LOW, HIGH = 1e-6, 1e4


@dataclass
class Rival:
    """A law with its own memory; ``beta`` is the present price of every plant."""

    target: float
    beta: Array

    def __post_init__(self) -> None:
        self.beta = np.array(self.beta, dtype=float)

    def __call__(self, kl: Array) -> Array:
        self.beta = np.clip(np.nan_to_num(self.law(kl), nan=LOW), LOW, HIGH)
        return self.beta

    def law(self, kl: Array) -> Array:
        """The next price."""
        return self.beta


@dataclass
class Fixed(Rival):
    """A constant."""


@dataclass
class Ziegler(Rival):
    """``beta (1 + clip(KL/target - 1, +-0.2) n / horizon)``."""

    rate: float = 256 / 10_000

    def law(self, kl: Array) -> Array:
        return self.beta * (1 + np.clip(kl / self.target - 1, -0.2, 0.2) * self.rate)


@dataclass
class Exponential(Rival):
    """``clip(beta exp(gain (KL - target)), 1e-4, 10)``: the error is absolute."""

    gain: float = 0.1

    def law(self, kl: Array) -> Array:
        return np.clip(self.beta * np.exp(np.clip(self.gain * (kl - self.target), -20, 20)), 1e-4, 10.0)


@dataclass
class Doubling(Rival):
    """``beta x factor`` above 1.5 target, ``beta / factor`` below target / 1.5."""

    factor: float = 2.0

    def law(self, kl: Array) -> Array:
        power = 1.0 * (kl > 1.5 * self.target) - 1.0 * (kl < self.target / 1.5)
        return self.beta * self.factor**power


@dataclass
class DualAscent(Rival):
    """``max(beta + gain (KL - target), 0)``."""

    gain: float = 1e-3

    def law(self, kl: Array) -> Array:
        return self.beta + self.gain * (kl - self.target)


@dataclass
class PID(Rival):
    """``[K_p e + I + K_d (slope)+]+`` with ``I <- [I + K_i e]+``; P and D see the KL through an EMA."""

    gains: tuple[float, float, float] = (0.03, 0.001, 0.0)
    smooth: float = 0.2
    integral: Array = field(init=False)
    level: Array = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.integral, self.level = self.beta.copy(), np.zeros_like(self.beta)

    def law(self, kl: Array) -> Array:
        before = self.level
        self.level = self.level + self.smooth * (kl - self.level)
        kp, ki, kd = self.gains
        self.integral = np.maximum(self.integral + ki * (kl - self.target), 0)
        rise = np.maximum(self.level - before, 0)
        return np.maximum(kp * (self.level - self.target) + self.integral + kd * rise, 0)


@dataclass
class LogPI(Rival):
    """PI on ``log(EMA KL / target)`` with a conditional integral: the first law tried for ``Hold``."""

    t: int = 0
    level: Array = field(init=False)
    slope: Array = field(init=False)
    error: Array = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.level, self.slope, self.error = (np.zeros_like(self.beta) for _ in range(3))

    def law(self, kl: Array) -> Array:
        kl = np.maximum(kl, 1e-9 * self.target)
        self.t += 1
        before = self.level if self.t > 1 else kl
        self.level = before + 0.16 * (kl - before)
        y = np.log(self.level / self.target)
        e = np.clip(y, -3, 3)
        if self.t == 1:
            self.error = e
            return self.beta
        self.slope = self.slope + 0.4 * (y - np.log(before / self.target) - self.slope)
        ahead = 50 * self.slope
        off = (y * (y + ahead) < 0) | ((np.abs(ahead) > 0.6) & (ahead * y < 0))
        integral = np.where(off, 0, 0.03 * e * np.where(np.abs(y) > 0.25, 3, 1))
        change = e - self.error + integral
        self.error = e
        return self.beta * np.exp(change)
