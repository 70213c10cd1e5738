"""The gradient oracle: what does a KL term descend, how far off is it, how noisy is it?

The oracle is a language model small enough to enumerate in float64: vocabulary 4, at most 4 tokens, token 0 ends a
sequence, 121 sequences over 40 prefixes. The logits of a prefix are ``features(prefix) @ theta`` with fewer features
than prefixes, so that prefixes share parameters as in a network.

A term is a loss over the enumerated sequences. Its derivative with respect to the per-token quantities is taken by
autograd, the rest by the chain rule with the enumerated Jacobians, and expectations are sums over all sequences: no
sampling, no tolerance but rounding. The truth is the autograd gradient of KL(π‖ref) of the sequence by its definition.
Shapes: N sequences, T tokens, V vocabulary, S prefixes, P parameters.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from statistics import median
from typing import Any

import torch
from torch import Tensor

from klamp.errors import ConfigError
from klamp.placements import LOCAL, LOCAL_MU, SEQUENCE

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


FORWARD, FORWARD_MU = "KL(ref‖π) token by token", "KL(ref‖π) token by token, on prefixes of μ"
AWAY = "−KL(μ‖π): away from the sampler"
NOTHING, OTHER = "nothing", "none of these"
DRIFTS = (0.03, 0.47)
"""Nats per sequence at which the matrix is taken."""


@dataclass(frozen=True)
class Batch:
    """Every sequence once, [N, T]; ``logp``, ``kl`` and ``forward_kl`` are leaves that a term may differentiate."""

    logp: Tensor
    ref_logp: Tensor
    old_logp: Tensor
    mask: Tensor
    kl: Tensor
    forward_kl: Tensor
    probability: Tensor
    """[N] under the sampler; for terms that need a mean over the batch as it would be sampled."""
    future: Tensor
    """[N, T], the expected KL still to come after t, known before t."""


Term = Callable[[Batch], Tensor]


@dataclass(frozen=True)
class GradientError:
    """One term in one world: its expected gradient against the truth."""

    descends: str
    bias: float
    """‖g − ∇KL‖ / ‖∇KL‖."""
    cosine: float
    std: float
    """Standard deviation of one sequence's gradient, over ‖∇KL‖."""
    scale: float
    """‖g‖ / ‖∇KL‖."""


