"""GRPO and PPO: from rewards to the advantages of every counted token, and what the update needs besides.

Shapes: N sequences, C token columns. ``reduce`` sums a tensor over all processes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from klamp import estimators as e
from klamp.advantages import gae, group_advantages, to_go, whiten
from klamp.kernels import TokenStats
from klamp.masked import select, sum_count
from klamp.placements import in_reward
from klamp.sampling.rollout import Part, Rollout
from klamp.train.config import KLConfig, ResolvedConfig
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

    @staticmethod
    def empty(rollout: Rollout, *, values: bool) -> Look:
        """Zeros in the shape of the rollout's tokens, to be filled part by part."""
        logp, ref_logp, kl, value = (torch.zeros(rollout.mask.shape, device=rollout.mask.device) for _ in range(4))
        return Look(logp, ref_logp, kl, value if values else None)

    def keep(self, piece: Part, stats: TokenStats) -> None:
        """What was seen of a part, in its place in the batch."""
        assert stats.ref_logp is not None, "the learner always has a reference"
        assert stats.kl is not None, "and its exact KL"
        for whole, values in ((self.logp, stats.logp), (self.ref_logp, stats.ref_logp), (self.kl, stats.kl)):
            piece.put(whole, values.detach())


@dataclass(frozen=True)
class Prepared:
    """What the update works with."""

    advantages: Tensor
    """[N, C], constants."""
    counted: Tensor
    """[N, C], the rollout's mask without the sequences whose reward failed."""
    spread: float
    """RMS spread of the advantages within a prompt: what the price competes with."""
    signal: float = 1.0
    """Share of the sequences in groups that show one: whose completions differ in their reward."""
    old_logp: Tensor | None = None
    """[N, C] log-probs under the sampler; None: the samples are the policy's own and are used once."""
    old_values: Tensor | None = None
    returns: Tensor | None = None
    kl_mean: Tensor | None = None
    """Global mean of the estimate over counted tokens, for ``in_advantage``."""
    weights: Tensor | None = None
    """[N] of a sequence's tokens in the policy loss; None: all alike."""
    source_logp: Tensor | None = None
    """[N, C] log-probs that ``in_advantage`` takes k1 of; None: the policy's as they are met in the update."""
    sampler_logp: Tensor | None = None
    """[N, C] log-probs under the sampler, where the update corrects for it; NaN where they are not known."""
    future_kl: Tensor | None = None
    """[N, C] the KL to come after a token as the step before had it: the baseline of ``sequence_exact``."""


class Measured(Protocol):
    """Log-probs and exact KL of some tokens: of a part during the update, or of the whole batch before it."""

    @property
    def logp(self) -> Tensor: ...
    @property
    def ref_logp(self) -> Tensor | None: ...
    @property
    def kl(self) -> Tensor | None: ...


def estimate(config: KLConfig, seen: Measured, old_logp: Tensor) -> Tensor:
    """Per-token values of the configured estimator; differentiable where what was ``seen`` is."""
    assert seen.ref_logp is not None, "the learner always has a reference"
    return e.named(config.estimator)(seen.logp, seen.ref_logp, old_logp=old_logp, kl=seen.kl, tail=config.tail)


class Algorithm(Protocol):
    """From rewards to advantages, and what a price in the reward does to them."""

    values: ClassVar[bool]
    """Whether a value head is trained, which takes a look at the batch first."""
    groups: ClassVar[bool]
    """Whether completions of one prompt are compared: one group that is rewarded alike says nothing."""

    def advantages(
        self, rollout: Rollout, scored: Scored, look: Look | None, counted: Tensor, beta: float, reduce: Reduce
    ) -> Prepared:
        """The advantages of the counted tokens and their spread, at the price ``beta``."""
        ...

    def in_reward(self, advantages: Tensor, cost: Tensor, beta: float, counted: Tensor) -> Tensor:
        """``advantages`` of a part in the update, where ``cost`` is priced in the reward."""
        ...


@dataclass(frozen=True)
class GRPO:
    """Group advantages of the task reward alone, the same for every token of a sequence."""

    config: ResolvedConfig
    values: ClassVar[bool] = False
    groups: ClassVar[bool] = True

    def advantages(
        self, rollout: Rollout, scored: Scored, look: Look | None, counted: Tensor, beta: float, reduce: Reduce
    ) -> Prepared:
        """``(r - mean) / std`` over the completions of a prompt, or the advantages that were given."""
        valid = scored.valid.to(counted.device)
        if scored.advantages is not None:
            per_sequence = scored.advantages.to(valid.device)
            told = per_sequence != 0 if scored.told is None else scored.told.to(valid.device)
        else:
            rewards, std = scored.total.to(valid.device), self.config.algorithm.std
            per_sequence = group_advantages(rewards, rollout.group_size, std=std, valid=valid)
            grouped = per_sequence.view(-1, rollout.group_size)
            told = valid & (grouped != 0).any(1).repeat_interleave(rollout.group_size)
        sums = reduce(torch.stack([(per_sequence**2).sum().double(), valid.sum().double(), told.sum().double()]))
        spread, signal = float((sums[0] / sums[1].clamp(min=1)).sqrt()), float(sums[2] / sums[1].clamp(min=1))
        advantages = select(per_sequence[:, None].expand(counted.shape), counted)
        return Prepared(advantages, counted, spread, signal=signal)

    def in_reward(self, advantages: Tensor, cost: Tensor, beta: float, counted: Tensor) -> Tensor:
        """The price of the KL to go joins the normalised advantage: the group's deviation does not divide it."""
        return advantages - beta * to_go(cost.detach(), counted)


