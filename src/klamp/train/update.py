"""The update of a step: the policy loss with the price of KL in its place, backward passes, AdamW.

The loss is a sum over counted tokens divided by the step's global token count, price and reward alike, so neither
micro-batches nor processes change it. Where asked, it is corrected for the sampler's distance from the policy.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from klamp import estimators as e
from klamp import trust
from klamp.distributed import whole
from klamp.errors import TrainingError
from klamp.kernels import TokenStats
from klamp.masked import select, sum_count
from klamp.models.optimizer import set_rate
from klamp.models.policy import ReferenceStates
from klamp.objectives import policy_loss, value_loss
from klamp.placements import in_advantage, in_loss, sequence_exact
from klamp.sampling.rollout import Part, Rollout, parts
from klamp.seeds import mix
from klamp.train.algorithms import Look, Prepared, algorithm_of, estimate
from klamp.train.config import USUAL_LIMIT, CorrectionConfig, ResolvedConfig
from klamp.train.metrics import Accumulator

if TYPE_CHECKING:
    from klamp.train.learner import Learner

Anchors = Callable[[Part], ReferenceStates]
"""The reference's states of any part of a rollout."""


@dataclass
class Updated:
    """What the optimiser did in a step."""

    met: Look
    """Each token as the first pass met it."""
    applied: int = 0
    """Updates made."""
    skipped: int = 0
    """Updates left out: nothing counted, or the gradient was not finite."""
    grad_norm: float | None = None
    """Of the last gradient, before it was clipped; None where there was none."""


def optimise(
    learner: Learner,
    step: int,
    rollout: Rollout,
    prepared: Prepared,
    anchors: Anchors,
    *,
    beta: float,
    added: Accumulator,
) -> Updated:
    """All epochs and minibatches at the price ``beta``; the losses of the first epoch are added to ``added``."""
    config, accelerator = learner.config, learner.accelerator
    done = Updated(Look.empty(rollout, values=False))
    for epoch in range(config.algorithm.epochs):
        order = _order(learner, step, epoch, len(rollout))
        for rows in torch.tensor_split(order, config.algorithm.minibatches):
            count = float(learner.reduce(prepared.counted[rows].sum().double()))
            if count == 0:  # every reward failed: Adam's momentum alone is no step
                done.skipped += 1
                continue
            set_rate(learner.optimizer, config.optim, step, config.steps)
            pieces = list(parts(rollout, rows, config.optim.micro_batch))
            for i, piece in enumerate(pieces):
                with _sync(learner, last=i + 1 == len(pieces)):
                    told = added if epoch == 0 else None
                    loss, stats = _loss(learner, piece, prepared, anchors(piece), count, beta, told)
                    accelerator.backward(loss * accelerator.num_processes)
                if epoch == 0:
                    done.met.keep(piece, stats)
            _apply(learner, step, done)
    return done


def loss_of(
    learner: Learner, rollout: Rollout, rows: Tensor, prepared: Prepared, anchors: Anchors, *, beta: float
) -> Tensor:
    """The loss of some rows as the update computes it at ``beta``, with its graph; for preflight and tests."""
    count = float(prepared.counted[rows].sum().clamp(min=1))
    pieces = parts(rollout, rows, learner.config.optim.micro_batch)
    return torch.stack([_loss(learner, p, prepared, anchors(p), count, beta, None)[0] for p in pieces]).sum()


def _loss(
    learner: Learner,
    piece: Part,
    prepared: Prepared,
    reference: ReferenceStates,
    count: float,
    beta: float,
    added: Accumulator | None,
) -> tuple[Tensor, TokenStats]:
    """``Σ (policy + price + value) / count`` over the counted tokens of a part."""
    config, counted = learner.config, piece.of(prepared.counted)
    piece = replace(piece, mask=counted)
    with learner.autocast():
        states = learner.module(piece, values=prepared.returns is not None)
        stats = learner.policy.stats(piece, states.hidden, reference, gradient_of(config))
    old = stats.logp.detach() if prepared.old_logp is None else piece.of(prepared.old_logp)
    policy, price, corrected = policy_term(config, piece, prepared, stats, old, beta)
    loss = policy + price
    if added is not None:
        _add_losses(config, counted, stats, old, policy, price, added)
        if corrected is not None:
            added.add("rollout/truncated", corrected.truncated.sum(), counted.sum())
            added.add("rollout/left_out", (counted & ~corrected.stays).sum(), counted.sum())
    if prepared.returns is not None and prepared.old_values is not None and states.values is not None:
        old_values, returns = piece.of(prepared.old_values), piece.of(prepared.returns)
        values = value_loss(states.values, old_values, returns, clip=config.algorithm.value_clip)
        value_term = select(values, counted).sum()
        loss = loss + config.algorithm.value_weight * value_term
        if added is not None:
            added.add("loss/value", value_term.detach(), counted.sum())
    return loss / count, stats


