"""The state of a :class:`klamp.Control`: everything a resumed run needs, to plain JSON and back without loss."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from klamp.clamp import Clamped
from klamp.controllers.base import State
from klamp.errors import ConfigError, require_number, shown
from klamp.gauge import GaugeState
from klamp.monitor import MonitorState
from klamp.strict_json import from_plain

DAMAGED = "The checkpoint is damaged; start from an earlier one."


@dataclass(frozen=True)
class BatchKL:
    """What a batch read before its update; kept until the update is done."""

    kl: float | None
    """In the unit of the target; None where the step measured none."""
    n: int = 1
    """Sequences behind it."""
    spread: float | None = None
    """RMS of the advantages within a prompt."""
    noise: float = 0.0
    """Relative standard error of ``kl``."""
    measured: float | None = None
    """KL before the update as ``measure`` reads it; ``kl`` unless told otherwise."""
    steers: bool = True
    """Whether the price follows it."""


@dataclass(frozen=True)
class ControlState:
    """Everything a resumed run needs. It goes to plain JSON and back without loss."""

    price: State | None = None
    """The controller's state; None before ``init``."""
    gauge: GaugeState = field(default_factory=GaugeState)
    """What the clamp knows of KL on fresh samples."""
    last: Clamped | None = None
    """What the clamp did in the step before, until the next batch is read; None where that was no KL."""
    floor: float = 0.0
    """What rounding alone makes of KL: it is there however small the displacement."""
    monitor: MonitorState = field(default_factory=MonitorState)
    """What the monitor has seen."""
    reading: BatchKL | None = None
    """The batch between ``before_update`` and ``after_update``."""

    def to_dict(self) -> dict[str, Any]:
        """A dictionary of JSON values; :meth:`from_dict` reverses it."""
        return {
            "controller": None if self.price is None else self.price.to_dict(),
            "gauge": asdict(self.gauge),
            "last": None if self.last is None else asdict(self.last),
            "floor": self.floor,
            "monitor": self.monitor.to_dict(),
            "reading": None if self.reading is None else _written(asdict(self.reading)),
        }

    @staticmethod
    def from_dict(saved: Mapping[str, Any]) -> ControlState:
        """The state that :meth:`to_dict` wrote, or that an earlier klamp did, which saved more or less of it."""
        if not isinstance(saved, Mapping) or not {"controller", "gauge", "monitor"} <= set(saved):
            raise ConfigError(f"a saved control must hold controller, gauge and monitor, got {shown(saved)}. {DAMAGED}")
        price, last, reading = (saved.get(k) for k in ("controller", "last", "reading"))
        known = None if last is None else from_plain(Clamped, last, finite=False)
        return ControlState(
            price=None if price is None else State.from_dict(price),
            gauge=from_plain(GaugeState, saved["gauge"], finite=False),
            last=known if known is not None and is_kl(known.kl_before, known.kl_after) else None,
            floor=require_number("control.floor", saved.get("floor", 0.0), at_least=0, way_out=DAMAGED),
            monitor=MonitorState.from_dict(saved["monitor"]),
            reading=None if reading is None else from_plain(BatchKL, _read(reading), finite=False),
        )


def _written(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no NaN and no infinity: they are text there."""
    return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in numbers.items()}


def _read(saved: object) -> object:
    """What :func:`_written` was given."""
    if not isinstance(saved, Mapping):
        return saved
    return {k: float(v) if v in ("nan", "inf", "-inf") else v for k, v in saved.items()}


def is_kl(*values: float) -> bool:
    """Whether these are numbers a clamp can learn from."""
    return all(math.isfinite(v) for v in values)
