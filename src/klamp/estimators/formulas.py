"""The formulas of :mod:`klamp.estimators`, each with the gradient that its docstring states."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast, overload

import torch
from torch import Tensor

from klamp.errors import ConfigError, require_number
from klamp.masked import as_mask, same_shape, select, wide
from klamp.numerics import Divergence, StraightThrough, bregman, with_slope

Estimator = Callable[..., Tensor]


def k1(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """``d``. Unbiased for KL(π‖ref) on samples of π; negative wherever the reference likes the token better.

    Args:
        logp: log-probs of the sampled tokens under π.
        ref_logp: the same under ref, in the same shape and dtype.

    Returns:
        Nats per token, in the shape of ``logp``.
    """
    logp, ref_logp = _pair(logp, ref_logp)
    return logp - ref_logp


def k2(logp: Tensor, ref_logp: Tensor, *, tail: float | None = None) -> Tensor:
    """``d² / 2``. Biased in value, equal to KL(π‖ref) to second order; in a loss its gradient is that of KL(π‖ref).

    ``tail=5.0`` continues it linearly beyond ``|d| = 5``.

    Args:
        logp: log-probs of the sampled tokens under π.
        ref_logp: the same under ref, in the same shape and dtype.
        tail: where the linear continuation begins, as a log-ratio in nats. None: the formula everywhere.

    Returns:
        Nats per token, in the shape of ``logp``.
    """
    d = k1(logp, ref_logp)
    return _continued(d, tail, lambda x: 0.5 * x * x, lambda x: x)


def k3(logp: Tensor, ref_logp: Tensor, *, tail: float | None = None) -> Tensor:
    """``expm1(-d) + d``. Unbiased for KL(π‖ref) on samples of π, never negative; in a loss it descends KL(ref‖π).

    ``tail=5.0`` continues it linearly beyond ``|d| = 5``, with the slopes ``1 - e^-5`` and ``1 - e^5``.

    Args:
        logp: log-probs of the sampled tokens under π.
        ref_logp: the same under ref, in the same shape and dtype.
        tail: where the linear continuation begins, as a log-ratio in nats. None: the formula everywhere.

    Returns:
        Nats per token, in the shape of ``logp``.
    """
    d = k1(logp, ref_logp)
    return _continued(d, tail, bregman, lambda x: -torch.expm1(-x))


def absolute(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """``|d|``. Not a KL estimate: it is of the order of its square root, and its gradient does not vanish at ref.

    Args:
        logp: log-probs of the sampled tokens under π.
        ref_logp: the same under ref, in the same shape and dtype.

    Returns:
        Nats per token, in the shape of ``logp``.
    """
    d = k1(logp, ref_logp)
    return with_slope(d.abs(), d, d.sign())


def k3_clamped(logp: Tensor, ref_logp: Tensor, limit: float = 10.0) -> Tensor:
    """``clamp(k3, ±limit)``, as in ROLL and verl. Biased low.

    It has no gradient beyond the limit, where the tokens are that drifted most. ``k3(tail=...)`` has one.

    Args:
        logp: log-probs of the sampled tokens under π.
        ref_logp: the same under ref, in the same shape and dtype.
        limit: the largest value, in nats.

    Returns:
        Nats per token, in the shape of ``logp``.
    """
    require_number("k3_clamped.limit", limit, above=0, way_out="It bounds a value in nats; ROLL uses 10.")
    return k3(logp, ref_logp).clamp(-limit, limit)


def r_log_r(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """``e^d · d`` for samples drawn from the REFERENCE, where it is unbiased for KL(π‖ref) in value and gradient.

    On samples of the policy the density ratio counts twice: three times the KL for small drifts and far worse after,
    ``3 e^(2 KL)`` times it where the log-ratio is Gaussian.

    Args:
        logp: log-probs of the sampled tokens under π.
        ref_logp: the same under ref, in the same shape and dtype.

    Returns:
        Nats per token, in the shape of ``logp``.
    """
    d = k1(logp, ref_logp)
    ratio = d.exp()
    return with_slope(ratio * d, d, ratio * (1 + d))


def chi2_minus_kl(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """``expm1(d) - d``: trlx's statistic. On samples of π it estimates χ²(π‖ref) − KL(π‖ref), which is not a KL.

    It is here to reproduce old dashboards.

    Args:
        logp: log-probs of the sampled tokens under π.
        ref_logp: the same under ref, in the same shape and dtype.

    Returns:
        Nats per token, in the shape of ``logp``.
    """
    d = k1(logp, ref_logp)
    return with_slope(bregman(-d), d, torch.expm1(d))


def exact(logits: Tensor, ref_logits: Tensor) -> Tensor:
    """``Σ_v π_v (log π_v - log ref_v)`` over the last axis: KL(π‖ref) itself at each prefix, never negative.

    A token that π excludes (−inf) costs nothing; one that only ref excludes costs ∞.

    Args:
        logits: logits or log-probs [..., V] of π. −inf excludes a token.
        ref_logits: the same of ref.

    Returns:
        Nats per position, [...].
    """
    logits, ref_logits = _pair(logits, ref_logits, ("logits", "ref_logits"))
    return cast(Tensor, Divergence.apply(logits, ref_logits))  # type: ignore[no-untyped-call]


def exact_forward(logits: Tensor, ref_logits: Tensor) -> Tensor:
    """``Σ_v ref_v (log ref_v - log π_v)`` over the last axis: KL(ref‖π), the other direction.

    Args:
        logits: logits or log-probs [..., V] of π. −inf excludes a token.
        ref_logits: the same of ref.

    Returns:
        Nats per position, [...].
    """
    logits, ref_logits = _pair(logits, ref_logits, ("logits", "ref_logits"))
    return cast(Tensor, Divergence.apply(ref_logits, logits))  # type: ignore[no-untyped-call]


def top_k_exact(logits: Tensor, ref_logits: Tensor, tokens: Tensor, k: int = 16) -> Tensor:
    """``Σ_{v∈K} π_v (log π_v - log ref_v) + [a∉K] d_a``, K the k likeliest tokens of π: unbiased, less noisy than k1.

    For measuring and steering. Its gradient is not that of a KL, and the placements refuse it.

    Args:
        logits: logits or log-probs [..., V] of π.
        ref_logits: the same of ref.
        tokens: ids of the sampled tokens, [...].
        k: how many of the likeliest tokens are summed.

    Returns:
        Nats per position, [...].
    """
    logits, ref_logits = _pair(logits, ref_logits, ("logits", "ref_logits"))
    if tokens.is_floating_point() or tuple(tokens.shape) != tuple(logits.shape[:-1]):
        raise ConfigError(
            f"tokens must be integer ids of shape {tuple(logits.shape[:-1])}, got {tokens.dtype} {tuple(tokens.shape)}."
        )
    if k < 1:
        raise ConfigError(f"top_k_exact.k must be >= 1, got {k!r}. With k = 0 it is k1.")
    logp, ref_logp, tokens = logits.log_softmax(-1), ref_logits.log_softmax(-1), tokens.long()
    top = logp.topk(min(k, logits.shape[-1]), dim=-1).indices
    p, d = logp.gather(-1, top), (logp - ref_logp).gather(-1, top)
    head: Tensor = torch.where(p.exp() > 0, p.exp() * d, torch.zeros_like(d)).sum(-1)
    sampled = (logp - ref_logp).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return head + select(sampled, (top != tokens.unsqueeze(-1)).all(-1))


def fitted(logp: Tensor, ref_logp: Tensor, mask: Tensor | None = None) -> Tensor:
    """``k1 + λ (r - 1)``, ``r = e^-d``, with λ fitted on the other half of the batch: unbiased.

    It is never much worse than the better of k1 (λ = 0) and k3 (λ = 1).
    The halves are the even and the odd rows ([T] input: the even and odd entries). A half whose partner cannot fit a
    λ uses 1. For measuring and steering only: the placements refuse it.

    Args:
        logp: log-probs of the sampled tokens under π.
        ref_logp: the same under ref, in the same shape and dtype.
        mask: True where a token counts. None: everywhere.

    Returns:
        Nats per token, in the shape of ``logp``.
    """
    d = k1(logp, ref_logp)
    keep = as_mask(mask, d)
    d = select(d, keep)
    gap = torch.expm1(-d)
    rows = torch.arange(d.shape[0], device=d.device).remainder(2) == 0
    even = rows.view(-1, *([1] * (d.dim() - 1))).expand_as(keep)
    from_odd, from_even = _control_variate(d, gap, keep & ~even), _control_variate(d, gap, keep & even)
    # k3 plus what λ differs from 1: the same number as k1 + λ (r - 1), with its digits near d = 0.
    kl: Tensor = bregman(d) + (torch.where(even, from_odd, from_even) - 1) * gap
    return kl


def weighted(
    estimator: Estimator | str,
    logp: Tensor,
    old_logp: Tensor,
    ref_logp: Tensor,
    *,
    detach_weight: bool = False,
    tail: float | None = None,
) -> Tensor:
    """``π/μ · k(d)`` with the differentiable weight ``e^(logp - old_logp)``: the off-policy form, on samples of μ.

    For k3 its gradient is ``w d`` times the score: KL(π‖ref), token by token. ``detach_weight`` holds the weight
    constant, which gives k2 that same gradient. ``tail=5.0`` continues k2 and k3 linearly beyond that log-ratio and
    keeps the log-weight inside ±5, so that value and gradient stay finite and do not vanish.

    Args:
        estimator: k1, k2, k3 or another function of ``(logp, ref_logp)``, or its name.
        logp: log-probs of the sampled tokens under π.
        old_logp: the same under μ.
        ref_logp: the same under ref.
        detach_weight: whether the weight is a constant.
        tail: where the linear continuation begins, as a log-ratio in nats; for k2 and k3.

    Returns:
        Nats per token, in the shape of ``logp``.
    """
    k = sampled("weighted", estimator)
    log_weight = torch.sub(*_pair(logp, old_logp, ("logp", "old_logp")))
    if tail is None:
        weight, kl = log_weight.exp(), k(logp, ref_logp)
        value = with_slope(weight * kl, kl, weight)
        # ∇(w k) = w ∇k + w k ∇log w; the second part has the value 0.
        return value if detach_weight else value + with_slope(torch.zeros_like(kl), log_weight, weight * kl)
    if k not in (k2, k3):
        raise ConfigError(f"weighted(tail=...) is for k2 and k3, got {_name(k)!r}. Leave tail out for the formula.")
    edge = _edge(tail)
    weight = log_weight.detach().clamp(-edge, edge).exp()
    value = weight * k(logp, ref_logp, tail=edge)
    if detach_weight:
        return value
    # ∇(w k) = w (k + k') s. For k3 that is w d s, but as the difference of two numbers of the size of e^|d|.
    pull = k1(logp, ref_logp).clamp(-edge, edge)
    slope = weight * (pull if k is k3 else k2(logp, ref_logp, tail=edge) + pull)
    return with_slope(value, wide("logp", logp), slope.detach())


@overload
def straight_through(value: Tensor, gradient: Tensor) -> Tensor: ...
@overload
def straight_through(value: Estimator, gradient: Estimator) -> Estimator: ...
def straight_through(value: Tensor | Estimator, gradient: Tensor | Estimator) -> Tensor | Estimator:
    """The value of one estimator with the gradient of another, of two tensors or of two estimators.

    ``straight_through(k3, k2)`` is verl's ``k3+``; with ``w.detach() * k2`` it is OpenRLHF's unbiased option.

    Args:
        value: what the result is equal to.
        gradient: what the result is differentiated as.

    Returns:
        A tensor for two tensors, an estimator for two estimators.
    """
    if isinstance(value, Tensor) and isinstance(gradient, Tensor):
        same_shape(value=value, gradient=gradient)
        return cast(Tensor, StraightThrough.apply(value, gradient))  # type: ignore[no-untyped-call]
    if callable(value) and callable(gradient):
        f, g = value, gradient

        def combined(logp: Tensor, ref_logp: Tensor) -> Tensor:
            return straight_through(f(logp, ref_logp), g(logp, ref_logp))

        combined.__name__ = f"{_name(f)}+" if g is k2 else f"{_name(f)}+{_name(g)}"
        return combined
    raise ConfigError(
        "straight_through takes two tensors or two estimators, got one of each. Call the estimator first."
    )


NOT_SAMPLED = (exact, exact_forward, top_k_exact, fitted)
"""These are no function of (logp, ref_logp) token by token, so no weight and no other gradient goes with them."""


def sampled(form: str, k: Estimator | str) -> Estimator:
    """The estimator, refused for ``form`` when it is not one of (logp, ref_logp)."""
    from klamp.estimators.names import estimator

    found = estimator(k) if isinstance(k, str) else k
    if found in NOT_SAMPLED:
        raise ConfigError(
            f"{form} needs an estimator of (logp, ref_logp), got {_name(found)!r}. Use k1, k2 or k3; exact KL "
            "needs neither a weight nor another gradient."
        )
    return found


def _name(k: Estimator) -> str:
    return str(getattr(k, "__name__", repr(k)))


def _pair(a: Tensor, b: Tensor, names: tuple[str, str] = ("logp", "ref_logp")) -> tuple[Tensor, Tensor]:
    """Both in float32 or wider, refused unless they agree in shape and dtype."""
    first, second = wide(names[0], a), wide(names[1], b)
    same_shape(**{names[0]: first, names[1]: second})
    if a.dtype != b.dtype:
        raise ConfigError(
            f"{names[0]} is {a.dtype} and {names[1]} is {b.dtype}; the difference in rounding alone would read as KL. "
            "Compute both in the same dtype, best from float32 logits."
        )
    return first, second


def _edge(tail: float) -> float:
    return require_number("tail", tail, above=0, way_out="It is a log-ratio in nats; klamp's trainer uses 5.0.")


def _continued(
    d: Tensor, tail: float | None, f: Callable[[Tensor], Tensor], slope: Callable[[Tensor], Tensor]
) -> Tensor:
    """``f(d)``, and beyond ``|d| = tail`` its tangent there: value and slope are continuous, and never let go."""
    inside = d if tail is None else d.clamp(-_edge(tail), _edge(tail))
    steepness = slope(inside)
    value = f(inside) if tail is None else f(inside) + steepness * (d - inside)
    return with_slope(value, d, steepness)


def _control_variate(d: Tensor, gap: Tensor, keep: Tensor) -> Tensor:
    """``λ = -Cov(k1, r - 1) / Var(r - 1)`` over the tokens in ``keep``; 1, which makes k3, where they cannot tell."""
    count = keep.sum().clamp(min=1)
    centred_gap = select(gap - select(gap, keep).sum() / count, keep)
    centred_d = select(d - select(d, keep).sum() / count, keep)
    variance = (centred_gap * centred_gap).sum()
    fit = -(centred_gap * centred_d).sum() / variance
    # A spread of the size of its own rounding says nothing about λ: tokens that are all alike.
    rounding = 8 * torch.finfo(gap.dtype).eps
    told = torch.isfinite(fit) & (variance > rounding**2 * select(gap * gap, keep).sum())
    return torch.where(told, fit, torch.ones_like(fit)).detach()
