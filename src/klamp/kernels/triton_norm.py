# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped, index"
"""``(s + w) · x / sqrt(mean(x²) + eps)`` of rows in float32, rounded once: a decoding step's norm in one kernel.

A program takes a row; rows of a decoding step are short and few, so they are read once and stay in registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _norm(x_ptr, w_ptr, y_ptr, width, eps, shift, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    real = at < width
    x = tl.load(x_ptr + row * width + at, mask=real, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / width + eps)
    w = tl.load(w_ptr + at, mask=real, other=0.0).to(tl.float32) + shift
    tl.store(y_ptr + row * width + at, (x * scale * w).to(y_ptr.dtype.element_ty), mask=real)


def rms_norm(x: Tensor, weight: Tensor, eps: float, shift: float) -> Tensor:
    """The norm of the last dimension, in the dtype of ``x``; without a gradient."""
    width = x.shape[-1]
    rows = x.reshape(-1, width).contiguous()
    out = torch.empty_like(rows)
    if len(rows):
        block = triton.next_power_of_2(width)
        _norm[(len(rows),)](rows, weight, out, width, eps, shift, BLOCK=block, num_warps=4 if block <= 2048 else 8)
    return out.view(x.shape)
