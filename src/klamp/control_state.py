"""What a :class:`klamp.Control` knows, as values that go to plain JSON and back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from klamp.clamp import MOST_BIAS, Clamped, GaugeState
from klamp.controllers.base import State
from klamp.errors import ConfigError, require_number, require_ranges, shown
from klamp.monitor import MonitorState
from klamp.strict_json import from_plain, nan_as_text, nan_from_text

DAMAGED = "The checkpoint is damaged; start from an earlier one."


@dataclass(frozen=True)
class BatchKL:
    """What a batch read before its update; kept until the update is done."""

    kl: float | None
    """In the unit of the target; None where the step measured none."""
    n: int = 1
    """Sequences behind it."""
    spread: float | None = None
    """RMS of the advantages within a prompt; groups without signal count as zero."""
    noise: float = 0.0
    """Relative standard error of ``kl``."""
    measured: float | None = None
    """KL before the update as ``measure`` reads it; ``kl`` unless told otherwise."""
    steers: bool = True
    """Whether the price follows it."""
    signal: float = 1.0
    """Share of the groups that show a signal."""


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
            "reading": None if self.reading is None else nan_as_text(asdict(self.reading)),
        }

    @staticmethod
    def from_dict(saved: Mapping[str, Any]) -> ControlState:
        """The state that :meth:`to_dict` wrote, or that an earlier klamp did, which saved more or less of it.

        Args:
            saved: what :meth:`to_dict` returned.

        Returns:
            The state. A damaged one is a :class:`klamp.ConfigError`.
        """
        if not isinstance(saved, Mapping) or not {"controller", "gauge", "monitor"} <= set(saved):
            raise ConfigError(f"a saved control must hold controller, gauge and monitor, got {shown(saved)}. {DAMAGED}")
        price, last, reading = (saved.get(k) for k in ("controller", "last", "reading"))
        known = None if last is None else from_plain(Clamped, last, finite=False)
        return ControlState(
            price=None if price is None else State.from_dict(price),
            gauge=_gauge(saved["gauge"]),
            last=known if known is not None and is_kl(known.kl_before, known.kl_after) else None,
            floor=require_number("control.floor", saved.get("floor", 0.0), at_least=0, way_out=DAMAGED),
            monitor=MonitorState.from_dict(saved["monitor"]),
            reading=None if reading is None else from_plain(BatchKL, _reading(reading), finite=False),
        )


def _reading(saved: Any) -> Any:
    """A saved reading; one from before groups without signal were told apart had all groups count."""
    plain = nan_from_text(saved)
    return {"signal": 1.0, **plain} if isinstance(plain, dict) else plain


def _gauge(saved: Mapping[str, Any]) -> GaugeState:
    """A saved gauge whose numbers can be reckoned with."""
    gauge = from_plain(GaugeState, saved)
    ranges = {"level": (0.0, 1e12), "reading": (0.0, 1e12), "share": (0.0, 1.2), "pairs": (0.0, 1e15)}
    ranges |= {"spread": (0.0, 1.0), "bias": (-MOST_BIAS, MOST_BIAS)}
    require_ranges("gauge", gauge, ranges, way_out=DAMAGED)
    return gauge


def is_kl(*values: float) -> bool:
    """Whether these are numbers a clamp can learn from."""
    return all(math.isfinite(v) for v in values)
