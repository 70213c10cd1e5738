# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped, index"
"""A token a row and its log-prob from logits in two kernels that read them once.

Of independent clocks with rates p, the one of token a rings first with probability p_a: the token drawn has the largest
``x_a - log E_a`` with E exponential. E are made of counters (Philox) and a seed, so nothing of the size of the logits
is written. A program takes BLOCK logits of a row; a second kernel puts a row's programs together.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Logits a program."""
LEAST = tl.constexpr(-1.0e30)  # a finite stand-in for the maximum of logits that are all -inf


@triton.jit
def _ahead(bits):
    """``-log E`` of random bits: E = -log(1 - u). Small E decide, so that u keeps its digits near 0."""
    u = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    clock = tl.where(u < 1.0e-3, u * (1.0 + u * (0.5 + u * 0.33333334)), -tl.log(1.0 - u))
    return -tl.log(clock)


@triton.jit
def _race(logits_ptr, seed_ptr, parts_ptr, first_ptr, stride, width, scale, PARTS: tl.constexpr, QUARTER: tl.constexpr):
    """Of a row's block: the maximum, the sum of exponentials below it, and who rings first with its logit and lead.

    A counter gives four numbers, for the same place in each quarter of the block.
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    place = tl.arange(0, QUARTER)
    count = part * QUARTER + place
    bits = tl.philox(tl.load(seed_ptr), count, count * 0 + tl.program_id(0), count * 0, count * 0)
    start = part * (4 * QUARTER)
    lead = tl.full([QUARTER], float("-inf"), tl.float32)
    kept = tl.full([QUARTER], float("-inf"), tl.float32)
    top = tl.full([QUARTER], LEAST, tl.float32)
    total = tl.zeros([QUARTER], tl.float32)
    who = start + place
    for quarter in tl.static_range(4):
        at = start + quarter * QUARTER + place
        x = tl.load(logits_ptr + row * stride + at, mask=at < width, other=float("-inf")).to(tl.float32) * scale
        ahead = x + _ahead(bits[quarter])
        higher = tl.maximum(top, x)
        total = total * tl.exp(top - higher) + tl.exp(x - higher)
        top = higher
        won = ahead > lead
        lead, kept, who = tl.where(won, ahead, lead), tl.where(won, x, kept), tl.where(won, at, who)
    m = tl.max(top, 0)
    best = tl.argmax(lead, 0)
    out = parts_ptr + (row * PARTS + part) * 4
    tl.store(out, m)
    tl.store(out + 1, tl.sum(total * tl.exp(top - m), 0))
    tl.store(out + 2, tl.max(lead, 0))
    tl.store(out + 3, tl.sum(tl.where(place == best, kept, 0.0), 0))
    tl.store(first_ptr + row * PARTS + part, tl.sum(tl.where(place == best, who, 0), 0))


@triton.jit
def _finish(parts_ptr, first_ptr, token_ptr, logp_ptr, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """The first of a row's blocks, and the log-prob of its token."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    real = at < PARTS
    source = parts_ptr + (row * PARTS + at) * 4
    m = tl.load(source, mask=real, other=LEAST)
    total = tl.load(source + 1, mask=real, other=0.0)
    best = tl.argmax(tl.load(source + 2, mask=real, other=float("-inf")), 0)
    top = tl.max(m, 0)
    normaliser = top + tl.log(tl.sum(total * tl.exp(m - top), 0))
    chosen = tl.load(parts_ptr + (row * PARTS + best) * 4 + 3)
    tl.store(token_ptr + row, tl.load(first_ptr + row * PARTS + best).to(tl.int64))
    tl.store(logp_ptr + row, chosen - normaliser)


def draw(logits: Tensor, temperature: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A token [n] a row of logits [n, V] and its log-prob under ``softmax(logits / temperature)``, in float32."""
    rows, width = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    parts = triton.cdiv(width, BLOCK)
    seed = torch.randint(1 << 62, (1,), device=logits.device, generator=generator)
    found = torch.empty(rows, parts, 4, dtype=torch.float32, device=logits.device)
    first = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    token = torch.empty(rows, dtype=torch.long, device=logits.device)
    logp = torch.empty(rows, dtype=torch.float32, device=logits.device)
    _race[(rows, parts)](
        logits, seed, found, first, logits.stride(0), width, 1.0 / temperature,
        PARTS=parts, QUARTER=BLOCK // 4, num_warps=8,
    )  # fmt: skip
    _finish[(rows,)](found, first, token, logp, PARTS=parts, BLOCK=triton.next_power_of_2(parts), num_warps=1)
    return token, logp
