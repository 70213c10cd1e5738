"""How KL is measured, priced, steered and clamped: the settings ``kl.*``, and the :class:`klamp.Control` they make."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from klamp.control import Control
from klamp.controllers import Controller, Doubling, Exponential, Fixed, Hold, Ziegler
from klamp.errors import ConfigError, require_number, shown, unknown
from klamp.estimators import named
from klamp.masked import UNITS, Unit
from klamp.monitor import Monitor
from klamp.placements import check, refusal
from klamp.references import parse

ControllerName = Literal["hold", "ziegler", "exponential", "doubling", "fixed"]
STEERS = {"hold": Hold, "ziegler": Ziegler, "exponential": Exponential, "doubling": Doubling}


@contextlib.contextmanager
def _within(part: str) -> Iterator[None]:
    """Errors about ``reference`` become errors about ``kl.reference``."""
    try:
        yield
    except ConfigError as error:
        raise error.within(part) from None


USUAL_TARGET = 0.05
"""Nats per token: what is held where no target is given."""


@dataclass(frozen=True, kw_only=True)
class KLConfig:
    """How KL is measured, priced, steered and clamped."""

    # Two fields, and not one klamp.Target, because flags and YAML give them one by one.
    target: float | Literal["auto"] | None = "auto"
    """KL to hold, in nats per `per`, which must be given with it. auto: 0.05 per token. None: no target, beta stays
    where it is."""
    per: Unit | None = None
    """Unit of target, limit and the KL that steers: token, sequence (its sum) or sequence_mean (its mean). None: that
    of auto, token."""
    controller: ControllerName = "hold"
    """What steers beta: hold, ziegler, exponential, doubling or fixed."""
    beta: float | None = None
    """The price: constant with `fixed`, the first one otherwise. None: Hold computes it from the first batch. With
    hold, a price more than twice or less than half of that is charged in the first step only, and said."""
    horizon: float = 10_000
    """Ziegler's horizon, in sequences."""
    gain: float = 0.1
    """Gain of the exponential rule, per nat."""
    estimator: str = "exact"
    """What is priced: exact, k1, k2, k1+, k3+, weighted_k1, weighted_k3 or detached_weight_k2."""
    placement: str = "sequence_exact"
    """Where the price enters: sequence_exact, in_reward, in_advantage or in_loss."""
    source: Literal["current_learner", "sample"] = "current_learner"
    """Whose log-probs `in_advantage` takes k1 of: the policy's, or those the sampler recorded with the tokens."""
    allow_biased: bool = False
    """Accept a pair of estimator and placement that does not descend KL(π‖ref)."""
    clamp: bool = True
    """Scale the update back when it carries KL past the limit."""
    limit: float | None = None
    """KL the clamp holds on fresh samples, in nats per `per`. None: 1.1 times the target."""
    clamp_share: float = 1.0
    """The most of a step's sequences that KL is measured on after the update; a quarter of them usually suffices."""
    reference: str = "base"
    """base, model:NAME, step:N, adapter:FOLDER, lag:N, ema:DECAY or periodic:N."""
    reference_on_cpu: bool = False
    """Keep a second model in CPU memory and bring it over for each step."""
    max_weight: float | None = 2.0
    """Truncation of the prefix ratios of sequence_exact when samples are stale. None: exact."""
    tail: float = 5.0
    """Log-ratio beyond which k2 and k3 go on linearly."""

    def __post_init__(self) -> None:
        with _within("kl"):
            object.__setattr__(self, "reference", str(parse(self.reference)))
            pair = check(self.estimator, self.placement, allow_biased=True)
        if not (pair.accepted or self.allow_biased):
            subject = f"‹kl.estimator={pair.estimator}› with ‹kl.placement={pair.placement}›"
            said = refusal(subject, pair.on_policy, pair.instead)
            raise ConfigError(f"{said}, or ‹kl.allow_biased=true› to reproduce another system.")
        # Other systems' names (full, mse, loss) are accepted and written down as klamp's own.
        object.__setattr__(self, "estimator", pair.estimator)
        object.__setattr__(self, "placement", pair.placement)
        if not named(pair.estimator).prices:
            raise ConfigError(
                f"‹kl.estimator› {pair.estimator!r} is for measuring; the trainer cannot price it. Use exact."
            )
        if self.source not in ("current_learner", "sample"):
            raise unknown("kl.source", self.source, ("current_learner", "sample"))
        if self.source == "sample" and (pair.estimator, pair.placement) != ("k1", "in_advantage"):
            raise ConfigError(
                f"‹kl.source='sample'› goes with k1 in_advantage only, not with {pair.estimator} {pair.placement}. "
                "Leave it at current_learner."
            )
        self._check_unit()
        if self.target is None and self.controller != "fixed":
            raise ConfigError(
                f"‹kl.target› is None, and ‹kl.controller={self.controller!r}› needs one. Give a target in nats per "
                f"{self.unit}, leave it out for {USUAL_TARGET:g} a token, or use ‹kl.controller=fixed› with ‹kl.beta›."
            )
        if self.controller == "fixed" and self.beta is None:
            raise ConfigError(
                "‹kl.beta› is missing for ‹kl.controller='fixed'›. Give the constant price; 0 only measures."
            )
        if self.limit is not None:
            require_number("kl.limit", self.limit, above=0, way_out="It is a KL; leave it out for 1.1 x the target.")
        if not 0 < self.clamp_share <= 1:
            raise ConfigError(
                f"‹kl.clamp_share› must be in (0, 1], got {self.clamp_share!r}. 1.0 measures every sequence."
            )
        self._check_numbers()
        self.make_controller()

    def _check_unit(self) -> None:
        """A KL of one's own has a unit of one's own: 0.05 per token and 0.05 per sequence are different wishes."""
        units = "‹kl.per=token›, ‹kl.per=sequence› (the sum over a sequence) or ‹kl.per=sequence_mean›"
        if isinstance(self.target, str) and self.target != "auto":
            raise unknown("kl.target", self.target, ("auto", "a number"))
        for name, value in {"kl.target": self.target, "kl.limit": self.limit}.items():
            if value not in (None, "auto") and self.per is None:
                raise ConfigError(f"‹{name}› {shown(value)} has no unit: nats per what? Add {units}.")
        if self.per not in (*UNITS, None):
            raise unknown("kl.per", self.per, UNITS)
        if self.target == "auto" and self.unit != "token":
            raise ConfigError(
                f"‹kl.per={self.per}› needs a ‹kl.target› in nats per {self.per}: the target of {USUAL_TARGET:g}, "
                "which holds where none is given, is per token."
            )

    def _check_numbers(self) -> None:
        """What the controllers check too, in the words of the configuration."""
        if self.goal is not None:
            way_out = (
                f"It is a KL in nats per {self.unit}; for a constant price use ‹kl.controller=fixed› with ‹kl.beta›."
            )
            require_number("kl.target", self.goal, above=0, way_out=way_out)
        if self.controller == "fixed":
            require_number("kl.beta", self.beta, at_least=0, way_out="A price is never negative; 0 only measures.")
        elif self.beta is not None:
            require_number(
                "kl.beta", self.beta, above=0, way_out="It is the first price; leave it out for a usual one."
            )
        if self.controller == "ziegler":
            require_number("kl.horizon", self.horizon, above=0, way_out="It is counted in sequences; 10000 is usual.")
        if self.controller == "exponential":
            require_number("kl.gain", self.gain, above=0, way_out="It is per nat; 0.1 is usual.")
        low, high = getattr(STEERS.get(self.controller), "bounds", None) or (0.0, math.inf)
        if self.beta is not None and not low <= self.beta <= high:
            raise ConfigError(
                f"‹kl.beta› must lie in [{low:g}, {high:g}] for ‹kl.controller={self.controller}›, got {self.beta!r}. "
                "Give another, or use ‹kl.controller=fixed›."
            )

    def make_controller(self) -> Controller:
        """The controller these settings describe."""
        beta: dict[str, Any] = {} if self.beta is None else {"init_beta": self.beta}
        target = 0.0 if self.goal is None else self.goal
        if self.controller == "fixed":
            return Fixed(0.0 if self.beta is None else self.beta)
        if self.controller == "hold":
            return Hold(target, self.unit, **beta)
        if self.controller == "ziegler":
            return Ziegler(target, self.unit, horizon=self.horizon, **beta)
        if self.controller == "exponential":
            return Exponential(target, self.unit, gain=self.gain, **beta)
        if self.controller == "doubling":
            return Doubling(target, self.unit, **beta)
        raise unknown("kl.controller", self.controller, ("hold", "ziegler", "exponential", "doubling", "fixed"))

    @property
    def goal(self) -> float | None:
        """The target as a number, in nats per ``unit``; None where there is none."""
        return USUAL_TARGET if self.target == "auto" else self.target

    @property
    def unit(self) -> Unit:
        """What a KL is per: ``per``, or the token where it was left out."""
        return self.per or "token"

    def resolved(self) -> KLConfig:
        """With target and unit written down."""
        return replace(self, target=self.goal, per=self.unit)

    @property
    def clamp_limit(self) -> float | None:
        """The limit the clamp holds, or None when there is none to hold."""
        if not self.clamp:
            return None
        return self.limit if self.limit is not None else None if self.goal is None else 1.1 * self.goal


