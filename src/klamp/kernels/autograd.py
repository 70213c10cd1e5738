"""The passes over chunks of rows that both kernels share: logits by matrix product, statistics, gradients.

Few rows of logits exist at a time (:class:`~klamp.kernels.types.Plan`), beside those that fit in the memory of a head's
gradient. What can wait comes after the first product: a GPU works while Python goes on.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from klamp.errors import KlampError
from klamp.kernels.chunking import Lead, Tiles
from klamp.kernels.loss_terms import Asked
from klamp.kernels.types import Logits, Ops, RowStats, Sheet, Side, Terms, Upstream, Work, cut, lowest, sheet

# A gradient of up to SPARE bytes is rounded into memory of its own: less than the logits took, which are gone by then.
# A larger one is rounded where it is, its first NEAR values by way of a copy.
SPARE, NEAR = 2**29, 2**20


class Gradients:
    """Row by row for the hidden states, summed over the rows for head and bias."""

    def __init__(self, ops: Ops, work: Work, side: Side, needs: tuple[bool, bool, bool], lead: Lead | None) -> None:
        self.work, self.side = work, side
        hidden, head = side.hidden, side.head
        self.wide = torch.promote_types(hidden.dtype, torch.float32)
        # Rows outside the mask are never visited: they need their zeros from the start.
        empty = torch.empty_like if work.index is None else torch.zeros_like
        self.hidden = empty(hidden, memory_format=torch.contiguous_format) if needs[0] else None
        # The first product overwrites: a large head's gradient is not first written as zeros and read back.
        start = torch.zeros if work.tokens.shape[0] == 0 else torch.empty
        self.head = self.tiles = None
        if lead is not None:
            padded = ops.width(head.shape[0])
            memory = head.new_empty(padded * head.shape[1], dtype=self.wide)
            self.head = memory[: head.numel()].view(head.shape)
            logits = memory.view(hidden.dtype)[: padded * lead.rows]
            self.tiles = Tiles(logits, lead.rows, head.shape[0], padded, lead.width, 0, lead.rows)
        elif needs[1]:
            self.head = start(head.shape, dtype=self.wide, device=head.device)
        self.bias = torch.zeros(head.shape[0], dtype=self.wide, device=head.device) if needs[2] else None

    def add(self, g: Tensor, hidden: Tensor, start: int, stop: int) -> None:
        """Take in the gradient ``g`` [rows, V] of counted rows ``start:stop``, whose hidden states are given."""
        if self.hidden is not None:
            if self.work.index is None:
                torch.mm(g, self.side.head, out=cut(self.hidden, start, stop))
            else:
                self._put(torch.mm(g, self.side.head), start, stop)
        if self.head is not None:
            product(g.t(), hidden, self.head, add=start > 0)
        if self.bias is not None:
            self.bias += g.sum(0, dtype=self.bias.dtype)

    def add_lead(self, tiles: Tiles, hidden: Tensor, chunk: int) -> None:
        """Take in the gradient of the first rows, which lies in ``tiles``; the head's gradient takes their place."""
        rows = tiles.shape[0]
        if self.hidden is not None:
            total = hidden.new_empty(min(chunk, rows), hidden.shape[1], dtype=self.wide)
            for start in range(0, rows, chunk):
                stop = min(start + chunk, rows)
                for columns, g in tiles[start:stop].blocks():
                    product(g, self.side.head[columns], total[: stop - start], add=columns.start > 0)
                self._put(total[: stop - start], start, stop)
            del total
        if self.bias is not None:
            for columns, g in tiles.blocks():
                self.bias[columns] += g.sum(0, dtype=self.bias.dtype)
        assert self.head is not None
        # A sum that nothing follows can be rounded at once; float16 might overflow before it is divided.
        if rows == self.work.tokens.shape[0] and hidden.dtype == self.work.policy.head.dtype == torch.bfloat16:
            self.head = self.head.view(-1).view(torch.bfloat16)[: self.head.numel()].view(self.head.shape)
        replace(tiles, hidden, self.head)

    def _put(self, rows: Tensor, start: int, stop: int) -> None:
        """Gradients of the hidden states of counted rows ``start:stop`` in their places."""
        assert self.hidden is not None
        if self.work.index is None:
            self.hidden[start:stop].copy_(rows)
        else:
            self.hidden.index_copy_(0, self.work.index[start:stop], rows.to(self.hidden.dtype))


