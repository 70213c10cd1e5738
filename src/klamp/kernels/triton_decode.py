# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped, index"
"""Kernels of a decoding step: rotated keys into the cache, attention over its filled part, and ``act(g) u``.

Everything in a step but its matrix products is small, so that its cost is the number of kernels. Arithmetic is in
float32, rounded once. Shapes: n sequences with one new token each, K key heads of G query heads, D numbers a head, W
columns of the cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from klamp.kernels.triton_statistics import INTERPRETED, LOG2E

HIDDEN = tl.constexpr(-1.0e30)  # a score that adds nothing; finite, so that a row of them is no NaN
COLUMNS = 64
"""Columns of the cache that a program takes at a time."""


@triton.jit
def _turned(x_ptr, w_ptr, cos_ptr, sin_ptr, eps, shift, HALF: tl.constexpr, SIZE: tl.constexpr, NEXT: tl.constexpr):
    """The two halves of a head, normalised where it has a norm, rotated by the token's position.

    cos and sin of the second half are NEXT numbers behind those of the first: none, where they are given once.
    """
    at = tl.arange(0, HALF)
    a = tl.load(x_ptr + at).to(tl.float32)
    b = tl.load(x_ptr + HALF + at).to(tl.float32)
    if w_ptr is not None:
        scale = 1.0 / tl.sqrt((tl.sum(a * a, 0) + tl.sum(b * b, 0)) / SIZE + eps)
        a = a * scale * (tl.load(w_ptr + at).to(tl.float32) + shift)
        b = b * scale * (tl.load(w_ptr + HALF + at).to(tl.float32) + shift)
    c = a * tl.load(cos_ptr + at).to(tl.float32) - b * tl.load(sin_ptr + at).to(tl.float32)
    d = b * tl.load(cos_ptr + NEXT + at).to(tl.float32) + a * tl.load(sin_ptr + NEXT + at).to(tl.float32)
    return c, d


@triton.jit
def _place(
    q_ptr, k_ptr, v_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, column_ptr, out_ptr, keys_ptr, values_ptr,
    q_row, k_row, v_row, cache_row, cache_head, eps, shift,
    HEADS: tl.constexpr, KEYS: tl.constexpr, SIZE: tl.constexpr, NEXT: tl.constexpr,
):  # fmt: skip
    """One program a sequence and head: a query to ``out``, a key or a value to the cache's next column."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    HALF: tl.constexpr = SIZE // 2
    at = tl.arange(0, HALF)
    cos_ptr += row * (HALF + NEXT)
    sin_ptr += row * (HALF + NEXT)
    if head < HEADS:
        c, d = _turned(q_ptr + row * q_row + head * SIZE, q_norm_ptr, cos_ptr, sin_ptr, eps, shift, HALF, SIZE, NEXT)
        out_ptr += (row * HEADS + head) * SIZE
        tl.store(out_ptr + at, c.to(out_ptr.dtype.element_ty))
        tl.store(out_ptr + HALF + at, d.to(out_ptr.dtype.element_ty))
    elif head < HEADS + KEYS:
        own = head - HEADS
        c, d = _turned(k_ptr + row * k_row + own * SIZE, k_norm_ptr, cos_ptr, sin_ptr, eps, shift, HALF, SIZE, NEXT)
        keys_ptr += row * cache_row + own.to(tl.int64) * cache_head + tl.load(column_ptr) * SIZE
        tl.store(keys_ptr + at, c.to(keys_ptr.dtype.element_ty))
        tl.store(keys_ptr + HALF + at, d.to(keys_ptr.dtype.element_ty))
    else:
        own = head - HEADS - KEYS
        v_ptr += row * v_row + own * SIZE
        values_ptr += row * cache_row + own.to(tl.int64) * cache_head + tl.load(column_ptr) * SIZE
        tl.store(values_ptr + at, tl.load(v_ptr + at))
        tl.store(values_ptr + HALF + at, tl.load(v_ptr + HALF + at))


