"""One record a step, and alarms that say what to change: a run that goes wrong should say so before it is over.

A :class:`Monitor` keeps the last ``window`` steps, and hands them out as a value (:attr:`Monitor.state`). It works with
no target and with beta 0: measuring is free of pricing. An alarm is raised once when its figure crosses the line and
again only after the figure has come well back.
"""

from __future__ import annotations

import copy
import json
import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, median
from types import MappingProxyType
from typing import Any

from klamp.controllers.base import Bounds, Target, check_bounds, split_target
from klamp.errors import ConfigError, require_number
from klamp.masked import Unit, check_unit

logger = logging.getLogger(__name__)

ADVICE = {
    "non_finite": "Look for overflowing log-probs or an empty batch, and skip the update.",
    "drifting": "Lower the learning rate or clamp; a constant beta is too low.",
    "not_learning": "Raise the learning rate, or look at the rewards; a constant beta is too high.",
    "spike": "Look at this step's samples and rewards; if it repeats, lower the learning rate or clip gradients.",
    "beta_at_bound": "Widen the bounds, or change the target or the learning rate.",
    "estimators_disagree": (
        "Trust the exact one; check that both use the sampling temperature, the same mask and the same samples."
    ),
    "sampler_gap": "Check dtype, temperature, top-p and how fresh the sampler's weights are.",
    "clamp_works_hard": "Lower the learning rate: the price should carry the load.",
    "no_signal": "Use a reward that tells completions of one prompt apart, other prompts, or larger groups.",
}
"""What to do about each kind of alarm in a loop of one's own; ``Monitor(advice=...)`` has other words for it."""

BAND = 0.2
"""How far from its target, relative to it, KL is still in its band."""
CLEAR = 0.8
"""A raised alarm is armed again once its figure is back inside this share of the line it crossed."""


@dataclass(frozen=True)
class Limits:
    """Where the alarms are set."""

    drifting: float = 2.0
    """Mean KL of the window, in targets, above which the policy drifts."""
    not_learning: float = 0.5
    """Mean KL of the window, in targets, below which it does not move, once the warm-up is over."""
    warmup: int = 50
    """Steps before ``not_learning`` is looked at: KL starts at 0."""
    spike: float = 5.0
    """One step's KL, in medians of the window, where it is above the band."""
    disagreement: float = 0.5
    """Relative distance between the window's means of two estimators of the same KL."""
    sampler_gap: float = 0.01
    """|mean KL(μ‖π)| of the window, in nats per token: trainer and sampler compute different models."""
    no_signal: float = 0.5
    """Share of groups, over the window, in which every completion has the same reward: most of them."""
    effort: float = 0.2
    """Mean effort of the clamp over the window: it scales away 20 % of the displacement every step."""
    fewest: int = 5
    """Steps in the window before a mean or a median is believed."""


@dataclass(frozen=True)
class Alarm:
    """What happened, with its figures, and what to do about it."""

    kind: str
    step: int
    message: str
    figures: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**asdict(self), "figures": _plain(self.figures)}


@dataclass(frozen=True)
class MonitorState:
    """What a monitor has seen: plain values, to JSON and back without loss."""

    window: tuple[Mapping[str, float], ...] = ()
    """The figures of the last steps, oldest first."""
    steps: int = 0
    """Steps in all."""
    raised: tuple[str, ...] = ()
    """Alarms that were raised and whose figures have not come back since."""

    def to_dict(self) -> dict[str, Any]:
        """A dictionary of JSON values; :meth:`from_dict` reverses it."""
        return {"window": [dict(row) for row in self.window], "steps": self.steps, "raised": list(self.raised)}

    @staticmethod
    def from_dict(saved: Mapping[str, Any]) -> MonitorState:
        """The state that :meth:`to_dict` wrote.

        Args:
            saved: what :meth:`to_dict` returned.

        Returns:
            The state. A damaged one is a :class:`klamp.ConfigError`.
        """
        try:
            rows = tuple({str(k): float(v) for k, v in row.items()} for row in saved["window"])
            return MonitorState(rows, int(saved["steps"]), tuple(sorted({str(kind) for kind in saved["raised"]})))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ConfigError(
                f"a saved monitor is damaged: {type(error).__name__} ({error}). Start a new one."
            ) from None


