"""One object with ``.value`` and ``.update``: any controller as a drop-in where a framework calls its own."""

from __future__ import annotations

from typing import Any

from klamp.controllers.base import Controller, State, observed, own_state
from klamp.errors import ConfigError


class Stateful:
    """A controller with its state, called as ROLL, trlx, verl and OpenRLHF call theirs: ``.value``, ``.update(...)``.

    Unlike theirs it is saved: put ``state_dict()`` in the checkpoint.
    """

    def __init__(self, controller: Controller, state: State | None = None) -> None:
        self.controller = controller
        fresh = controller.init()
        own_state(fresh if state is None else state, type(fresh))
        self.state = fresh if state is None else state

    @property
    def value(self) -> float:
        """The current beta."""
        return self.state.beta

    def update(self, current: Any = None, n_steps: int = 1, *, current_kl: Any = None) -> None:
        """Observe a KL (a number or a tensor of one) over ``n_steps`` sequences; verl's ``current_kl=`` works too."""
        if (current is None) == (current_kl is None):
            raise ConfigError(
                f"Stateful.update takes one KL, got current={current!r} and current_kl={current_kl!r}. Pass either."
            )
        kl = current_kl if current is None else current
        self.state = self.controller.update(self.state, observed(kl), int(n_steps))

    def state_dict(self) -> dict[str, Any]:
        """The state as plain JSON values."""
        return self.state.to_dict()

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""
        state = State.from_dict(saved)
        own_state(state, type(self.controller.init()))
        self.state = state

    def __repr__(self) -> str:
        return f"Stateful({self.controller!r}, value={self.value:.6g})"
