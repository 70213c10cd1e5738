"""From the last hidden states to per-token log-probs, exact KL and entropy, or to a whole policy loss, without logits.

Two implementations of one specification: :mod:`~klamp.kernels.eager` (plain PyTorch, any device) and
:mod:`~klamp.kernels.triton_statistics` (Triton, loaded at its first use). The choice is made once: fused on CUDA where
Triton is installed, eager elsewhere; ``KLAMP_KERNELS=eager`` or ``=fused`` forces it.

Shapes: tokens [...], hidden [..., H], head [V, H], bias [V]. Row i of hidden predicts token i.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
from collections.abc import Collection
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from klamp.errors import ConfigError, unknown
from klamp.kernels import autograd, eager, jacobians
from klamp.kernels.lm_heads import HeadSpec, head_of, matches, why_full_logits
from klamp.kernels.lm_heads import token_stats_from_logits as _from_logits
from klamp.kernels.loss_terms import Asked, ask
from klamp.kernels.types import FORMS, Form, Number, Ops, Scaling, TokenStats, Work, prepare, side

__all__ = [
    "FORMS",
    "HeadSpec",
    "PolicyLoss",
    "TokenStats",
    "backend",
    "head_of",
    "matches",
    "policy_loss",
    "token_stats",
    "token_stats_from_logits",
    "why_full_logits",
]


class PolicyLoss(NamedTuple):
    """A loss to call backward on, and what was measured on the way."""

    loss: Tensor
    """Σ over counted tokens / denominator. A scalar in float32 or wider, differentiable once."""
    stats: TokenStats
    """Constants: no gradient flows through them."""


def token_stats(
    hidden: Tensor,
    head: Tensor,
    tokens: Tensor,
    *,
    ref_hidden: Tensor | None = None,
    ref_head: Tensor | None = None,
    ref_logp: Tensor | None = None,
    mask: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    bias: Tensor | None = None,
    ref_bias: Tensor | None = None,
    gradient_of: Collection[str] = ("logp", "kl"),
) -> TokenStats:
    """log π(token), log ref(token), KL(π‖ref) over the vocabulary and the entropy, per token; logits never exist whole.

    Differentiable in ``logp``, ``kl`` and ``entropy`` with respect to hidden, head and bias, for any loss; the
    reference is a constant. While head and bias are frozen, the gradient of any loss in the statistics of
    ``gradient_of`` is prepared on the way. Elsewhere the backward pass computes the logits again, chunk by chunk.

    Args:
        hidden: last hidden states of the policy, [..., H].
        head: the matrix [V, H] that makes logits of them.
        tokens: ids of the tokens that the rows predict, [...].
        ref_hidden: last hidden states of the reference, [..., H].
        ref_head: the reference's own head. None: ``head``.
        ref_logp: log-probs of the reference in place of ``ref_hidden``; there is then no exact KL.
        mask: True where a token counts. Other rows are never read. None: everywhere.
        temperature: logits are divided by it.
        softcap: cap of the logits, ``c · tanh(x / c)``. None: no cap.
        logit_scale: logits are multiplied by it.
        bias: [V], added to the policy's logits.
        ref_bias: [V], added to the reference's. None: ``bias``, unless ``ref_head`` is given.
        gradient_of: those of logp, kl and entropy that the loss will use. Naming fewer saves a matrix product each;
            one that is not named stays differentiable, and costs the logits again.

    Returns:
        Per-token tensors [...]; ``kl`` is None without ``ref_hidden``.
    """
    scaling = Scaling(temperature, softcap, logit_scale)
    work = _work(hidden, head, tokens, (ref_hidden, ref_head, ref_logp), mask, (bias, ref_bias), scaling)
    ops, states = _ops(work.policy.hidden), work.policy.hidden
    names = jacobians.statistics_of(gradient_of, work)
    frozen = not head.requires_grad and (bias is None or not bias.requires_grad)
    with _no_autocast(hidden):
        if frozen and names and states.requires_grad and torch.is_grad_enabled():
            out = jacobians.OnePass.apply(states, head, work, ops, names)  # type: ignore[no-untyped-call]
        else:
            out = autograd.Statistics.apply(states, head, bias, work, ops)  # type: ignore[no-untyped-call]
    logp, kl, entropy, ref_rows = out
    if ref_hidden is None:
        given = None if ref_logp is None else work.spread(_constant(work, ref_logp))
        return TokenStats(_spread(work, logp), given, None, _spread(work, entropy))
    return TokenStats(_spread(work, logp), _spread(work, ref_rows), _spread(work, kl), _spread(work, entropy))


def policy_loss(
    hidden: Tensor,
    head: Tensor,
    tokens: Tensor,
    advantages: Tensor,
    *,
    beta: Number = 0.0,
    form: Form | None = "exact",
    clip: tuple[Number, Number] | None = None,
    old_logp: Tensor | None = None,
    kl_weights: Tensor | None = None,
    unclipped_advantages: Tensor | None = None,
    denominator: Number | None = None,
    tail: float | None = None,
    ref_hidden: Tensor | None = None,
    ref_head: Tensor | None = None,
    ref_logp: Tensor | None = None,
    mask: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    bias: Tensor | None = None,
    ref_bias: Tensor | None = None,
) -> PolicyLoss:
    """``Σ_t [-min(r A, clip(r, 1-lo, 1+hi) A) - r A' + beta · w · K] / denominator``, its gradient computed on the way.

    ``beta``, the clip and everything per token are run-time values: steering never recompiles. Differentiable once.

    Args:
        hidden, head, tokens: as in :func:`token_stats`.
        advantages: A, [...].
        beta: the price.
        form: K: k2, k3, ``weighted_k3`` (π/μ · k3, the weight differentiated), ``exact``, ``sequence_exact`` (exact,
            with the weights w of the prefix), or None.
        clip: (lo, hi). None: no clip.
        old_logp: log-probs under the sampler μ, so that r = π/μ. None: the samples are the policy's own, r is 1 and
            its gradient the score.
        kl_weights: w, [...].
        unclipped_advantages: A', [...]: the future part of ``sequence_exact``.
        denominator: the step's global token count, where a batch comes in parts. None: the counted tokens.
        tail: log-ratio beyond which k2 and k3 continue linearly.
        ref_hidden, ref_head, ref_logp, mask, temperature, softcap, logit_scale, bias, ref_bias: as in
            :func:`token_stats`.

    Returns:
        The loss and the statistics.
    """
    scaling = Scaling(temperature, softcap, logit_scale)
    work = _work(hidden, head, tokens, (ref_hidden, ref_head, ref_logp), mask, (bias, ref_bias), scaling)
    per_token = {
        "advantages": advantages,
        "old_logp": old_logp,
        "ref_logp": ref_logp,
        "kl_weights": kl_weights,
        "unclipped_advantages": unclipped_advantages,
    }
    low, high = (float("inf"), float("inf")) if clip is None else clip
    asked = ask(work, form, (beta, low, high), tail, per_token)
    total, stats = _priced(work, asked, head, bias)
    return PolicyLoss(total / (max(1, work.tokens.shape[0]) if denominator is None else denominator), stats)


def token_stats_from_logits(
    logits: Tensor,
    tokens: Tensor,
    *,
    ref_logits: Tensor | None = None,
    ref_logp: Tensor | None = None,
    mask: Tensor | None = None,
    temperature: float = 1.0,
) -> TokenStats:
    """:func:`token_stats` for models whose head is more than a linear map: from whole logits [..., V].

    Same numbers and gradients; beyond the logits and their gradient only a chunk is allocated. Apply soft-capping and
    scales before.

    Args:
        logits: the policy's logits, [..., V].
        tokens: ids of the tokens that the rows predict, [...].
        ref_logits: the reference's logits, [..., V].
        ref_logp: log-probs of the reference in place of ``ref_logits``; there is then no exact KL.
        mask: True where a token counts. None: everywhere.
        temperature: logits are divided by it.

    Returns:
        Per-token tensors [...]; ``kl`` is None without ``ref_logits``.
    """
    return _from_logits(
        _ops(logits), logits, tokens, ref_logits=ref_logits, ref_logp=ref_logp, mask=mask, temperature=temperature
    )


def backend(device: torch.device | str = "cpu") -> str:
    """``"eager"`` or ``"fused"``: the kernels that are used on a device.

    Args:
        device: the device.

    Returns:
        The name.
    """
    forced = _forced()
    return forced or ("fused" if torch.device(device).type == "cuda" and _has_triton() else "eager")


@functools.cache
def _forced() -> str | None:
    """``KLAMP_KERNELS``, read once; None where it is unset."""
    name = os.environ.get("KLAMP_KERNELS", "").strip() or None
    if name is not None and name not in ("eager", "fused"):
        raise unknown("KLAMP_KERNELS", name, ("eager", "fused"))
    if name == "fused" and not _has_triton():
        raise ConfigError(
            "KLAMP_KERNELS is 'fused' but triton is not installed. Install triton, or unset the variable."
        )
    return name


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _ops(hidden: Tensor) -> Ops:
    """The kernels for these hidden states. float64 is eager's alone: it is there to check the others."""
    if backend(hidden.device) == "eager" or hidden.dtype == torch.float64:
        return cast(Ops, eager)
    return _launch()


@functools.cache
def _launch() -> Ops:
    return cast(Ops, importlib.import_module("klamp.kernels.triton_launch"))


def _work(
    hidden: Tensor,
    head: Tensor,
    tokens: Tensor,
    ref: tuple[Tensor | None, Tensor | None, Tensor | None],
    mask: Tensor | None,
    biases: tuple[Tensor | None, Tensor | None],
    scaling: Scaling,
) -> Work:
    """The checked Work of both models, in the dtype autocast asks for where it is on."""
    ref_hidden, ref_head, ref_logp = ref
    if ref_hidden is not None and ref_logp is not None:
        raise ConfigError(
            "ref_hidden and ref_logp were both given; ref_logp follows from ref_hidden. Give one of them."
        )
    if ref_hidden is None and (ref_head is not None or biases[1] is not None):
        raise ConfigError("ref_head or ref_bias was given without ref_hidden. Give the reference's hidden states too.")
    policy = side("policy", _autocast(hidden), head, biases[0])
    if ref_hidden is None:
        return prepare(policy, None, tokens, mask, scaling)
    ref_bias = biases[0] if ref_head is None and biases[1] is None else biases[1]
    reference = side("reference", _autocast(ref_hidden.detach()), head if ref_head is None else ref_head, ref_bias)
    return prepare(policy, reference, tokens, mask, scaling)


def _priced(work: Work, asked: Asked, head: Tensor, bias: Tensor | None) -> tuple[Tensor, TokenStats]:
    """The sum of the counted tokens' losses, with its gradient ready, and the statistics in the caller's shape."""
    hidden = work.policy.hidden
    with _no_autocast(hidden):
        total, logp, ref_logp, kl, entropy = autograd.Loss.apply(  # type: ignore[no-untyped-call]
            hidden, head, bias, work, asked, _ops(hidden), torch.is_grad_enabled()
        )
    if work.reference is None and (given := asked.per_token.get("ref_logp")) is not None:
        ref_logp = _constant(work, given)
    return total, TokenStats(
        work.spread(logp),
        None if ref_logp is None else work.spread(ref_logp),
        None if work.reference is None else work.spread(kl),
        work.spread(entropy),
    )


def _autocast(hidden: Tensor) -> Tensor:
    """Hidden states in the dtype in which the model's own head would take them."""
    kind = hidden.device.type if isinstance(hidden, Tensor) else "cpu"
    if not torch.is_autocast_enabled(kind) or hidden.dtype == torch.float64:
        return hidden
    return hidden.to(torch.get_autocast_dtype(kind))


def _no_autocast(hidden: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Autocast off where it is on: the kernels choose their dtypes themselves."""
    kind = hidden.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else contextlib.nullcontext()


def _constant(work: Work, x: Tensor) -> Tensor:
    """A per-token tensor as counted rows in float32 or wider."""
    rows = work.compact(x)
    return rows if rows.dtype == torch.float64 else rows.float()


def _spread(work: Work, rows: Tensor) -> Tensor:
    """:meth:`Work.spread` that autograd can follow."""
    if work.index is None:
        return rows.view(work.shape)
    count = 1
    for size in work.shape:
        count *= size
    return rows.new_zeros(count).index_copy(0, work.index, rows).view(work.shape)
