"""Reward lost at equal KL against the known optimum, for each way of pricing KL.

Every sequence of 6 tokens over 3 is enumerated (729 of them, 364 prefixes with logits of their own), so the best policy
at any KL is known: ``π* ∝ ref · e^(R/β)``. Each row trains a policy from the reference with klamp's own estimators,
placements and objectives until it rests, measures its exact KL and reward, and compares with π* at that same KL::

    python benchmarks/frontier.py                  # expected gradients: sums over all sequences, no noise
    python benchmarks/frontier.py --samples 256    # the same from 256 samples a step
    python benchmarks/frontier.py --draws 1 --steps 400 --betas 0.5

A loss of 0 % is the optimum. Rows that give the true gradient of the sequence's KL reach it; those that differentiate
the KL token by token never see what a token does to the KL still to come; k3 in the loss descends the other direction;
k3 in the reward pulls nowhere near the reference: its KL runs away, and where it has run all the way to one sequence
nothing is left to lose at that KL. The last two are refused by klamp and are here for comparison.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from klamp import estimators as e
from klamp.objectives import policy_loss, to_go
from klamp.placements import in_advantage, in_loss, in_reward, sequence_exact

VOCABULARY, LENGTH = 3, 6
REWARDS = ("gaussian", "structured", "sparse")


@dataclass(frozen=True)
class Tree:
    """Every sequence: tokens [N, T] and the number of the prefix before each of them [N, T]."""

    tokens: Tensor
    prefix: Tensor
    prefixes: int


def grow() -> Tree:
    """Enumerate them; prefixes are numbered as they are met."""
    index: dict[tuple[int, ...], int] = {}
    rows = list(itertools.product(range(VOCABULARY), repeat=LENGTH))
    parents = [[index.setdefault(row[:t], len(index)) for t in range(LENGTH)] for row in rows]
    return Tree(torch.tensor(rows), torch.tensor(parents), len(index))


TREE = grow()


@dataclass(frozen=True)
class Step:
    """What a placement sees, [B, T]: log-probs, the exact KL of each position, the reward less its mean [B, 1]."""

    logp: Tensor
    ref_logp: Tensor
    kl: Tensor
    advantage: Tensor
    beta: float
    weights: Tensor
    """[B] share of each sequence in the expectation."""

    def policy(self, advantages: Tensor, unclipped: Tensor | None = None) -> Tensor:
        """The policy loss on the policy's own samples, per token."""
        return policy_loss(self.logp, self.logp.detach(), advantages, clip=None, unclipped=unclipped)

    @property
    def task(self) -> Tensor:
        """The task's advantage at every token."""
        return self.advantage.expand_as(self.logp)

    @property
    def k1(self) -> Tensor:
        """Of the sampled tokens, without gradient."""
        return e.k1(self.logp.detach(), self.ref_logp)


def true_gradient(s: Step) -> Tensor:
    """exact with sequence_exact: the local part differentiated, the KL to come in the advantage."""
    price = sequence_exact(s.kl, s.beta)
    return s.policy(s.task, price.advantage) + price.local


def rewarded(k: Callable[..., Tensor]) -> Callable[[Step], Tensor]:
    """An estimator in the reward, with returns to go."""

    def loss(s: Step) -> Tensor:
        cost = in_reward(torch.zeros_like(s.k1), k(s.logp.detach(), s.ref_logp), s.beta)
        return s.policy(s.task + to_go(cost))

    return loss


def advantaged(s: Step) -> Tensor:
    """k1 in the advantage, centred over the batch."""
    mean = (s.weights[:, None] * s.k1).sum() / (s.weights.sum() * LENGTH)
    return s.policy(in_advantage(s.task, s.k1, s.beta, mean=mean))


def in_the_loss(k: Callable[[Step], Tensor]) -> Callable[[Step], Tensor]:
    """An estimator differentiated where it stands, token by token."""

    def loss(s: Step) -> Tensor:
        # in_loss sums over what it is given: the tokens of one weighted sequence after another, in one sum.
        price = in_loss(k(s) * s.weights[:, None], s.beta, count=1.0)
        return s.policy(s.task) + price / (s.weights.sum() * LENGTH)

    return loss


ROWS: dict[str, Callable[[Step], Tensor]] = {
    "exact, sequence_exact": true_gradient,
    "k1, in_reward": rewarded(e.k1),
    "exact, in_loss": in_the_loss(lambda s: s.kl),
    "k2, in_loss": in_the_loss(lambda s: e.k2(s.logp, s.ref_logp)),
    "weighted_k3, in_loss": in_the_loss(lambda s: e.weighted(e.k3, s.logp, s.logp.detach(), s.ref_logp)),
    "k1, in_advantage": advantaged,
    "k3, in_loss (refused)": in_the_loss(lambda s: e.k3(s.logp, s.ref_logp)),
    "k3, in_reward (refused)": rewarded(e.k3),
}
BEST = ("exact, sequence_exact", "k1, in_reward")


