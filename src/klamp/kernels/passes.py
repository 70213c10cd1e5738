"""The passes over chunks of rows that both kernels share: logits by matrix product, statistics, gradients.

No more than one chunk of logits of each model exists at a time (:class:`~klamp.kernels.work.Plan`). Head gradients
accumulate in float32 over the chunks and are rounded once, at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from klamp.errors import KlampError
from klamp.kernels.work import Ops, Plan, RowStats, Side, Terms, Upstream, Work, lowest


class Span(NamedTuple):
    """Counted rows ``start:stop``, and the rows ``at:at + stop - start`` of the buffer that hold them."""

    start: int
    stop: int
    at: int


class Gradients:
    """``∂L/∂hidden`` row by row, and ``∂L/∂head`` and ``∂L/∂bias`` summed in float32, from ``G = ∂L/∂logits``."""

    def __init__(self, work: Work, side: Side, needs: tuple[bool, bool, bool]) -> None:
        self.work, self.side = work, side
        hidden, head = side.hidden, side.head
        wide = torch.promote_types(hidden.dtype, torch.float32)
        # Rows outside the mask are never visited: they need their zeros from the start.
        empty = torch.empty_like if work.index is None else torch.zeros_like
        self.hidden = empty(hidden, memory_format=torch.contiguous_format) if needs[0] else None
        # The first product overwrites: a large head's gradient is not first written as zeros and read back.
        start = torch.zeros if work.tokens.shape[0] == 0 else torch.empty
        self.head = start(head.shape, dtype=wide, device=head.device) if needs[1] else None
        self.bias = torch.zeros(head.shape[0], dtype=wide, device=head.device) if needs[2] else None

    def add(self, g: Tensor, hidden: Tensor, start: int, stop: int) -> None:
        """Take in the gradient ``g`` [rows, V] of counted rows ``start:stop``, whose hidden states are given."""
        if self.hidden is not None:
            if self.work.index is None:
                torch.mm(g, self.side.head, out=self.hidden[start:stop])
            else:
                self.hidden.index_copy_(0, self.work.index[start:stop], torch.mm(g, self.side.head))
        if self.head is not None:
            accumulate(self.head, g, hidden, overwrite=start == 0)
        if self.bias is not None:
            self.bias += g.sum(0, dtype=self.bias.dtype)


def accumulate(total: Tensor, g: Tensor, hidden: Tensor, *, overwrite: bool) -> None:
    """``total += gᵀ · hidden`` (``=`` to overwrite) with every sum in the dtype of ``total``, float32 or wider."""
    if g.dtype != total.dtype and g.is_cuda:
        if overwrite:
            torch.mm(g.t(), hidden, out_dtype=total.dtype, out=total)
        else:
            torch.addmm(total, g.t(), hidden, out_dtype=total.dtype, out=total)
        return
    torch.addmm(total, g.t().to(total.dtype), hidden.to(total.dtype), beta=0 if overwrite else 1, out=total)


def spans(rows: int, plan: Plan) -> Iterator[list[Span]]:
    """The counted rows in blocks, each block in chunks."""
    for block in range(0, rows, plan.block):
        end = min(rows, block + plan.block)
        yield [Span(a, min(end, a + plan.chunk), a - block) for a in range(block, end, plan.chunk)]


def buffer(ops: Ops, side: Side, rows: int) -> Tensor:
    """Room for ``rows`` of logits in the dtype of the hidden states."""
    vocabulary = side.head.shape[0]
    return side.hidden.new_empty(rows, ops.width(vocabulary))[:, :vocabulary]


def logits(side: Side, hidden: Tensor, out: Tensor) -> Tensor:
    """``hidden · headᵀ + bias`` into ``out``."""
    if side.bias is None:
        return torch.mm(hidden, side.head.t(), out=out)
    return torch.addmm(side.bias, hidden, side.head.t(), out=out)


def cast(side: Side) -> Side:
    """The same in one dtype, that of the hidden states, detached; a head of another dtype is copied."""
    dtype = side.hidden.dtype
    # A bias of -inf excludes a token; so does the lowest logit, and no sum meets inf - inf.
    bias = None if side.bias is None else side.bias.detach().to(dtype).clamp(min=lowest(dtype))
    return Side(side.hidden.detach(), side.head.detach().to(dtype), bias)


def join(parts: list[RowStats], work: Work) -> RowStats:
    """Chunks' statistics as one; empty where no row counts."""
    if not parts:
        hidden = work.policy.hidden
        none = hidden.new_empty(0, dtype=torch.promote_types(hidden.dtype, torch.float32))
        ref = None if work.reference is None else none.clone()
        return RowStats(none, ref, ref if ref is None else ref.clone(), none.clone(), none.clone(), ref)
    if len(parts) == 1:
        return parts[0]
    return RowStats(*(None if c[0] is None else torch.cat(c) for c in zip(*parts, strict=True)))  # type: ignore[arg-type]


