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
    centred = select(r - r.sum(1, keepdim=True) / count.clamp(min=1), keep)
    if std:
        variance = (centred * centred).sum(1, keepdim=True) / (count - correction).clamp(min=1)
        centred = centred / (variance.sqrt() + eps)
    return centred.reshape(-1)


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

    Args:
        logp: log-probs of the tokens under π, [B, T].
        old_logp: the same under the sampler.
        advantages: A, [B, T].
        clip: (lo, hi). None: no clip.
        unclipped: A', [B, T]: the future part of ``sequence_exact``, which must stay outside the clip.
        cispo: ``-sg[clip(r, 1-lo, 1+hi)] A logp`` instead (MiniMax 2025). The ratio is then a constant weight, and a
            token beyond the clip keeps its gradient.

    Returns:
        Loss per token, [B, T].
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
    """``½ max((V - R)², (V_clipped - R)²)`` per token, ``V_clipped`` within ``clip`` of the old value.

    Args:
        values: V, [B, T].
        old_values: the values when the tokens were sampled.
        returns: R, [B, T].
        clip: how far V may move from the old value before it stops paying. None: no clip.

    Returns:
        Loss per token, [B, T].
    """
    same_shape(values=values, old_values=old_values, returns=returns)
    loss = (values - returns) ** 2
    if clip is not None:
        near = old_values + (values - old_values).clamp(-clip, clip)
        loss = torch.maximum(loss, (near - returns) ** 2)
    return 0.5 * loss