def replace(tiles: Tiles, hidden: Tensor, head: Tensor) -> None:
    """``Gᵀ · hidden`` into ``head`` [V, H], which shares its memory with G.

    Where a column takes more room in ``head`` than in G, a block's place begins where the blocks before it have ended,
    so the last block goes first; where it takes less, the first. A block's own G may be in the way: then by a copy.
    """
    bytes_g, bytes_head = tiles.depth * hidden.element_size(), head.shape[1] * head.element_size()
    blocks = list(tiles.blocks())
    for columns, g in blocks if bytes_head < bytes_g else reversed(blocks):
        own = head[columns]
        apart = columns.stop * bytes_head <= columns.start * bytes_g
        apart |= (columns.start + g.stride(0)) * bytes_g <= columns.start * bytes_head
        if apart:
            product(g.t(), hidden, own)
        else:
            own.copy_(product(g.t(), hidden, torch.empty_like(own)))


def product(a: Tensor, b: Tensor, out: Tensor, *, add: bool = False) -> Tensor:
    """``out = a · b``, or ``out += a · b``, with every sum in float32 or wider."""
    if a.dtype == out.dtype:
        return torch.addmm(out, a, b, out=out) if add else torch.mm(a, b, out=out)
    if a.is_cuda:
        to = out.dtype
        return torch.addmm(out, a, b, out_dtype=to, out=out) if add else torch.mm(a, b, out_dtype=to, out=out)
    return product(a.to(out.dtype), b.to(out.dtype), out, add=add)


def hand_out(ops: Ops, g: Gradients, factor: Tensor, dtypes: tuple[torch.dtype, torch.dtype | None]) -> list[Any]:
    """``factor`` times the gradients of hidden, head and bias, the last two in ``dtypes``. Uses ``g`` up."""
    if g.hidden is not None:
        ops.scale(g.hidden, factor, g.hidden)
    head = None if g.head is None else narrow(ops, g.head, factor, dtypes[0])
    bias = None if g.bias is None or dtypes[1] is None else narrow(ops, g.bias, factor, dtypes[1])
    return [g.hidden, head, bias]


