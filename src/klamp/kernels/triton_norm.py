# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped, index"
"""``(s + w) · x / sqrt(mean(x²) + eps)`` of rows in float32, rounded once: a decoding step's norm in one kernel.

It may be added to what is there already, as behind Gemma's attention. A program takes a row; rows of a decoding step
are short and few, so they are read once and stay in registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


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