@triton.jit
def _attend(
    q_ptr, keys_ptr, values_ptr, seen_ptr, live_ptr, column_ptr, sinks_ptr, out_ptr,
    seen_row, cache_row, cache_head, scale, cap,
    GROUPS: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One program a sequence and key head: its query heads over the last WINDOW columns up to the new token's, or all.

    A sequence that has ended is passed over: its row is 0. The interpreter cannot loop to a number that it loaded: it
    goes over all WIDTH columns, which is 0 elsewhere. A sink is a score of its own beside those of the columns.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    own = tl.arange(0, ROWS)
    size = tl.arange(0, SIZE)
    place = (row * heads + head) * (GROUPS * SIZE) + own[:, None] * SIZE + size[None, :]
    there = (own < GROUPS)[:, None] & (size >= 0)[None, :]
    q = tl.load(q_ptr + place, mask=there, other=0.0)
    keys_ptr += row * cache_row + head.to(tl.int64) * cache_head
    values_ptr += row * cache_row + head.to(tl.int64) * cache_head
    seen_ptr += row * seen_row
    end = tl.where(tl.load(live_ptr + row) != 0, tl.load(column_ptr) + 1, 0)
    first = end - end
    if WINDOW > 0:
        first = tl.maximum(end - WINDOW, 0)
    m = tl.full([ROWS], HIDDEN, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if sinks_ptr is not None:
        m = tl.load(sinks_ptr + head * GROUPS + own, mask=own < GROUPS, other=0.0).to(tl.float32) * LOG2E
        total += 1.0
    found = tl.zeros([ROWS, SIZE], tl.float32)
    for start in tl.range(0 if WIDTH > 0 else first, WIDTH if WIDTH > 0 else end, COLUMNS, num_stages=STAGES):
        at = start + tl.arange(0, COLUMNS)
        inside = (at < end) & (at >= first)
        seen = tl.load(seen_ptr + at, mask=inside, other=0) != 0
        where = at[:, None] * SIZE + size[None, :]
        k = tl.load(keys_ptr + where, mask=inside[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k)) * scale
        if CAPPED:
            scores = cap * (2.0 * tl.sigmoid(2.0 * scores / cap) - 1.0)  # cap · tanh(scores / cap)
        scores = scores * LOG2E
        scores = tl.where(seen[None, :], scores, HIDDEN)
        top = tl.maximum(m, tl.max(scores, 1))
        p = tl.where(seen[None, :], tl.exp2(scores - top[:, None]), 0.0)
        left = tl.exp2(m - top)
        total = total * left + tl.sum(p, 1)
        v = tl.load(values_ptr + where, mask=inside[:, None], other=0.0)
        found = found * left[:, None] + tl.dot(p.to(v.dtype), v)
        m = top
    found = found / tl.maximum(total, 1e-30)[:, None]
    tl.store(out_ptr + place, found.to(out_ptr.dtype.element_ty), mask=there)


@triton.jit
def _gated(g_ptr, u_ptr, out_ptr, g_row, u_row, width, GELU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(g_ptr + row * g_row + at, mask=at < width).to(tl.float32)
    u = tl.load(u_ptr + row * u_row + at, mask=at < width).to(tl.float32)
    # GELU by its tangent, g (1 + tanh(y)) / 2 with y = sqrt(2 / π) (g + 0.044715 g³), is g sigmoid(2 y).
    x = 1.5957691216057308 * (g + 0.044715 * g * g * g) if GELU else g
    found = g / (1.0 + tl.exp(-x)) * u
    tl.store(out_ptr + row * width + at, found.to(out_ptr.dtype.element_ty), mask=at < width)


def place(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    norms: tuple[Tensor | None, Tensor | None, float, float],
    turn: tuple[Tensor, Tensor],
    column: Tensor,
    cache: tuple[Tensor, Tensor],
) -> Tensor:
    """Queries [n, K G D] rotated, of ``q`` [n, K G D]; ``k`` and ``v`` [n, K D] go into ``column`` of the cache.

    ``norms`` are the weights of the queries' and the keys' norms, if any, their eps and what is added to the weights;
    ``turn`` cos and sin [n, D], or [n, D / 2] where the two halves are alike.
    """
    keys, values = cache
    size, key_heads = keys.shape[-1], keys.shape[1]
    heads = q.shape[1] // size
    out = q.new_empty(q.shape)
    _place[(len(q), heads + 2 * key_heads)](
        q, k, v, norms[0], norms[1], *turn, column, out, keys, values,
        q.stride(0), k.stride(0), v.stride(0), keys.stride(0), keys.stride(1), norms[2], norms[3],
        HEADS=heads, KEYS=key_heads, SIZE=size, NEXT=turn[0].shape[1] - size // 2, num_warps=1,
    )  # fmt: skip
    return out


def attend(
    q: Tensor,
    cache: tuple[Tensor, Tensor],
    seen: Tensor,
    live: Tensor,
    column: Tensor,
    scale: float,
    *,
    window: int | None = None,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention [n, K G D] of one new token a sequence over the columns up to ``column`` that it sees.

    Args:
        q: rotated queries [n, K G D].
        cache: keys and values [n, K, W, D].
        seen: [n, W] booleans, which columns are no padding.
        live: [n] booleans, which sequences go on.
        column: [1] the new token's column.
        scale: what scores are multiplied by.
        window: columns that are seen, the new token's included. None: all.
        cap: scores become ``cap · tanh(score / cap)``.
        sinks: [K G] a score of each head that takes its share of the softmax and adds nothing.
    """
    keys, values = cache
    size, key_heads = keys.shape[-1], keys.shape[1]
    groups = q.shape[1] // (size * key_heads)
    out = torch.empty_like(q)
    _attend[(len(q), key_heads)](
        q, keys, values, seen.view(torch.uint8), live.view(torch.uint8), column, sinks, out,
        seen.stride(0), keys.stride(0), keys.stride(1), scale, cap or 1.0,
        GROUPS=groups, ROWS=max(16, 1 << (groups - 1).bit_length()), SIZE=size, COLUMNS=COLUMNS,
        STAGES=3 if size <= 128 else 2, WINDOW=window or 0, CAPPED=cap is not None,
        WIDTH=seen.shape[1] if INTERPRETED else 0, num_warps=4,
    )  # fmt: skip
    return out


def gated(gate: Tensor, up: Tensor, activation: str = "silu") -> Tensor:
    """``act(gate) · up`` of rows; ``activation`` is silu, or gelu by its tangent."""
    out = gate.new_empty(gate.shape)
    width = gate.shape[1]
    block = min(1024, triton.next_power_of_2(width))
    _gated[(len(gate), triton.cdiv(width, block))](
        gate, up, out, gate.stride(0), up.stride(0), width, GELU=activation == "gelu", BLOCK=block, num_warps=4
    )
    return out