@dataclass(frozen=True)
class World:
    """A reference [S, V] (log-probs of every prefix) and a reward [N] for every sequence."""

    reference: Tensor
    reward: Tensor

    def sequence_logp(self, table: Tensor) -> Tensor:
        """[N] log-probability of every sequence."""
        return table[TREE.prefix, TREE.tokens].sum(-1)

    def measure(self, table: Tensor) -> tuple[float, float]:
        """(KL(π‖ref) of the sequence, expected reward), exact."""
        logp, ref = self.sequence_logp(table), self.sequence_logp(self.reference)
        p = logp.exp()
        return float((p * (logp - ref)).sum()), float((p * self.reward).sum())

    def optimum(self, beta: float) -> tuple[float, float]:
        """(KL, reward) of ``π* ∝ ref · e^(R/β)``."""
        ref = self.sequence_logp(self.reference)
        logp = (ref + self.reward / beta).log_softmax(0)
        p = logp.exp()
        return float((p * (logp - ref)).sum()), float((p * self.reward).sum())

    def optimum_at(self, kl: float) -> float:
        """The most reward there is at a KL, by bisection over the price."""
        low, high = 1e-3, 1e6
        for _ in range(200):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if self.optimum(middle)[0] > kl else (low, middle)
        return self.optimum(high)[1]

    def lost(self, table: Tensor) -> float:
        """Share of the optimum's gain in reward that a policy with these log-probs leaves at its own KL."""
        kl, reward = self.measure(table)
        start = self.measure(self.reference)[1]
        best = self.optimum_at(kl)
        return (best - reward) / (best - start)


def make(kind: str, seed: int) -> World:
    """A random reference and one of three kinds of reward, scaled to a spread of 1 under it (sparse: 0 or 1)."""
    g = torch.Generator().manual_seed(seed)
    reference = torch.randn(TREE.prefixes, VOCABULARY, generator=g, dtype=torch.float64).log_softmax(-1)
    if kind == "gaussian":
        reward = torch.randn(len(TREE.tokens), generator=g, dtype=torch.float64)
    elif kind == "structured":  # a score for every pair of neighbours
        pairs = torch.randn(VOCABULARY, VOCABULARY, generator=g, dtype=torch.float64)
        reward = pairs[TREE.tokens[:, :-1], TREE.tokens[:, 1:]].sum(-1)
    else:
        return World(reference, (torch.rand(len(TREE.tokens), generator=g) < 0.05).double())
    p = reference[TREE.prefix, TREE.tokens].sum(-1).exp()
    mean = (p * reward).sum()
    return World(reference, (reward - mean) / ((p * (reward - mean) ** 2).sum()).sqrt())


def train(
    world: World, row: str, beta: float, *, steps: int, lr: float = 0.1, samples: int = 0, seed: int = 0
) -> Tensor:
    """Log-probs [S, V] after ``steps`` of Adam from the reference; noise is averaged out over the last third."""
    theta = world.reference.clone().requires_grad_(True)
    optimiser = torch.optim.Adam([theta], lr=lr, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    g = torch.Generator().manual_seed(seed)
    everything = torch.arange(len(TREE.tokens))
    average, averaged = torch.zeros_like(world.reference), 0
    for step in range(steps):
        table = theta.log_softmax(-1)
        with torch.no_grad():
            p = world.sequence_logp(table).exp()
        rows = torch.multinomial(p, samples, replacement=True, generator=g) if samples else everything
        weights = torch.full((samples,), 1 / samples, dtype=p.dtype) if samples else p
        loss = ROWS[row](_step(world, table, rows, weights, beta))
        optimiser.zero_grad()
        (weights[:, None] * loss).sum().backward()
        optimiser.step()
        schedule.step()
        if step >= steps * 2 // 3:
            average, averaged = average + theta.detach(), averaged + 1
    return ((average / averaged) if samples else theta.detach()).log_softmax(-1)


def _step(world: World, table: Tensor, rows: Tensor, weights: Tensor, beta: float) -> Step:
    prefix, tokens = TREE.prefix[rows], TREE.tokens[rows]
    reward = world.reward[rows]
    advantage = (reward - (weights * reward).sum() / weights.sum())[:, None]
    kl = e.exact(table, world.reference)[prefix]
    return Step(table[prefix, tokens], world.reference[prefix, tokens], kl, advantage, beta, weights)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--betas", type=float, nargs="+", default=[1.0, 0.5, 0.25])
    parser.add_argument("--draws", type=int, default=3, help="worlds of each kind of reward")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--samples", type=int, default=0, help="sequences a step; 0: all of them, weighted")
    args = parser.parse_args()
    torch.set_num_threads(1)
    cells = [(kind, beta) for kind in REWARDS for beta in args.betas]
    print("reward lost at equal KL, in % of the optimum's gain, and (KL / the optimum's KL at the same price)")
    print(f"{'':24}" + "".join(f"{f'{kind} {beta:g}':>17}" for kind, beta in cells))
    worst = 0.0
    for row in ROWS:
        line = []
        for kind, beta in cells:
            worlds = [make(kind, seed) for seed in range(args.draws)]
            tables = [train(w, row, beta, steps=args.steps, samples=args.samples) for w in worlds]
            lost = fmean(w.lost(t) for w, t in zip(worlds, tables, strict=True))
            inflation = fmean(w.measure(t)[0] / w.optimum(beta)[0] for w, t in zip(worlds, tables, strict=True))
            line.append(f"{100 * lost:8.2f} ({inflation:5.2f})")
            worst = max(worst, lost) if row in BEST else worst
        print(f"{row:24}" + "".join(f"{cell:>17}" for cell in line), flush=True)
    print(f"largest loss of {' and '.join(BEST)}: {100 * worst:.2f} % (bound: 2 %)")


if __name__ == "__main__":
    main()
