"""The gradient oracle: what does a KL term descend, how far off is it, how noisy is it?

A term is a loss over enumerated sequences. Its derivative with respect to the per-token quantities is taken by
autograd, the rest by the chain rule with the enumerated Jacobians, and expectations are sums over all sequences: no
sampling, no tolerance but rounding. The truth is the autograd gradient of KL(π‖ref) of the sequence by its definition.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from statistics import median
from typing import Any

import torch
from torch import Tensor

from klamp.audit.world import TREE, World, make
from klamp.errors import ConfigError
from klamp.placements import LOCAL, LOCAL_MU, SEQUENCE

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
class Reading:
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


def read(term: Term, world: World, *, stale: bool, rescale: bool = False) -> Reading:
    """What ``term`` does in ``world``; ``rescale`` forgives a constant factor, such as a mean's denominator."""
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
    """``term`` in ``len(seeds)`` random worlds at each drift."""
    on = [[read(term, _world(s, d), stale=False, rescale=rescale) for s in seeds] for d in drifts]
    off = [[read(term, _world(s, d), stale=True, rescale=rescale) for s in seeds] for d in drifts]

    def medians(readings: list[list[Reading]], what: str) -> tuple[float, ...]:
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


def _compare(rows: Tensor, probability: Tensor, world: World, rescale: bool) -> Reading:
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
    return Reading(
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


def _agreed(readings: list[list[Reading]]) -> str:
    """What every world says, or that they differ."""
    said = {r.descends for row in readings for r in row}
    return said.pop() if len(said) == 1 else OTHER
