"""Before step 1: is the KL term wired right? Each of these failed silently in a shipped system.

One small batch, no trace left: weights, gradients and the price are put back to the bit.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from klamp.clamp_scalers import snapshot
from klamp.distributed import share, whole
from klamp.errors import PreflightError
from klamp.masked import sum_count
from klamp.models.lora import has_experts
from klamp.references import Base, CheckpointStep, Ema, Periodic, StepLag
from klamp.sampling.rollout import Rollout, part
from klamp.seeds import mix
from klamp.train.algorithms import needs_look, prepare
from klamp.train.learner import Learner
from klamp.train.rewards import Scored
from klamp.train.update import loss_of

ROWS = 8
"""Sequences looked at."""
SAME = {torch.float32: 1e-5, torch.bfloat16: 1e-4, torch.float16: 1e-4}
"""Nats per token within which a policy and a reference of the same weights agree."""
APART = {torch.float32: (1e-4, 1e-3), torch.float64: (1e-7, 1e-6)}
"""Nats by which two ways to the same log-prob may differ, on average and at most: float32 rounds at 1e-7, a log-prob is
the difference of logits of size 20 behind some tens of layers."""
COARSE = 0.05, 1.0
"""The same in bfloat16, which rounds at 0.004: logits of size 20 move by 0.1, and by several times that where weights
were rounded once more when an adapter was merged into them. A way that is wrong is off by nats on most tokens."""
ROUTED = 0.2, math.inf
"""The same with experts: rounding sends a token to another one now and then, and its log-prob moves by nats."""


def preflight(learner: Learner, rollout: Rollout, *, sampled: bool = False) -> dict[str, float]:
    """Check dropout, agreement at the start, and that the price reaches the update; returns what was measured.

    ``sampled`` says that klamp's own sampler drew the rollout from the policy as it is: then both must agree on it.
    """
    rollout = _few(rollout).to(learner.device)
    _no_dropout(learner)
    with torch.no_grad():
        look = learner.look(rollout, learner.reference_states(rollout))
    kl = _start_kl(learner, rollout, look.kl)
    padding = _padding_gap(learner, rollout, look.logp)
    sampler = _sampler_gap(learner, rollout, look.logp) if sampled else math.nan
    pull = _pull(learner, rollout)
    if not pull > 0:
        raise PreflightError(
            "the price of KL does not reach the update: away from the reference its gradient is zero. Check that the "
            f"trained weights are part of the graph and ‹kl.placement={learner.config.kl.placement!r}› is meant."
        )
    return {"preflight/kl": kl, "preflight/pull": pull, "preflight/padding": padding, "preflight/sampler": sampler}


def _no_dropout(learner: Learner) -> None:
    active = [n for n, m in learner.policy.named_modules() if isinstance(m, nn.Dropout) and m.p > 0 and m.training]
    if active:
        raise PreflightError(f"dropout is on in {active[0]} ({len(active)} such): it would read as KL. Set it to 0.")


def _sampler_gap(learner: Learner, rollout: Rollout, logp: Tensor) -> float:
    """The largest difference between the sampler's log-probs and the trainer's, token by token."""
    known = rollout.mask & torch.isfinite(rollout.sampler_logp)
    # A nucleus of probability p at least is what was drawn from: its log-probs are higher by -log p at most.
    cut = -math.log(learner.config.rollout.top_p)
    gap = rollout.sampler_logp - logp
    far = torch.where(known, torch.maximum(gap - cut, -gap).clamp(min=0), torch.zeros_like(gap))
    return _within(
        learner,
        far,
        known,
        "sampler and trainer differ",
        "The completions are not drawn from the policy that is trained: klamp's sampler does not know this model.",
    )


@torch.no_grad()
def _padding_gap(learner: Learner, rollout: Rollout, logp: Tensor) -> float:
    """The largest difference between log-probs in the batch and those of two of its sequences alone, unpadded."""
    prompts, lengths = rollout.attention[:, : rollout.first].sum(1), rollout.attention.sum(1)
    far, seen = torch.zeros_like(logp), torch.zeros_like(rollout.mask)
    for row in (int(prompts.argmin()), int(lengths.argmax())):  # the most padding, the most tokens
        piece = part(rollout, torch.tensor([row], device=learner.device))
        with learner.autocast():
            alone = learner.policy.stats(piece, learner.module(piece).hidden, None).logp
        piece.put(far, torch.where(piece.mask, (alone - piece.of(logp)).abs(), torch.zeros_like(alone)))
        piece.put(seen, piece.mask)
    return _within(
        learner,
        far,
        seen,
        "a sequence in a batch and the same one alone differ",
        "The model does not see which tokens are padding. Use prompts of one length, or another model.",
    )


def _within(learner: Learner, far: Tensor, counted: Tensor, what: str, why: str) -> float:
    """The largest of ``far``, refused beyond what the rounding of the dtype can do."""
    if not bool(counted.any()):
        return 0.0
    dtype = next(learner.policy.model.parameters()).dtype
    coarse = ROUTED if has_experts(learner.policy.model.config) else COARSE
    mean_bound, bound = coarse if learner.rounds else APART.get(dtype, coarse)
    far = far.nan_to_num(torch.inf)
    mean, largest = float(far[counted].mean()), float(far[counted].max())
    if mean > mean_bound or largest > bound:
        row, column = divmod(int(torch.where(counted, far, -1.0).argmax()), far.shape[1])
        raise PreflightError(
            f"{what} by {largest:.2g} nats on token {column + 1} of completion {row + 1} ({mean:.2g} on average); "
            f"rounding explains {mean_bound:g} on average, {bound:g} at most. {why} preflight=false leaves this out."
        )
    return largest


def _start_kl(learner: Learner, rollout: Rollout, token_kl: Tensor) -> float:
    """Mean exact KL per token before any update; 0 when policy and reference are the same weights."""
    total, count = sum_count(token_kl, rollout.mask)
    kl = float(total / count.clamp(min=1))
    if not math.isfinite(kl):
        raise PreflightError(
            f"the KL of the first batch is {kl}: the policy or its reference {learner.reference.spec} gives log-probs "
            "that are not finite. Check their weights, and whether dtype holds them."
        )
    fresh = not learner.control.started
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
    model = learner.policy.model
    learner.settle()
    saved = snapshot(model)
    generator = torch.Generator().manual_seed(mix(learner.config.seed, 7))
    try:
        with torch.no_grad():
            for p in (p for p in model.parameters() if p.requires_grad):
                noise = torch.randn(p.shape, generator=generator).to(p.device, p.dtype)
                p.add_(share(noise, p), alpha=0.02)
        anchors = learner.reference_states(rollout)
        look = learner.look(rollout, anchors)
        _apart(learner, look.kl, rollout.mask)
        nothing = Scored(torch.zeros(len(rollout)), torch.ones(len(rollout), dtype=torch.bool), {})
        prepared = prepare(
            learner.config, rollout, nothing, look if needs_look(learner.config, False) else None, 1.0, _own
        )
        prepared = replace(prepared, returns=None)
        rows = torch.arange(len(rollout), device=learner.device)
        loss = loss_of(learner, rollout, rows, prepared, anchors, beta=1.0)
        return math.sqrt(sum(float(whole(g.float().square().sum())) for g in _gradients(learner, loss)))
    finally:
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