@dataclass(frozen=True)
class Finding:
    """One term over many random worlds: medians at each drift, on-policy and with a stale sampler."""

    name: str
    accepted: bool
    drifts: tuple[float, ...]
    descends_on: str
    descends_off: str
    bias_on: tuple[float, ...]
    bias_off: tuple[float, ...]
    cosine_on: tuple[float, ...]
    cosine_off: tuple[float, ...]
    std_on: tuple[float, ...]
    std_off: tuple[float, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def read(term: Term, world: World, *, stale: bool, rescale: bool = False) -> GradientError:
    """What ``term`` does in ``world``; ``rescale`` forgives a constant factor, such as a mean's denominator.

    Args:
        term: a scalar loss of a batch.
        world: a policy, a reference and rewards, small enough to enumerate.
        stale: samples come from an older policy.
        rescale: forgive a constant factor.

    Returns:
        The errors of the term's gradient.
    """
    batch = _fresh(_batch(world, stale))
    leaves = (batch.logp, batch.kl, batch.forward_kl)
    loss = term(batch)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ConfigError(f"the audited function must return one number (a scalar tensor), got {what}. Sum or average.")
    parts: Sequence[Tensor | None] = (None, None, None)
    if loss.requires_grad:
        parts = torch.autograd.grad(loss.reshape(()), leaves, allow_unused=True)
    if any(part is not None and not part[batch.mask].isfinite().all() for part in parts):
        raise ConfigError(
            "the audited function has a NaN or infinite gradient at counted tokens of finite log-probs. "
            "Look for a division by zero, or an exp of something large."
        )
    rows = torch.zeros(len(batch.probability), world.policy.numel(), dtype=torch.float64)
    for part, jacobian in zip(parts, _jacobians(world), strict=True):
        if part is not None:
            rows = rows + torch.einsum("nt,ntp->np", torch.where(batch.mask, part, 0.0), jacobian)
    return _compare(rows, batch.probability, world, rescale)


def examine(
    name: str,
    term: Term,
    *,
    accepted: bool = True,
    drifts: Sequence[float] = DRIFTS,
    seeds: Sequence[int] = range(20),
    rescale: bool = False,
) -> Finding:
    """``term`` in ``len(seeds)`` random worlds at each drift.

    Args:
        name: of the term, in the finding.
        term: a scalar loss of a batch.
        accepted: whether klamp accepts it.
        drifts: KL of the policies that are enumerated.
        seeds: one random world each.
        rescale: forgive a constant factor, such as the denominator of a mean.

    Returns:
        What it descends, with bias, cosine and noise at each drift.
    """
    on = [[read(term, _world(s, d), stale=False, rescale=rescale) for s in seeds] for d in drifts]
    off = [[read(term, _world(s, d), stale=True, rescale=rescale) for s in seeds] for d in drifts]

    def medians(readings: list[list[GradientError]], what: str) -> tuple[float, ...]:
        return tuple(median(getattr(r, what) for r in row) for row in readings)

    return Finding(
        name,
        accepted,
        tuple(drifts),
        _agreed(on),
        _agreed(off),
        medians(on, "bias"),
        medians(off, "bias"),
        medians(on, "cosine"),
        medians(off, "cosine"),
        medians(on, "std"),
        medians(off, "std"),
    )


def truth(world: World) -> Tensor:
    """∇KL(π‖ref) of the sequence by autograd through its definition, [P]."""
    theta = world.policy.clone().requires_grad_()
    (grad,) = torch.autograd.grad(world.sequence_kl(theta, world.reference), theta)
    return grad.flatten()


_world = functools.lru_cache(maxsize=256)(make)


@functools.lru_cache(maxsize=256)
def _batch(world: World, stale: bool) -> Batch:
    sampler = world.sampler if stale else world.policy
    kl = world.prefix_kl(world.policy)[TREE.prefix]
    forward = world.prefix_forward_kl(world.policy)[TREE.prefix]
    return Batch(
        logp=world.logp(world.policy).requires_grad_(),
        ref_logp=world.logp(world.reference),
        old_logp=world.logp(sampler),
        mask=TREE.mask,
        kl=torch.where(TREE.mask, kl, 0.0).requires_grad_(),
        forward_kl=torch.where(TREE.mask, forward, 0.0).requires_grad_(),
        probability=world.probability(sampler),
        future=world.before(),
    )


def _fresh(batch: Batch) -> Batch:
    """Its own copy, so that a function that writes into its arguments spoils no other reading."""
    copies = {f.name: getattr(batch, f.name) for f in fields(batch)}
    return Batch(**{k: v.detach().clone().requires_grad_(v.requires_grad) for k, v in copies.items()})


@functools.lru_cache(maxsize=256)
def _jacobians(world: World) -> tuple[Tensor, Tensor, Tensor]:
    """The Jacobians of a batch's three leaves, each [N, T, P]."""
    logp, kl, forward = world.jacobians
    return logp[TREE.prefix, TREE.tokens], kl[TREE.prefix], forward[TREE.prefix]


@functools.lru_cache(maxsize=256)
def _candidates(world: World) -> dict[str, Tensor]:
    """The gradients a term may turn out to have."""
    _, kl, forward = world.jacobians

    def local(jacobian: Tensor, theta: Tensor) -> Tensor:
        return torch.einsum("n,nt,ntp->p", world.probability(theta), TREE.mask.double(), jacobian[TREE.prefix])

    return {
        SEQUENCE: truth(world),
        LOCAL: local(kl, world.policy),
        LOCAL_MU: local(kl, world.sampler),
        FORWARD: local(forward, world.policy),
        FORWARD_MU: local(forward, world.sampler),
        AWAY: torch.einsum("n,nt,ntp->p", world.probability(world.sampler), TREE.mask.double(), _jacobians(world)[0]),
    }


def _compare(rows: Tensor, probability: Tensor, world: World, rescale: bool) -> GradientError:
    gradient = probability @ rows
    candidates = _candidates(world)
    true = candidates[SEQUENCE]
    size = float(true.norm())
    scale = float(gradient.norm()) / size
    nothing = scale < 1e-9 * max(1.0, float(rows.norm(dim=1).max()) / size)
    if rescale and not nothing:
        factor = float(gradient @ true / (gradient @ gradient))
        if factor > 0:
            gradient, rows = gradient * factor, rows * factor
    variance = float(probability @ (rows - gradient).square().sum(-1))
    return GradientError(
        descends=NOTHING if nothing else _closest(gradient, candidates, rescale),
        bias=float((gradient - true).norm()) / size,
        cosine=0.0 if nothing else float(gradient @ true / (gradient.norm() * true.norm())),
        std=variance**0.5 / size,
        scale=scale,
    )


def _closest(gradient: Tensor, candidates: dict[str, Tensor], rescale: bool) -> str:
    """The candidate that ``gradient`` equals to rounding, up to a positive factor if ``rescale``."""
    for name, candidate in candidates.items():
        factor = float(candidate @ gradient / (gradient @ gradient)) if rescale else 1.0
        if factor > 0 and float((factor * gradient - candidate).norm()) < 1e-7 * float(candidate.norm()):
            return name
    return OTHER


def _agreed(readings: list[list[GradientError]]) -> str:
    """What every world says, or that they differ."""
    said = {r.descends for row in readings for r in row}
    return said.pop() if len(said) == 1 else OTHER
