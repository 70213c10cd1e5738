"""The controllers of the literature, exactly as published, with their traps refused instead of met.

Ziegler et al. 2019 (arXiv 1909.08593 §2.2), as ROLL, trlx, verl and OpenRLHF have it; the exponential rule of the PPO
tutorial; the doubling rule of PPO (arXiv 1707.06347 §4); a constant and a schedule. They go by the KL alone, Ziegler's
also by the number of sequences: ``effort``, ``spread``, ``noise``, ``signal`` and ``length`` change nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from klamp.controllers.base import (
    Bounds,
    Known,
    State,
    Target,
    check_bounds,
    clip,
    multiplied,
    nats,
    observed,
    settle_target,
    skip,
)
from klamp.errors import ConfigError, require_number
from klamp.masked import Unit


class Rule:
    """What the rules share: a KL that is NaN or infinite is counted and changes nothing, any other is one update."""

    def update(
        self,
        state: State,
        kl: float,
        n: int = 1,
        *,
        effort: float = 0.0,
        spread: Known = None,
        noise: Known = None,
        signal: float = 1.0,
    ) -> State:
        """The state after a reading.

        Args:
            state: what ``init`` or the last ``update`` returned; it is left as it is.
            kl: the batch's KL, in the unit of the target.
            n: sequences behind ``kl``.
            effort, spread, noise, signal: not used by these rules.

        Returns:
            The new state.
        """
        skipped = skip(state, kl)
        if skipped:
            return skipped
        return replace(state, beta=self._next(state, observed(kl), n), updates=state.updates + 1)

    def _next(self, state: State, kl: float, n: int) -> float:
        """The price after a KL that is a number."""
        raise NotImplementedError


@dataclass(frozen=True)
class Fixed(Rule):
    """``beta`` for ever: KL is measured and never steered by."""

    beta: float
    """The price, >= 0. At 0 the KL is still measured."""

    def __post_init__(self) -> None:
        require_number("Fixed.beta", self.beta, at_least=0, way_out="A price is never negative; 0 only measures.")

    def init(self, *, spread: Known = None, length: Known = None, n: Known = None, signal: float = 1.0) -> State:
        """The constant, before any update."""
        return State(beta=float(self.beta))

    def _next(self, state: State, kl: float, n: int) -> float:
        return state.beta


@dataclass(frozen=True)
class Scheduled(Rule):
    """``beta = schedule(updates)``: a price set in advance, whatever the KL does."""

    schedule: Callable[[int], float]
    """Maps the number of updates so far to beta >= 0."""

    def __post_init__(self) -> None:
        if not callable(self.schedule):
            raise ConfigError(
                f"Scheduled.schedule must be a function of the number of updates, got {self.schedule!r}. "
                "For a constant use Fixed(beta=...)."
            )

    def init(self, *, spread: Known = None, length: Known = None, n: Known = None, signal: float = 1.0) -> State:
        """``schedule(0)``."""
        return State(beta=self._price(0))

    def _next(self, state: State, kl: float, n: int) -> float:
        return self._price(state.updates + 1)

    def _price(self, step: int) -> float:
        return require_number(
            f"Scheduled.schedule({step})", self.schedule(step), at_least=0, way_out="A price is never negative."
        )


@dataclass(frozen=True)
class TargetRule(Rule):
    """What the rules that multiply their price share: a target with its unit, and the first price."""

    target: float | Target
    """KL to hold, in nats per ``per``; or a :class:`Target`, which has its unit."""
    per: Unit | None = None
    """Unit of the target; required."""
    init_beta: float = 0.1
    """The first price, > 0: the rule multiplies and can never leave 0."""

    def __post_init__(self) -> None:
        settle_target(self)
        way_out = "The rule multiplies beta, so 0 would stay 0; use Fixed(beta=0.0) to measure only."
        require_number(f"{type(self).__name__}.init_beta", self.init_beta, above=0, way_out=way_out)

    def init(self, *, spread: Known = None, length: Known = None, n: Known = None, signal: float = 1.0) -> State:
        """``init_beta``."""
        return State(beta=float(self.init_beta))


@dataclass(frozen=True)
class Ziegler(TargetRule):
    """``beta ← beta · (1 + clip(kl/target − 1, ±max_error) · n / horizon)`` (Ziegler et al. 2019).

    ``n`` is the number of sequences behind a KL and ``horizon`` is counted in the same sequences. Unbounded unless
    ``bounds`` are given, as the original is.
    """

    init_beta: float = 0.2
    """The first price, > 0: the rule multiplies and can never leave 0."""
    horizon: float = 10_000
    """Sequences over which an error of 1 would change beta by 100 %."""
    max_error: float = 0.2
    """Relative errors are clipped to this."""
    bounds: Bounds | None = None
    """Optional (low, high) for beta."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number("Ziegler.horizon", self.horizon, above=0, way_out="It is counted in sequences; 10000 is usual.")
        require_number("Ziegler.max_error", self.max_error, above=0, way_out="The original clips at 0.2.")
        check_bounds("Ziegler", self.bounds, around=self.init_beta)

    def _next(self, state: State, kl: float, n: int) -> float:
        """Refuses a step so large that beta would turn zero or negative."""
        require_number("n", n, at_least=0, way_out="It is the number of sequences behind this KL.")
        error = clip(kl / nats(self.target) - 1, -self.max_error, self.max_error)
        factor = 1 + error * n / self.horizon
        if factor <= 0:
            raise ConfigError(
                f"Ziegler.update would multiply beta by {factor:.3g} with n={n} and horizon={self.horizon:g}, and a "
                f"price is never negative. Keep n below horizon / max_error = {self.horizon / self.max_error:g}."
            )
        return multiplied(state.beta, factor, self.bounds)


