"""The controller classes people already import, as thin fronts over :mod:`klamp.controllers`.

``from klamp.compat import AdaptiveKLController`` takes the place of the class of that name in ROLL, trlx, verl or
OpenRLHF: the same numbers to the last bit, plus ``state_dict`` / ``load_state_dict``, and an error instead of a NaN, a
division by zero or a negative price. These fronts alone may leave the unit of the target out, as the originals do.
"""

from __future__ import annotations

from typing import Any

from klamp.controllers import Exponential, Fixed, Stateful, Ziegler
from klamp.errors import ConfigError
from klamp.masked import Unit

__all__ = [
    "AdaptiveKLController",
    "ExponentialKLController",
    "FixedKLController",
    "get_kl_controller",
    "kl_controller",
]

# The unit is the caller's: whatever it feeds. The rules themselves do not depend on it.
UNSTATED: Unit = "sequence_mean"


class AdaptiveKLController(Stateful):
    """``value ← value · (1 + clip(current/target − 1, ±0.2) · n_steps / horizon)``: ROLL, trlx, verl, OpenRLHF."""

    def __init__(
        self,
        init_kl_coef: float,
        target: float | None = None,
        horizon: float = 10_000,
        *,
        target_kl: float | None = None,
    ) -> None:
        if (target is None) == (target_kl is None):
            raise ConfigError(
                f"AdaptiveKLController takes one target, got target={target!r} and target_kl={target_kl!r} (verl's "
                "name for it). Give one of them."
            )
        rule = Ziegler(target_kl if target is None else target, UNSTATED, init_beta=init_kl_coef, horizon=horizon)  # type: ignore[arg-type]
        self.target, self.horizon = rule.target, rule.horizon
        super().__init__(rule)


class FixedKLController(Stateful):
    """``value`` stays ``kl_coef``: ROLL, trlx, verl, OpenRLHF."""

    def __init__(self, kl_coef: float) -> None:
        super().__init__(Fixed(kl_coef))


def get_kl_controller(
    init_kl_coef: float, target_kl: float | None = None, kl_horizon: float = 10_000
) -> AdaptiveKLController | FixedKLController:
    """ROLL's factory: fixed when ``target_kl`` is None, adaptive otherwise."""
    if target_kl is None:
        return FixedKLController(init_kl_coef)
    return AdaptiveKLController(init_kl_coef, target_kl, kl_horizon)


def kl_controller(init_kl_coef: float, target: float | None = None, horizon: float = 10_000) -> Stateful:
    """A :class:`klamp.Stateful` by the same rule: Fixed when ``target`` is None, Ziegler otherwise."""
    return get_kl_controller(init_kl_coef, target, horizon)


class ExponentialKLController(Stateful):
    """``value ← clip(value · exp(0.1 · (current_kl − target_kl)), 1e-4, 10)``: the PPO tutorial's controller.

    ``horizon`` is accepted and does nothing, as in the original.
    """

    def __init__(self, init_kl_coef: float = 0.1, target_kl: float = 0.1, horizon: float = 100) -> None:
        super().__init__(Exponential(target_kl, UNSTATED, init_beta=init_kl_coef))
        self.horizon = horizon

    @property
    def kl_coef(self) -> float:
        """The tutorial's name for ``value``."""
        return self.value

    def update(self, current: Any = None, n_steps: int = 1, *, current_kl: Any = None) -> float:  # type: ignore[override]
        """Observe a KL, a float or a tensor, and return the new coefficient."""
        super().update(current, n_steps, current_kl=current_kl)
        return self.value
