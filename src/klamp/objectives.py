"""Advantages and policy losses: pure functions of per-token tensors.

Shapes: B sequences, T tokens, G samples of one prompt. ``mask`` True where a token counts; a NaN outside it reaches
nothing. Losses come back per token: the caller sums them and divides by the step's global token count.
"""

from __future__ import annotations

import math

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

    ``std=False`` leaves the scale alone (Dr. GRPO). The variance is over ``n - correction``: 1 as in TRL, 0 for the
    population's, as in ART. Rows where ``valid`` is False take no part and get 0.
    """
    rewards = wide("rewards", rewards)
    if group_size < 1 or rewards.shape[0] % group_size:
        raise ConfigError(
            f"group_size {group_size} does not divide the batch of {rewards.shape[0]}. Make the batch a multiple of it."
        )
    keep = as_mask(valid, rewards).view(-1, group_size)
    r = select(rewards.view(-1, group_size), keep)
    count = keep.sum(1, keepdim=True)
    centred = select(r - r.sum(1, keepdim=True) / count.clamp(min=1), keep)
    if std:
        variance = (centred * centred).sum(1, keepdim=True) / (count - correction).clamp(min=1)
        centred = centred / (variance.sqrt() + eps)
    return centred.reshape(-1)


def to_go(x: Tensor, mask: Tensor | None = None, gamma: float = 1.0) -> Tensor:
    """``Σ_{u>=t} γ^{u-t} x_u`` over the counted tokens."""
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

    Tokens outside the mask are stepped over: the value after a tool's output follows the value before it.
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
    """``(x - mean) / std`` over the counted tokens; ``moments`` gives (mean, variance) of a batch in parts."""
    x = wide("x", x)
    keep = as_mask(mask, x)
    values = select(x, keep)
    if moments is None:
        count = keep.sum().clamp(min=1)
        mean = values.sum() / count
        moments = mean, (select(x - mean, keep) ** 2).sum() / count
    mean, variance = moments
    return select((values - mean) * (variance + 1e-8).rsqrt(), keep)


def policy_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    *,
    clip: tuple[float, float] | None = (0.2, 0.2),
    unclipped: Tensor | None = None,
    cispo: bool = False,
) -> Tensor:
    """``-min(r A, clip(r, 1-lo, 1+hi) A) - r A'`` per token, ``r = e^(logp - old_logp)`` (PPO, Schulman et al. 2017).

    ``unclipped`` is A': the KL still to come of ``sequence_exact``, which a clip must not let go. ``cispo`` gives
    ``-sg[clip(r, 1-lo, 1+hi)] A logp`` instead (MiniMax 2025): the ratio is a constant weight, so that a token beyond
    the clip keeps its gradient.
    """
    same_shape(logp=logp, old_logp=old_logp, advantages=advantages, unclipped=unclipped)
    ratio = (wide("logp", logp) - wide("old_logp", old_logp)).exp()
    if cispo:
        low, high = clip or (1.0, math.inf)
        return -ratio.detach().clamp(1 - low, 1 + high) * advantages * logp - (
            0 if unclipped is None else ratio * unclipped
        )
    loss = -ratio * advantages
    if clip is not None:
        low, high = clip
        loss = torch.maximum(loss, -ratio.clamp(1 - low, 1 + high) * advantages)
    return loss if unclipped is None else loss - ratio * unclipped


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float | None = 0.2) -> Tensor:
    """``½ max((V - R)², (V_clipped - R)²)`` per token, ``V_clipped`` within ``clip`` of the old value."""
    same_shape(values=values, old_values=old_values, returns=returns)
    loss = (values - returns) ** 2
    if clip is not None:
        near = old_values + (values - old_values).clamp(-clip, clip)
        loss = torch.maximum(loss, (near - returns) ** 2)
    return 0.5 * loss
