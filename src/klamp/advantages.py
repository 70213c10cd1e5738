"""Advantages: of groups (GRPO) and of a critic (GAE), as pure functions of per-token tensors.

Shapes: B sequences, T tokens, G samples of one prompt. ``mask`` True where a token counts; a NaN outside it reaches
nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from klamp.errors import ConfigError
from klamp.masked import as_mask, same_shape, select, wide


def group_advantages(
    rewards: Tensor,
    group_size: int,
    *,
    std: bool = True,
    valid: Tensor | None = None,
    eps: float = 1e-4,
    correction: int = 1,
) -> Tensor:
    """``(r - mean of its group) / (std of its group + eps)``, [B]: GRPO's advantages, on the task reward alone.

    Args:
        rewards: one reward per sequence, [B]; the sequences of a prompt stand next to each other.
        group_size: sequences per prompt.
        std: whether to divide by the standard deviation (False: Dr. GRPO).
        valid: [B], False for rows that take no part and get 0.
        eps: added to the standard deviation.
        correction: the variance is over ``n - correction``: 1 as in TRL, 0 as in ART.

    Returns:
        Advantages [B].
    """
    rewards = wide("rewards", rewards)
    if group_size < 1 or rewards.shape[0] % group_size:
        raise ConfigError(
            f"group_size {group_size} does not divide the batch of {rewards.shape[0]}. Make the batch a multiple of it."
        )
    keep = as_mask(valid, rewards).view(-1, group_size)
    r = select(rewards.view(-1, group_size), keep)
    count = keep.sum(1, keepdim=True)
    # Equal rewards say nothing. Their mean may miss them by rounding, which the division would blow up.
    centred = select(r - r.sum(1, keepdim=True) / count.clamp(min=1), keep & ~alike(r, keep)[:, None])
    if std:
        variance = (centred * centred).sum(1, keepdim=True) / (count - correction).clamp(min=1)
        centred = centred / (variance.sqrt() + eps)
    return centred.reshape(-1)


def alike(rewards: Tensor, valid: Tensor) -> Tensor:
    """[groups], True where the valid rewards of a group [groups, G] are equal, or sums that are equal on paper."""
    high, low = select(rewards, valid, -torch.inf).amax(1), select(rewards, valid, torch.inf).amin(1)
    rounding = 2 * torch.finfo(rewards.dtype).eps * torch.maximum(high.abs(), low.abs())
    return (high == low) | ((high - low <= rounding) & rounding.isfinite())


def to_go(x: Tensor, mask: Tensor | None = None, gamma: float = 1.0) -> Tensor:
    """``Σ_{u>=t} γ^{u-t} x_u`` over the counted tokens.

    Args:
        x: values per token, [B, T].
        mask: True where a token counts. None: everywhere.
        gamma: the discount γ.

    Returns:
        Sums [B, T].
    """
    x = select(wide("x", x), as_mask(mask, x))
    if gamma == 1.0:
        return x.flip(-1).cumsum(-1).flip(-1)
    total, columns = torch.zeros_like(x[..., 0]), []
    for t in reversed(range(x.shape[-1])):
        total = x[..., t] + gamma * total
        columns.append(total)
    return torch.stack(columns[::-1], -1) if columns else x


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor | None = None, *, gamma: float = 1.0, lam: float = 0.95
) -> tuple[Tensor, Tensor]:
    """Advantages ``Σ (γλ)^k δ_{t+k}``, ``δ_t = r_t + γ V_{t+1} - V_t``, and returns ``A + V`` (Schulman et al. 2016).

    Tokens outside the mask are skipped: the value after a tool's output follows the value before it.

    Args:
        rewards: rewards per token, [B, T].
        values: values of the states before each token, [B, T].
        mask: True where a token counts. None: everywhere.
        gamma: the discount γ.
        lam: λ.

    Returns:
        (advantages, returns), each [B, T].
    """
    same_shape(rewards=rewards, values=values)
    keep = as_mask(mask, rewards)
    r, v = select(wide("rewards", rewards), keep), select(wide("values", values), keep)
    advantage, after = r.new_zeros(r.shape[:-1]), r.new_zeros(r.shape[:-1])  # also where there is no token at all
    columns = []
    for t in reversed(range(r.shape[-1])):
        delta = r[..., t] + gamma * after - v[..., t]
        advantage = torch.where(keep[..., t], delta + gamma * lam * advantage, advantage)
        after = torch.where(keep[..., t], v[..., t], after)
        columns.append(torch.where(keep[..., t], advantage, torch.zeros_like(advantage)))
    advantages = torch.stack(columns[::-1], -1) if columns else r
    return advantages, advantages + v


def whiten(x: Tensor, mask: Tensor | None = None, *, moments: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """``(x - mean) / std`` over the counted tokens.

    Args:
        x: values per token, [B, T].
        mask: True where a token counts. None: everywhere.
        moments: (mean, variance) of the whole batch, where it comes in parts. None: computed from ``x``.

    Returns:
        [B, T], 0 outside the mask.
    """
    x = wide("x", x)
    keep = as_mask(mask, x)
    values = select(x, keep)
    if moments is None:
        count = keep.sum().clamp(min=1)
        mean = values.sum() / count
        moments = mean, (select(x - mean, keep) ** 2).sum() / count
    mean, variance = moments
    return select((values - mean) * (variance + 1e-8).rsqrt(), keep)
