"""The policy loss of a part's tokens with the price of KL in its place, corrected for the sampler where asked."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from klamp import estimators as e
from klamp import trust
from klamp.kernels import TokenStats
from klamp.masked import select
from klamp.objectives import policy_loss
from klamp.placements import in_advantage, in_loss, sequence_exact
from klamp.sampling.batch import Part
from klamp.train.algorithms import Prepared, algorithm_of, estimate
from klamp.train.config import USUAL_LIMIT, CorrectionConfig, TrainConfig


class Priced(NamedTuple):
    """Where the price of a part's tokens goes."""

    advantages: Tensor
    """[n, c] inside the clip."""
    unclipped: Tensor | None
    """[n, c] outside it."""
    loss: Tensor
    """Added to the loss, summed over the tokens."""


class PolicyTerm(NamedTuple):
    """Both sums over a part's tokens, and what the correction did."""

    policy: Tensor
    price: Tensor
    corrected: Corrected | None


def policy_term(
    config: TrainConfig, piece: Part, prepared: Prepared, stats: TokenStats, old: Tensor, beta: float
) -> PolicyTerm:
    """The clipped policy loss and the price over the counted tokens of a part."""
    corrected = correction_of(config, piece, prepared, old)
    priced = price_of(config, piece, prepared, stats, old, beta, corrected)
    clip, cispo = config.algorithm.clip, config.algorithm.loss == "cispo"
    if corrected is None:
        per_token = policy_loss(stats.logp, old, priced.advantages, clip=clip, unclipped=priced.unclipped, cispo=cispo)
    else:
        task = piece.of(prepared.advantages)
        per_token = trust.corrected_loss(
            stats.logp,
            old,
            task,
            weights=corrected.weights,
            stays=corrected.stays,
            price=priced.advantages - task,
            unclipped=priced.unclipped,
            pays=config.algorithm.correction.pays,
            clip=clip,
            cispo=cispo,
        )
    if prepared.weights is not None:
        per_token = per_token * prepared.weights[piece.rows][:, None]
    return PolicyTerm(select(per_token, piece.mask).sum(), priced.loss, corrected)


def gradient_of(config: TrainConfig) -> tuple[str, ...]:
    """The statistics through which :func:`policy_term` has a gradient: the exact KL only where it is in the loss."""
    kl = config.kl
    exact = kl.placement == "sequence_exact" or (kl.placement == "in_loss" and kl.estimator == "exact")
    return ("logp", "kl") if exact else ("logp",)


def correction_of(config: TrainConfig, piece: Part, prepared: Prepared, old: Tensor) -> Corrected | None:
    """What the sampler's distance makes of a part's tokens; None where it is not corrected for."""
    if config.correction is None or prepared.sampler_logp is None:
        return None
    drawn = piece.of(prepared.sampler_logp)
    return correct(config.correction, old, drawn, piece.mask, piece.of(prepared.advantages))


def price_of(
    config: TrainConfig,
    piece: Part,
    prepared: Prepared,
    stats: TokenStats,
    old: Tensor,
    beta: float,
    corrected: Corrected | None,
) -> Priced:
    """The price of a part in the configured placement."""
    kl, counted = config.kl, piece.mask
    advantages = piece.of(prepared.advantages)
    nothing = torch.zeros((), device=counted.device)
    free = corrected is not None and not config.algorithm.correction.pays
    payers = counted & corrected.stays if free and corrected is not None else counted
    assert stats.ref_logp is not None, "the learner always has a reference"
    if kl.placement == "sequence_exact":
        assert stats.kl is not None, "and its exact KL"
        sampler = None if prepared.old_logp is None else old
        both = sequence_exact(
            stats.kl,
            beta,
            counted,
            logp=stats.logp,
            old_logp=sampler if corrected is None else _drawn_at(piece, prepared, stats),
            max_weight=kl.max_weight,
            objective="ratio" if corrected is None else "score",
        )
        return Priced(advantages, both.advantage, select(both.local, payers).sum())
    if kl.placement == "in_loss":
        cost = estimate(kl, stats, old if corrected is None else _drawn_at(piece, prepared, stats))
        if corrected is not None and e.named(kl.estimator).sampled:
            cost = cost * corrected.weights
        return Priced(advantages, None, in_loss(cost, beta, payers, count=1.0))
    if kl.placement == "in_advantage":
        recorded = prepared.source_logp
        cost = estimate(kl, stats, old) if recorded is None else e.k1(piece.of(recorded), stats.ref_logp)
        return Priced(in_advantage(advantages, cost, beta, counted, mean=prepared.kl_mean), None, nothing)
    cost = estimate(kl, stats, old)
    return Priced(algorithm_of(config).in_reward(advantages, cost, beta, counted), None, nothing)


def _drawn_at(piece: Part, prepared: Prepared, stats: TokenStats) -> Tensor:
    """The sampler's log-probs of a part; the policy's own where they are not known, so that the ratio is 1."""
    assert prepared.sampler_logp is not None, "only a corrected step asks"
    recorded = piece.of(prepared.sampler_logp).to(stats.logp.dtype)
    return torch.where(torch.isfinite(recorded), recorded, stats.logp.detach())


class Corrected(NamedTuple):
    """What a part's tokens count for in the policy loss, [n, c] each, without gradient."""

    weights: Tensor
    stays: Tensor
    """Tokens that are not left out."""
    truncated: Tensor
    """Tokens whose weight was cut."""


def correct(
    config: CorrectionConfig, logp: Tensor, sampler_logp: Tensor, counted: Tensor, advantages: Tensor
) -> Corrected:
    """Weights and mask for tokens with the trainer's ``logp`` before the update and the sampler's ``sampler_logp``."""
    limit = USUAL_LIMIT if config.limit is None else config.limit
    nothing = torch.zeros_like(counted)
    if config.kind == "truncate":
        w = trust.weights(logp, sampler_logp, counted)
        cut = trust.truncate(w, limit, per=config.per, keep=counted)
        whole = trust.truncate(w, torch.finfo(w.dtype).max, per=config.per, keep=counted)
        return Corrected(cut, counted, counted & (whole > limit))
    kind: dict[str, trust.Kind] = {"mask_ratio": "ratio", "mask_tv": "tv", "mask_kl": "kl"}
    stays = trust.mask(
        logp, sampler_logp, counted, kind=kind[config.kind], limit=limit, side=config.side, advantages=advantages
    )
    return Corrected(trust.weights(logp, sampler_logp, stays), stays, nothing)
