"""``Control``: price, clamp and monitor as one value, for any training loop.

    control = klamp.Control(klamp.Hold(target=0.05, per="token"), clamp=True, monitor=klamp.Monitor(0.05, "token"))
    control = control.init(spread=1.0, length=200)               # the first price, from the first batch
    for batch in batches:
        kl = measure(batch)                                      # before the update, on fresh samples
        control = control.before_update(kl, spread=1.0, n=64)
        update(loss(batch, control.beta))                        # your optimiser's step
        control = control.after_update(lambda: measure(batch), scale)
    saved = control.to_dict()                                    # plain JSON; control.from_dict(saved) goes on

A ``Control`` is frozen. Every method returns another one and leaves the old one as it was: a step that was not taken is
one whose value is thrown away. Outside itself it does what it is asked to: it calls ``scale``, and a monitor writes its
log and its file. With several processes, give each the same numbers, reduced over all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from klamp.clamp import LIMIT, Clamped, Gauge, no_farther
from klamp.clamp import clamp as clamp_kl
from klamp.clamp_scalers import Scaler
from klamp.control_state import BatchKL, is_kl
from klamp.control_state import ControlState as ControlState
from klamp.controllers.base import (
    Controller,
    advance,
    begin,
    check_controller,
    clip,
    described,
    groups_told,
    observed,
)
from klamp.errors import ConfigError, require_number
from klamp.monitor import Alarm, Monitor, MonitorState

FAR = 4.0
"""How many times a KL must fit under the limit to be far from it: twice the displacement. A share of four sequences
that reads KL a third too low is within that by far, and what it might miss the next batch reads in full."""


ROUNDING = 1.3
"""The highest reading of a floor, over the floor itself: SmolLM2 in bfloat16 reads 0.002 to 0.0025 nats per token."""


@dataclass(frozen=True)
class Control:
    """Price, clamp and monitor of a run, with their state.

    Args:
        controller: what sets the price: ``Hold`` or any other :class:`klamp.Controller`.
        clamp: the KL that no step may pass, in the unit of the target. True: 1.1 times the target. None: no clamp.
        monitor: what raises alarms; its settings are used, and what it sees is kept here. None: no alarms.
        gauge: learns how KL on a step's own tokens differs from KL on fresh ones. None: ``clamp`` bounds what
            ``measure`` reads, which is right where it reads every sequence there is.
        state: where to go on from; :meth:`init` and :meth:`from_dict` set it.
    """

    controller: Controller
    clamp: float | bool | None = None
    monitor: Monitor | None = None
    gauge: Gauge | None = field(default_factory=Gauge)
    state: ControlState = field(default_factory=ControlState)
    clamped: Clamped | None = field(default=None, compare=False)
    """What the clamp found and did in the last step; None where there was nothing to clamp."""
    own_limit: float | None = field(default=None, compare=False)
    """The limit on own tokens that the last step was held to."""
    alarms: tuple[Alarm, ...] = field(default=(), compare=False)
    """What the last step raised."""

    def __post_init__(self) -> None:
        check_controller("Control.controller", self.controller)
        object.__setattr__(self, "clamp", self._limit(self.clamp))

    def _limit(self, clamp: float | bool | None) -> float | None:
        if clamp is None or clamp is False:
            return None
        if clamp is True:
            if self.target is None:
                raise ConfigError(
                    f"Control.clamp is True, and {type(self.controller).__name__} has no target to take the limit "
                    "from. Give the limit in nats, or clamp=None."
                )
            return LIMIT * self.target
        return require_number("Control.clamp", clamp, above=0, way_out="It is a KL in nats; None for no clamp.")

    @property
    def beta(self) -> float:
        """The price of the coming update."""
        if self.state.price is None:
            raise ConfigError("Control.beta is not set yet. Start with control = control.init().")
        return self.state.price.beta

    @property
    def started(self) -> bool:
        """Whether there is a price."""
        return self.state.price is not None

    @property
    def limit(self) -> float | None:
        """The KL that the clamp holds on fresh samples; None without a clamp."""
        return None if self.clamp is None else float(self.clamp)

    @property
    def target(self) -> float | None:
        """The KL that is steered to, or that the monitor judges by; None without one."""
        own = getattr(self.controller, "target", None)
        return own if own is not None or self.monitor is None else self.monitor.target

    @property
    def seen(self) -> Monitor:
        """The monitor with what it has seen so far: ``control.seen.in_band``, ``control.seen.mean()``."""
        return (self.monitor or Monitor()).at(self.state.monitor)

    def init(
        self,
        *,
        spread: float | None = None,
        length: float | None = None,
        n: float | None = None,
        signal: float = 1.0,
        floor: float | None = None,
    ) -> Control:
        """The first price; what else is known stays known.

        Args:
            spread: RMS of the first batch's advantages within a prompt. Hold computes its first price from it, unless
                it has an ``init_beta``; None (or a number that is none) starts at the controller's ``init_beta``.
            length: mean number of tokens in a completion; Hold needs it with ``spread`` for a target per token.
            n: sequences that are drawn for each update: those of a batch, divided by the updates that are made on it.
                Without a clamp Hold starts higher the fewer they are, because gradient noise makes KL, too, and nothing
                else takes it back.
            signal: share of its groups that show a signal: whose completions differ in their reward. The price is in
                units of the spread in these.
            floor: what rounding alone makes of KL, in the unit of the target: a bfloat16 model reads about 0.002 nats
                per token beside itself. The controller sees the KL above it.

        Returns:
            The control with a price.
        """
        known = spread is not None and 0 <= spread < math.inf and (length is None or length > 0)
        given = {"spread": spread, "length": length, "n": n if self.limit is None else None, "signal": signal}
        price = begin(self.controller, **(given if known else {}))
        return replace(self, state=replace(self.state, price=price, floor=self.state.floor if floor is None else floor))

    def before_update(
        self,
        kl: float | None,
        spread: float | None = None,
        n: int = 1,
        *,
        signal: float = 1.0,
        noise: float = 0.0,
        measured: float | None = None,
        fresh: bool = True,
        steers: bool = True,
    ) -> Control:
        """Take in what a batch reads before its update. The price stays what it is until the update is done.

        Args:
            kl: the batch's KL in the unit of the target. None: this step measured none, and steers nothing.
            spread: RMS of its advantages within a prompt; groups without signal count as zero.
            n: sequences behind ``kl``.
            signal: share of its groups that show a signal: whose completions differ in their reward. Tell it to
                :meth:`init` too, or to neither.
            noise: relative standard error of ``kl``; 0 where it is not known.
            measured: KL before the update as ``measure`` of :meth:`after_update` reads it, where that differs.
            fresh: False for tokens that were trained on before: they tell how KL changed, not where it is.
            steers: False leaves the price alone in this step.

        Returns:
            The control that :meth:`after_update` goes on from.
        """
        kl = None if kl is None else observed(kl)
        spread = 0.0 if spread is not None and signal == 0 else spread
        reading = BatchKL(kl, n, spread, noise, measured, steers, groups_told(signal, spread))
        read = kl if measured is None else measured
        gauge, last = self.state.gauge, self.state.last
        if self.gauge is not None and read is not None:
            if fresh:
                gauge = self.gauge.update(gauge, read, last, noise)
            elif last is not None:
                gauge = self.gauge.carry(gauge, read, last)
        return replace(self, state=replace(self.state, gauge=gauge, last=None, reading=reading))

    def after_update(
        self,
        measure: Callable[[], float] | None = None,
        scale: Scaler | None = None,
        *,
        kl: float | None = None,
        origin_kl: float | None = None,
        step: int | None = None,
        figures: Mapping[str, Any] | None = None,
    ) -> Control:
        """Clamp the update, find the next price, record the step.

        Args:
            measure: reads KL of the weights as they are, on the step's own tokens; needed with a clamp.
            scale: multiplies the displacement from the reference: :func:`klamp.lora_scaler`,
                :func:`klamp.weights_scaler`. Needed with a clamp.
            kl: what ``measure`` would read first, where that is known already.
            origin_kl: KL where the displacement is zero: that of the weights before the step, where ``scale`` goes
                back to them. A step that began above the limit may then end no higher than it began.
            step: the number that alarms name; the monitor's own count where it is left out.
            figures: further keywords of :meth:`klamp.Monitor.record`: ``estimates``, ``sampler_kl``, ``no_signal``,
                numbers of your own for its file, and ``beta`` where another price than this one was charged.

        Returns:
            The control of the next step. Its ``clamped`` and ``alarms`` say what was done and found.
        """
        reading = self.state.reading
        if reading is None or self.state.price is None:
            missing = "before_update(kl)" if self.started else "init() and before_update(kl)"
            raise ConfigError(f"after_update goes with a reading. Call {missing} first.")
        done = self._clamped(measure, scale, kl, origin_kl)
        clamped, price = done.clamped, self.state.price
        if reading.kl is not None and reading.steers:
            kl_above, noise = self._above_floor(reading.kl, reading.noise)
            price = advance(
                self.controller,
                price,
                kl_above,
                reading.n,
                effort=0.0 if clamped is None else clamped.effort,
                spread=reading.spread,
                noise=noise,
                signal=reading.signal,
            )
        seen, alarms = self._record(reading.kl, clamped, step, figures)
        return replace(done, state=replace(done.state, price=price, monitor=seen, reading=None), alarms=tuple(alarms))

    def skip(
        self, kl: float | None = None, *, step: int | None = None, figures: Mapping[str, Any] | None = None
    ) -> Control:
        """A step without an update: the monitor hears of it, price and clamp go on from where they were.

        Args:
            kl: what the batch read; NaN where nothing counted. None records nothing.
            step: as in :meth:`after_update`.
            figures: as in :meth:`after_update`.

        Returns:
            The control of the next step.
        """
        seen, alarms = self._record(kl, None, step, figures)
        reading, last = self.state.reading, self.state.last
        if reading is not None:  # a batch was read, and changed nothing
            read = reading.kl if reading.measured is None else reading.measured
            last = None if read is None or not is_kl(read) else Clamped(read, read)
        state = replace(self.state, monitor=seen, reading=None, last=last)
        return replace(self, state=state, clamped=None, own_limit=None, alarms=tuple(alarms))

    def new_reference(self, *, restarts: bool = False) -> Control:
        """KL is to another reference from here on: forget the last ones, keep how own tokens and fresh ones differ.

        Args:
            restarts: whether the new reference is the policy itself, so that KL begins at 0 again.

        Returns:
            The control for the new reference.
        """
        gauge, price = replace(self.state.gauge, level=0.0, reading=0.0), self.state.price
        if restarts and price is not None:
            price = price.restarted()
        return replace(self, state=replace(self.state, gauge=gauge, price=price, last=None))

    def retarget(self, old: float | None, new: float | None) -> Control:
        """The state was steered to ``old``, and goes on to ``new``, the controller's target.

        Hold keeps what it knows, at ``beta sqrt(old / new)``; rules that know a price alone keep it. What the monitor
        saw was judged by the old target, and is forgotten.

        Args:
            old: the target before. None: there was none.
            new: the target from here on.

        Returns:
            The control for ``new``.
        """
        price = self.state.price
        if price is not None and old and new:
            price = price.retargeted(old, new)
            if bounds := getattr(self.controller, "bounds", None):
                price = replace(price, beta=clip(price.beta, *bounds))
        return replace(self, state=replace(self.state, price=price, monitor=MonitorState()))

    def far(self, kl: float) -> bool:
        """Whether ``kl`` on own tokens is far below the limit; one that cannot be measured is not.

        Args:
            kl: KL after the update, on the step's own tokens.

        Returns:
            True where the clamp has nothing to do for this step or the next.
        """
        return self.limit is not None and FAR * kl < min(self.limit, self._own_limit(kl))

    def _above_floor(self, kl: float, noise: float) -> tuple[float, float]:
        """``kl`` as the controller takes it, 0 at the floor and the target at the target, and its relative error."""
        target, floor = self.target, self.state.floor
        if not floor or target is None or not target > floor:
            return kl, noise
        above = max(kl - floor, 0.0)
        return above * target / (target - floor), noise * kl / above if above else 0.0

    def to_dict(self) -> dict[str, Any]:
        """The state as plain JSON values, and a line that says whose it is."""
        return {"settings": described(self.controller), **self.state.to_dict()}

    def from_dict(self, saved: Mapping[str, Any]) -> Control:
        """This control, going on from what :meth:`to_dict` wrote.

        Args:
            saved: of a control whose controller has states of the same kind.

        Returns:
            The control with that state. Damaged values, and the state of another kind of controller, are a ConfigError.
        """
        state = ControlState.from_dict(saved)
        if state.price is not None and type(state.price) is not type(begin(self.controller)):
            raise ConfigError(
                f"the saved state is the {type(state.price).__name__} of another controller than "
                f"{type(self.controller).__name__}. Give the controller it was made with, or start anew with init()."
            )
        return replace(self, state=state, clamped=None, own_limit=None, alarms=())

    def _own_limit(self, own: float) -> float:
        """The limit for own tokens that read ``own`` after the update."""
        assert self.limit is not None, "only a clamp asks"
        return self.limit if self.gauge is None else self.gauge.limit(self.state.gauge, self.limit, own)

    def _clamped(
        self, measure: Callable[[], float] | None, scale: Scaler | None, own: float | None, origin_kl: float | None
    ) -> Control:
        """The control after the clamp has looked at the update."""
        if self.limit is None:
            return replace(self, clamped=None, own_limit=None)
        if measure is None or scale is None:
            raise ConfigError(
                f"after_update needs measure and scale to hold KL under {self.limit:g}. Pass both, or make the control "
                "with clamp=None."
            )
        own = measure() if own is None else own
        limit, floor = self._own_limit(own), self.state.floor
        origin = 0.0 if origin_kl is None or not math.isfinite(origin_kl) else origin_kl
        if origin_kl is None:  # what rounding alone reads cannot be scaled away
            limit = max(limit, ROUNDING * floor)
        if origin >= limit:
            result = no_farther(measure, scale, origin, floor=floor)
        else:
            result = clamp_kl(measure, scale, limit, kl=own, origin_kl=origin, floor=floor)
        last = result if is_kl(result.kl_before, result.kl_after) else None
        return replace(self, state=replace(self.state, last=last), clamped=result, own_limit=limit)

    def _record(
        self, kl: float | None, clamped: Clamped | None, step: int | None, figures: Mapping[str, Any] | None
    ) -> tuple[MonitorState, list[Alarm]]:
        if self.monitor is None or kl is None:
            return self.state.monitor, []
        seen = self.seen
        effort = None if clamped is None else clamped.effort
        at = seen.steps + 1 if step is None else step
        known = {"beta": self.beta if self.started else None, "effort": effort}
        alarms = seen.record(at, kl=kl, **{**known, **(figures or {})})
        return seen.state, alarms
