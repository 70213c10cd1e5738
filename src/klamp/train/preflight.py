"""Before step 1: is the KL term wired right? Each of these failed silently in a shipped system.

One small batch, no trace left: weights, gradients and the price are put back to the bit.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from klamp.clamp import snapshot
from klamp.controllers import State
from klamp.errors import KlampError
from klamp.masked import sum_count
from klamp.references import Base, CheckpointStep, Ema, Periodic, StepLag
from klamp.sharded import share, whole
from klamp.train.algorithms import needs_look, prepare
from klamp.train.batch import Rollout
from klamp.train.data import mix
from klamp.train.learner import Learner
from klamp.train.rewards import Scored

ROWS = 8
"""Sequences looked at."""
SAME = {torch.float32: 1e-5, torch.bfloat16: 1e-4, torch.float16: 1e-4}
"""Nats per token within which a policy and a reference of the same weights agree."""


class PreflightError(KlampError, RuntimeError):
    """The KL term would not do what it is there for."""


def preflight(learner: Learner, rollout: Rollout) -> dict[str, float]:
    """Check dropout, agreement at the start, and that the price reaches the update; returns what was measured."""
    rollout = _few(rollout).to(learner.device)
    _no_dropout(learner)
    kl = _start_kl(learner, rollout)
    pull = _pull(learner, rollout)
    if not pull > 0:
        raise PreflightError(
            "the price of KL does not reach the update: away from the reference its gradient is zero. Check that the "
            f"trained weights are part of the graph and kl.placement={learner.config.kl.placement!r} is meant."
        )
    return {"preflight/kl": kl, "preflight/pull": pull}


def _no_dropout(learner: Learner) -> None:
    active = [n for n, m in learner.policy.named_modules() if isinstance(m, nn.Dropout) and m.p > 0 and m.training]
    if active:
        raise PreflightError(f"dropout is on in {active[0]} ({len(active)} such): it would read as KL. Set it to 0.")


@torch.no_grad()
def _start_kl(learner: Learner, rollout: Rollout) -> float:
    """Mean exact KL per token before any update; 0 when policy and reference are the same weights."""
    look = learner._look(rollout, learner._anchors(rollout))
    total, count = sum_count(look.kl, rollout.mask)
    kl = float(total / count.clamp(min=1))
    if not math.isfinite(kl):
        raise PreflightError(
            f"the KL of the first batch is {kl}: the policy or its reference {learner.reference.spec} gives log-probs "
            "that are not finite. Check their weights, and whether dtype holds them."
        )
    fresh = learner.steering.state is None
    spec = learner.reference.spec
    same = isinstance(spec, Base | Ema | Periodic | StepLag) or (isinstance(spec, CheckpointStep) and spec.step == 0)
    dtype = next(learner.policy.model.parameters()).dtype
    if fresh and same and not abs(kl) <= SAME.get(dtype, 1e-4):
        raise PreflightError(
            f"policy and reference {spec} are the same weights and yet {kl:.3g} nats per token apart. Something "
            "differs between the two paths: dtype, dropout, attention, or an adapter that is not off."
        )
    return kl


def _pull(learner: Learner, rollout: Rollout) -> float:
    """Norm of the price's gradient a little away from the reference, with rewards that say nothing.

    There the two must be apart: a fresh adapter is 0, so one that stays on in the reference shows only when it moves.
    """
    model, steering = learner.policy.model, learner.steering
    learner.settle()
    saved, state = snapshot(model), steering.state
    generator = torch.Generator().manual_seed(mix(learner.config.seed, 7))
    try:
        steering.state = State(beta=1.0)
        with torch.no_grad():
            for p in (p for p in model.parameters() if p.requires_grad):
                noise = torch.randn(p.shape, generator=generator).to(p.device, p.dtype)
                p.add_(share(noise, p), alpha=0.02)
        anchors = learner._anchors(rollout)
        look = learner._look(rollout, anchors)
        _apart(learner, look.kl, rollout.mask)
        nothing = Scored(torch.zeros(len(rollout)), torch.ones(len(rollout), dtype=torch.bool), {})
        prepared = prepare(
            learner.config, rollout, nothing, look if needs_look(learner.config, False) else None, 1.0, _own
        )
        prepared = replace(prepared, returns=None)
        rows = torch.arange(len(rollout), device=learner.device)
        loss = learner.loss_of(rollout, rows, prepared, anchors)
        return math.sqrt(sum(float(whole(g.float().square().sum())) for g in _gradients(learner, loss)))
    finally:
        steering.state = state
        learner.settle()
        with torch.no_grad():
            for name, p in model.named_parameters():
                if name in saved:
                    p.copy_(saved[name])


def _gradients(learner: Learner, loss: Tensor) -> list[Tensor]:
    """The gradients of the trained weights. Shards get theirs from a backward pass alone, which is undone."""
    trained = [p for p in learner.policy.model.parameters() if p.requires_grad]
    if not learner.sharded:
        return [g for g in torch.autograd.grad(loss, trained, allow_unused=True) if g is not None]
    loss.backward()  # type: ignore[no-untyped-call]
    grads = [p.grad for p in learner.trained if p.grad is not None]
    learner.optimizer.zero_grad(set_to_none=True)
    return grads


def _apart(learner: Learner, kl: Tensor, mask: Tensor) -> None:
    total, count = sum_count(kl, mask)
    mean, dtype = float(total / count.clamp(min=1)), next(learner.policy.model.parameters()).dtype
    if not mean > SAME.get(dtype, 1e-4):
        raise PreflightError(
            f"the policy was moved and its reference {learner.reference.spec} moved along: they are {mean:.3g} nats "
            "per token apart. The adapter is not off where the reference is computed, or both share their weights."
        )


def _own(x: Tensor) -> Tensor:
    """This process alone: nothing to sum."""
    return x


def _few(rollout: Rollout) -> Rollout:
    """The first whole groups of the rollout, about :data:`ROWS` sequences."""
    rows = min(len(rollout), max(rollout.group_size, ROWS // rollout.group_size * rollout.group_size))
    return replace(
        rollout,
        ids=rollout.ids[:rows],
        attention=rollout.attention[:rows],
        mask=rollout.mask[:rows],
        sampler_logp=rollout.sampler_logp[:rows],
        ended=None,
    )
