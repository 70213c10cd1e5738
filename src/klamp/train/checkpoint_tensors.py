"""What a checkpoint holds of the learner's tensors: whole, in CPU memory, on the process that writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from klamp.distributed import gathered, share, whole
from klamp.train.learner import Learner


@dataclass(frozen=True)
class Contents:
    """Gathered tensors by name. Empty on processes that do not write."""

    model: dict[str, Tensor] | None
    """The model's weights where they are sharded; None where the model can save itself."""
    value: dict[str, Tensor]
    """PPO's value head."""
    optimizer: dict[str, Tensor]
    reference: dict[str, Tensor]
    """Weights of the reference that exist nowhere else."""
    identity: dict[str, Any]


def collect(learner: Learner) -> Contents:
    """Every process calls; under FSDP2 they gather together, one tensor at a time."""
    keep, sharded, policy = learner.accelerator.is_main_process, learner.sharded, learner.policy
    learner.settle()
    if not (keep or sharded):
        return Contents(None, {}, {}, {}, {})
    model: Any = policy.model
    named = model.state_dict(keep_vars=True) if sharded else {}
    saved = {k: v for k, v in named.items() if not policy.lora or "lora_" in k}
    return Contents(
        model=gathered(saved, keep=keep) if sharded else None,
        value={} if policy.value is None else gathered(policy.value.state_dict(), keep=keep),
        optimizer=gathered(_moments(learner), keep=keep),
        reference=gathered(learner.reference.tensors(), keep=keep),
        identity=learner.reference.identity(),
    )


def _moments(learner: Learner) -> dict[str, Tensor]:
    """Adam's state by parameter name."""
    names = {id(p): n for n, p in learner.policy.named_parameters()}
    flat = {}
    for p, state in learner.optimizer.state.items():
        for key, value in state.items():
            flat[f"{names[id(p)]}::{key}"] = value if isinstance(value, Tensor) else torch.tensor(value)
    return flat or {"empty": torch.zeros(1)}


def restore_moments(learner: Learner, saved: dict[str, Tensor]) -> None:
    """Put :func:`collect`'s optimiser state back, whatever the number of processes is now."""
    states: dict[str, dict[str, Tensor]] = {}
    for name, tensor in saved.items():
        parameter, _, key = name.partition("::")
        if key:
            states.setdefault(parameter, {})[key] = tensor
    fused = bool(learner.optimizer.param_groups[0].get("fused"))
    for name, p in learner.policy.trainable().items():
        if name in states:
            learner.optimizer.state[p] = {k: _placed(v, p, fused) for k, v in states[name].items()}


def _placed(value: Tensor, p: Tensor, fused: bool) -> Tensor:
    """Moments lie where their parameter lies; the count of steps stays on the CPU unless Adam is fused."""
    if value.dim() == 0:
        return value.to(p.device) if fused else value
    return share(value.to(p.device), p)


def not_finite(learner: Learner) -> list[str]:
    """Trained parameters that hold a NaN or an infinity; the same list on every process."""
    learner.settle()
    return [n for n, p in learner.policy.trainable().items() if bool(whole((~torch.isfinite(p)).sum()) > 0)]
