"""``∂L/∂hidden``, ``∂L/∂head`` and ``∂L/∂bias`` from ``G = ∂L/∂logits``: summed in float32, handed out in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from klamp.kernels.tiles import Tiles
from klamp.kernels.work import Lead, Ops, Side, Work, cut

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
