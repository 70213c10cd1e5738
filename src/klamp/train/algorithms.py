"""GRPO and PPO: from rewards to the advantages of every counted token, and what the update needs besides.

Shapes: N sequences, C token columns. ``reduce`` sums a tensor over all processes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from klamp.masked import select, sum_count
from klamp.objectives import gae, group_advantages, whiten
from klamp.placements import in_reward
from klamp.train.batch import Rollout
from klamp.train.config import TrainConfig
from klamp.train.rewards import Scored

Reduce = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Look:
    """What a pass without gradient saw of the whole batch before the update, [N, C] each."""

    logp: Tensor
    ref_logp: Tensor
    kl: Tensor
    """Exact, of each token."""
    values: Tensor | None


@dataclass(frozen=True)
class Prepared:
    """What the update works with."""

    advantages: Tensor
    """[N, C], constants."""
    counted: Tensor
    """[N, C], the rollout's mask without the sequences whose reward failed."""
    spread: float
    """RMS spread of the advantages within a prompt: what the price competes with."""
    old_logp: Tensor | None = None
    """[N, C] log-probs under the sampler; None: the samples are the policy's own and are used once."""
    old_values: Tensor | None = None
    returns: Tensor | None = None
    kl_mean: Tensor | None = None
    """Global mean of k1 over counted tokens, for ``in_advantage``."""


def needs_look(config: TrainConfig, stale: bool) -> bool:
    """Whether the update must know the whole batch's log-probs beforehand."""
    several = config.algorithm.epochs * config.algorithm.minibatches > 1
    return several or stale or config.algorithm.name == "ppo" or config.kl.placement == "in_advantage"


def prepare(
    config: TrainConfig, rollout: Rollout, scored: Scored, look: Look | None, beta: float, reduce: Reduce
) -> Prepared:
    """Advantages for the configured algorithm at the price ``beta``, which only PPO with KL in the reward looks at."""
    valid = scored.valid.to(rollout.mask.device)
    counted = rollout.mask & valid[:, None]
    rewards = scored.total.to(rollout.mask.device)
    if config.algorithm.name == "grpo":
        prepared = _grpo(config, rollout, rewards, valid, counted, reduce)
    else:
        assert look is not None, "PPO looks at the batch first"
        prepared = _ppo(config, rewards, look, counted, beta, reduce)
    several = config.algorithm.epochs * config.algorithm.minibatches > 1
    mean = None
    if look is not None and config.kl.placement == "in_advantage":
        total, count = sum_count(look.logp - look.ref_logp, counted)
        sums = reduce(torch.stack([total.double(), count.double()]))
        mean = sums[0] / sums[1].clamp(min=1)
    old = look.logp if look is not None and several else None
    return Prepared(prepared.advantages, counted, prepared.spread, old, prepared.old_values, prepared.returns, mean)


def _grpo(
    config: TrainConfig, rollout: Rollout, rewards: Tensor, valid: Tensor, counted: Tensor, reduce: Reduce
) -> Prepared:
    """Group advantages of the task reward alone, the same for every token of a sequence."""
    per_sequence = group_advantages(rewards, rollout.group_size, std=config.algorithm.std, valid=valid)
    sums = reduce(torch.stack([(per_sequence**2).sum().double(), valid.sum().double()]))
    spread = float((sums[0] / sums[1].clamp(min=1)).sqrt())
    return Prepared(select(per_sequence[:, None].expand(counted.shape), counted), counted, spread)


def _ppo(config: TrainConfig, rewards: Tensor, look: Look, counted: Tensor, beta: float, reduce: Reduce) -> Prepared:
    """Generalised advantages of the reward at the last counted token; k1 joins the reward where it is placed there."""
    per_token = place_at_end(rewards, counted)
    if config.kl.placement == "in_reward":
        per_token = in_reward(per_token, look.logp - look.ref_logp, beta, counted)
    assert look.values is not None
    advantages, returns = gae(per_token, look.values, counted, gamma=config.algorithm.gamma, lam=config.algorithm.lam)
    total, count = sum_count(advantages, counted)
    squares, _ = sum_count(advantages**2, counted)
    sums = reduce(torch.stack([total.double(), squares.double(), count.double()]))
    mean = sums[0] / sums[2].clamp(min=1)
    variance = (sums[1] / sums[2].clamp(min=1) - mean**2).clamp(min=0)
    white = whiten(advantages, counted, moments=(mean.to(advantages.dtype), variance.to(advantages.dtype)))
    spread = 1.0 if float(variance) > 0 else 0.0
    return Prepared(white, counted, spread, old_values=look.values, returns=returns)


def place_at_end(rewards: Tensor, counted: Tensor) -> Tensor:
    """[N, C] with each sequence's reward at its last counted token."""
    columns = torch.arange(counted.shape[1], device=counted.device)
    last = torch.where(counted, columns, -1).amax(1) if counted.shape[1] else torch.full_like(rewards, -1).long()
    return torch.where(counted & (columns == last[:, None]), rewards[:, None], torch.zeros_like(rewards[:, None]))
