"""What the fronts share: settings that can be read and set later, with effect, as the originals' attributes can."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from klamp.controllers import Exponential, Fixed, Stateful, Ziegler
from klamp.controllers.base import nats
from klamp.errors import require_number
from klamp.masked import Unit

# The unit is the caller's: whatever it feeds. The rules themselves do not depend on it.
UNSTATED: Unit = "sequence_mean"


class SteeringFront(Stateful):
    """A front over a rule that multiplies its price: ``value`` and the target are set as they are made, > 0."""

    __slots__ = ()
    controller: Ziegler | Exponential

    @property
    def value(self) -> float:
        """The current coefficient; may be set."""
        return self.state.beta

    @value.setter
    def value(self, beta: float) -> None:
        way_out = "The rule multiplies it, so 0 would stay 0; to switch the penalty off use FixedKLController(0.0)."
        number = require_number(f"{type(self).__name__}.value", beta, above=0, way_out=way_out)
        self.state = replace(self.state, beta=number)

    def set(self, **settings: Any) -> None:
        """Replace settings of the rule, checked as when it was made; the price stays where it is."""
        self.controller = replace(self.controller, **settings)


class ZieglerFront(SteeringFront):
    """``value``, ``target`` and ``horizon`` as plain attributes over :class:`klamp.Ziegler`."""

    __slots__ = ()
    controller: Ziegler

    @property
    def target(self) -> float:
        """The KL to hold; may be set."""
        return nats(self.controller.target)

    @target.setter
    def target(self, target: float) -> None:
        self.set(target=target)

    @property
    def horizon(self) -> float:
        """Sequences over which an error of 1 would change the coefficient by 100 %; may be set."""
        return self.controller.horizon

    @horizon.setter
    def horizon(self, horizon: float) -> None:
        self.set(horizon=horizon)


class FixedKLController(Stateful):
    """``value`` stays ``kl_coef``, or what it is set to: ROLL, trlx, verl, OpenRLHF."""

    __slots__ = ()

    def __init__(self, kl_coef: float) -> None:
        super().__init__(Fixed(kl_coef))
