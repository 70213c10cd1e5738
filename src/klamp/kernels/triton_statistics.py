# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped, index"
"""The kernels of :mod:`~klamp.kernels.eager` in Triton: logits leave memory once and return once, whatever the loss.

Matrix products stay with cuBLAS. For a row of logits z and reference logits y, over slices of the vocabulary::

    m = max z    s = Σ 2^(z-m)    h = Σ 2^(z-m) (z-m)    u = Σ 2^(z-m) (z-y)    and n, t: the m, s of y
    lse = m + log s      kl = u/s - (lse - lse')      entropy = log s - h/s      (z in units of log 2)

A loss is one pass (:mod:`~klamp.kernels.triton_one_pass`): a program takes a slice of a row, publishes its partial
sums, waits for those of the row's other slices, and writes the gradient over its logits, which it finds again in the
second-level cache. Partial sums are combined in the order of the slices, so results repeat to the bit. No number that
steers is a compile-time constant. :mod:`~klamp.kernels.triton_launch` starts these kernels.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl
from triton.compiler import CompiledKernel

LOWEST = tl.constexpr(-1.0e18)  # below every logit; finite, and its square too
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")
"""Whether the kernels run in Triton's interpreter, one program after another: then none may wait for another."""
DIRECT: tuple[type, ...] = (CompiledKernel,) if triton.__version__.startswith(("3.6.", "3.7.")) else ()
"""What a launch returns that can itself be started with all arguments: by Triton's source, in these versions."""


@triton.jit
def _place(z_ptr, row, low, depth, width, last, blocks):
    """Where column 0 of a row of logits would lie, seen from column ``low``, and the column at which its memory ends.

    Logits lie in blocks of ``width`` columns (:class:`~klamp.kernels.chunking.Tiles`), the last one ``last`` wide, or
    in one block that is all. Made of products and differences only: so the compiler sees that 16 divides all of it.
    """
    block = low // width
    left = block * width
    own = width - (block == blocks - 1).to(tl.int32) * (width - last)
    return z_ptr + (left.to(tl.int64) * depth + row.to(tl.int64) * own - left), left + own


@triton.jit
def _logits(ptr, at, edge, rate, cap, CAPPED: tl.constexpr, WHOLE: tl.constexpr = False):
    """Logits x in float32 before scaling; soft-capped ones after it.

    Loads are masked by the row's end with its padding, which the compiler knows to be a multiple of 16, and so stay 16
    bytes wide: a mask by the vocabulary, of which it knows nothing, would make every load two bytes. Padding is ours to
    read. WHOLE: every column is there, and no mask is computed.
    """
    x = tl.load(ptr + at) if WHOLE else tl.load(ptr + at, mask=at < edge, other=0.0)
    x = x.to(tl.float32)
    if CAPPED:
        x = cap * (1.0 - 2.0 / (tl.exp(2.0 * x * (rate / cap)) + 1.0))
    return x


@triton.jit
def _add4(a, b, c, d, e, f, g, h):
    return a + e, b + f, c + g, d + h


@triton.jit
def _max2(a, b, c, d):
    return tl.maximum(a, c), tl.maximum(b, d)


