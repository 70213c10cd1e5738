# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped, index"
"""Kernels of a decoding step: attention that rotates the new token and keeps its key and value, and ``act(g) u``.

Everything in a step but its matrix products is small, so that its cost is the number of kernels. Arithmetic is in
float32, rounded once. Shapes: n sequences with one new token each, K key heads of G query heads, D numbers a head, W
columns of the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from klamp.kernels.triton_statistics import INTERPRETED, LOG2E

HIDDEN = tl.constexpr(-1.0e30)  # a score that adds nothing; finite, so that a row of them is no NaN
COLUMNS, STAGES, WARPS = 64, 2, 4
"""Columns of the cache that a program takes at a time, how many times that is on its way, and its warps."""


@triton.jit
def _turned(x_ptr, w_ptr, cos_ptr, sin_ptr, own, there, eps, shift, SIZE: tl.constexpr, NEXT: tl.constexpr):
    """Heads ``own`` [R, 1] of a token, normalised where they have a norm, rotated by its position: [R, D] in float32.

    A number's partner is the one half a head away. cos and sin of the second half are NEXT numbers behind those of the
    first: none, where they are given once.
    """
    HALF: tl.constexpr = SIZE // 2
    at = tl.arange(0, SIZE)[None, :]
    partner = tl.where(at < HALF, at + HALF, at - HALF)
    x = tl.load(x_ptr + own * SIZE + at, mask=there, other=0.0).to(tl.float32)
    y = tl.load(x_ptr + own * SIZE + partner, mask=there, other=0.0).to(tl.float32)
    if w_ptr is not None:
        scale = 1.0 / tl.sqrt(tl.sum(x * x, 1) / SIZE + eps)
        x = x * scale[:, None] * (tl.load(w_ptr + at).to(tl.float32) + shift)
        y = y * scale[:, None] * (tl.load(w_ptr + partner).to(tl.float32) + shift)
    turn = tl.where(at < HALF, at, at - HALF + NEXT)
    sine = tl.load(sin_ptr + turn).to(tl.float32)
    return x * tl.load(cos_ptr + turn).to(tl.float32) + y * tl.where(at < HALF, -sine, sine)


@triton.jit
def _kept(
    k_ptr, v_ptr, k_norm_ptr, cos_ptr, sin_ptr, key_ptr, value_ptr, eps, shift, SIZE: tl.constexpr, NEXT: tl.constexpr
):
    """The new token's key and value of a head [1, D] in float32, as they were rounded for the cache and put there."""
    one = tl.arange(0, 1)[:, None]
    at = one + tl.arange(0, SIZE)[None, :]
    k = _turned(k_ptr, k_norm_ptr, cos_ptr, sin_ptr, one, at >= 0, eps, shift, SIZE, NEXT).to(key_ptr.dtype.element_ty)
    v = tl.load(v_ptr + at)
    tl.store(key_ptr + at, k)
    tl.store(value_ptr + at, v)
    return k.to(tl.float32), v.to(tl.float32)


@triton.jit
def _capped(scores, cap, CAPPED: tl.constexpr):
    """Scores in base two, after ``cap · tanh(score / cap)`` where there is a cap."""
    if CAPPED:
        scores = cap * (2.0 * tl.sigmoid(2.0 * scores / cap) - 1.0)
    return scores * LOG2E


@triton.jit
def _begun(score, sinks_ptr, at, there):
    """Maximum and sum of a softmax that has the new token's ``score``, which sees itself, and the sink's."""
    m = score
    total = tl.zeros_like(score) + 1.0
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + at, mask=there, other=0.0).to(tl.float32) * LOG2E
        m = tl.maximum(score, sink)
        total = tl.exp2(score - m) + tl.exp2(sink - m)
    return m, total


