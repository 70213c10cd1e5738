"""The specification of the kernels in plain PyTorch, on any device: what the fused kernels must equal.

With z the scaled logits of a row, ``p = softmax(z)`` and ``d = log p - log p_ref``::

    logp = log p_a          kl = Σ p d                    entropy = -Σ p log p
    ∂logp/∂z_j = [j = a] - p_j
    ∂kl/∂z_j   = p_j (d_j - kl)         (the reference is a constant)
    ∂entropy/∂z_j = -p_j (log p_j + entropy)

Matrix products are taken in the dtype of the hidden states, everything after them in float32 or wider. Extra memory:
at most ``BUFFERS · chunk · V · 4`` bytes (8 a value in float64) with ``chunk = max(1, BUDGET / (4 V))`` rows, so
``BUFFERS · BUDGET`` = 64 MiB in all, beside the gradients that are returned and a head gradient's float32 sum.
Shapes: [rows, V] logits, [rows] everything else.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from klamp import estimators
from klamp.kernels.chunking import Plan
from klamp.kernels.types import RowStats, Scaling, Sheet, Terms, Upstream, Work

# A chunk's logits should stay in a core's share of the last-level cache between the passes over them, and a chunk
# should be tall enough for the matrix product to reuse the head: 13 MiB is 68 rows at V = 49,152.
BUDGET = 13 * 2**20
BUFFERS = 5


class Expanded(NamedTuple):
    """A chunk's distributions written out: ``p``, ``log p`` and, with a reference, ``d``; and the rows' statistics."""

    p: Tensor
    logp: Tensor
    d: Tensor | None
    stats: RowStats


def plan(work: Work, *, trains_head: bool) -> Plan:
    """Rows at a time, by the memory bound in the module's docstring. A trained head asks for no other."""
    rows = max(1, BUDGET // (4 * work.policy.head.shape[0]))
    return Plan(rows, rows)


def rows_at_a_time(work: Work, slots: int) -> int:
    """The same for the vectors of ``slots`` statistics: no more of the memory is alive."""
    return plan(work, trains_head=False).chunk


def width(vocabulary: int) -> int:
    """Columns to allocate for a row of logits: no padding."""
    return vocabulary


def statistics(z: Tensor, ref: Tensor | None, tokens: Tensor, scaling: Scaling, out: Sheet) -> None:
    """logp, ref_logp, kl and entropy of each row into ``out``. Overwrites both buffers."""
    out.write(expand(z, ref, tokens, scaling).stats)


def gradient(z: Tensor, ref: Tensor | None, tokens: Tensor, stats: RowStats, up: Upstream, scaling: Scaling) -> None:
    """``Σ_s up_s · ∂s/∂x`` over s in (logp, kl, entropy), written over the logits x in ``z``. Overwrites ``ref``."""
    assert up.kl is None or ref is not None
    chunk = expand(z, ref if up.kl is not None else None, tokens, scaling)
    z.copy_(backward(chunk, tokens, up, scaling))


def loss_gradient(z: Tensor, ref: Tensor | None, tokens: Tensor, terms: Terms, scaling: Scaling, out: Sheet) -> None:
    """Each row's loss and statistics into ``out``, the loss's gradient over the logits in ``z``. Overwrites ``ref``."""
    chunk = expand(z, ref, tokens, scaling)
    loss, up = price(chunk.stats, terms)
    out.write(chunk.stats, loss)
    z.copy_(backward(chunk, tokens, up, scaling))


def jacobians(
    z: Tensor,
    ref: Tensor | None,
    into: list[Tensor],
    names: tuple[str, ...],
    tokens: Tensor,
    scaling: Scaling,
    out: Sheet,
) -> None:
    """The statistics into ``out``, and ``∂s/∂x`` of those in ``names`` into a buffer each, which z and ref may be."""
    p, logp, d, stats = expand(z, ref, tokens, scaling)
    out.write(stats)
    found: dict[str, Tensor] = {}
    if "entropy" in names:
        found["entropy"] = (logp + stats.entropy.unsqueeze(1)).neg_().mul_(p)
    if "kl" in names:
        assert d is not None, "a KL needs a reference"
        assert stats.kl is not None, "and has one"
        found["kl"] = d.sub_(stats.kl.unsqueeze(1)).mul_(p)
    if "logp" in names:
        at = tokens.unsqueeze(1)
        found["logp"] = p.neg_().scatter_add_(1, at, p.new_ones(at.shape))
    slope = bend(logp, stats.lse, scaling)
    for name, x in zip(names, into, strict=False):  # in this order none is written over before it was copied
        g = chain(found[name], slope, scaling)
        if g.data_ptr() != x.data_ptr():
            x.copy_(g)


def combine(vectors: Tensor, weights: list[Tensor | None], chunk: int, index: Tensor | None, out: Tensor) -> None:
    """``Σ_s weight_s · vector_s`` of each row into its place in ``out`` [N, H]; ``vectors`` as in ``jacobians``."""
    n, k = len(vectors) // len(weights), len(weights)
    wide = torch.promote_types(vectors.dtype, torch.float32)
    for start in range(0, n, chunk):
        stop = min(n, start + chunk)
        parts = torch.split(vectors[k * start : k * stop], stop - start)
        pairs = [(w[start:stop, None].to(wide), v) for w, v in zip(weights, parts, strict=True) if w is not None]
        total = pairs[0][0] * pairs[0][1]
        for w, v in pairs[1:]:
            total.addcmul_(w, v.to(wide))
        if index is None:
            out[start:stop] = total
        else:
            out.index_copy_(0, index[start:stop], total.to(out.dtype))


def scale(source: Tensor, factor: Tensor, out: Tensor) -> None:
    """``factor · source`` into ``out``, of another dtype maybe."""
    torch.mul(source, factor, out=out)


def price(stats: RowStats, terms: Terms) -> tuple[Tensor, Upstream]:
    """The loss of each row and its derivatives in logp and kl, by autograd over :func:`token_loss`."""
    with torch.enable_grad():
        logp = stats.logp.detach().requires_grad_()
        kl = None if stats.kl is None else stats.kl.detach().requires_grad_()
        loss = token_loss(logp, kl, stats.ref_logp if terms.ref_logp is None else terms.ref_logp, terms)
        wanted = [logp] if kl is None else [logp, kl]
        grads = torch.autograd.grad(loss.sum(), wanted, allow_unused=True)
    return loss.detach(), Upstream(grads[0], grads[1] if len(grads) > 1 else None, None)


def token_loss(logp: Tensor, kl: Tensor | None, ref_logp: Tensor | None, terms: Terms) -> Tensor:
    """``-min(r A, clip(r, 1 - lo, 1 + hi) A) - r A' + beta · w · K``; r = π/μ, and without μ ``exp(logp - sg(logp))``.

    K is k2, k3, ``π/μ · k3`` with the weight differentiated (gradient ``r d`` times the score), or the exact KL.
    """
    beta, low, high = terms.knobs.to(logp.dtype).unbind()
    old = logp.detach() if terms.old_logp is None else terms.old_logp
    ratio = (logp - old).exp()
    clipped = ratio.clamp(1 - low, 1 + high)
    loss = -torch.minimum(ratio * terms.advantages, clipped * terms.advantages)
    if terms.unclipped is not None:
        loss = loss - ratio * terms.unclipped
    if terms.form is None:
        return loss
    if terms.form in ("exact", "sequence_exact"):
        assert kl is not None
        penalty = kl
    else:
        assert ref_logp is not None
        penalty = sampled_kl(logp, old, ref_logp, terms)
    return loss + beta * (penalty if terms.kl_weights is None else terms.kl_weights * penalty)


def sampled_kl(logp: Tensor, old_logp: Tensor, ref_logp: Tensor, terms: Terms) -> Tensor:
    """k2, k3 or weighted k3 of the sampled tokens, continued linearly beyond ``tail`` where one is given."""
    if terms.form == "weighted_k3":
        return estimators.weighted(estimators.k3, logp, old_logp, ref_logp, tail=terms.tail)
    k = estimators.k2 if terms.form == "k2" else estimators.k3
    return k(logp, ref_logp, tail=terms.tail)


def expand(x: Tensor, ref: Tensor | None, tokens: Tensor, scaling: Scaling) -> Expanded:
    """``p``, ``log p`` and ``d`` from the logits of both models, reusing their memory, and the statistics.

    Written with ``d`` of log-probs, not of logits: its sum has no large terms that cancel, so equal policies give 0.
    """
    z = scaled(x, scaling)
    logp = torch.log_softmax(z, -1)
    at = tokens.unsqueeze(1)
    picked = logp.gather(1, at).squeeze(1)
    lse = z.gather(1, at).squeeze(1) - picked
    p = torch.exp(logp, out=z)
    entropy = -dot(p, logp)
    if ref is None:
        return Expanded(p, logp, None, RowStats(picked, None, None, entropy, lse, None))
    zr = scaled(ref, scaling)
    ref_logp = torch.log_softmax(zr, -1)
    ref_picked = ref_logp.gather(1, at).squeeze(1)
    ref_lse = zr.gather(1, at).squeeze(1) - ref_picked
    d = torch.sub(logp, ref_logp, out=zr)
    kl = dot(p, d)
    return Expanded(p, logp, d, RowStats(picked, ref_picked, kl.clamp(min=0), entropy, lse, ref_lse))


def backward(chunk: Expanded, tokens: Tensor, up: Upstream, scaling: Scaling) -> Tensor:
    """``∂L/∂x`` from ``∂L/∂(logp, kl, entropy)``: ``p (u_kl (d - kl) - u_logp - u_H (log p + H)) + [j = a] u_logp``."""
    p, logp, d, stats = chunk
    slope = torch.zeros_like(stats.logp)
    if up.logp is not None:
        slope = slope - up.logp
    if up.entropy is not None:
        inner = (logp + stats.entropy.unsqueeze(1)).mul_(-up.entropy.unsqueeze(1))
        if up.kl is not None and d is not None and stats.kl is not None:
            inner.addcmul_(d - stats.kl.unsqueeze(1), up.kl.unsqueeze(1))
        grad = inner.add_(slope.unsqueeze(1)).mul_(p)
    elif up.kl is not None and d is not None and stats.kl is not None:
        grad = d.mul_(up.kl.unsqueeze(1)).add_((slope - up.kl * stats.kl).unsqueeze(1)).mul_(p)
    else:
        grad = p.mul_(slope.unsqueeze(1))
    if up.logp is not None:
        grad.scatter_add_(1, tokens.unsqueeze(1), up.logp.unsqueeze(1))
    return chain(grad, bend(logp, stats.lse, scaling), scaling)


def scaled(x: Tensor, scaling: Scaling) -> Tensor:
    """``softcap · tanh(logit_scale · x / softcap) / temperature`` in float32 or wider, in place where x is wide."""
    z = x if x.dtype in (torch.float32, torch.float64) else x.float()
    if scaling.softcap is not None:
        z = z.mul_(scaling.logit_scale / scaling.softcap).tanh_()
        return z.mul_(scaling.softcap / scaling.temperature)
    return z if scaling.plain else z.mul_(scaling.logit_scale / scaling.temperature)


def bend(logp: Tensor, lse: Tensor, scaling: Scaling) -> Tensor | None:
    """``1 - tanh²`` of the soft-cap, tanh read back from z, written over ``logp``; None without one."""
    if scaling.softcap is None:
        return None
    tanh = logp.add_(lse.unsqueeze(1)).mul_(scaling.temperature / scaling.softcap)
    return tanh.square_().neg_().add_(1)


def chain(grad: Tensor, slope: Tensor | None, scaling: Scaling) -> Tensor:
    """``∂L/∂x = ∂L/∂z · ∂z/∂x``, in place; ``∂z/∂x = logit_scale / temperature · slope``, of :func:`bend`."""
    if slope is not None:
        grad.mul_(slope)
    return grad if scaling.plain else grad.mul_(scaling.logit_scale / scaling.temperature)


def dot(a: Tensor, b: Tensor) -> Tensor:
    """``Σ_j a_j b_j`` of each row, without writing the products out."""
    return torch.bmm(a.unsqueeze(1), b.unsqueeze(2)).view(-1)
