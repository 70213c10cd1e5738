"""Price and clamp of a run: the controller's state, the clamp's gauge, the monitor; all of it goes into checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, is_dataclass, replace
from typing import Any

from klamp.clamp import Clamped, Gauge, GaugeState
from klamp.clamp import clamp as clamp_kl
from klamp.controllers import Controller, Hold, State
from klamp.controllers.base import advance
from klamp.errors import require_number
from klamp.monitor import Alarm, Monitor, logger
from klamp.plain import from_plain
from klamp.train.advice import advice
from klamp.train.config import KLConfig
from klamp.train.floor import WARN
from klamp.train.reading import Reading

FAR = 4.0
"""How many times a KL must fit under the limit to be far from it: twice the displacement. A share of four sequences
that reads KL a third too low is within that by far, and what it might miss the next batch reads in full."""
FADES = 0.9
"""What is left after a step of the largest change of sqrt(KL): halved in seven. Changes differ by a factor of two or so
from step to step, and get smaller from the first ones on."""


class Steering:
    """Knows the price; learns it from each step's KL and the clamp's effort."""

    def __init__(self, config: KLConfig, controller: Controller | None = None) -> None:
        self.config = config
        self.controller = controller or config.make_controller()
        self.state: State | None = None
        self.gauge = Gauge()
        self.gauge_state: GaugeState = self.gauge.init()
        self.last: Clamped | None = None
        """What the clamp found and did in the step before."""
        self.limit: float | None = None
        """The limit on own tokens that the last step was held to."""
        self.jump: float | None = None
        """The largest change of sqrt(KL) on own tokens that one of the last updates made; None before the first."""
        self.floor = 0.0
        """What rounding alone makes of KL: it is there however small the displacement."""
        self.share = 1.0
        """Share of its sequences on which the last step was measured."""
        bounds = getattr(self.controller, "bounds", None)
        self.monitor = Monitor(config.target, config.per, bounds=bounds, advice=advice(config))

    def start(self, spread: float, length: float) -> None:
        """Set the first price from the first batch, unless one is set: Hold's feed-forward, or the configured beta."""
        if self.state is not None:
            return
        known = 0 <= spread < math.inf and length > 0
        told = isinstance(self.controller, Hold) and self.config.beta is None and known
        if told:
            assert isinstance(self.controller, Hold)
            self.state = self.controller.init(spread=spread, length=length)
        else:
            self.state = self.controller.init()

    @property
    def beta(self) -> float:
        """The current price."""
        assert self.state is not None, "start() comes first"
        return self.state.beta

    def fresh(self, kl: float, noise: float = 0.0) -> None:
        """Take in a batch's KL before its update: what became of the step before on fresh samples."""
        self.gauge_state = self.gauge.update(self.gauge_state, kl, self.last, noise)
        self.last = None

    def new_reference(self) -> None:
        """Forget KLs to another reference; how own tokens and fresh ones differ stays known."""
        self.gauge_state = replace(self.gauge_state, level=0.0, reading=0.0)
        self.last = self.jump = None  # from a reference elsewhere the same steps may lead straight away

    def retarget(self, old: float | None, new: float | None) -> None:
        """Go on to another target: Hold starts anew at ``beta sqrt(old / new)``, for KL goes as ``1 / beta²``.

        What Hold knows is relative to its target, and what the monitor saw was read against it. Other rules know the
        price alone, and keep it.
        """
        if isinstance(self.controller, Hold) and self.state is not None and old and new:
            low, high = self.controller.bounds
            beta = min(max(self.state.beta * math.sqrt(old / new), low), high)
            self.state = replace(self.controller, init_beta=beta).init()
        self.monitor.load_state_dict({"window": [], "steps": 0, "raised": []})

    def far(self, kl: float) -> bool:
        """Whether ``kl`` on own tokens is far below the limit; one that cannot be measured is not."""
        limit = self.config.clamp_limit
        return limit is not None and FAR * kl < min(limit, self.gauge.limit(self.gauge_state, limit, kl))

    def expected(self, kl: float) -> float:
        """KL after an update that began at ``kl`` and is as large as any of the last; NaN where none is known."""
        return math.nan if self.jump is None or not kl >= 0 else (math.sqrt(kl) + self.jump) ** 2

    def _remember(self, kl: float, own: float) -> None:
        """Take in that an update carried KL from ``kl`` to ``own``."""
        if not all(0 <= x < math.inf for x in (kl, own)):
            self.jump = None
            return
        self.jump = max(abs(math.sqrt(own) - math.sqrt(kl)), FADES * (self.jump or 0.0))

    def clamp(
        self, reading: Reading, scale: Callable[[float], None], kl: float, *, origin_kl: float = 0.0
    ) -> Clamped | None:
        """Hold KL under the limit after an update that began at ``kl``; None without a limit.

        ``origin_kl`` is the KL where the displacement is zero: 0 at the reference, the KL before the step where that is
        backtracked. A step that starts above the limit may end no higher than it began: it can only come nearer.
        """
        limit = self.config.clamp_limit
        if limit is None:
            return None
        own = reading.first(kl, self.expected(kl), self.far)
        self.share = reading.share
        self._remember(kl, own)
        self.limit = self.gauge.limit(self.gauge_state, limit, own)
        if origin_kl >= self.limit:
            self.last = no_farther(reading, scale, origin_kl)
        else:
            self.last = clamp_kl(reading, scale, self.limit, kl=own, origin_kl=origin_kl)
        return self.last

    def observe(
        self,
        step: int,
        kl: float,
        sequences: int,
        clamped: Clamped | None,
        *,
        spread: float,
        noise: float,
        estimates: Mapping[str, float],
        sampler_kl: float | None,
        no_signal: float | None = None,
    ) -> list[Alarm]:
        """The next price, and the alarms of the step. ``kl`` is the step's fresh KL in the unit of the target."""
        assert self.state is not None, "start() comes first"
        priced = self.state.beta
        effort = clamped.effort if clamped is not None else 0.0
        self.state = advance(
            self.controller, self.state, self.above_floor(kl), sequences, effort=effort, spread=spread, noise=noise
        )
        return self.monitor.record(
            step,
            kl=kl,
            beta=priced,
            estimates=estimates,
            sampler_kl=sampler_kl,
            effort=None if clamped is None else clamped.effort,
            no_signal=no_signal,
        )

    def set_floor(self, floor: float) -> None:
        """Take in what rounding makes of KL, and say so where the target is hardly above it."""
        self.floor = floor
        target = self.config.target
        if target is not None and target < WARN * floor:
            logger.warning(
                "the target %.3g is less than %g times the floor: KL reads %.2g nats per %s from rounding alone. Raise "
                "kl.target, or set dtype=float32.",
                *(target, WARN, floor, self.config.per),
            )

    def above_floor(self, kl: float) -> float:
        """``kl`` as a controller takes it: 0 at the floor, the target at the target."""
        target = self.config.target
        if not self.floor or target is None or not target > self.floor:
            return kl
        return max(kl - self.floor, 0.0) * target / (target - self.floor)

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "settings": described(self.controller),
            "controller": None if self.state is None else self.state.to_dict(),
            "gauge": asdict(self.gauge_state),
            "last": None if self.last is None else asdict(self.last),
            "jump": self.jump,
            "floor": self.floor,
            "monitor": self.monitor.state_dict(),
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""
        self.state = None if saved["controller"] is None else State.from_dict(saved["controller"])
        self.gauge_state = from_plain(GaugeState, saved["gauge"], finite=False)
        self.last = None if saved["last"] is None else from_plain(Clamped, saved["last"], finite=False)
        jump = saved.get("jump")  # earlier versions did not save it: the next step is measured in full
        way_out = "The checkpoint is damaged; start from an earlier one."
        self.jump = None if jump is None else require_number("steering.jump", jump, at_least=0, way_out=way_out)
        self.floor = require_number("steering.floor", saved.get("floor", 0.0), at_least=0, way_out=way_out)
        self.monitor.load_state_dict(saved["monitor"])


def described(controller: Controller) -> str:
    """The kind and the plain settings of a controller, the same in every process: whose state a saved state is."""
    known: tuple[Any, ...] = fields(controller) if is_dataclass(controller) else ()
    values = {f.name: getattr(controller, f.name) for f in known}
    plain = [f"{n}={v!r}" for n, v in values.items() if v is None or isinstance(v, int | float | str | tuple | list)]
    return f"{type(controller).__name__}({', '.join(plain)})"


def no_farther(
    measure: Callable[[], float], scale: Callable[[float], None], began: float, halvings: int = 4
) -> Clamped:
    """Halve a step until KL is no higher than where it began; undo it when that does not do."""
    before = kl = measure()
    total, rounds = 1.0, 0
    while kl > began and rounds < halvings:
        scale(0.5)
        total, rounds, kl = total / 2, rounds + 1, measure()
    effort = rounds * math.log(2)
    if not kl <= began:  # also where it cannot be measured
        scale(0.0)
        total, kl = 0.0, began
    return Clamped(before, kl, total, effort, rounds, held=math.isfinite(before))
