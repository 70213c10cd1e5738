"""AdamW over what trains, and the learning rate of a step."""

from __future__ import annotations

import math
from typing import Any

import torch

from klamp.models.policy import Policy
from klamp.train.config import OptimConfig


def adamw(policy: Policy, optim: OptimConfig) -> torch.optim.AdamW:
    """One group for the model, one with a rate of its own for PPO's value head; fused on a GPU."""
    groups: list[dict[str, Any]] = [
        {"params": [p for p in policy.model.parameters() if p.requires_grad], "lr": optim.lr}
    ]
    if policy.value is not None:
        groups.append({"params": list(policy.value.parameters()), "lr": optim.value_lr})
    for group in groups:
        group["initial_lr"] = group["lr"]
    fused = all(p.device.type == "cuda" for g in groups for p in g["params"])
    return torch.optim.AdamW(groups, betas=optim.betas, weight_decay=optim.weight_decay, fused=fused)


def share_of_rate(optim: OptimConfig, step: int, steps: int) -> float:
    """Share of the learning rate at ``step`` of ``steps``, which counts from 1: warm-up, then the schedule."""
    if step <= optim.warmup:
        return step / (optim.warmup + 1)
    progress = min((step - 1 - optim.warmup) / max(steps - optim.warmup, 1), 1.0)
    if optim.schedule == "linear":
        return 1 - progress
    return 0.5 * (1 + math.cos(math.pi * progress)) if optim.schedule == "cosine" else 1.0
