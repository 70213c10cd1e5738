"""The floor of KL: what rounding alone makes of it, measured once before the first update.

A bfloat16 model that moved by next to nothing rounds differently in every layer, and KL reads 0.002 nats per token or
so whatever the update was. It adds to what the policy is really away from its reference.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import nn

from klamp.clamp_scalers import snapshot
from klamp.errors import warn
from klamp.seeds import mix

logger = logging.getLogger(__name__)

SMALL = 1e-2
"""Size of the perturbation over that of the weights. Its own KL is quadratic in it, and far below any target."""
QUADRATIC = 4.0
"""A KL that falls by more than this when the perturbation is quartered is real (16 times) and no rounding (once)."""
WARN = 5.0
"""Targets of less than so many floors are worth a word."""


def reads_rounding(model: nn.Module, *, autocast: bool) -> bool:
    """Whether anything in the forward pass is narrower than float32."""
    return autocast or any(p.dtype in (torch.bfloat16, torch.float16) for p in model.parameters())


@torch.no_grad()
def perturb(model: nn.Module, size: float, seed: int) -> None:
    """Move every trained weight by ``size`` of its tensor's RMS; one that is all zeros by ``size`` of a hundredth."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(mix(seed, 11))
    for p in model.parameters():
        if p.requires_grad:
            rms = float(p.float().square().mean().sqrt()) or 0.01
            p.add_((size * rms * torch.randn(p.shape, generator=generator, device=device)).to(p))


def measure_floor(model: nn.Module, measure: Callable[[], float], seed: int) -> float:
    """KL a very small step away from the reference where that is rounding; 0 where it is a real distance.

    ``measure()`` reads the KL of the weights as they are; they are put back to the bit.
    """
    kept, found = snapshot(model), []
    try:
        for size in (SMALL, SMALL / 4):
            perturb(model, size, seed)
            found.append(max(float(measure()), 0.0))
            restore(model, kept)
    finally:
        restore(model, kept)
    far, near = found
    return far if far < QUADRATIC * near else 0.0


@torch.no_grad()
def restore(model: nn.Module, kept: dict[str, torch.Tensor]) -> None:
    """Put the trained weights back."""
    for name, p in model.named_parameters():
        if name in kept:
            p.copy_(kept[name])


def warn_near_floor(target: float | None, unit: str, floor: float) -> None:
    """Say so where the target is hardly above what rounding alone makes of KL."""
    if target is not None and target < WARN * floor:
        warn(
            logger,
            "the target %.3g is less than %g times the floor: KL reads %.2g nats per %s from rounding alone. Raise "
            "kl.target, or set dtype=float32.",
            *(target, WARN, floor, unit),
        )
