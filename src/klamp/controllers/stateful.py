"""One object with ``.value`` and ``.update``: any controller as a drop-in where a framework calls its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from klamp.controllers.base import Controller, State, observed, own_state
from klamp.errors import ConfigError, require_number


class Stateful:
    """A controller with its state, called as ROLL, trlx, verl and OpenRLHF call theirs: ``.value``, ``.update(...)``.

    Unlike theirs it is saved: put ``state_dict()`` in the checkpoint. Setting ``value`` sets the price of the coming
    step; setting an attribute that would have no effect raises an ``AttributeError``.
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
        way_out = "A price is never negative; 0 only measures."
        number = require_number(f"{type(self).__name__}.value", beta, at_least=0, way_out=way_out)
        self.state = replace(self.state, beta=number)

    def update(self, current: Any = None, n_steps: float = 1, *, current_kl: Any = None) -> None:
        """Observe a KL (a number or a tensor of one) over ``n_steps`` sequences; verl's ``current_kl=`` works too."""
        if (current is None) == (current_kl is None):
            raise ConfigError(
                f"Stateful.update takes one KL, got current={current!r} and current_kl={current_kl!r}. Pass either."
            )
        kl = current_kl if current is None else current
        self.state = self.controller.update(self.state, observed(kl), _count(n_steps))

    def state_dict(self) -> dict[str, Any]:
        """The state as plain JSON values."""
        return self.state.to_dict()

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""
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