@dataclass(frozen=True)
class Exponential(TargetRule):
    """``beta ← clip(beta · exp(gain · (kl − target)), bounds)``: the PPO tutorial's rule.

    The error is absolute, so the gain means another speed in another unit; ``Hold`` is scale-free.
    """

    init_beta: float = 0.1
    """The first price, > 0."""
    gain: float = 0.1
    """Change of log beta per nat of error."""
    bounds: Bounds = (1e-4, 10.0)
    """(low, high) for beta."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number("Exponential.gain", self.gain, above=0, way_out="The tutorial uses 0.1.")
        check_bounds("Exponential", self.bounds, around=self.init_beta)

    def _next(self, state: State, kl: float, n: int) -> float:
        # The bounds hold after any exponent; clipping it first keeps exp from overflowing on the way there.
        factor = math.exp(clip(self.gain * (kl - nats(self.target)), -700.0, 700.0))
        return multiplied(state.beta, factor, self.bounds)


@dataclass(frozen=True)
class Doubling(TargetRule):
    """``beta · factor`` above ``target · tolerance``, ``beta / factor`` below ``target / tolerance`` (PPO 2017)."""

    init_beta: float = 1.0
    """The first price, > 0."""
    factor: float = 2.0
    """What beta is multiplied or divided by, > 1."""
    tolerance: float = 1.5
    """How far KL may be from the target, as a factor > 1, before beta moves."""
    bounds: Bounds = (1e-6, 1e6)
    """(low, high) for beta."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number("Doubling.factor", self.factor, above=1, way_out="PPO uses 2.")
        require_number("Doubling.tolerance", self.tolerance, above=1, way_out="PPO uses 1.5.")
        check_bounds("Doubling", self.bounds, around=self.init_beta)

    def _next(self, state: State, kl: float, n: int) -> float:
        factor = 1.0
        if kl > nats(self.target) * self.tolerance:
            factor = self.factor
        elif kl < nats(self.target) / self.tolerance:
            factor = 1 / self.factor
        return multiplied(state.beta, factor, self.bounds)
