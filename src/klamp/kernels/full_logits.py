"""Statistics from whole logits, for heads that are more than a linear map. Shapes: logits [..., V], N rows of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from klamp.errors import ConfigError
from klamp.kernels.types import Ops, RowStats, Scaling, Sheet, TokenStats, Upstream, check_tokens, counted, lowest

# Rows copied at a time: enough to fill a GPU, few enough to be nothing beside the logits.
CHUNK = 256


def token_stats_from_logits(
    ops: Ops,
    logits: Tensor,
    tokens: Tensor,
    *,
    ref_logits: Tensor | None,
    ref_logp: Tensor | None,
    mask: Tensor | None,
    temperature: float,
) -> TokenStats:
    """logp, ref_logp, exact kl and entropy, differentiable in the logits."""
    if ref_logits is not None and ref_logp is not None:
        raise ConfigError("ref_logits and ref_logp were both given; the second follows from the first. Give one.")
    for name, x in (("logits", logits), ("ref_logits", ref_logits)):
        if x is not None and (not x.is_floating_point() or tuple(x.shape) != (*tokens.shape, logits.shape[-1])):
            raise ConfigError(
                f"{name} must be floating point and [*tokens.shape, V] with tokens {tuple(tokens.shape)}, got "
                f"{x.dtype} {tuple(x.shape)}. Drop the last position's logits and the first token."
            )
    flat = logits.reshape(-1, logits.shape[-1])
    ref = None if ref_logits is None else ref_logits.detach().reshape(-1, logits.shape[-1])
    index = counted(mask, tokens)
    index = torch.arange(flat.shape[0], device=flat.device) if index is None else index
    kept = tokens.reshape(-1).index_select(0, index).long()
    check_tokens(kept, flat.shape[1])
    rows = FromLogits.apply(flat, ref, kept, index, Scaling(temperature), ops)  # type: ignore[no-untyped-call]

    def spread(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.new_zeros(tokens.numel()).index_copy(0, index, x).view(tokens.shape)

    logp, kl, entropy, own = (spread(x) for x in rows)
    assert logp is not None
    assert entropy is not None
    if ref_logp is not None:
        own = spread(ref_logp.detach().reshape(-1).index_select(0, index).to(logp.dtype))
    return TokenStats(logp, own, kl, entropy)


class FromLogits(torch.autograd.Function):
    """logits [N, V] → rows' (logp, kl, entropy, ref_logp), differentiable in the first three."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, ref: Tensor | None, tokens: Tensor, index: Tensor, scaling: Scaling, ops: Ops
    ) -> Any:
        n = tokens.shape[0]
        wide = torch.promote_types(logits.dtype, torch.float32)
        out = Sheet(logits.new_zeros(9, n, dtype=wide), ref is not None)
        for a in range(0, n, CHUNK):
            b = min(n, a + CHUNK)
            z, zr = _pick(logits, ref, index[a:b])
            ops.statistics(z, zr, tokens[a:b], scaling, out.columns(a, b))
        stats = out.stats()
        ctx.save_for_backward(logits, ref, tokens, index)
        ctx.stats, ctx.scaling, ctx.ops = stats.for_backward(), scaling, ops
        return stats.returned(ctx)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, logp: Tensor | None, kl: Tensor | None, entropy: Tensor | None, _: Any) -> Any:
        logits, ref, tokens, index = ctx.saved_tensors
        grad = torch.zeros_like(logits)
        ref = None if kl is None else ref
        if not (logp is None and kl is None and entropy is None):
            for a in range(0, tokens.shape[0], CHUNK):
                b = min(tokens.shape[0], a + CHUNK)
                z, zr = _pick(logits, ref, index[a:b])
                up = Upstream(*(None if x is None else x[a:b].contiguous() for x in (logp, kl, entropy)))
                stats = RowStats(*(None if x is None else x[a:b] for x in ctx.stats))  # type: ignore[arg-type]
                ctx.ops.gradient(z, zr, tokens[a:b], stats, up, ctx.scaling)
                grad.index_copy_(0, index[a:b], z)
        return grad, None, None, None, None, None


def _pick(logits: Tensor, ref: Tensor | None, rows: Tensor) -> tuple[Tensor, Tensor | None]:
    """Copies of some rows, in one dtype and finite: the kernels write over what they are given."""
    low = lowest(logits.dtype)
    z = logits.index_select(0, rows).clamp_(min=low)
    return z, None if ref is None else ref.index_select(0, rows).to(z.dtype).clamp_(min=low)
