"""The gap between the sampler and the trainer: how far apart their log-probs are, and what to do about it.

An inference engine computes slightly other numbers than the trainer, or is an update behind, or cuts the distribution
by top-p. With ``w_t = π(a_t) / μ(a_t)`` for the trainer's π and the sampler's μ, a loss that multiplies each token by
``w_t`` is right in expectation, up to the ratio of the prefixes; :func:`truncate` bounds its variance, :func:`mask`
leaves out the tokens on which the two disagree, :func:`replay` removes the part of the gap that a top-p cut makes.

Shapes: B sequences, T tokens, V vocabulary. ``keep`` is True where a token counts. Results carry no gradient.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from klamp.errors import ConfigError, require_number, unknown
from klamp.masked import as_mask, same_shape, select, wide
from klamp.objectives import policy_loss

FARTHEST = 40.0
"""Log-ratios stop here, e^40 either way: one token beyond it is a broken sampler, and float32 would make inf of it."""

Kind = Literal["ratio", "tv", "kl"]
Side = Literal["both", "away"]


class Gap(NamedTuple):
    """Sums over the counted tokens whose sampler's log-prob is known; divide by ``tokens`` after adding over ranks."""

    k1: Tensor
    """``Σ log μ - log π``: its mean is KL(μ‖π), unbiased."""
    k3: Tensor
    """``Σ w - 1 - log w``: its mean is KL(μ‖π), unbiased and never negative."""
    absolute: Tensor
    """``Σ |log π - log μ|``."""
    largest: Tensor
    """The largest ``|log π - log μ|``."""
    tokens: Tensor
    """How many there are."""


def gap(logp: Tensor, sampler_logp: Tensor, keep: Tensor | None = None) -> Gap:
    """KL(μ‖π) by k1 and k3 on the sampler's own tokens, with the mean and the largest difference of log-probs.

    Args:
        logp: log-probs of the tokens under the trainer's π, [B, T].
        sampler_logp: the same under the sampler's μ; NaN where it is not known.
        keep: True where a token counts. None: everywhere.

    Returns:
        Sums, and the number of tokens to divide them by.
    """
    counted = as_mask(keep, logp) & torch.isfinite(sampler_logp)
    d = _log_ratio(logp, sampler_logp, counted)
    size = d.abs()
    largest = size.max() if size.numel() else size.sum()
    return Gap(-d.sum(), (torch.expm1(d) - d).sum(), size.sum(), largest, counted.sum())


def weights(logp: Tensor, sampler_logp: Tensor, keep: Tensor | None = None) -> Tensor:
    """``w_t = e^(logp - sampler_logp)``, [B, T]; 1 outside ``keep`` and where the sampler's log-prob is not known.

    Args:
        logp: log-probs of the tokens under the trainer's π, [B, T].
        sampler_logp: the same under the sampler's μ; NaN where it is not known.
        keep: True where a token counts. None: everywhere.

    Returns:
        Weights [B, T], detached.
    """
    counted = as_mask(keep, logp) & torch.isfinite(sampler_logp)
    return _log_ratio(logp, sampler_logp, counted).exp()


def truncate(
    w: Tensor, limit: float = 2.0, *, per: Literal["token", "sequence"] = "token", keep: Tensor | None = None
) -> Tensor:
    """``min(w_t, limit)``, or for every token of a sequence ``min(Π_u w_u, limit)``: truncated importance sampling.

    Per token the variance stays small and the ratio of the prefixes is left out; per sequence it is included, and the
    product of many ratios is truncated more often.

    Args:
        w: weights of :func:`weights`, [B, T].
        limit: the largest weight.
        per: one weight per token, or one per sequence.
        keep: True where a token counts. None: everywhere.

    Returns:
        Weights [B, T], detached.
    """
    require_number("limit", limit, above=0, way_out="It bounds a weight; 2 is usual.")
    w = wide("w", w).detach()
    w = select(w, as_mask(keep, w), 1.0)
    if per == "sequence":
        w = w.log().sum(-1, keepdim=True).clamp(max=FARTHEST).exp().expand_as(w)
    elif per != "token":
        raise unknown("per", per, ("token", "sequence"))
    return w.clamp(max=limit)


def mask(
    logp: Tensor,
    sampler_logp: Tensor,
    keep: Tensor | None = None,
    *,
    kind: Kind = "ratio",
    limit: float,
    side: Side = "both",
    advantages: Tensor | None = None,
) -> Tensor:
    """True for the tokens that stay: those on which sampler and trainer differ by no more than ``limit``.

    ``kind`` says how the difference is measured, for the token drawn against all others:

    - ``"ratio"``: ``max(w, 1/w) <= limit`` (masked importance sampling, IcePop);
    - ``"tv"``: ``|π - μ| <= limit``, the total variation of {token, all others};
    - ``"kl"``: ``μ log(μ/π) + (1-μ) log((1-μ)/(1-π)) <= limit``, their KL.

    ``side="both"`` leaves out every token beyond the limit. ``side="away"`` needs ``advantages`` and leaves out only
    those whose update would widen the difference: ``A > 0`` where ``π > μ`` and ``A < 0`` where ``π < μ`` (DPPO).
    A token whose sampler's log-prob is not known stays.

    Args:
        logp: log-probs of the tokens under the trainer's π, [B, T].
        sampler_logp: the same under the sampler's μ; NaN where it is not known.
        keep: True where a token counts. None: everywhere.
        kind: how the difference is measured.
        limit: the largest difference that stays.
        side: which tokens beyond the limit are left out.
        advantages: [B, T], for ``side="away"``.

    Returns:
        Booleans [B, T].
    """
    require_number(
        "limit", limit, above=1 if kind == "ratio" else 0, way_out="It is the largest difference that stays."
    )
    counted = as_mask(keep, logp)
    known = counted & torch.isfinite(sampler_logp)
    d = _log_ratio(logp, sampler_logp, known)
    if kind == "ratio":
        beyond = d.abs() > torch.log(torch.tensor(limit, dtype=d.dtype, device=d.device))
    elif kind in ("tv", "kl"):
        new, old = (select(wide("logp", x).detach(), known).clamp(max=0.0) for x in (logp, sampler_logp))
        beyond = (_total_variation(new, old) if kind == "tv" else _binary_kl(new, old)) > limit
    else:
        raise unknown("kind", kind, ("ratio", "tv", "kl"))
    if side == "away":
        if advantages is None:
            raise ConfigError("mask with side='away' needs advantages: their sign says which way the update goes.")
        same_shape(logp=logp, advantages=advantages)
        beyond = beyond & (advantages.detach() * d > 0)
    elif side != "both":
        raise unknown("side", side, ("both", "away"))
    return counted & ~(known & beyond)


