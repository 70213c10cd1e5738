"""``∂logp/∂h``, ``∂kl/∂h`` and ``∂entropy/∂h`` of every row, computed beside the statistics: any loss in one pass.

The statistics s of a row depend on its hidden state h alone while the head W is frozen, so the gradient of a loss is
linear in what it asks of them::

    ∂L/∂h = Σ_s ∂L/∂s · Wᵀ ∂s/∂x        ∂logp/∂x = (onehot - p) ∂z/∂x     ∂kl/∂x = p (d - kl) ∂z/∂x
                                         ∂entropy/∂x = -p (log p + H) ∂z/∂x

with x the logits and z their scaled form. The vectors ``Wᵀ ∂s/∂x`` need no loss: the forward pass computes them while
the logits are there, and the backward pass is a sum of rows. Matrix products of an exact KL: policy, reference, and one
for each of the two vectors, in place of five where the backward pass computes the logits again.

Shapes: n counted rows, N rows in all, k statistics whose vectors are kept, [k c, V] logits of c rows at a time.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from klamp.errors import unknown
from klamp.kernels.autograd import Gradients, backward_statistics, buffer, cast, hand_out, logits, upstream_scale
from klamp.kernels.types import Ops, RowStats, Upstream, Work, cut, sheet

STATISTICS = ("logp", "kl", "entropy")


def statistics_of(gradient_of: Collection[str], work: Work) -> tuple[str, ...]:
    """The statistics whose vectors are kept, in order; refuses names that are none."""
    for name in gradient_of:
        if name not in STATISTICS:
            raise unknown("gradient_of", name, STATISTICS)
    return tuple(s for s in STATISTICS if s in gradient_of and (s != "kl" or work.reference is not None))


def forward(ops: Ops, work: Work, names: tuple[str, ...]) -> tuple[RowStats, Tensor, int]:
    """The rows' statistics, their vectors [k n, H], and how many rows c were taken at a time.

    Of each c rows the vectors of the first statistic come first, then those of the second.
    """
    policy, reference = cast(work.policy), None if work.reference is None else cast(work.reference)
    n, out = work.tokens.shape[0], sheet(work)
    slots = max(len(names), 1 if reference is None else 2)
    chunk = max(1, min(n, ops.rows_at_a_time(work, slots)))
    memory = buffer(ops, policy, slots * chunk)
    found = policy.hidden.new_empty(len(names) * n, policy.hidden.shape[1])
    for start in range(0, n, chunk):
        stop = min(n, start + chunk)
        rows = stop - start
        own = cut(memory, 0, slots * rows)
        parts = list(torch.split(own, rows))
        z = logits(policy, work.rows(policy.hidden, start, stop), parts[0])
        ref = None
        if reference is not None:
            ref = logits(reference, work.rows(reference.hidden, start, stop), parts[1])
        ops.jacobians(z, ref, parts, names, cut(work.tokens, start, stop), work.scaling, out.columns(start, stop))
        if names:
            torch.mm(cut(own, 0, len(names) * rows), policy.head, out=found[len(names) * start : len(names) * stop])
    return out.stats(), found, chunk


class OnePass(torch.autograd.Function):
    """hidden → rows' (logp, kl, entropy, ref_logp), differentiable while head and bias are constants."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, work: Work, ops: Ops, names: tuple[str, ...]) -> Any:
        stats, ctx.vectors, ctx.chunk = forward(ops, work, names)
        ctx.save_for_backward(hidden, head)
        ctx.work, ctx.ops, ctx.names, ctx.stats = work, ops, names, stats.for_backward()
        return stats.returned(ctx)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, logp: Tensor | None, kl: Tensor | None, entropy: Tensor | None, _: Any) -> Any:
        hidden, _head = ctx.saved_tensors  # unpacked for its check that nobody wrote over them
        up = Upstream(logp, kl, entropy)
        if all(x is None for x in up):
            return (None,) * 5
        asked = {name: x for name, x in zip(STATISTICS, up, strict=True) if x is not None}
        if not set(asked) <= set(ctx.names):
            return (_recomputed(ctx, up, hidden.dtype), None, None, None, None)
        work: Work = ctx.work
        # Rows outside the mask are never visited: they need their zeros from the start.
        empty = torch.empty_like if work.index is None else torch.zeros_like
        out = empty(work.policy.hidden, memory_format=torch.contiguous_format)
        weights = [asked[name].contiguous() if name in asked else None for name in ctx.names]
        ctx.ops.combine(ctx.vectors, weights, ctx.chunk, work.index, out)
        return out, None, None, None, None


def _recomputed(ctx: Any, up: Upstream, dtype: torch.dtype) -> Tensor | None:
    """The gradient by way of the logits, computed again: for a statistic whose vectors were not kept."""
    scale = upstream_scale(up, dtype)
    scaled = Upstream(*(None if x is None else (x * scale).contiguous() for x in up))
    g: Gradients = backward_statistics(ctx.ops, ctx.work, ctx.stats, scaled, (True, False, False))
    found: Tensor | None = hand_out(ctx.ops, g, 1 / scale, (dtype, None))[0]
    return found
