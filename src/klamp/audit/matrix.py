"""The terms that klamp and its peers use, each as one function of a :class:`~klamp.audit.core.Batch`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from klamp import estimators as e
from klamp.audit.core import Batch, Term
from klamp.placements import in_advantage, in_loss, in_reward, sequence_exact

Values = Callable[[Batch], Tensor]


def sampled(estimator: e.Estimator) -> Values:
    """Per-token values of an estimator of (logp, ref_logp)."""
    return lambda b: estimator(b.logp, b.ref_logp)


def weighted(estimator: e.Estimator, detach_weight: bool = False) -> Values:
    """The off-policy form of an estimator."""
    return lambda b: e.weighted(estimator, b.logp, b.old_logp, b.ref_logp, detach_weight=detach_weight)


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


def k3_clamped_at_1(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """The clamp at 1 nat, where these small worlds reach it."""
    return e.k3_clamped(logp, ref_logp, limit=1.0)


ROWS: dict[str, tuple[bool, Term]] = {
    "exact · sequence_exact(max_weight=None)": (True, sequence(None)),
    "exact · sequence_exact, with a value baseline": (True, sequence(None, baseline=True)),
    "exact · sequence_exact(max_weight=2.0)": (True, sequence(2.0)),
    "k1 · in_reward": (True, reward(sampled(e.k1))),
    "k1 · in_advantage": (True, advantage(sampled(e.k1))),
    "exact · in_loss": (True, loss(lambda b: b.kl)),
    "k2 · in_loss": (True, loss(sampled(e.k2))),
    "k3+ · in_loss": (True, loss(sampled(e.straight_through(e.k3, e.k2)))),
    "weighted k1 · in_loss": (True, loss(weighted(e.k1))),
    "weighted k3 · in_loss": (True, loss(weighted(e.k3))),
    "detached-weight k2 · in_loss": (True, loss(weighted(e.k2, detach_weight=True))),
    "k1 of the sampler · in_reward": (False, reward(stale_k1)),
    "k1 · in_loss": (False, loss(sampled(e.k1))),
    "k3 · in_loss": (False, loss(sampled(e.k3))),
    "k3_clamped(limit=1) · in_loss": (False, loss(sampled(k3_clamped_at_1))),
    "weighted k2 · in_loss": (False, loss(weighted(e.k2))),
    "detached-weight k3 · in_loss": (False, loss(weighted(e.k3, detach_weight=True))),
    "exact_forward · in_loss": (False, loss(lambda b: b.forward_kl)),
    "absolute · in_loss": (False, loss(sampled(e.absolute))),
    "r_log_r · in_loss": (False, loss(sampled(e.r_log_r))),
    "k2 · in_reward": (False, reward(sampled(e.k2))),
    "k3 · in_reward": (False, reward(sampled(e.k3))),
    "absolute · in_reward": (False, reward(sampled(e.absolute))),
    "exact · in_reward": (False, reward(lambda b: b.kl)),
    "exact · in_advantage": (False, advantage(lambda b: b.kl)),
}