def forward_statistics(ops: Ops, work: Work) -> RowStats:
    """logp, ref_logp, kl and entropy of the counted rows."""
    policy, reference = cast(work.policy), None if work.reference is None else cast(work.reference)
    n = work.tokens.shape[0]
    plan = ops.plan(work, trains_head=False)
    z = buffer(ops, policy, min(n, plan.chunk))
    zr = None if reference is None else buffer(ops, reference, min(n, plan.chunk))
    parts = []
    for block in spans(n, Plan(plan.chunk, plan.chunk)):
        start, stop, _ = block[0]
        rows = stop - start
        logits(policy, work.rows(policy.hidden, start, stop), z[:rows])
        if reference is not None and zr is not None:
            logits(reference, work.rows(reference.hidden, start, stop), zr[:rows])
        tokens = work.tokens[start:stop]
        parts.append(ops.statistics(z[:rows], None if zr is None else zr[:rows], tokens, work.scaling))
    return join(parts, work)


def backward_statistics(
    ops: Ops, work: Work, stats: RowStats, up: Upstream, needs: tuple[bool, bool, bool]
) -> Gradients:
    """Gradients of hidden, head and bias from those of the statistics; logits are computed again, chunk by chunk."""
    policy = cast(work.policy)
    reference = cast(work.reference) if work.reference is not None and up.kl is not None else None
    grads = Gradients(work, policy, needs)
    n = work.tokens.shape[0]
    plan = ops.plan(work, trains_head=needs[1])
    g = buffer(ops, policy, min(n, plan.block))
    zr = None if reference is None else buffer(ops, reference, min(n, plan.chunk))
    for block in spans(n, plan):
        first, last = block[0].start, block[-1].stop
        hidden = work.rows(policy.hidden, first, last)
        logits(policy, hidden, g[: last - first])
        for start, stop, at in block:
            rows = stop - start
            z = g[at : at + rows]
            if reference is not None and zr is not None:
                logits(reference, work.rows(reference.hidden, start, stop), zr[:rows])
            part = RowStats(*(None if x is None else x[start:stop] for x in stats))  # type: ignore[arg-type]
            cut = Upstream(*(None if x is None else x[start:stop] for x in up))
            ops.gradient(z, None if zr is None else zr[:rows], work.tokens[start:stop], part, cut, work.scaling)
        grads.add(g[: last - first], hidden, first, last)
    return grads


def loss_pass(ops: Ops, work: Work, terms: Terms, needs: tuple[bool, bool, bool]) -> tuple[Tensor, RowStats, Gradients]:
    """Each counted row's loss, its statistics, and the gradients of the rows' sum, logits visited once."""
    policy, reference = cast(work.policy), None if work.reference is None else cast(work.reference)
    grads = Gradients(work, policy, needs)
    n = work.tokens.shape[0]
    plan = ops.plan(work, trains_head=needs[1])
    g = buffer(ops, policy, min(n, plan.block))
    zr = None if reference is None else buffer(ops, reference, min(n, plan.chunk))
    losses, parts = [], []
    for block in spans(n, plan):
        first, last = block[0].start, block[-1].stop
        hidden = work.rows(policy.hidden, first, last)
        logits(policy, hidden, g[: last - first])
        for start, stop, at in block:
            rows = stop - start
            z = g[at : at + rows]
            if reference is not None and zr is not None:
                logits(reference, work.rows(reference.hidden, start, stop), zr[:rows])
            ref = None if zr is None else zr[:rows]
            loss, stats = ops.loss_gradient(z, ref, work.tokens[start:stop], terms.rows(start, stop), work.scaling)
            losses.append(loss)
            parts.append(stats)
        grads.add(g[: last - first], hidden, first, last)
    stats = join(parts, work)
    return torch.cat(losses) if losses else stats.logp.clone(), stats, grads


