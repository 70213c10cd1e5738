"""What an update descends when the tokens come from another sampler, and what each correction makes of it.

The update is the trainer's: the policy gradient of a reward and the price of the sequence's KL, on sequences of a
sampler μ that rounds, is an update behind, or cut its distribution by top-p. The truth is the gradient of
``E_π[R] - beta · KL(π‖ref)`` by its definition; expectations are sums over all sequences.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from klamp import trust
from klamp.advantages import to_go
from klamp.audit.enumeration import TREE, World, make
from klamp.estimators import k1
from klamp.placements import sequence_exact

if TYPE_CHECKING:
    from rich.table import Table

DRIFT = 0.47
"""Nats per sequence between policy and reference: the larger drift of the matrix."""
BETA = 1.0
TOP_P = 0.8


@dataclass(frozen=True)
class Sampled:
    """Every sequence once, with what the sampler and the trainer say of it; ``logp`` and ``kl`` are leaves."""

    logp: Tensor
    ref_logp: Tensor
    sampler_logp: Tensor
    kl: Tensor
    mask: Tensor
    advantage: Tensor
    """[N, T] reward less its mean under the sampler."""


Correction = Callable[[Sampled], Tensor]


@dataclass(frozen=True)
class Corrected:
    """One correction under one sampler: medians over random worlds."""

    sampler: str
    correction: str
    bias: float
    """‖g − truth‖ / ‖truth‖."""
    cosine: float
    std: float
    """Standard deviation of one sequence's gradient, over ‖truth‖."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def rounds(world: World) -> Tensor:
    """[S, V] log-probs of an engine that computes the policy's logits in bfloat16."""
    return (world.features @ world.policy).to(torch.bfloat16).double().log_softmax(-1)


def behind(world: World) -> Tensor:
    """[S, V] log-probs of the policy an update ago."""
    return world.table(world.sampler)


def cut(world: World) -> Tensor:
    """[S, V] log-probs of the policy cut by top-p; ``-inf`` outside the kept set."""
    return trust.replay(world.features @ world.policy, nucleus(world))


def nucleus(world: World) -> Tensor:
    """[S, V] the smallest set of tokens whose probability reaches :data:`TOP_P`."""
    logp, order = world.table(world.policy).sort(-1, descending=True)
    before = logp.exp().cumsum(-1) - logp.exp()
    return torch.zeros_like(logp, dtype=torch.bool).scatter(-1, order, before < TOP_P)


SAMPLERS: dict[str, Callable[[World], Tensor]] = {
    "rounds to bfloat16": rounds,
    "one update behind": behind,
    f"cut by top-p {TOP_P:g}": cut,
}


def corrected(weigh: Callable[[Sampled], tuple[Tensor, Tensor]], *, pays: bool = True) -> Correction:
    """The trainer's update with these weights and this mask; the price has the sampler's weights of its own."""

    def update(s: Sampled) -> Tensor:
        weights, stays = weigh(s)
        price = sequence_exact(
            s.kl, BETA, s.mask, logp=s.logp, old_logp=s.sampler_logp, max_weight=None, objective="score"
        )
        loss = trust.corrected_loss(
            s.logp,
            s.logp.detach(),
            s.advantage,
            weights=weights,
            stays=stays,
            unclipped=price.advantage,
            pays=pays,
            clip=None,
        )
        return torch.where(s.mask, loss, 0.0).sum() + torch.where(s.mask if pays else stays, price.local, 0.0).sum()

    return update


def in_reward_corrected(weigh: Callable[[Sampled], tuple[Tensor, Tensor]]) -> Correction:
    """The same with k1 in the reward: its price to go stands in the advantage, and the loss's weights are its own."""

    def update(s: Sampled) -> Tensor:
        weights, stays = weigh(s)
        price = -BETA * to_go(k1(s.logp.detach(), s.ref_logp), s.mask)
        loss = trust.corrected_loss(
            s.logp, s.logp.detach(), s.advantage, weights=weights, stays=stays, price=price, clip=None
        )
        return torch.where(s.mask, loss, 0.0).sum()

    return update


def uncorrected(s: Sampled) -> Tensor:
    """As if the trainer had drawn the tokens itself."""
    price = sequence_exact(s.kl, BETA, s.mask, objective="score")
    score = (s.logp - s.logp.detach()).exp()
    return torch.where(s.mask, price.local - score * (s.advantage + price.advantage), 0.0).sum()


def twice(s: Sampled) -> Tensor:
    """The mistake: the future part of the price weighted by its prefixes and by the loss's weight as well."""
    price = sequence_exact(s.kl, BETA, s.mask, logp=s.logp, old_logp=s.sampler_logp, max_weight=None, objective="score")
    w = trust.weights(s.logp, s.sampler_logp, s.mask)
    score = (s.logp - s.logp.detach()).exp()
    return torch.where(s.mask, price.local - w * score * (s.advantage + price.advantage), 0.0).sum()


def truncated(limit: float, per: Any = "token") -> Callable[[Sampled], tuple[Tensor, Tensor]]:
    """Weights cut at ``limit``; every token stays."""
    return lambda s: (
        trust.truncate(trust.weights(s.logp, s.sampler_logp, s.mask), limit, per=per, keep=s.mask),
        s.mask,
    )


def masked(kind: trust.Kind, limit: float, side: trust.Side = "both") -> Callable[[Sampled], tuple[Tensor, Tensor]]:
    """Tokens beyond the limit left out, the others weighted in full."""

    def weigh(s: Sampled) -> tuple[Tensor, Tensor]:
        stays = trust.mask(s.logp, s.sampler_logp, s.mask, kind=kind, limit=limit, side=side, advantages=s.advantage)
        return trust.weights(s.logp, s.sampler_logp, stays), stays

    return weigh