@triton.jit
def _walk(
    z_ptr, y_ptr, low, vocabulary, edge, ref_edge, rate, cap, unit,
    HAS_REF: tl.constexpr, CAPPED: tl.constexpr, STEPS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
    WHOLE: tl.constexpr = False,
):  # fmt: skip
    """(m, s, h, u, n, t) of STEPS · STEP columns from ``low`` on.

    A thread takes eight neighbours at a time, one 16-byte load, and keeps running sums of its own; threads meet once,
    at the end. In base two a column costs one multiply-add and one exp2 a model, whose argument serves the entropy.
    """
    m = tl.full([STEP // 8], LOWEST, tl.float32)
    n = m
    s = tl.zeros([STEP // 8], tl.float32)
    h = s
    u = s
    t = s
    for i in tl.range(0, STEPS, num_stages=STAGES):
        at = low + i * STEP + 8 * tl.arange(0, STEP // 8)[:, None] + tl.arange(0, 8)[None, :]
        x = _logits(z_ptr, at, edge, rate, cap, CAPPED, WHOLE)
        y = _logits(y_ptr, at, ref_edge, rate, cap, CAPPED, WHOLE) if HAS_REF else x
        if not WHOLE:
            x = tl.where(at < vocabulary, x, LOWEST)
            y = tl.where(at < vocabulary, y, LOWEST)
        top = tl.maximum(m, tl.max(x, 1) * unit)
        a = x * unit - top[:, None]
        e = tl.exp2(a)
        f = tl.exp2(m - top)
        h = f * (h + s * (m - top)) + tl.sum(e * a, 1)
        s = f * s + tl.sum(e, 1)
        m = top
        if HAS_REF:
            u = f * u + tl.sum(e * (x - y), 1)
            top = tl.maximum(n, tl.max(y, 1) * unit)
            t = t * tl.exp2(n - top) + tl.sum(tl.exp2(y * unit - top[:, None]), 1)
            n = top
    return _combine(m, s, h, u, n, t)


@triton.jit
def _combine(m, s, h, u, n, t):
    """Partial sums over one maximum each, from sums over several; always in the same order."""
    top, ref_top = tl.reduce((m, n), 0, _max2)
    f = tl.exp2(m - top)
    h = f * (h + s * (m - top))
    s, h, u, t = tl.reduce((f * s, h, f * u, t * tl.exp2(n - ref_top)), 0, _add4)
    return top, s, h, u, ref_top, t


@triton.jit
def _publish(ptr, m, s, h, u, n, t, xa, ya):
    """A slice's partial sums, where :func:`_gather` finds them."""
    tl.store(ptr, m)
    tl.store(ptr + 1, s)
    tl.store(ptr + 2, h)
    tl.store(ptr + 3, u)
    tl.store(ptr + 4, n)
    tl.store(ptr + 5, t)
    tl.store(ptr + 6, xa)
    tl.store(ptr + 7, ya)


@triton.jit
def _gather(ptr, slices, SLICES: tl.constexpr):
    """The partial sums of a row's slices as those of the row, and its token's two logits."""
    i = tl.arange(0, SLICES)
    live = i < slices
    ptr += 8 * i
    # Written by other programs moments ago: read past this multiprocessor's own cache.
    m = tl.load(ptr, mask=live, other=LOWEST, volatile=True)
    s = tl.load(ptr + 1, mask=live, other=0.0, volatile=True)
    h = tl.load(ptr + 2, mask=live, other=0.0, volatile=True)
    u = tl.load(ptr + 3, mask=live, other=0.0, volatile=True)
    n = tl.load(ptr + 4, mask=live, other=LOWEST, volatile=True)
    t = tl.load(ptr + 5, mask=live, other=0.0, volatile=True)
    xa = tl.max(tl.load(ptr + 6, mask=live, other=LOWEST, volatile=True), 0)
    ya = tl.max(tl.load(ptr + 7, mask=live, other=LOWEST, volatile=True), 0)
    m, s, h, u, n, t = _combine(m, s, h, u, n, t)
    return m, s, h, u, n, t, xa, ya


@triton.jit
def _slice_of(gate_ptr, lines, slices, PHASE: tl.constexpr, SLICES: tl.constexpr):
    """The row and the slice of it that a program takes.

    It takes its number when it starts, not from its place in the grid: then the programs it waits for have started too,
    and the wait ends whatever order the hardware chose.
    """
    number = tl.program_id(0)
    if PHASE == 0 and SLICES > 1:
        number = tl.atomic_add(gate_ptr + lines, 1, sem="relaxed")
    return number // slices, number % slices


@triton.jit
def _token_logits(
    z_ptr, y_ptr, token, low, high, vocabulary, edge, ref_edge, rate, cap, HAS_REF: tl.constexpr, CAPPED: tl.constexpr
):
    """Whether the token is among columns ``low`` to ``high``, and its two logits there; LOWEST elsewhere."""
    mine = (token >= low) & (token < high) & (token < vocabulary)
    xa = LOWEST + 0.0
    ya = LOWEST + 0.0
    if mine:
        xa = _logits(z_ptr, token, edge, rate, cap, CAPPED)
        if HAS_REF:
            ya = _logits(y_ptr, token, ref_edge, rate, cap, CAPPED)
    return mine, xa, ya


@triton.jit
def _row_sums(
    z_ptr, y_ptr, part_ptr, gate_ptr, row, here, slices, low, whole, token, xa, ya, vocabulary, edge, ref_edge,
    rate, cap, unit,
    HAS_REF: tl.constexpr, CAPPED: tl.constexpr, PHASE: tl.constexpr, SLICES: tl.constexpr,
    STEPS: tl.constexpr, TAIL: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A row's (m, s, h, u, n, t) and its token's two logits: those of the slice, published, and the others' with them.

    In phase 1 those of the slice alone. Masks cost a third of the sums: only the slice in which the vocabulary ends has
    them, for its TAIL of steps.
    """
    part_ptr += row.to(tl.int64) * (8 * SLICES)
    if PHASE != 2 or SLICES == 1:
        if whole:
            m, s, h, u, n, t = _walk(
                z_ptr, y_ptr, low, vocabulary, edge, ref_edge, rate, cap, unit,
                HAS_REF, CAPPED, STEPS, STEP, STAGES, True,
            )  # fmt: skip
        else:
            m, s, h, u, n, t = _walk(
                z_ptr, y_ptr, low, vocabulary, edge, ref_edge, rate, cap, unit,
                HAS_REF, CAPPED, TAIL, STEP, STAGES, False,
            )  # fmt: skip
    if PHASE != 2 and SLICES > 1:
        _publish(part_ptr + 8 * here, m, s, h, u, n, t, xa, ya)
    if PHASE == 0 and SLICES > 1:
        tl.atomic_add(gate_ptr + row, 1, sem="release")
        while tl.atomic_add(gate_ptr + row, 0, sem="acquire") < slices:
            pass
    if PHASE != 1 and SLICES > 1:
        m, s, h, u, n, t, xa, ya = _gather(part_ptr, slices, SLICES)
    xa = tl.where((token >= 0) & (token < vocabulary), xa, float("nan"))
    return m, s, h, u, n, t, xa, ya


@triton.jit
def _finish(out_ptr, row, lines, first, xa, ya, m, s, h, u, n, t, unit, HAS_REF: tl.constexpr):
    """logp, ref_logp and kl in nats from a row's sums; the row's ``first`` program writes them to out, line by line."""
    log_s = tl.log2(s)
    logp = LN2 * ((xa * unit - m) - log_s)
    ref = logp
    kl = 0.0
    if HAS_REF:
        log_t = tl.log2(t)
        ref = LN2 * ((ya * unit - n) - log_t)
        # Equal sums cancel exactly; what rounding leaves below zero is not a distance.
        kl = tl.maximum(LN2 * ((u / s * unit - (m - n)) - (log_s - log_t)), 0.0)
        tl.store(out_ptr + 3 * lines + row, ref, mask=first)
        tl.store(out_ptr + 4 * lines + row, kl, mask=first)
        tl.store(out_ptr + 5 * lines + row, LN2 * (n + log_t), mask=first)
    tl.store(out_ptr + row, logp, mask=first)
    tl.store(out_ptr + lines + row, LN2 * (log_s - h / s), mask=first)
    tl.store(out_ptr + 2 * lines + row, LN2 * (m + log_s), mask=first)
    return logp, ref, kl


@triton.jit(do_not_specialize=["lines", "vocabulary"], do_not_specialize_on_alignment=["tokens_ptr", "out_ptr"])
def _row_stats(
    z_ptr, y_ptr, tokens_ptr, out_ptr, lines, vocabulary, stride, ref_stride, rate, cap,
    HAS_REF: tl.constexpr, CAPPED: tl.constexpr, STEPS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program a row: its statistics."""
    row = tl.program_id(0)
    unit = LOG2E * (1.0 if CAPPED else rate)
    z_ptr += row.to(tl.int64) * stride
    if HAS_REF:
        y_ptr += row.to(tl.int64) * ref_stride
    m, s, h, u, n, t = _walk(
        z_ptr, y_ptr, 0, vocabulary, stride, ref_stride, rate, cap, unit, HAS_REF, CAPPED, STEPS, STEP, STAGES
    )
    token = tl.load(tokens_ptr + row)
    known = (token >= 0) & (token < vocabulary)
    safe = tl.where(known, token, 0)
    xa = tl.where(known, _logits(z_ptr, safe, stride, rate, cap, CAPPED), float("nan"))
    ya = _logits(y_ptr, safe, ref_stride, rate, cap, CAPPED) if HAS_REF else xa
    _finish(out_ptr, row, lines, row >= 0, xa, ya, m, s, h, u, n, t, unit, HAS_REF)


@triton.jit(
    do_not_specialize=["vocabulary", "above", "depth", "blocks"],
    do_not_specialize_on_alignment=[
        "tokens_ptr", "lse_ptr", "entropy_ptr", "kl_ptr", "ref_lse_ptr", "up_logp_ptr", "up_kl_ptr", "up_entropy_ptr"
    ],
)  # fmt: skip
def _row_gradient(
    z_ptr, y_ptr, tokens_ptr, lse_ptr, entropy_ptr, kl_ptr, ref_lse_ptr, up_logp_ptr, up_kl_ptr, up_entropy_ptr,
    vocabulary, above, depth, width, last, blocks, ref_stride, rate, cap,
    CAPPED: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One program a row and step: ``p (u_kl (d - kl) - u_logp - u_H (log p + H)) + [j = a] u_logp`` over the logits."""
    row = tl.program_id(0)
    low = tl.program_id(1) * STEP
    at = low + tl.arange(0, STEP)
    unit = 1.0 if CAPPED else rate
    z_ptr, edge = _place(z_ptr, row + above, low, depth, width, last, blocks)
    x = tl.maximum(tl.where(at < vocabulary, _logits(z_ptr, at, edge, rate, cap, CAPPED), LOWEST), LOWEST)
    log_p = x * unit - tl.load(lse_ptr + row)
    p = tl.exp2(log_p * LOG2E)
    slope = tl.zeros_like(p)
    up_logp = 0.0
    if up_logp_ptr is not None:
        up_logp += tl.load(up_logp_ptr + row)
        slope -= up_logp
    if up_entropy_ptr is not None:
        slope -= tl.load(up_entropy_ptr + row) * (log_p + tl.load(entropy_ptr + row))
    if up_kl_ptr is not None:
        y_ptr += row.to(tl.int64) * ref_stride
        y = tl.maximum(_logits(y_ptr, at, ref_stride, rate, cap, CAPPED), LOWEST)
        d = log_p - (y * unit - tl.load(ref_lse_ptr + row))
        slope += tl.load(up_kl_ptr + row) * (d - tl.load(kl_ptr + row))
    g = (p * slope + tl.where(at == tl.load(tokens_ptr + row), up_logp, 0.0)) * rate
    if CAPPED:
        g *= 1.0 - (x / cap) * (x / cap)
    tl.store(z_ptr + at, g.to(z_ptr.dtype.element_ty), mask=at < edge)
