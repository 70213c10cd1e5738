"""The controller classes people already import, as thin fronts over :mod:`klamp.controllers`.

``from klamp.compat import AdaptiveKLController`` takes the place of the class of that name in ROLL, trlx or OpenRLHF:
the same numbers to the last bit, plus ``state_dict`` / ``load_state_dict``, and an error instead of a NaN, a division
by zero or a negative price. ``value``, ``target`` and ``horizon`` can be read and set at any time, as there.

verl and the PPO tutorial have a class of the same name with the same keywords and another rule. Each has a module of
its own: :mod:`klamp.compat.verl` and :mod:`klamp.compat.tutorial`. These fronts alone may leave the unit of the target
out, as the originals do.
"""

from __future__ import annotations

from typing import Any

from klamp.compat.tutorial import AdaptiveKLController as ExponentialKLController
from klamp.controllers import Stateful, Ziegler
from klamp.controllers.stateful import UNSTATED, FixedKLController, ZieglerFront
from klamp.errors import ConfigError

__all__ = [
    "AdaptiveKLController",
    "ExponentialKLController",
    "FixedKLController",
    "get_kl_controller",
    "kl_controller",
]

WHICH = (
    "Two systems call their class AdaptiveKLController and its target target_kl: use "
    "klamp.compat.tutorial.AdaptiveKLController for the PPO tutorial's exponential rule, or "
    "klamp.compat.verl.AdaptiveKLController for verl's."
)


class AdaptiveKLController(ZieglerFront):
    """``value ← value · (1 + clip(current/target − 1, ±0.2) · n_steps / horizon)``: ROLL, trlx, OpenRLHF.

    Args:
        init_kl_coef: the first price.
        target: the KL to hold, in the unit in which it is fed.
        horizon: sequences over which an error of 1 would change the price by 100 %.
        target_kl: refused: the name that other classes with this name have for ``target``.
    """

    __slots__ = ()

    def __init__(
        self,
        init_kl_coef: float,
        target: float | None = None,
        horizon: float = 10_000,
        *,
        target_kl: float | None = None,
    ) -> None:
        if target_kl is not None:
            raise ConfigError(f"AdaptiveKLController got target_kl={target_kl!r}. {WHICH}")
        if target is None:
            raise ConfigError("AdaptiveKLController.target is missing. Give a KL in nats, or use FixedKLController.")
        super().__init__(Ziegler(target, UNSTATED, init_beta=init_kl_coef, horizon=horizon))

    def update(self, current: Any = None, n_steps: float | None = None, *, current_kl: Any = None) -> None:
        """Observe a KL over ``n_steps`` sequences, which the originals ask for too.

        Args:
            current: the KL of the step.
            n_steps: sequences behind it.
            current_kl: verl's name for ``current``; give one of the two.
        """
        if n_steps is None:
            raise ConfigError(
                "AdaptiveKLController.update needs n_steps, the number of sequences behind the KL. The PPO tutorial's "
                "class, whose update takes the KL alone, is klamp.compat.tutorial.AdaptiveKLController."
            )
        super().update(current, n_steps, current_kl=current_kl)


def get_kl_controller(
    init_kl_coef: float, target_kl: float | None = None, kl_horizon: float = 10_000
) -> AdaptiveKLController | FixedKLController:
    """ROLL's factory: fixed when ``target_kl`` is None, adaptive otherwise.

    Args:
        init_kl_coef: the first price.
        target_kl: the KL to hold. None: the price stays.
        kl_horizon: Ziegler's horizon, in sequences.

    Returns:
        A controller with ROLL's attributes and methods.
    """
    if target_kl is None:
        return FixedKLController(init_kl_coef)
    return AdaptiveKLController(init_kl_coef, target_kl, kl_horizon)


def kl_controller(init_kl_coef: float, target: float | None = None, horizon: float = 10_000) -> Stateful:
    """A :class:`klamp.Stateful`: Fixed when ``target`` is None, Ziegler otherwise, as in ROLL, trlx and OpenRLHF.

    Args:
        init_kl_coef: the first price.
        target: the KL target in nats, in whatever unit the KL is fed in.
        horizon: Ziegler's horizon, in sequences.

    Returns:
        A controller with ``value``, ``update(current, n_steps)`` and ``state_dict()``.
    """
    return get_kl_controller(init_kl_coef, target, horizon)