def control_of(kl: KLConfig, controller: Controller | None = None) -> Control:
    """Price, clamp and monitor as configured, before the first batch; ``controller`` in place of the named one."""
    made = controller or kl.make_controller()
    monitor = Monitor(kl.goal, kl.unit, bounds=getattr(made, "bounds", None), advice=advice(kl))
    return Control(made, clamp=kl.clamp_limit, monitor=monitor)


def advice(kl: KLConfig) -> dict[str, str]:
    """What to change when an alarm rings, in the fields of the configuration: nothing that klamp steers by itself."""
    constant = kl.controller == "fixed"
    steer = "Raise kl.beta, lower optim.lr, or set kl.controller=hold" if constant else "Lower optim.lr"
    hold = steer if kl.clamp_limit is not None else f"{steer}, or set kl.limit with kl.clamp=true"
    free = "Lower kl.beta or raise optim.lr" if constant else "Raise optim.lr"
    return {
        "drifting": f"{hold}.",
        "not_learning": f"{free}, or look at reward/std and reward/no_signal: there may be nothing to learn from.",
        "spike": "Look at the samples of this step; if it repeats, lower optim.lr or optim.max_grad_norm.",
        "non_finite": "If it repeats, lower optim.lr, or look at the rewards and the dtype of the model.",
        "beta_at_bound": "Change kl.target, or optim.lr: lower where beta is high, higher where it is low.",
        "estimators_disagree": "The run is steered by the exact one; a higher rollout.prompts has less noise.",
        "sampler_gap": "Set dtype=float32, or rollout.top_p to 1.",
        "clamp_works_hard": f"{steer}: the clamp undoes good and bad alike.",
        "no_signal": (
            "Change reward.functions to one that differs between completions of a prompt, prompts to some that are "
            "neither too easy nor too hard, or raise rollout.group_size."
        ),
    }
