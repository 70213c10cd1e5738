"""The arms of a comparison: what steers beta in each, everything else alike.

Rivals run with the settings they are published with; Hold is told its target and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from klamp.errors import ConfigError, require_number, unknown

ADAPTIVE = ("ziegler", "exponential", "hold-price", "hold")
ARMS = ("static", *ADAPTIVE)
ORACLE = "oracle"
"""The name under which the best constant in hindsight appears in tables and figures."""
COARSE = 2.0
FINE = 2.0**0.25
"""Ratios between neighbouring constants: KL goes as 1 / beta^2, so a fine step changes it by 1.4."""
CONSTANTS = 7


@dataclass(frozen=True)
class Arm:
    """A name and the fields of KLConfig that make it."""

    name: str
    summary: str
    kl: dict[str, Any] = field(default_factory=dict)

    @property
    def constant(self) -> bool:
        """True for the constants among which the oracle is found."""
        return self.name.startswith("beta=")


def arm(name: str, static_beta: float) -> Arm:
    """The arm called ``name``."""
    if name == "static":
        return Arm(name, f"beta = {static_beta:g}", {"controller": "fixed", "beta": static_beta, "clamp": False})
    if name == "ziegler":
        summary = "Ziegler et al. 2019, from 0.2, horizon 10000"
        return Arm(name, summary, {"controller": "ziegler", "beta": 0.2, "clamp": False})
    if name == "exponential":
        summary = "exponential rule, from 0.1, gain 0.1"
        return Arm(name, summary, {"controller": "exponential", "beta": 0.1, "clamp": False})
    if name == "hold-price":
        return Arm(name, "Hold, price only", {"controller": "hold", "clamp": False})
    if name == "hold":
        return Arm(name, "Hold, price and clamp", {"controller": "hold", "clamp": True})
    if name.startswith("beta="):
        return constant(_number(name))
    raise unknown("arm", name, (*ARMS, "beta=NUMBER"))


def constant(beta: float) -> Arm:
    """A constant price, named after it."""
    return Arm(f"beta={beta:.4g}", f"beta = {beta:.4g}", {"controller": "fixed", "beta": beta, "clamp": False})


def parse(names: Sequence[str] | str, static_beta: float) -> list[Arm]:
    """Arms from names with commas or without, each once, in the order given."""
    require_number("--static-beta", static_beta, at_least=0, way_out="It is the static arm's price; 0.04 is usual.")
    listed = [names] if isinstance(names, str) else list(names)
    flat = [part.strip() for text in listed for part in str(text).split(",") if part.strip()]
    if not flat:
        raise ConfigError(f"--arms is empty. Choose from: {', '.join(ARMS)}.")
    return [arm(name, static_beta) for name in dict.fromkeys(flat)]


def coarse_constants(target: float, length: float) -> list[float]:
    """Seven constants a factor 2 apart around ``0.65 / sqrt(2 target per sequence)``, where the best one should be."""
    centre = 0.65 / math.sqrt(2 * target * length)
    return [_round(centre * COARSE**i) for i in range(-(CONSTANTS // 2), CONSTANTS // 2 + 1)]


def fine_constants(around: float) -> list[float]:
    """Seven constants a quarter of an octave apart around one."""
    return [_round(around * FINE**i) for i in range(-(CONSTANTS // 2), CONSTANTS // 2 + 1)]


def _round(x: float) -> float:
    return float(f"{x:.4g}")


def _number(name: str) -> float:
    text = name.removeprefix("beta=")
    try:
        value = float(text)
    except ValueError:
        raise ConfigError(f"arm {name!r}: {text!r} is not a number. Write it as beta=0.3.") from None
    return require_number(f"arm {name!r}", value, at_least=0, way_out="A price is never negative.")
