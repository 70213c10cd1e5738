"""verl's controllers under verl's names and keywords. ``klamp.integrations.verl`` brings ``Hold`` to verl itself."""

from __future__ import annotations

from typing import Any

from klamp.controllers import Ziegler
from klamp.controllers.stateful import UNSTATED, FixedKLController, ZieglerFront
from klamp.errors import ConfigError

__all__ = ["AdaptiveKLController", "FixedKLController", "get_kl_controller"]


class AdaptiveKLController(ZieglerFront):
    """``value ← value · (1 + clip(current_kl/target − 1, ±0.2) · n_steps / horizon)``: verl's, to the last bit.

    Args:
        init_kl_coef: the first price.
        target_kl: the KL to hold, in the unit in which it is fed.
        horizon: Ziegler's horizon, in sequences.
    """

    __slots__ = ()

    def __init__(self, init_kl_coef: float, target_kl: float, horizon: float) -> None:
        super().__init__(Ziegler(target_kl, UNSTATED, init_beta=init_kl_coef, horizon=horizon))


def get_kl_controller(kl_ctrl: Any) -> AdaptiveKLController | FixedKLController:
    """``core_algos.get_kl_controller``: ``kl_ctrl.type`` is fixed or adaptive.

    Args:
        kl_ctrl: verl's node ``algorithm.kl_ctrl``: ``type``, ``kl_coef``, ``target_kl`` and ``horizon``.

    Returns:
        A controller with ``value`` and ``update(current_kl, n_steps)``.
    """
    if kl_ctrl.type == "fixed":
        return FixedKLController(kl_ctrl.kl_coef)
    if kl_ctrl.type == "adaptive":
        return AdaptiveKLController(kl_ctrl.kl_coef, kl_ctrl.target_kl, kl_ctrl.horizon)
    raise ConfigError(f"kl_ctrl.type must be 'fixed' or 'adaptive', got {kl_ctrl.type!r}.")
