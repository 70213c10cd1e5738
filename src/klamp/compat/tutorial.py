"""The controller of the PPO tutorial (the course chapter "PPO with KL control"), with the tutorial's own behaviour."""

from __future__ import annotations

from typing import Any

from klamp.controllers import Exponential
from klamp.controllers.base import nats
from klamp.controllers.stateful import UNSTATED, SteeringFront

__all__ = ["AdaptiveKLController"]


class AdaptiveKLController(SteeringFront):
    """``kl_coef ← clip(kl_coef · exp(0.1 · (current_kl − target_kl)), 1e-4, 10)``; ``update`` returns it.

    ``kl_coef``, ``target_kl``, ``horizon`` and ``step_count`` are the tutorial's attributes. ``horizon`` does nothing,
    as in the original. A Python float is taken like a tensor, where the original fails.

    Args:
        init_kl_coef: the first price.
        target_kl: the KL to hold.
        horizon: kept and not used, as in the original.
    """

    __slots__ = ("horizon",)
    controller: Exponential

    def __init__(self, init_kl_coef: float = 0.1, target_kl: float = 0.1, horizon: float = 100) -> None:
        super().__init__(Exponential(target_kl, UNSTATED, init_beta=init_kl_coef))
        self.horizon = horizon

    @property
    def kl_coef(self) -> float:
        """The tutorial's name for ``value``; may be set."""
        return self.value

    @kl_coef.setter
    def kl_coef(self, beta: float) -> None:
        self.value = beta

    @property
    def target_kl(self) -> float:
        """The KL to hold; may be set."""
        return nats(self.controller.target)

    @target_kl.setter
    def target_kl(self, target: float) -> None:
        self.set(target=target)

    @property
    def step_count(self) -> int:
        """Calls of ``update`` so far."""
        return self.state.updates + self.state.skipped

    def update(self, current: Any = None, n_steps: float = 1, *, current_kl: Any = None) -> float:  # type: ignore[override]
        """Observe a KL, a float or a tensor, and return the new coefficient.

        Args:
            current: the KL of the step.
            n_steps: sequences behind it; the rule does not use them.
            current_kl: verl's name for ``current``; give one of the two.

        Returns:
            The coefficient of the next step.
        """
        super().update(current, n_steps, current_kl=current_kl)
        return self.value
