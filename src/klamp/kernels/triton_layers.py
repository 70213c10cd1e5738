# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped, index"
"""Parts of a layer in one kernel each, with arithmetic in float32, rounded once.

``silu(g) u`` with its gradient, rotary positions, and ``(s + w) · x / sqrt(mean(x²) + eps)``, a decoding step's norm.
The norm may be added to what is there already, as behind Gemma's attention. A program takes a row of it; rows of a
decoding step are short and few, so they are read once and stay in registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from klamp.kernels.triton_launch import Starter, common

BLOCK = 4096
"""Numbers a program."""


@triton.jit
def _rounded(x):
    """Float32 rounded to bfloat16 and back, ties to even, by its bits: casts there and back the compiler leaves out."""
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _gated(g_ptr, u_ptr, out_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(g_ptr + at, mask=at < count).to(tl.float32)
    u = tl.load(u_ptr + at, mask=at < count).to(tl.float32)
    tl.store(out_ptr + at, (g / (1.0 + tl.exp(-g)) * u).to(out_ptr.dtype.element_ty), mask=at < count)


@triton.jit
def _gated_gradient(g_ptr, u_ptr, up_ptr, dg_ptr, du_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(g_ptr + at, mask=at < count).to(tl.float32)
    u = tl.load(u_ptr + at, mask=at < count).to(tl.float32)
    up = tl.load(up_ptr + at, mask=at < count).to(tl.float32)
    s = tl.sigmoid(g)
    tl.store(dg_ptr + at, (up * u * s * (1.0 + g * (1.0 - s))).to(dg_ptr.dtype.element_ty), mask=at < count)
    tl.store(du_ptr + at, (up * g * s).to(du_ptr.dtype.element_ty), mask=at < count)


@triton.jit
def _rotate(
    x_ptr, cos_ptr, sin_ptr, out_ptr, heads, sign, STEPWISE: tl.constexpr, SIZE: tl.constexpr, HEADS: tl.constexpr
):
    """A token's heads: ``x cos + turned(x) sin``, turned a half-rotation one way or, with sign -1, the other."""
    row = tl.program_id(0).to(tl.int64)
    HALF: tl.constexpr = SIZE // 2
    head = tl.arange(0, HEADS)[:, None]
    half = tl.arange(0, HALF)[None, :]
    there = (head < heads) & (half >= 0)
    place = (row * heads + head) * SIZE + half
    a = tl.load(x_ptr + place, mask=there).to(tl.float32)
    b = tl.load(x_ptr + place + HALF, mask=there).to(tl.float32)
    low = row * SIZE + half
    c, s = tl.load(cos_ptr + low).to(tl.float32), tl.load(sin_ptr + low).to(tl.float32) * sign
    d, t = tl.load(cos_ptr + low + HALF).to(tl.float32), tl.load(sin_ptr + low + HALF).to(tl.float32) * sign
    e, f, g, h = a * c, b * s, b * d, a * t
    if STEPWISE:
        e, f, g, h = _rounded(e), _rounded(f), _rounded(g), _rounded(h)
    tl.store(out_ptr + place, (e - f).to(out_ptr.dtype.element_ty), mask=there)
    tl.store(out_ptr + place + HALF, (g + h).to(out_ptr.dtype.element_ty), mask=there)


_start_gated = Starter(_gated, 8)
_start_rotate = Starter(_rotate, 4)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) · up``."""
    out, count = torch.empty_like(gate), gate.numel()
    key = (common(gate, up, out), (count % 16 == 0, count == 1, count < 2**31))
    _start_gated((triton.cdiv(count, BLOCK), 1, 1), (gate, up, out, count, BLOCK), key)
    return out


def gated_gradient(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up from that of ``silu(gate) · up``; up's is written over ``grad``."""
    of_gate = torch.empty_like(gate)
    _gated_gradient[(triton.cdiv(gate.numel(), BLOCK),)](
        gate, up, grad, of_gate, grad, gate.numel(), BLOCK=BLOCK, num_warps=8
    )
    return of_gate, grad


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False, stepwise: bool = False) -> Tensor:
    """Heads x [tokens, heads, D] rotated by cos and sin [tokens, D], whose halves are alike; ``back`` undoes it.

    ``stepwise`` rounds after each operation, as PyTorch's do of bfloat16.
    """
    tokens, heads, size = x.shape
    out = torch.empty_like(x)
    fixed = (stepwise, size, 1 << (heads - 1).bit_length())
    key = (common(x, cos, sin, out), heads, fixed)
    _start_rotate((tokens, 1, 1), (x, cos, sin, out, heads, -1.0 if back else 1.0, *fixed), key)
    return out


@triton.jit
def _norm(x_ptr, w_ptr, y_ptr, width, eps, shift, ONTO: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    real = at < width
    x = tl.load(x_ptr + row * width + at, mask=real, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / width + eps)
    w = tl.load(w_ptr + at, mask=real, other=0.0).to(tl.float32) + shift
    y = x * scale * w
    if ONTO:
        y += tl.load(y_ptr + row * width + at, mask=real, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * width + at, y.to(y_ptr.dtype.element_ty), mask=real)


def rms_norm(x: Tensor, weight: Tensor, eps: float, shift: float, onto: Tensor | None = None) -> Tensor:
    """The norm of the last dimension, in the dtype of ``x``; without a gradient. Added to ``onto`` where that is given.

    ``onto`` is contiguous and of the shape of ``x``; the sum is written over it and is the result.
    """
    width = x.shape[-1]
    rows = x.reshape(-1, width).contiguous()
    out = torch.empty_like(rows) if onto is None else onto
    if len(rows):
        block = triton.next_power_of_2(width)
        warps = 4 if block <= 2048 else 8
        _norm[(len(rows),)](rows, weight, out, width, eps, shift, ONTO=onto is not None, BLOCK=block, num_warps=warps)
    return out.view(x.shape)