@triton.jit
def _attend(
    q_ptr, k_ptr, v_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr,
    keys_ptr, values_ptr, seen_ptr, live_ptr, column_ptr, sinks_ptr, out_ptr,
    q_row, k_row, v_row, seen_row, cache_row, cache_head, eps, shift, scale, cap,
    GROUPS: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, NEXT: tl.constexpr, COLUMNS: tl.constexpr,
    STAGES: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One program a sequence and key head: its key and value into the new column of the cache, then its query heads
    over that column and the others of the last WINDOW, or all.

    A sequence that has ended is passed over: its row is 0. The interpreter cannot loop to a number that it loaded: it
    goes over all WIDTH columns, which is 0 elsewhere. A sink is a score of its own beside those of the columns.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    own = tl.arange(0, ROWS)
    size = tl.arange(0, SIZE)
    there = (own < GROUPS)[:, None] & (size >= 0)[None, :]
    column = tl.load(column_ptr)
    live = tl.load(live_ptr + row) != 0
    cos_ptr += row * (SIZE // 2 + NEXT)
    sin_ptr += row * (SIZE // 2 + NEXT)
    q_ptr += row * q_row + head * (GROUPS * SIZE)
    q = _turned(q_ptr, q_norm_ptr, cos_ptr, sin_ptr, own[:, None], there, eps, shift, SIZE, NEXT)
    q = q.to(keys_ptr.dtype.element_ty)
    keys_ptr += row * cache_row + head.to(tl.int64) * cache_head
    values_ptr += row * cache_row + head.to(tl.int64) * cache_head
    k, v = _kept(
        k_ptr + row * k_row + head * SIZE, v_ptr + row * v_row + head * SIZE, k_norm_ptr, cos_ptr, sin_ptr,
        keys_ptr + column * SIZE, values_ptr + column * SIZE, eps, shift, SIZE, NEXT,
    )  # fmt: skip
    score = _capped(tl.sum(q.to(tl.float32) * k, 1) * scale, cap, CAPPED)
    m, total = _begun(score, sinks_ptr, head * GROUPS + own, own < GROUPS)
    found = tl.exp2(score - m)[:, None] * v
    seen_ptr += row * seen_row
    end = tl.where(live, column, 0)
    first = end - end
    if WINDOW > 0:
        first = tl.maximum(end + 1 - WINDOW, 0)
    for start in tl.range(0 if WIDTH > 0 else first, WIDTH if WIDTH > 0 else end, COLUMNS, num_stages=STAGES):
        at = start + tl.arange(0, COLUMNS)
        inside = (at < end) & (at >= first)
        seen = tl.load(seen_ptr + at, mask=inside, other=0) != 0
        where = at[:, None] * SIZE + size[None, :]
        keys = tl.load(keys_ptr + where, mask=inside[:, None], other=0.0)
        scores = tl.where(seen[None, :], _capped(tl.dot(q, tl.trans(keys)) * scale, cap, CAPPED), HIDDEN)
        top = tl.maximum(m, tl.max(scores, 1))
        p = tl.where(seen[None, :], tl.exp2(scores - top[:, None]), 0.0)
        left = tl.exp2(m - top)
        total = total * left + tl.sum(p, 1)
        values = tl.load(values_ptr + where, mask=inside[:, None], other=0.0)
        found = found * left[:, None] + tl.dot(p.to(values.dtype), values)
        m = top
    found = tl.where(live, found / total[:, None], 0.0)
    place = (row * tl.num_programs(1) + head) * (GROUPS * SIZE) + own[:, None] * SIZE + size[None, :]
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


class Rotary(NamedTuple):
    """How queries and keys of a layer's heads are made: their norms, if any, and the token's position."""

    query: Tensor | None
    """[D] weight of the queries' norm."""
    key: Tensor | None
    eps: float
    shift: float
    """What is added to the weights."""
    cos: Tensor
    """[n, D], or [n, D / 2] where the two halves are alike."""
    sin: Tensor


def attend(
    qkv: Sequence[Tensor],
    rotary: Rotary,
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
    """Attention [n, K G D] of one new token a sequence over what it sees; its key and value go into the cache.

    Args:
        qkv: [n, K G D], [n, K D] and [n, K D] of the new tokens, before norms and rotation.
        rotary: their norms and positions.
        cache: keys and values [n, K, W, D]; ``column`` is written.
        seen: [n, W] booleans, which columns are no padding.
        live: [n] booleans, which sequences go on.
        column: [1] the new token's column.
        scale: what scores are multiplied by.
        window: columns that are seen, the new token's included. None: all.
        cap: scores become ``cap · tanh(score / cap)``.
        sinks: [K G] a score of each head that takes its share of the softmax and adds nothing.
    """
    q, k, v = qkv
    keys, values = cache
    size, key_heads = keys.shape[-1], keys.shape[1]
    groups = q.shape[1] // (size * key_heads)
    out = q.new_empty(q.shape)
    _attend[(len(q), key_heads)](
        q, k, v, rotary.query, rotary.key, rotary.cos, rotary.sin,
        keys, values, seen.view(torch.uint8), live.view(torch.uint8), column, sinks, out,
        q.stride(0), k.stride(0), v.stride(0), seen.stride(0), keys.stride(0), keys.stride(1),
        rotary.eps, rotary.shift, scale, cap or 1.0,
        GROUPS=groups, ROWS=max(16, 1 << (groups - 1).bit_length()), SIZE=size, NEXT=rotary.cos.shape[1] - size // 2,
        COLUMNS=COLUMNS, STAGES=STAGES if size <= 128 else 2, WINDOW=window or 0, CAPPED=cap is not None,
        WIDTH=seen.shape[1] if INTERPRETED else 0, num_warps=WARPS,
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