class Monitor:
    """Records steps, raises alarms, writes JSONL.

    Args:
        target: the KL target. None: record without one.
        per: the unit of the target.
        window: how many steps are kept.
        bounds: bounds of ``beta``, for the alarm ``beta_at_bound``.
        limits: thresholds of the alarms.
        callback: called with every alarm.
        path: a JSONL file to append to.
        advice: by kind of alarm, what to do, in place of the usual text.
    """

    def __init__(
        self,
        target: float | Target | None = None,
        per: Unit | None = None,
        *,
        window: int = 100,
        bounds: Bounds | None = None,
        limits: Limits | None = None,
        callback: Callable[[Alarm], None] | None = None,
        path: str | Path | None = None,
        advice: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.target: float | None
        self.per: Unit | None
        self.target, self.per = split_target("Monitor", target, per)
        if self.target is not None:
            check_unit("Monitor.per", self.per)
            require_number("Monitor.target", self.target, above=0, way_out="Leave it out to record without a target.")
        require_number("Monitor.window", window, at_least=1, way_out="It counts steps; 100 is usual.")
        check_bounds("Monitor", bounds)
        self.bounds = bounds
        self.limits = limits or Limits()
        self.advice = {**ADVICE, **advice}
        self.callback = callback
        self.path = Path(path) if path is not None else None
        self.window: deque[dict[str, float]] = deque(maxlen=int(window))
        self.steps = 0
        self.raised: set[str] = set()

    def record(
        self,
        step: int,
        *,
        kl: float,
        beta: float | None = None,
        estimates: Mapping[str, float] | None = None,
        sampler_kl: float | None = None,
        effort: float | None = None,
        no_signal: float | None = None,
        **extra: float,
    ) -> list[Alarm]:
        """Record one step.

        Args:
            step: its number.
            kl: its KL, in the unit of the target.
            beta: the price.
            estimates: other estimates of the same KL, by name, in the same unit.
            sampler_kl: KL(μ‖π) per token.
            effort: the clamp's effort.
            no_signal: share of groups in which every completion has the same reward.
            **extra: further numbers for the file.

        Returns:
            The alarms that the step raised.
        """
        given = {"kl": kl, "beta": beta, "sampler_kl": sampler_kl, "effort": effort, "no_signal": no_signal}
        row = {k: float(v) for k, v in given.items() if v is not None}
        row |= {f"kl/{k}": float(v) for k, v in (estimates or {}).items()}
        bad = {k: v for k, v in row.items() if not math.isfinite(v)}
        self.steps += 1
        if not bad:
            self.window.append(row)
        found = [self._non_finite(step, bad), *(() if bad else self._judge(step))]
        alarms = [a for a in found if a]
        self._write({"step": step, **row, **{k: float(v) for k, v in extra.items()}}, alarms)
        for alarm in alarms:
            logger.warning("%s at step %d: %s", alarm.kind, alarm.step, alarm.message)
            if self.callback:
                self.callback(alarm)
        return alarms

    @property
    def in_band(self) -> float | None:
        """Share of the window's steps within 20 % of the target; None without a target or a step."""
        if self.target is None or not self.window:
            return None
        return fmean(abs(r["kl"] / self.target - 1) <= BAND for r in self.window)

    def mean(self, key: str = "kl") -> float | None:
        """Mean of ``key`` over the window; None when it was never recorded.

        Args:
            key: a name that was recorded, such as ``"kl"`` or ``"beta"``.

        Returns:
            The mean, or None.
        """
        values = [r[key] for r in self.window if key in r]
        return fmean(values) if values else None

    @property
    def state(self) -> MonitorState:
        """What was seen, as a value."""
        return MonitorState(tuple(self.window), self.steps, tuple(sorted(self.raised)))

    def at(self, state: MonitorState) -> Monitor:
        """A monitor with the same settings that has seen ``state``; this one is left as it is.

        Args:
            state: of this or another monitor.

        Returns:
            The other monitor.
        """
        other = copy.copy(self)
        other.window = deque((dict(row) for row in state.window), maxlen=self.window.maxlen)
        other.steps, other.raised = state.steps, set(state.raised)
        return other

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs, as plain JSON values.

        Returns:
            What :meth:`load_state_dict` goes on from.
        """
        return self.state.to_dict()

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`.

        Args:
            saved: of a monitor with the same settings.
        """
        vars(self).update(vars(self.at(MonitorState.from_dict(saved))))

    def _judge(self, step: int) -> Iterator[Alarm | None]:
        *past, row = self.window
        few = min(self.limits.fewest, self.window.maxlen or 1)
        enough = len(self.window) >= few
        if self.target is not None and enough:
            mean = fmean(r["kl"] for r in self.window)
            yield self._drifting(step, mean, self.target)
            yield self._not_learning(step, mean, fmean(r["kl"] for r in [*past, row][-few:]), self.target)
        if past and len(past) >= few - 1:
            yield self._spike(step, row["kl"], median(r["kl"] for r in past))
        yield self._bound(step, row.get("beta"))
        if enough:
            yield from self._disagreement(step)
            yield self._sampler(step, self._column("sampler_kl"))
            yield self._effort(step, self._column("effort"))
            yield self._no_signal(step, self._column("no_signal"))

    def _column(self, key: str) -> list[float]:
        return [row[key] for row in self.window if key in row]

    def _non_finite(self, step: int, bad: dict[str, float]) -> Alarm | None:
        message = f"{', '.join(f'{k} is {v}' for k, v in bad.items())}. The step is left out of the window."
        return self._alarm("non_finite", step, bool(bad), not bad, message, bad)

    def _drifting(self, step: int, mean: float, target: float) -> Alarm | None:
        line = self.limits.drifting * target
        message = (
            f"KL is {mean:.4g} nats per {self.per} over the last {len(self.window)} steps, "
            f"{mean / target:.1f} times its target {target:g}."
        )
        figures = {"kl": mean, "target": target}
        return self._alarm("drifting", step, mean > line, mean < CLEAR * line, message, figures)

    def _not_learning(self, step: int, mean: float, latest: float, target: float) -> Alarm | None:
        line = self.limits.not_learning * target
        # The window still holds the ramp from 0 when the warm-up ends; a KL that has arrived since is learning.
        low = max(mean, latest) < line and self.steps > self.limits.warmup
        message = (
            f"KL is {mean:.4g} nats per {self.per}, under {self.limits.not_learning:g} of its target {target:g} after "
            f"{self.steps} steps: the policy hardly moves."
        )
        figures = {"kl": mean, "target": target}
        return self._alarm("not_learning", step, low, mean > line / CLEAR, message, figures)

    def _spike(self, step: int, kl: float, usual: float) -> Alarm | None:
        # While KL climbs from 0 to its target every step is many medians high.
        line = max(self.limits.spike * usual, (1 + BAND) * (self.target or 0.0))
        message = f"KL jumped to {kl:.4g}, {kl / usual if usual > 0 else math.inf:.1f} times its median {usual:.4g}."
        return self._alarm(
            "spike", step, usual > 0 and kl > line, kl < CLEAR * line, message, {"kl": kl, "median": usual}
        )

    def _bound(self, step: int, beta: float | None) -> Alarm | None:
        if beta is None or self.bounds is None:
            return None
        low, high = self.bounds
        at = beta <= low or beta >= high
        inside = low < CLEAR * beta and beta < CLEAR * high
        message = f"beta is at its bound {beta:.4g} of [{low:g}, {high:g}] and can steer no further that way."
        return self._alarm("beta_at_bound", step, at, inside, message, {"beta": beta, "low": low, "high": high})

    def _disagreement(self, step: int) -> Iterator[Alarm | None]:
        for key in sorted({k for r in self.window for k in r if k.startswith("kl/")}):
            both = [(r["kl"], r[key]) for r in self.window if key in r]
            own, other = fmean(a for a, _ in both), fmean(b for _, b in both)
            # Relative to a tenth of the target at least: at the reference both are noise around 0.
            size = max(abs(own), abs(other), 0.1 * (self.target or 0.0))
            gap = abs(other - own) / size if size > 0 else 0.0
            message = f"two estimates of the same KL disagree over the window: {own:.4g} and {other:.4g} by {key[3:]}."
            line = self.limits.disagreement
            kind, figures = f"estimators_disagree:{key[3:]}", {"kl": own, key: other}
            yield self._alarm(kind, step, gap > line, gap < CLEAR * line, message, figures)

    def _sampler(self, step: int, gaps: list[float]) -> Alarm | None:
        if not gaps:
            return None
        gap, line = abs(fmean(gaps)), self.limits.sampler_gap  # the noise of single steps cancels in the mean
        message = (
            f"sampler and trainer differ by {gap:.4g} nats per token: the tokens are not drawn from the policy that is "
            "trained."
        )
        return self._alarm("sampler_gap", step, gap > line, gap < CLEAR * line, message, {"sampler_kl": gap})

    def _effort(self, step: int, efforts: list[float]) -> Alarm | None:
        if not efforts:
            return None
        effort, line = fmean(efforts), self.limits.effort
        message = f"the clamp undoes {1 - math.exp(-effort):.0%} of the displacement every step."
        return self._alarm("clamp_works_hard", step, effort > line, effort < CLEAR * line, message, {"effort": effort})

    def _no_signal(self, step: int, shares: list[float]) -> Alarm | None:
        if not shares:
            return None
        share, line = fmean(shares), self.limits.no_signal
        message = (
            f"in {share:.0%} of the groups of the last {len(shares)} steps every completion has the same reward: they "
            "do not say which completion is better."
        )
        return self._alarm("no_signal", step, share > line, share < CLEAR * line, message, {"no_signal": share})

    def _alarm(
        self, kind: str, step: int, crossed: bool, clear: bool, message: str, figures: dict[str, float]
    ) -> Alarm | None:
        """The alarm if it was just crossed; hysteresis keeps it quiet until it has been clear again."""
        if kind in self.raised:
            if clear:
                self.raised.discard(kind)
            return None
        if not crossed:
            return None
        self.raised.add(kind)
        return Alarm(kind, step, f"{message} {self.advice[kind.partition(':')[0]]}", figures)

    def _write(self, row: dict[str, float], alarms: list[Alarm]) -> None:
        if self.path is None:
            return
        line = _plain(row)
        if alarms:
            line["alarms"] = [a.to_dict() for a in alarms]
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise ConfigError(f"Monitor.path {str(self.path)!r} cannot be written: {error}. Choose another.") from error


def _plain(figures: Mapping[str, float]) -> dict[str, Any]:
    """JSON has no NaN; a string keeps the line readable for every parser."""
    return {k: v if math.isfinite(v) else str(v) for k, v in figures.items()}
