"""A language model small enough to enumerate: every sequence, its probability and its gradients, in float64.

Vocabulary 4, at most 4 tokens, token 0 ends a sequence: 121 sequences over 40 prefixes. The logits of a prefix are
``features(prefix) @ theta`` with fewer features than prefixes, so that prefixes share parameters as in a network.
Shapes: N sequences, T tokens, V vocabulary, S prefixes, P parameters.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

VOCABULARY, LENGTH, FEATURES, END = 4, 4, 8, 0
STALENESS = 0.02
"""KL(π‖μ) of the stale sampler, in nats per sequence."""


@dataclass(frozen=True)
class Tree:
    """All sequences: ``tokens`` [N, T], ``mask`` [N, T] and the index of the prefix before each token, [N, T]."""

    tokens: Tensor
    mask: Tensor
    prefix: Tensor
    prefixes: int


def grow() -> Tree:
    """Enumerate the sequences; the end token counts, what follows it does not."""
    index: dict[tuple[int, ...], int] = {}
    rows, masks, parents = [], [], []
    for full in itertools.product(range(VOCABULARY), repeat=LENGTH):
        length = full.index(END) + 1 if END in full else LENGTH
        if any(full[length:]):
            continue
        rows.append(full)
        masks.append([t < length for t in range(LENGTH)])
        parents.append([index.setdefault(full[:t], len(index)) if t < length else 0 for t in range(LENGTH)])
    return Tree(torch.tensor(rows), torch.tensor(masks), torch.tensor(parents), len(index))


TREE = grow()


@dataclass(frozen=True, eq=False)
class World:
    """A policy, its reference and the sampler, with all that the audit needs of them."""

    features: Tensor
    policy: Tensor
    reference: Tensor
    sampler: Tensor
    jacobians: tuple[Tensor, Tensor, Tensor] = field(init=False)
    """∇logp [S, V, P], ∇KL(π‖ref) [S, P] and ∇KL(ref‖π) [S, P] of every prefix."""

    def __post_init__(self) -> None:
        parts = (self.table, self.prefix_kl, self.prefix_forward_kl)
        grads = tuple(torch.func.jacrev(part)(self.policy).flatten(-2).detach() for part in parts)
        object.__setattr__(self, "jacobians", grads)

    def table(self, theta: Tensor) -> Tensor:
        """log-probs of every token after every prefix, [S, V]."""
        return (self.features @ theta).log_softmax(-1)

    def prefix_kl(self, theta: Tensor) -> Tensor:
        """KL(θ‖ref) after every prefix, [S]."""
        logp, ref = self.table(theta), self.table(self.reference)
        return (logp.exp() * (logp - ref)).sum(-1)

    def prefix_forward_kl(self, theta: Tensor) -> Tensor:
        """KL(ref‖θ) after every prefix, [S]."""
        logp, ref = self.table(theta), self.table(self.reference)
        return (ref.exp() * (ref - logp)).sum(-1)

    def logp(self, theta: Tensor) -> Tensor:
        """log-probs of the tokens of every sequence, [N, T]; 0 after the end."""
        return torch.where(TREE.mask, self.table(theta)[TREE.prefix, TREE.tokens], 0.0)

    def probability(self, theta: Tensor) -> Tensor:
        """Probability of every sequence, [N]."""
        return self.logp(theta).sum(-1).exp()

    def sequence_kl(self, theta: Tensor, other: Tensor) -> Tensor:
        """KL of whole sequences, by the definition: Σ_y p(y) (log p(y) - log q(y))."""
        p, q = self.logp(theta).sum(-1), self.logp(other).sum(-1)
        return (p.exp() * (p - q)).sum()

    def future(self) -> Tensor:
        """E_π[Σ_{u>t} KL_u | tokens up to t], [N, T]: the best baseline there is."""
        kl = self.prefix_kl(self.policy)[TREE.prefix] * TREE.mask
        after = kl.flip(-1).cumsum(-1).flip(-1) - kl
        p = self.probability(self.policy)
        rows = []
        for t in range(LENGTH):
            same = (TREE.tokens[:, None, : t + 1] == TREE.tokens[None, :, : t + 1]).all(-1).double() * p
            rows.append((same @ after[:, t]) / same.sum(-1))
        return torch.stack(rows, -1)

    def before(self) -> Tensor:
        """E_π[Σ_{u>=t} KL_u | tokens before t] - KL_t, [N, T]: the same, known before the token t is drawn."""
        after = self.future()
        p = self.probability(self.policy)
        rows = []
        for t in range(LENGTH):
            same = (TREE.prefix[:, None, t] == TREE.prefix[None, :, t]).double() * p * TREE.mask[:, t]
            rows.append((same @ after[:, t]) / same.sum(-1))
        return torch.stack(rows, -1)


def make(seed: int, drift: float) -> World:
    """A random world whose policy has drifted ``drift`` nats per sequence from its reference."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    features = noise(TREE.prefixes, FEATURES) / FEATURES**0.5
    reference, step, stale = (noise(FEATURES, VOCABULARY) for _ in range(3))
    world = World(features, reference, reference, reference)
    policy = reference + step * _solve(lambda c: world.sequence_kl(reference + c * step, reference), drift)
    sampler = policy + stale * _solve(lambda c: world.sequence_kl(policy, policy + c * stale), STALENESS)
    return World(features, policy, reference, sampler)


def _solve(kl: Callable[[float], Tensor], goal: float) -> float:
    """The scale at which ``kl`` reaches ``goal``, by bisection: KL grows from 0 along a ray."""
    low, high = 0.0, 1.0
    while kl(high) < goal:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if kl(middle) < goal else (low, middle)
    return high