def replay(logits: Tensor, kept: Tensor) -> Tensor:
    """``log_softmax`` over the kept set, [..., V]; ``-inf`` elsewhere. Differentiable.

    A sampler that cuts by top-p draws from the kept tokens alone. Renormalised over the same set, the trainer's
    log-probs are those of the distribution that was drawn from; without it the mean ratio is the kept mass.

    Args:
        logits: the trainer's logits, [..., V].
        kept: booleans [..., V], True for each token that the sampler could have drawn.

    Returns:
        Log-probs [..., V].
    """
    logits = wide("logits", logits)
    if kept.shape != logits.shape or kept.dtype != torch.bool:
        raise ConfigError(
            f"kept must be a boolean tensor of shape {tuple(logits.shape)}, got {kept.dtype} {tuple(kept.shape)}. "
            "It is True for each token that the sampler could have drawn."
        )
    if not bool(kept.any(-1).all()):
        raise ConfigError("kept has a position without any token. Each position keeps at least the one drawn.")
    lowest = torch.finfo(logits.dtype).min
    total = torch.where(kept, logits, lowest).logsumexp(-1, keepdim=True)
    return torch.where(kept, logits - total, -torch.inf)


def corrected_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    *,
    weights: Tensor,
    stays: Tensor,
    price: Tensor | None = None,
    unclipped: Tensor | None = None,
    pays: bool = True,
    clip: tuple[float, float] | None = (0.2, 0.2),
    cispo: bool = False,
) -> Tensor:
    """``w_t · clipped(r_t, A_t + price_t) - ρ_t A'_t`` per token, ``r = e^(logp - old_logp)`` of the trainer alone.

    ``w_t`` corrects for the sampler once, outside the clip. ``A'`` is the future part of ``sequence_exact`` with
    ``objective="score"``, which holds the sampler's weights already: ``ρ_t`` is 1 and passes its gradient on, so no
    weight is counted twice. A token that does not stay loses its advantage.

    Args:
        logp: log-probs of the tokens under π, [B, T].
        old_logp: the same under the trainer's policy before the update.
        advantages: A, [B, T].
        weights: w, [B, T].
        stays: booleans [B, T] of :func:`mask`.
        price: the price in the advantage (``in_reward``, ``in_advantage``), inside the clip.
        unclipped: A', outside the clip.
        pays: whether a token that does not stay still pays ``price`` and ``unclipped``.
        clip: (lo, hi) of the ratio. None: no clip.
        cispo: as in :func:`klamp.objectives.policy_loss`.

    Returns:
        Loss per token, [B, T].
    """
    same_shape(logp=logp, weights=weights, stays=stays, price=price)
    zero = torch.zeros_like(advantages)
    paid = zero if price is None else price if pays else torch.where(stays, price, zero)
    kept = torch.where(stays, advantages, zero) + paid
    loss = weights * policy_loss(logp, old_logp, kept, clip=clip, cispo=cispo)
    if unclipped is None:
        return loss
    score = (wide("logp", logp) - wide("logp", logp).detach()).exp()
    return loss - score * (unclipped if pays else torch.where(stays, unclipped, torch.zeros_like(unclipped)))


def _log_ratio(logp: Tensor, sampler_logp: Tensor, counted: Tensor) -> Tensor:
    """``log w_t`` without gradient, 0 where nothing counts."""
    new, old = wide("logp", logp).detach(), wide("sampler_logp", sampler_logp).detach()
    same_shape(logp=new, sampler_logp=old)
    return (select(new, counted) - select(old, counted)).clamp(-FARTHEST, FARTHEST)


def _total_variation(new: Tensor, old: Tensor) -> Tensor:
    """``|π - μ|`` of the drawn token: the total variation between {token, others} under the two."""
    return (new.exp() - old.exp()).abs()


def _binary_kl(new: Tensor, old: Tensor) -> Tensor:
    """``μ log(μ/π) + (1-μ) log((1-μ)/(1-π))`` of the drawn token, at least 0."""
    rest_new, rest_old = _log_rest(new), _log_rest(old)
    # Where the sampler gave the token everything, nothing is left to differ on: 0 · (-inf - ...) counts as 0.
    others = torch.where(torch.isinf(rest_old), torch.zeros_like(old), rest_old.exp() * (rest_old - rest_new))
    return (old.exp() * (old - new) + others).clamp(min=0.0)


def _log_rest(logp: Tensor) -> Tensor:
    """``log(1 - e^logp)`` without cancellation on either side of log 2."""
    near = torch.log(-torch.expm1(logp.clamp(min=-0.7)))
    return torch.where(logp > -0.6931, near, torch.log1p(-logp.clamp(max=-0.5).exp()))
