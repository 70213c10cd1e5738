"""Policy and value losses, clipped, as pure functions of per-token tensors; advantages are in :mod:`klamp.advantages`.

Shapes: B sequences, T tokens. Losses come back per token: the caller sums them and divides by the step's global token
count.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from klamp.advantages import gae, group_advantages, to_go, whiten
from klamp.masked import same_shape, wide

__all__ = ["gae", "group_advantages", "policy_loss", "to_go", "value_loss", "whiten"]


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
