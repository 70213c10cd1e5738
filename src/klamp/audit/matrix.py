"""The terms that klamp and its peers use, each as one function of a :class:`~klamp.audit.core.Batch`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from klamp import estimators as e
from klamp.audit.core import Batch, Term
from klamp.placements import TABLE, Pair, in_advantage, in_loss, in_reward, sequence_exact

Values = Callable[[Batch], Tensor]


def values_of(name: str) -> Values:
    """Per-token values of the estimator of that name."""
    if name == "exact_forward":
        return lambda b: b.forward_kl
    if name == "k3_clamped":
        return lambda b: e.k3_clamped(b.logp, b.ref_logp, limit=1.0)  # 1 nat is within the reach of these small worlds
    form = e.named(name)
    return lambda b: form(b.logp, b.ref_logp, old_logp=b.old_logp, kl=b.kl)


def stale_k1(batch: Batch) -> Tensor:
    """k1 of the sampler instead of the policy: what PPO has after the first of several epochs."""
    return e.k1(batch.old_logp, batch.ref_logp)


def reward(values: Values) -> Term:
    """A ratio objective whose advantage is the return to go of ``in_reward``."""

    def term(b: Batch) -> Tensor:
        rewards = in_reward(torch.zeros_like(b.ref_logp), values(b), 1.0, b.mask)
        return ratio_objective(b, rewards.flip(-1).cumsum(-1).flip(-1))

    return term


def advantage(values: Values) -> Term:
    """A ratio objective whose advantage is ``in_advantage``, centred on the mean of the sampled batch."""

    def term(b: Batch) -> Tensor:
        kl = torch.where(b.mask, values(b).detach(), 0.0)
        mean = (b.probability @ kl.sum(-1)) / (b.probability @ b.mask.double().sum(-1))
        return ratio_objective(b, in_advantage(torch.zeros_like(b.ref_logp), kl, 1.0, b.mask, mean=mean))

    return term


def loss(values: Values) -> Term:
    """The sum of the values, as a loss."""
    return lambda b: in_loss(values(b), 1.0, b.mask, count=1.0)


def sequence(max_weight: float | None, baseline: bool = False) -> Term:
    """Both halves of ``sequence_exact``."""

    def term(b: Batch) -> Tensor:
        parts = sequence_exact(
            b.kl,
            1.0,
            b.mask,
            logp=b.logp,
            old_logp=b.old_logp,
            max_weight=max_weight,
            baseline=b.future if baseline else None,
        )
        return parts.local.sum() + ratio_objective(b, parts.advantage)

    return term


def ratio_objective(b: Batch, advantages: Tensor) -> Tensor:
    """``-Σ π/μ · A``, the policy-gradient loss that every advantage goes into."""
    ratio = (b.logp - b.old_logp).exp()
    return -torch.where(b.mask, ratio * advantages, 0.0).sum()


def term_of(pair: Pair) -> Term:
    """The KL term of an estimator in a placement."""
    if pair.placement == "sequence_exact":
        return sequence(None)
    return {"in_reward": reward, "in_advantage": advantage, "in_loss": loss}[pair.placement](values_of(pair.estimator))


def title(pair: Pair) -> str:
    """The name of a pair's row."""
    estimator = pair.estimator.replace("detached_weight_", "detached-weight ").replace("weighted_", "weighted ")
    estimator = "k3_clamped(limit=1)" if estimator == "k3_clamped" else estimator
    return f"{estimator} · {pair.placement}{'(max_weight=None)' if pair.placement == 'sequence_exact' else ''}"


VARIANTS: dict[str, tuple[bool, Term]] = {
    "exact · sequence_exact, with a value baseline": (True, sequence(None, baseline=True)),
    "exact · sequence_exact(max_weight=2.0)": (True, sequence(2.0)),
    "k1 of the sampler · in_reward": (False, reward(stale_k1)),
}
"""Rows that are no pair of their own."""

ROWS: dict[str, tuple[bool, Term]] = {title(pair): (pair.accepted, term_of(pair)) for pair in TABLE} | VARIANTS
"""Every pair of :data:`klamp.placements.TABLE`, and the variants: whether klamp accepts it, and the term."""