def narrow(ops: Ops, total: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """``factor · total`` in ``dtype``; a large one written over ``total``, for it is too large to hold twice.

    A narrow value's place lies before its wide one's, so after a first block with a copy of its own, blocks that double
    in length never write where they still have to read.
    """
    wide = total.view(-1)
    if dtype.itemsize >= total.dtype.itemsize:
        ops.scale(wide, factor, wide)
        return total.to(dtype)
    if wide.numel() * dtype.itemsize <= SPARE:
        own = torch.empty_like(total, dtype=dtype)
        ops.scale(wide, factor, own.view(-1))
        return own
    narrow = wide.view(dtype)[: wide.numel()]
    start = min(NEAR, wide.numel())
    narrow[:start] = wide[:start] * factor
    while start < wide.numel():
        stop = min(2 * start, wide.numel())
        ops.scale(wide[start:stop], factor, narrow[start:stop])
        start = stop
    return narrow.view(total.shape)


class Turn(Protocol):
    """What is done with the logits of counted rows ``start:stop`` of both models, where ``z`` may be overwritten."""

    def __call__(self, z: Logits, ref: Tensor | None, start: int, stop: int) -> None: ...


def buffer(ops: Ops, side: Side, rows: int) -> Tensor:
    """Room for ``rows`` of logits in the dtype of the hidden states."""
    vocabulary = side.head.shape[0]
    width = ops.width(vocabulary)
    made = side.hidden.new_empty(rows, width)
    return made if width == vocabulary else made[:, :vocabulary]


def logits(side: Side, hidden: Tensor, out: Tensor) -> Tensor:
    """``hidden · headᵀ + bias`` into ``out``."""
    if side.bias is None:
        return torch.mm(hidden, side.head.t(), out=out)
    return torch.addmm(side.bias, hidden, side.head.t(), out=out)


def cast(side: Side) -> Side:
    """The same in one dtype, that of the hidden states; a head of another dtype is copied."""
    dtype = side.hidden.dtype
    if side.bias is None and side.head.dtype == dtype:
        return side
    # A bias of -inf excludes a token; so does the lowest logit, and no sum meets inf - inf.
    bias = None if side.bias is None else side.bias.to(dtype).clamp(min=lowest(dtype))
    return Side(side.hidden, side.head.to(dtype), bias)


def visit(ops: Ops, work: Work, reference: Side | None, z: Logits, first: int, chunk: int, turn: Turn) -> None:
    """Take ``turn`` with the policy's logits ``z`` of counted rows from ``first`` on, the reference's beside them."""
    rows = z.shape[0]
    zr = None if reference is None else buffer(ops, reference, min(rows, chunk))
    for at in range(0, rows, chunk):
        end = min(rows, at + chunk)
        ref = None
        if reference is not None and zr is not None:
            ref = logits(reference, work.rows(reference.hidden, first + at, first + end), cut(zr, 0, end - at))
        turn(z if end - at == rows else z[at:end], ref, first + at, first + end)


def forward(ops: Ops, work: Work, turn: Turn) -> None:
    """Take ``turn`` with the logits of every counted row."""
    policy, reference = cast(work.policy), None if work.reference is None else cast(work.reference)
    n, chunk = work.tokens.shape[0], ops.plan(work, trains_head=False).chunk
    z = buffer(ops, policy, min(n, chunk))
    for start in range(0, n, chunk):
        stop = min(n, start + chunk)
        own = logits(policy, work.rows(policy.hidden, start, stop), cut(z, 0, stop - start))
        visit(ops, work, reference, own, start, chunk, turn)


def descend(ops: Ops, work: Work, ref: Side | None, needs: tuple[bool, bool, bool], turn: Turn) -> Gradients:
    """The same where ``turn`` leaves the gradient of the logits in their place: gradients of hidden, head and bias."""
    policy, reference = cast(work.policy), None if ref is None else cast(ref)
    n, done = work.tokens.shape[0], 0
    plan = ops.plan(work, trains_head=needs[1])
    grads = Gradients(ops, work, policy, needs, plan.lead)
    if plan.lead is not None and grads.tiles is not None:
        done = plan.lead.rows
        hidden = work.rows(policy.hidden, 0, done)
        for columns, block in grads.tiles.blocks():
            bias = None if policy.bias is None else policy.bias[columns]
            logits(Side(hidden, policy.head[columns], bias), hidden, block)
        visit(ops, work, reference, grads.tiles, 0, plan.lead.chunk, turn)
        grads.add_lead(grads.tiles, hidden, plan.lead.chunk)
        del hidden
    g = buffer(ops, policy, min(n - done, plan.block))
    for start in range(done, n, plan.block):
        stop = min(n, start + plan.block)
        hidden = work.rows(policy.hidden, start, stop)
        z = logits(policy, hidden, cut(g, 0, stop - start))
        visit(ops, work, reference, z, start, plan.chunk, turn)
        grads.add(z, hidden, start, stop)
    return grads


def forward_statistics(ops: Ops, work: Work) -> RowStats:
    """logp, ref_logp, kl and entropy of the counted rows."""
    out = sheet(work)

    def turn(z: Logits, ref: Tensor | None, start: int, stop: int) -> None:
        ops.statistics(z, ref, cut(work.tokens, start, stop), work.scaling, out.columns(start, stop))

    forward(ops, work, turn)
    return out.stats()


def backward_statistics(
    ops: Ops, work: Work, stats: RowStats, up: Upstream, needs: tuple[bool, bool, bool]
) -> Gradients:
    """Gradients of hidden, head and bias from those of the statistics; logits are computed again, chunk by chunk."""

    def turn(z: Logits, ref: Tensor | None, start: int, stop: int) -> None:
        own = RowStats(*(None if x is None else cut(x, start, stop) for x in stats))  # type: ignore[arg-type]
        ups = Upstream(*(None if x is None else cut(x, start, stop) for x in up))
        ops.gradient(z, ref, cut(work.tokens, start, stop), own, ups, work.scaling)

    return descend(ops, work, None if up.kl is None else work.reference, needs, turn)


def loss_pass(ops: Ops, work: Work, asked: Asked, needs: tuple[bool, bool, bool]) -> tuple[Sheet, Gradients]:
    """Each counted row's loss, its statistics, and the gradients of the rows' sum, logits visited once."""
    made: list[tuple[Terms, Sheet]] = []

    def turn(z: Logits, ref: Tensor | None, start: int, stop: int) -> None:
        if not made:  # only now: after the first product has started
            made.append((asked.terms(work, once=not needs[1]), sheet(work)))
        terms, out = made[0]
        tokens = cut(work.tokens, start, stop)
        ops.loss_gradient(z, ref, tokens, terms.rows(start, stop), work.scaling, out.columns(start, stop))

    grads = descend(ops, work, work.reference, needs, turn)
    return made[0][1] if made else sheet(work), grads


class Statistics(torch.autograd.Function):
    """(hidden, head, bias) → rows' (logp, kl, entropy, ref_logp), differentiable in the first three."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, bias: Tensor | None, work: Work, ops: Ops) -> Any:
        stats = forward_statistics(ops, work)
        ctx.save_for_backward(hidden, head, bias)
        ctx.work, ctx.ops, ctx.stats = work, ops, stats.for_backward()
        return stats.returned(ctx)

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
        ctx: Any, hidden: Tensor, head: Tensor, bias: Tensor | None, work: Work, asked: Asked, ops: Ops, wanted: bool
    ) -> Any:
        needs = tuple(wanted and x is not None and x.requires_grad for x in (hidden, head, bias))
        found, ctx.gradients = loss_pass(ops, work, asked, needs)  # type: ignore[arg-type]
        stats = found.stats()
        ctx.ops, ctx.dtypes = ops, (head.dtype, None if bias is None else bias.dtype)
        out = (found.loss.sum(), stats.logp, stats.ref_logp, stats.kl, stats.entropy)
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