UNBOUNDED = 1e12
CORRECTIONS: dict[str, Correction] = {
    "none": uncorrected,
    "truncate(2)": corrected(truncated(2.0)),
    "truncate(2) per sequence": corrected(truncated(2.0, "sequence")),
    "whole sequence weights": corrected(truncated(UNBOUNDED, "sequence")),
    "mask ratio 1.1": corrected(masked("ratio", 1.1)),
    "mask ratio 1.1, left-out tokens free": corrected(masked("ratio", 1.1), pays=False),
    "mask tv 0.05": corrected(masked("tv", 0.05)),
    "mask tv 0.05, one side": corrected(masked("tv", 0.05, "away")),
    "mask kl 0.005": corrected(masked("kl", 0.005)),
    "k1 in the reward, truncate(2)": in_reward_corrected(truncated(2.0)),
    "k1 in the reward, whole sequence weights": in_reward_corrected(truncated(UNBOUNDED, "sequence")),
    "price weighted twice": twice,
}
"""The limits of the masks are such that a stale sampler's tokens pass some of them; 2 is what is used in practice."""


def audit_samplers(seeds: Iterable[int] = range(20)) -> list[Corrected]:
    """Every correction under every sampler, and the replay of a cut."""
    worlds = [make(seed, DRIFT) for seed in seeds]
    found = []
    for sampler, table in SAMPLERS.items():
        for name, correction in CORRECTIONS.items():
            found.append(_medians(sampler, name, [_read(w, table(w), correction) for w in worlds]))
        if table is cut:
            found.append(_medians(sampler, "replay", [_read(w, table(w), uncorrected, replay=True) for w in worlds]))
    return found


def render(findings: Iterable[Corrected]) -> Table:
    """A table, one block a sampler."""
    from rich.table import Table

    shown = Table(header_style="bold", show_edge=False, pad_edge=False)
    shown.add_column("sampler")
    shown.add_column("correction", no_wrap=True)
    for column in ("bias", "cos", "std"):
        shown.add_column(column, justify="right")
    before = ""
    for f in findings:
        name = "" if f.sampler == before else f.sampler
        shown.add_row(name, f.correction, f"{f.bias:.3f}", f"{f.cosine:.3f}", f"{f.std:.2f}")
        before = f.sampler
    return shown


def _medians(sampler: str, name: str, read: list[tuple[float, float, float]]) -> Corrected:
    bias, cosine, std = (median(column) for column in zip(*read, strict=True))
    return Corrected(sampler, name, bias, cosine, std)


def _read(world: World, table: Tensor, correction: Correction, *, replay: bool = False) -> tuple[float, float, float]:
    """Bias, cosine and standard deviation of a correction's update in a world whose tokens ``table`` draws."""
    drawn = torch.where(TREE.mask, table[TREE.prefix, TREE.tokens], 0.0)
    probability = drawn.sum(-1).exp()
    possible = probability > 0
    own = functools.partial(_log_table, world, nucleus(world) if replay else None)
    logp = torch.where(TREE.mask, own(world.policy)[TREE.prefix, TREE.tokens], 0.0)
    rewards = reward(world)
    sampled = Sampled(
        logp=torch.where(possible[:, None], logp, 0.0).detach().requires_grad_(),
        ref_logp=world.logp(world.reference),
        sampler_logp=torch.where(possible[:, None], drawn, 0.0),
        kl=torch.where(TREE.mask, world.prefix_kl(world.policy)[TREE.prefix], 0.0).requires_grad_(),
        mask=TREE.mask & possible[:, None],
        advantage=(rewards - probability @ rewards)[:, None].expand(TREE.mask.shape),
    )
    by_logp, by_kl = torch.autograd.grad(correction(sampled), (sampled.logp, sampled.kl), allow_unused=True)
    scores = torch.func.jacrev(own)(world.policy).flatten(-2) if replay else world.jacobians[0]
    scores = torch.where(torch.isfinite(scores), scores, 0.0)
    rows = torch.einsum("nt,ntp->np", _counted(by_logp, sampled.mask), scores[TREE.prefix, TREE.tokens])
    rows = rows + torch.einsum("nt,ntp->np", _counted(by_kl, sampled.mask), world.jacobians[1][TREE.prefix])
    gradient, true = probability @ rows, truth(world)
    size = float(true.norm())
    variance = float(probability @ (rows - gradient).square().sum(-1))
    cosine = float(gradient @ true / (gradient.norm() * size))
    return float((gradient - true).norm()) / size, cosine, variance**0.5 / size


def _log_table(world: World, keep: Tensor | None, theta: Tensor) -> Tensor:
    """[S, V] the trainer's log-probs, over the kept set where that is replayed."""
    return world.table(theta) if keep is None else trust.replay(world.features @ theta, keep)


def _counted(part: Tensor | None, mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape, dtype=torch.float64) if part is None else torch.where(mask, part, 0.0)


def reward(world: World) -> Tensor:
    """[N] a reward of each sequence, of unit size; the same for the same world."""
    generator = torch.Generator().manual_seed(int(abs(float(world.policy.sum())) * 1e6) % 2**31)
    return torch.randn(len(TREE.tokens), generator=generator, dtype=torch.float64)


def truth(world: World) -> Tensor:
    """[P] the gradient of ``-(E_π[R] - beta · KL(π‖ref))`` by its definition."""
    theta = world.policy.clone().requires_grad_()
    loss = BETA * world.sequence_kl(theta, world.reference) - world.probability(theta) @ reward(world)
    (gradient,) = torch.autograd.grad(loss, theta)
    return gradient.flatten()
