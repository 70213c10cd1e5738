"""One object with ``.value`` and ``.update``: any controller as a drop-in where a framework calls its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from klamp.controllers.base import LARGEST, SMALLEST, Controller, State, clip, nats, observed, own_state
from klamp.controllers.classic import Exponential, Fixed, Ziegler
from klamp.controllers.hold import HoldState
from klamp.errors import ConfigError, require_number
from klamp.masked import Unit


class Stateful:
    """A controller with its state, called as ROLL, trlx, verl and OpenRLHF call theirs: ``.value``, ``.update(...)``.

    Unlike theirs it is saved: put ``state_dict()`` in the checkpoint. Setting ``value`` sets the price of the coming
    step; setting an attribute that would have no effect raises an ``AttributeError``.

    Args:
        controller: the rule: any :class:`klamp.Controller`.
        state: where to go on from. None: the start.
    """

    __slots__ = ("controller", "state")

    def __init__(self, controller: Controller, state: State | None = None) -> None:
        self.controller = controller
        fresh = controller.init()
        own_state(fresh if state is None else state, type(fresh))
        self.state = fresh if state is None else state

    @property
    def value(self) -> float:
        """The current beta."""
        return self.state.beta

    @value.setter
    def value(self, beta: float) -> None:
        name = f"{type(self).__name__}.value"
        if isinstance(self.state, HoldState):
            way_out = "Hold keeps its logarithm; to switch the penalty off use Fixed(0.0)."
            number = clip(require_number(name, beta, above=0, way_out=way_out), SMALLEST, LARGEST)
        else:
            number = require_number(name, beta, at_least=0, way_out="A price is never negative; 0 only measures.")
        self.state = replace(self.state, beta=number)

    def update(self, current: Any = None, n_steps: float = 1, *, current_kl: Any = None) -> None:
        """Observe a KL (a number or a tensor of one) over ``n_steps`` sequences; verl's ``current_kl=`` works too.

        Args:
            current: the KL of the step, in the unit of the target.
            n_steps: sequences behind it.
            current_kl: verl's name for ``current``; give one of the two.
        """
        if (current is None) == (current_kl is None):
            raise ConfigError(
                f"Stateful.update takes one KL, got current={current!r} and current_kl={current_kl!r}. Pass either."
            )
        kl = current_kl if current is None else current
        self.state = self.controller.update(self.state, observed(kl), _count(n_steps))

    def state_dict(self) -> dict[str, Any]:
        """The state as plain JSON values.

        Returns:
            What :meth:`load_state_dict` goes on from.
        """
        return self.state.to_dict()

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`.

        Args:
            saved: of an object with the same kind of controller.
        """
        state = State.from_dict(saved)
        own_state(state, type(self.controller.init()))
        self.state = state

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.controller!r}, value={self.value:.6g})"


def _count(n_steps: object) -> Any:
    """``n_steps`` as a plain number: whole where it is whole, never cut; a fraction counts as the fraction it is."""
    way_out = "It is the number of sequences behind this KL."
    number = require_number("n_steps", n_steps, at_least=0, way_out=way_out)
    return int(number) if number.is_integer() else number


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
    """``value`` stays ``kl_coef``, or what it is set to: ROLL, trlx, verl, OpenRLHF.

    Args:
        kl_coef: the price.
    """

    __slots__ = ()

    def __init__(self, kl_coef: float) -> None:
        super().__init__(Fixed(kl_coef))
