"""AdamW for a policy: PyTorch's own, or torchao's with moments in 8 bits; its learning rate, and its state by name.

With 8-bit moments a full fine-tune on a GPU keeps weights and gradients in bfloat16, six bytes a parameter where
float32 takes sixteen. An update is smaller than a bfloat16 weight's last place, so it is rounded up or down at random,
with the probability that makes it right on the mean; the clamp scales such weights the same way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from klamp.distributed import share
from klamp.errors import ConfigError, needing
from klamp.models.policy import Policy

if TYPE_CHECKING:
    from klamp.train.config import OptimConfig, ResolvedConfig, ResolvedOptim

PARTS = ("codes", "scale", "qmap")
"""Tensors that a moment in 8 bits consists of."""


def optimizer_of(policy: Policy, optim: ResolvedOptim) -> torch.optim.Optimizer:
    """One group for the model, one with a rate of its own for PPO's value head."""
    groups: list[dict[str, Any]] = [
        {"params": [p for p in policy.model.parameters() if p.requires_grad], "lr": optim.lr}
    ]
    if policy.value is not None:
        groups.append({"params": list(policy.value.parameters()), "lr": optim.value_lr})
    for group in groups:
        group["initial_lr"] = group["lr"]
    usual: dict[str, Any] = {"betas": optim.betas, "weight_decay": optim.weight_decay}
    if optim.name == "adamw8bit":
        return _eight_bit(groups, usual)
    fused = all(p.device.type == "cuda" for g in groups for p in g["params"])
    return torch.optim.AdamW(groups, **usual, fused=fused)


def _eight_bit(groups: list[dict[str, Any]], usual: dict[str, Any]) -> torch.optim.Optimizer:
    """torchao's AdamW, which compiles its step for every shape of a parameter; not on a CPU, where that takes longer
    than it saves."""
    from torchao.optim import AdamW8bit

    class AdamW(AdamW8bit):  # type: ignore[misc]
        def _new_buffer(self, p: Tensor, signed: bool) -> Any:
            """Moments of a tensor too small for 8 bits in float32: in bfloat16 the second one would never fall, for a
            thousandth of it is less than half of its last place."""
            found = super()._new_buffer(p, signed)
            return found if hasattr(found, "codes") else found.float()

    made: torch.optim.Optimizer = AdamW(groups, **usual, bf16_stochastic_round=True)
    if all(p.device.type == "cpu" for g in groups for p in g["params"]):
        made.step = torch.compiler.set_stance("force_eager")(made.step)  # type: ignore[method-assign]
    return made


def check_optimizer(optim: OptimConfig, processes: int) -> None:
    """Whether the optimiser can be had; what it needs is named before a model is loaded."""
    if optim.name != "adamw8bit":
        return
    with needing("‹optim.name=adamw8bit›", "adamw8bit"):
        import torchao.optim  # noqa: F401
    if processes > 1:  # rounding at random would give each of them weights of its own
        raise ConfigError(
            f"‹optim.name=adamw8bit› trains in one process, and there are {processes}. With several, FSDP2 shares "
            "out the memory of ‹optim.name=adamw›."
        )


def set_rate(optimizer: Any, optim: OptimConfig, step: int, steps: int) -> None:
    """The learning rates of ``step`` of ``steps``; torchao keeps them in tensors."""
    for group in optimizer.param_groups:
        rate = group["initial_lr"] * share_of_rate(optim, step, steps)
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def share_of_rate(optim: OptimConfig, step: int, steps: int) -> float:
    """Share of the learning rate at ``step`` of ``steps``, which counts from 1: warm-up, then the schedule."""
    if step <= optim.warmup:
        return step / (optim.warmup + 1)
    progress = min((step - 1 - optim.warmup) / max(steps - optim.warmup, 1), 1.0)
    if optim.schedule == "linear":
        return 1 - progress
    return 0.5 * (1 + math.cos(math.pi * progress)) if optim.schedule == "cosine" else 1.0


def rate_of(config: ResolvedConfig, step: int) -> float:
    """The model's learning rate at ``step``."""
    return config.optim.lr * share_of_rate(config.optim, step, config.steps)


def moments(policy: Policy, optimizer: Any) -> dict[str, Tensor]:
    """Adam's state by parameter name, in plain tensors."""
    names = {id(p): n for n, p in policy.named_parameters()}
    flat = {}
    for p, state in optimizer.state.items():
        for key, value in state.items():
            for place, tensor in _plain(value):
                flat[f"{names[id(p)]}::{key}{place}"] = tensor
    return flat or {"empty": torch.zeros(1)}


def _plain(value: Any) -> Iterator[tuple[str, Tensor]]:
    if hasattr(value, "codes"):
        yield from ((f"::{name}", getattr(value, name)) for name in PARTS)
    else:
        yield "", value if isinstance(value, Tensor) else torch.tensor(value)


def restore_moments(policy: Policy, optimizer: Any, saved: dict[str, Tensor]) -> None:
    """Put :func:`moments` back, whatever the number of processes is now."""
    states: dict[str, dict[str, Tensor]] = {}
    for name, tensor in saved.items():
        parameter, _, key = name.partition("::")
        if key:
            states.setdefault(parameter, {})[key] = tensor
    fused = bool(optimizer.param_groups[0].get("fused"))
    for name, p in policy.trainable().items():
        if name in states:
            placed = {k: _placed(v, p, fused) for k, v in states[name].items()}
            optimizer.state[p] = _joined(placed, p)


def _placed(value: Tensor, p: Tensor, fused: bool) -> Tensor:
    """Moments lie where their parameter lies; the count of steps stays on the CPU unless Adam is fused."""
    if value.dim() == 0:
        return value.to(p.device) if fused else value
    return share(value.to(p.device), p)


def _joined(state: dict[str, Tensor], p: Tensor) -> dict[str, Tensor]:
    """A parameter's state with the parts of its 8-bit moments put together."""
    found = {key: value for key, value in state.items() if "::" not in key}
    for key in {k.partition("::")[0] for k in state if "::" in k}:
        from torchao.optim.subclass_8bit import OptimState8bit

        parts = (state[f"{key}::{name}"] for name in PARTS)
        found[key] = OptimState8bit(*parts, signed=key == "exp_avg", dtype=p.dtype)
    return found