def _add_losses(
    config: ResolvedConfig,
    counted: Tensor,
    stats: TokenStats,
    old: Tensor,
    policy: Tensor,
    price: Tensor,
    added: Accumulator,
) -> None:
    """``loss/*`` and ``policy/*`` of a part."""
    logp = stats.logp.detach()
    added.add("loss/policy", policy.detach(), counted.sum())
    added.add("loss/price", price.detach(), counted.sum())
    added.add("policy/entropy", *sum_count(stats.entropy.detach(), counted))
    low, high = config.algorithm.clip
    ratio = (logp - old).exp()
    added.add("policy/clipped", *sum_count(((ratio < 1 - low) | (ratio > 1 + high)).float(), counted))


def _apply(learner: Learner, step: int, done: Updated) -> None:
    """Clip, step, and skip a step whose gradient is not finite; DeepSpeed has done the first two by now."""
    optim, accelerator = learner.config.optim, learner.accelerator
    done.grad_norm = float(whole(accelerator.clip_grad_norm_(learner.trained, optim.max_grad_norm or math.inf)))
    if math.isfinite(done.grad_norm):
        learner.optimizer.step()
        done.applied += 1
    else:
        done.skipped += 1
        if optim.on_nonfinite == "stop" or accelerator.distributed_type == "DEEPSPEED":
            raise TrainingError(
                f"the gradient of step {step} is {done.grad_norm}. Look at this step's samples and rewards, lower "
                "‹optim.lr›, or set ‹optim.on_nonfinite=skip› to leave such steps out (not with DeepSpeed)."
            )
    learner.optimizer.zero_grad(set_to_none=True)


@contextlib.contextmanager
def _sync(learner: Learner, *, last: bool) -> Iterator[None]:
    """Processes exchange gradients at the last part only."""
    with contextlib.nullcontext() if last else learner.accelerator.no_sync(learner.module):
        yield


def _order(learner: Learner, step: int, epoch: int, count: int) -> Tensor:
    """Rows of a pass: in order for a single update, shuffled by seed, step and epoch otherwise."""
    config = learner.config
    if config.algorithm.minibatches == 1:
        return torch.arange(count, device=learner.device)
    generator = torch.Generator().manual_seed(mix(config.seed, step, epoch, learner.accelerator.process_index))
    return torch.randperm(count, generator=generator).to(learner.device)


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
    config: ResolvedConfig, piece: Part, prepared: Prepared, stats: TokenStats, old: Tensor, beta: float
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


def gradient_of(config: ResolvedConfig) -> tuple[str, ...]:
    """The statistics through which :func:`policy_term` has a gradient: the exact KL only where it is in the loss."""
    kl = config.kl
    exact = kl.placement == "sequence_exact" or (kl.placement == "in_loss" and kl.estimator == "exact")
    return ("logp", "kl") if exact else ("logp",)


def correction_of(config: ResolvedConfig, piece: Part, prepared: Prepared, old: Tensor) -> Corrected | None:
    """What the sampler's distance makes of a part's tokens; None where it is not corrected for."""
    if config.correction is None or prepared.sampler_logp is None:
        return None
    drawn = piece.of(prepared.sampler_logp)
    return correct(config.correction, old, drawn, piece.mask, piece.of(prepared.advantages))


def price_of(
    config: ResolvedConfig,
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
        # A score times what is known before it has mean 0, unless the token itself decides what it counts for.
        known = None if free or prepared.weights is not None else prepared.future_kl
        both = sequence_exact(
            stats.kl,
            beta,
            counted,
            logp=stats.logp,
            old_logp=sampler if corrected is None else _drawn_at(piece, prepared, stats),
            max_weight=kl.max_weight,
            baseline=None if known is None else piece.of(known),
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