@dataclass(frozen=True)
class PPO:
    """Generalised advantages of the reward at the last counted token, whitened over the step."""

    config: ResolvedConfig
    values: ClassVar[bool] = True
    groups: ClassVar[bool] = False

    def advantages(
        self, rollout: Rollout, scored: Scored, look: Look | None, counted: Tensor, beta: float, reduce: Reduce
    ) -> Prepared:
        """GAE; KL joins the reward where it is placed there, and is divided along with it."""
        assert look is not None, "PPO looks at the batch first"
        assert look.values is not None, "and has a value head"
        config, placed = self.config, self.config.kl.placement == "in_reward"
        per_token = place_at_end(scored.total.to(counted.device), counted)
        if placed:
            per_token = in_reward(per_token, estimate(config.kl, look, look.logp), beta, counted)
        gamma, lam = config.algorithm.gamma, config.algorithm.lam
        advantages, returns = gae(per_token, look.values, counted, gamma=gamma, lam=lam)
        total, count = sum_count(advantages, counted)
        squares, _ = sum_count(advantages**2, counted)
        sums = reduce(torch.stack([total.double(), squares.double(), count.double()]))
        mean = sums[0] / sums[2].clamp(min=1)
        variance = (sums[1] / sums[2].clamp(min=1) - mean**2).clamp(min=0)
        white = whiten(advantages, counted, moments=(mean.to(advantages.dtype), variance.to(advantages.dtype)))
        # A price in the reward is divided along with it; one that joins the white advantages meets a spread of 1.
        spread = float(variance.sqrt()) if placed else float(float(variance) > 0)
        return Prepared(white, counted, spread, old_values=look.values, returns=returns)

    def in_reward(self, advantages: Tensor, cost: Tensor, beta: float, counted: Tensor) -> Tensor:
        """The advantages as they are: they were made of the priced reward."""
        return advantages


ALGORITHMS: dict[str, type[GRPO | PPO]] = {"grpo": GRPO, "ppo": PPO}


def algorithm_of(config: ResolvedConfig) -> Algorithm:
    """The algorithm that ``algorithm.name`` names."""
    return ALGORITHMS[config.algorithm.name](config)


def needs_look(config: ResolvedConfig, stale: bool) -> bool:
    """Whether the update must know the whole batch's log-probs beforehand."""
    several = config.algorithm.epochs * config.algorithm.minibatches > 1
    return several or stale or algorithm_of(config).values or config.kl.placement == "in_advantage"


def prepare(
    config: ResolvedConfig, rollout: Rollout, scored: Scored, look: Look | None, beta: float, reduce: Reduce
) -> Prepared:
    """What the update works with, at the price ``beta``, which only PPO with KL in the reward looks at."""
    valid = scored.valid.to(rollout.mask.device)
    counted = rollout.mask & valid[:, None]
    prepared = algorithm_of(config).advantages(rollout, scored, look, counted, beta, reduce)
    several = config.algorithm.epochs * config.algorithm.minibatches > 1
    mean = source = None
    if look is not None and config.kl.placement == "in_advantage":
        cost = estimate(config.kl, look, look.logp)
        if config.kl.source == "sample":
            source = torch.where(torch.isfinite(rollout.sampler_logp), rollout.sampler_logp, look.logp)
            cost = e.k1(source, look.ref_logp)
        total, count = sum_count(cost, counted)
        sums = reduce(torch.stack([total.double(), count.double()]))
        mean = sums[0] / sums[1].clamp(min=1)
    old = look.logp if look is not None and several else None
    weights = None if scored.weights is None else scored.weights.to(valid.device)
    return replace(prepared, old_logp=old, kl_mean=mean, source_logp=source, weights=weights)


def place_at_end(rewards: Tensor, counted: Tensor) -> Tensor:
    """[N, C] with each sequence's reward at its last counted token."""
    columns = torch.arange(counted.shape[1], device=counted.device)
    last = torch.where(counted, columns, -1).amax(1) if counted.shape[1] else torch.full_like(rewards, -1).long()
    return torch.where(counted & (columns == last[:, None]), rewards[:, None], torch.zeros_like(rewards[:, None]))
