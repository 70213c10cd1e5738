"""klamp: measure, price and steer the KL divergence of a language model in reinforcement learning.

>>> import torch, klamp
>>> logp, ref_logp = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.8]])
>>> kl = klamp.k3(logp, ref_logp)
>>> hold = klamp.Hold(target=0.05, per="token")
>>> state = hold.update(hold.init(), klamp.mean(kl).item())
>>> state.beta > 0
True
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from klamp.audit import Finding, audit_function, audit_matrix
    from klamp.clamp import Clamped, Gauge, scale_for
    from klamp.clamp import clamp as clamp_kl
    from klamp.clamp_scalers import lora_scaler, snapshot, weights_scaler
    from klamp.compat import kl_controller
    from klamp.control import Control, ControlState
    from klamp.controllers import (
        Controller,
        Doubling,
        Exponential,
        Fixed,
        Hold,
        HoldState,
        Scheduled,
        State,
        Stateful,
        Target,
        Ziegler,
    )
    from klamp.errors import ConfigError, KlampError
    from klamp.estimators import (
        absolute,
        chi2_minus_kl,
        estimator,
        exact,
        exact_forward,
        fitted,
        k1,
        k2,
        k3,
        k3_clamped,
        mean,
        r_log_r,
        straight_through,
        sum_count,
        top_k_exact,
        weighted,
    )
    from klamp.monitor import Alarm, Limits, Monitor, MonitorState
    from klamp.placements import Pair, SequenceKL, check, in_advantage, in_loss, in_reward, sequence_exact

__version__ = "0.1.0"

HOMES = {
    "audit": ("Finding", "audit_function", "audit_matrix"),
    "clamp": ("Clamped", "Gauge", "scale_for"),
    "compat": ("kl_controller",),
    "control": ("Control", "ControlState"),
    "controllers": (
        *("Controller", "Doubling", "Exponential", "Fixed", "Hold"),
        *("HoldState", "Scheduled", "State", "Stateful", "Target", "Ziegler"),
    ),
    "errors": ("ConfigError", "KlampError"),
    "estimators": (
        *("absolute", "chi2_minus_kl", "estimator", "exact", "exact_forward", "fitted", "k1", "k2", "k3", "k3_clamped"),
        *("mean", "r_log_r", "straight_through", "sum_count", "top_k_exact", "weighted"),
    ),
    "monitor": ("Alarm", "Limits", "Monitor", "MonitorState"),
    "clamp_scalers": ("lora_scaler", "snapshot", "weights_scaler"),
    "placements": ("Pair", "SequenceKL", "check", "in_advantage", "in_loss", "in_reward", "sequence_exact"),
    # These need transformers and its kin.
    "local_backend": ("LocalBackend", "Trajectory", "TrajectoryGroup", "TrainableModel"),
    "measure": ("Measurement", "measure_kl"),
    "train.config": ("TrainConfig",),
    "train.loop": ("train_policy",),
}
"""Where each name is from. Each is imported when first asked for, so that a command can set up its process before torch
is loaded."""


def __getattr__(name: str) -> object:
    from klamp.errors import needing

    if name == "clamp_kl":
        return importlib.import_module("klamp.clamp").clamp
    for module, names in HOMES.items():
        if name in names:
            with needing(f"klamp.{name}", "train"):
                return getattr(importlib.import_module(f"klamp.{module}"), name)
    if not name.startswith("_") and importlib.util.find_spec(f"klamp.{name}") is not None:
        return importlib.import_module(f"klamp.{name}")
    raise AttributeError(f"module 'klamp' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *(name for names in HOMES.values() for name in names)})


__all__ = [
    "Alarm",
    "Clamped",
    "ConfigError",
    "Control",
    "ControlState",
    "Controller",
    "Doubling",
    "Exponential",
    "Finding",
    "Fixed",
    "Gauge",
    "Hold",
    "HoldState",
    "KlampError",
    "Limits",
    "Monitor",
    "MonitorState",
    "Pair",
    "Scheduled",
    "SequenceKL",
    "State",
    "Stateful",
    "Target",
    "Ziegler",
    "absolute",
    "audit_function",
    "audit_matrix",
    "check",
    "chi2_minus_kl",
    "clamp_kl",
    "estimator",
    "exact",
    "exact_forward",
    "fitted",
    "in_advantage",
    "in_loss",
    "in_reward",
    "k1",
    "k2",
    "k3",
    "k3_clamped",
    "kl_controller",
    "lora_scaler",
    "mean",
    "r_log_r",
    "scale_for",
    "sequence_exact",
    "snapshot",
    "straight_through",
    "sum_count",
    "top_k_exact",
    "weighted",
    "weights_scaler",
]