class Statistics(torch.autograd.Function):
    """(hidden, head, bias) → rows' (logp, kl, entropy, ref_logp), differentiable in the first three."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, bias: Tensor | None, work: Work, ops: Ops) -> Any:
        stats = forward_statistics(ops, work)
        ctx.save_for_backward(hidden, head, bias)
        ctx.work, ctx.ops, ctx.stats = work, ops, stats.for_backward()
        ctx.set_materialize_grads(False)
        if stats.ref_logp is not None:
            ctx.mark_non_differentiable(stats.ref_logp)
        return stats.logp, stats.kl, stats.entropy, stats.ref_logp

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, logp: Tensor | None, kl: Tensor | None, entropy: Tensor | None, _: Any) -> Any:
        hidden, head, bias = ctx.saved_tensors  # unpacked for its check that nobody wrote over them
        up = Upstream(logp, kl, entropy)
        if all(x is None for x in up):
            return None, None, None, None, None
        needs = tuple(ctx.needs_input_grad[:3])
        scale = upstream_scale(up, hidden.dtype)
        up = Upstream(*(None if x is None else (x * scale).contiguous() for x in up))
        g = backward_statistics(ctx.ops, ctx.work, ctx.stats, up, needs)
        dtypes = (head.dtype, None if bias is None else bias.dtype)
        return (*hand_out(ctx.ops, g, 1 / scale, dtypes), None, None)


def upstream_scale(up: Upstream, dtype: torch.dtype) -> Tensor:
    """A power of two that brings the largest upstream gradient to about 1 in float16; 1 elsewhere.

    A mean over 16,384 tokens leaves 6e-5 a token, and times a probability of 1e-4 float16 has nothing left of it.
    """
    given = [x for x in up if x is not None]
    if dtype != torch.float16 or not given[0].numel():
        return torch.ones((), dtype=given[0].dtype, device=given[0].device)
    largest = torch.stack([x.abs().amax() for x in given]).amax()
    return torch.where(largest > 0, torch.exp2(-torch.log2(largest).ceil()), 1.0)


class Loss(torch.autograd.Function):
    """(hidden, head, bias) → (Σ rows' loss, statistics); the gradients are ready before backward is called."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, bias: Tensor | None, work: Work, terms: Terms, ops: Ops, wanted: bool
    ) -> Any:
        needs = tuple(wanted and x is not None and x.requires_grad for x in (hidden, head, bias))
        losses, stats, ctx.gradients = loss_pass(ops, work, terms, needs)  # type: ignore[arg-type]
        ctx.ops, ctx.dtypes = ops, (head.dtype, None if bias is None else bias.dtype)
        out = (losses.sum(), stats.logp, stats.ref_logp, stats.kl, stats.entropy)
        ctx.mark_non_differentiable(*(x for x in out[1:] if x is not None))
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, loss: Tensor, *_: Any) -> Any:
        g: Gradients | None = ctx.gradients
        if g is None:
            raise KlampError("policy_loss was differentiated twice; its gradients were handed out. Call it again.")
        ctx.gradients = None
        return (*hand_out(ctx.ops, g, loss, ctx.dtypes), None, None, None, None)


def hand_out(ops: Ops, g: Gradients, factor: Tensor, dtypes: tuple[torch.dtype, torch.dtype | None]) -> list[Any]:
    """``factor`` times the gradients of hidden, head and bias, the last two in ``dtypes``. Uses ``g`` up."""
    if g.hidden is not None:
        ops.scale(g.hidden, factor, g.hidden)
    head = None if g.head is None else narrow(ops, g.head, factor, dtypes[0])
    bias = None if g.bias is None or dtypes[1] is None else narrow(ops, g.bias, factor, dtypes[1])
    return [g.hidden, head, bias]


def narrow(ops: Ops, total: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """``factor · total`` in ``dtype``, written over ``total``: a head's gradient is too large to hold twice.

    A narrow value's place lies before its wide one's, so after a first block with a copy of its own, blocks that double
    in length never write where they still have to read.
    """
    wide = total.view(-1)
    if dtype.itemsize >= total.dtype.itemsize:
        ops.scale(wide, factor, wide)
        return total.to(dtype)
    narrow = wide.view(dtype)[: wide.numel()]
    start = min(4096, wide.numel())
    narrow[:start] = wide[:start] * factor
    while start < wide.numel():
        stop = min(2 * start, wide.numel())
        ops.scale(wide[start:stop], factor, narrow[start:stop])
        start = stop
    return narrow.view(total.shape)
