"""Reductions over counted tokens: masks select, means travel as (sum, count).

Shapes: B sequences, T tokens. ``mask`` is True (or non-zero) where a token counts: prompt, padding and tool
output are False. A NaN or an infinity outside the mask never reaches a result or a gradient.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from klamp.errors import ConfigError, unknown

Unit = Literal["token", "sequence", "sequence_mean"]
"""``token``: mean over tokens. ``sequence``: mean over sequences of the sum over tokens. ``sequence_mean``: mean over
sequences of the token mean."""

UNITS: tuple[str, ...] = get_args(Unit)


def check_unit(field: str, per: object) -> Unit:
    """``per`` if it is one of the three units, otherwise the error that explains them."""
    if per is None:
        token, sequence, mean = (f"{field} {u}" if field.startswith("--") else f"per={u!r}" for u in UNITS)
        raise ConfigError(
            f"{field} is missing. A KL has a unit: give {token}, {sequence} (the sum over a sequence) "
            f"or {mean} (the mean over sequences of token means)."
        )
    if per not in UNITS:
        raise unknown(field, per, UNITS)
    return per  # type: ignore[return-value]


def same_shape(**tensors: Tensor | None) -> None:
    """Refuse tensors of different shapes by name; None is passed over."""
    shapes = {name: tuple(t.shape) for name, t in tensors.items() if t is not None}
    if len(set(shapes.values())) > 1:
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ConfigError(f"{' and '.join(shapes)} must have the same shape, got {listed}. Nothing is broadcast.")


def wide(name: str, x: Tensor) -> Tensor:
    """``x`` in float32 or wider; refuses anything that is not a floating-point tensor."""
    if not isinstance(x, Tensor):
        raise ConfigError(f"{name} must be a torch.Tensor, got {type(x).__name__}. Use torch.as_tensor first.")
    if not x.is_floating_point():
        raise ConfigError(f"{name} must be a floating-point tensor, got {x.dtype}. Pass log-probabilities, not ids.")
    return x if x.dtype == torch.float64 else x.float()


def as_mask(mask: Tensor | None, like: Tensor) -> Tensor:
    """``mask`` as booleans in the shape of ``like``; None counts every token."""
    if mask is None:
        return torch.ones(like.shape, dtype=torch.bool, device=like.device)
    if not isinstance(mask, Tensor):
        raise ConfigError(f"mask must be a torch.Tensor or None, got {type(mask).__name__}. Use torch.as_tensor first.")
    same_shape(values=like, mask=mask)
    return mask if mask.dtype == torch.bool else mask != 0


def select(x: Tensor, mask: Tensor, fill: float = 0.0) -> Tensor:
    """``x`` where the mask counts, ``fill`` elsewhere. Apply it to what enters a formula, before any exp or product:
    the backward pass of ``where`` multiplies by zero, and 0 · inf is NaN."""
    return torch.where(mask, x, torch.as_tensor(fill, dtype=x.dtype, device=x.device))


def sum_count(
    x: Tensor, mask: Tensor | None = None, *, per: Unit = "token", count_empty: bool = False
) -> tuple[Tensor, Tensor]:
    """``(sum, count)`` whose quotient is the mean of ``x`` in the unit ``per``; add both over ranks, then divide.

    Args:
        x: values per token, [B, T].
        mask: True where a token counts. None: everywhere.
        per: the unit.
        count_empty: whether rows without a counted token count as zeros. Otherwise they are left out.

    Returns:
        Two tensors of one number each.
    """
    check_unit("per", per)
    x = wide("x", x)
    keep = as_mask(mask, x)
    x = select(x, keep)
    if per == "token":
        return x.sum(), keep.sum()
    if x.dim() < 2:
        raise ConfigError(f"per={per!r} needs a [B, T] tensor, got shape {tuple(x.shape)}. Add the batch dimension.")
    tokens = keep.sum(-1)
    rows = x.sum(-1)
    if per == "sequence_mean":
        rows = rows / tokens.clamp(min=1)
    count = torch.tensor(tokens.numel(), device=x.device) if count_empty else (tokens > 0).sum()
    return rows.sum(), count


def mean(x: Tensor, mask: Tensor | None = None, per: Unit = "token", count_empty: bool = False) -> Tensor:
    """``sum / count`` of :func:`sum_count`; 0 where nothing counts.

    Args:
        x: values per token, [B, T].
        mask: True where a token counts. None: everywhere.
        per: the unit.
        count_empty: whether rows without a counted token count as zeros. Otherwise they are left out.

    Returns:
        A tensor of one number.
    """
    total, count = sum_count(x, mask, per=per, count_empty=count_empty)
    return total / count.clamp(min=1)
