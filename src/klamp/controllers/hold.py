"""``Hold``: find the price that keeps KL at its target, then be quiet.

``x = sqrt(KL / target)`` settles at ``beta* / beta``: KL regulates itself to ``c / beta^2``. So a measured KL, divided by
what the policy has felt so far of recent prices, reads off ``beta*`` even while KL is still moving.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from klamp.controllers.base import Bounds, State, check_bounds, check_target, clip, skip
from klamp.errors import ConfigError, require_number, unknown
from klamp.masked import Unit

PRESETS = {"conservative": 0.02, "moderate": 0.08, "aggressive": 0.15}
"""Targets in nats per token, inside the usual bands 0.01-0.03, 0.05-0.10 and 0.10-0.20."""


@dataclass(frozen=True)
class HoldState(State):
    """What the controller believes of the plant. Numbers only."""

    felt: tuple[float, ...] = (0.0, 0.0)
    centre: float = 0.0
    surprise: tuple[float, ...] = (0.0, 0.3)
    level: tuple[float, ...] = (0.0, 0.0)


@dataclass(frozen=True)
class Hold:
    """``log beta = log beta* + push-back``; ``beta*`` is read off ``sqrt(KL / target)`` and the prices felt so far."""

    target: float
    per: Unit | None = None
    init_beta: float = 0.1
    bounds: Bounds = (1e-6, 1e4)

    def __post_init__(self) -> None:
        check_target("Hold", self.target, self.per)
        require_number("Hold.init_beta", self.init_beta, above=0, way_out="It is the price before the first update.")
        check_bounds("Hold", self.bounds, around=self.init_beta)

    @classmethod
    def preset(cls, name: str) -> Hold:
        """A controller with a usual target, in nats per token: conservative 0.02, moderate 0.08, aggressive 0.15."""
        if name not in PRESETS:
            raise unknown("Hold.preset", name, PRESETS)
        return cls(target=PRESETS[name], per="token")

    def init(self, *, spread: float | None = None, length: float | None = None) -> HoldState:
        """``beta = 0.65 spread / sqrt(2 target per sequence)``; at ``init_beta`` when told nothing."""
        beta = self.init_beta
        if spread is not None:
            require_number("spread", spread, above=0, way_out="It is the RMS spread of the advantages in a group.")
            beta = 0.65 * spread / math.sqrt(2 * self.target * self._tokens(length))
        beta = clip(beta, *self.bounds)
        return HoldState(beta=beta, centre=math.log(beta))

    def _tokens(self, length: float | None) -> float:
        if self.per == "sequence":
            return 1.0
        if length is None:
            raise ConfigError(
                f"length is missing: Hold.init(spread=...) with per={self.per!r} needs the mean number of tokens in a "
                "completion. Pass length=..., or leave spread out to start at init_beta."
            )
        return require_number("length", length, above=0, way_out="It is the mean number of tokens in a completion.")

    def update(self, state: HoldState, kl: float, n: int = 1, effort: float = 0.0) -> HoldState:
        """The state after observing ``kl``; ``effort`` is what a clamp had to undo of the last step."""
        left_out = skip(state, kl)
        if left_out is not None:
            return left_out
        effort = effort if math.isfinite(effort) and effort > 0 else 0.0
        kl = max(kl / self.target, 1e-9) * math.exp(2 * effort)
        t = state.updates + 1
        w, x = state.felt
        w += (1 / state.beta - w) / 3
        x += (w - x) / 12
        fast, slow = state.level
        fast += 0.7 * (kl - fast)
        slow += max(0.07, min(0.5, 3 / t)) * (kl - slow)
        state = replace(state, updates=t, felt=(w, x), level=(fast, slow))
        if t <= 2:
            return state
        y = 0.5 * math.log(fast)
        r = clip(y - math.log(x) - state.centre, -1.2, 1.2)
        mean, square = state.surprise
        mean, square = mean + 0.04 * (r - mean), square + 0.04 * (r * r - square)
        centre = state.centre + (0.03 + 0.19 * min(1.0, mean * mean / square)) * r
        u = centre + 1.2 * max(min(y, 1.9) - 0.055, 0) - 0.22 * max(min(-y, 0.25) - 0.055, 0)
        if fast < 1 and fast > 1.05 * slow:
            u = max(u, math.log(state.beta))
        beta = math.exp(clip(u, *(math.log(max(b, 1e-300)) for b in self.bounds)))
        return replace(state, beta=clip(beta, *self.bounds), centre=centre, surprise=(mean, square))
