# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped, index"
"""``∂s/∂x`` of a row's statistics in Triton, in one pass over its logits, and the rows that a loss makes of them.

As in :mod:`~klamp.kernels.triton_statistics`, of whose parts it is made: a program takes a slice of a row, publishes
its partial sums, waits for those of the others, and finds its logits again in the second-level cache.
"""

from __future__ import annotations

import triton
import triton.language as tl

from klamp.kernels.triton_statistics import LN2, LOG2E, LOWEST, _finish, _logits, _row_sums, _slice_of, _token_logits


@triton.jit(
    do_not_specialize=["lines", "vocabulary", "slices"],
    do_not_specialize_on_alignment=["tokens_ptr", "out_ptr", "gate_ptr"],
)
def _jacobians(
    z_ptr, y_ptr, logp_ptr, kl_ptr, entropy_ptr, tokens_ptr, out_ptr, part_ptr, gate_ptr,
    lines, vocabulary, slices, stride, rate, cap,
    CAPPED: tl.constexpr, PHASE: tl.constexpr,
    SLICES: tl.constexpr, STEPS: tl.constexpr, TAIL: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program a slice of a row, as in :mod:`~klamp.kernels.triton_one_pass`. The buffers for ``∂s/∂x``, None where
    nobody asks, have the stride of the logits; z's and y's own may be among them.
    """
    row, here = _slice_of(gate_ptr, lines, slices, PHASE, SLICES)
    low = here * (STEPS * STEP)
    unit = LOG2E * (1.0 if CAPPED else rate)
    HAS_REF: tl.constexpr = y_ptr is not None
    shift = row.to(tl.int64) * stride
    z_ptr += shift
    if HAS_REF:
        y_ptr += shift
    token = tl.load(tokens_ptr + row)
    mine, xa, ya = _token_logits(
        z_ptr, y_ptr, token, low, low + STEPS * STEP, vocabulary, stride, stride, rate, cap, HAS_REF, CAPPED
    )
    whole = low + STEPS * STEP <= vocabulary
    m, s, h, u, n, t, xa, ya = _row_sums(
        z_ptr, y_ptr, part_ptr, gate_ptr, row, here, slices, low, whole, token, xa, ya, vocabulary, stride, stride,
        rate, cap, unit, HAS_REF, CAPPED, PHASE, SLICES, STEPS, TAIL, STEP, STAGES,
    )  # fmt: skip
    if PHASE != 1:
        _finish(out_ptr, row, lines, here == 0, xa, ya, m, s, h, u, n, t, unit, HAS_REF)
        if logp_ptr is not None:
            logp_ptr += shift
        if kl_ptr is not None:
            kl_ptr += shift
        if entropy_ptr is not None:
            entropy_ptr += shift
        if whole:
            _write(
                z_ptr, y_ptr, logp_ptr, kl_ptr, entropy_ptr, low, stride, rate, cap, unit, m, s, h, u,
                CAPPED, STEPS, STEP, STAGES, True,
            )  # fmt: skip
        else:
            _write(
                z_ptr, y_ptr, logp_ptr, kl_ptr, entropy_ptr, low, stride, rate, cap, unit, m, s, h, u,
                CAPPED, TAIL, STEP, STAGES, False,
            )  # fmt: skip
        if logp_ptr is not None:
            # The token's own column once more, after all the others.
            tl.debug_barrier()
            g = rate - rate / s * tl.exp2(xa * unit - m)
            if CAPPED:
                g *= 1.0 - (xa / cap) * (xa / cap)
            tl.store(logp_ptr + token, g.to(logp_ptr.dtype.element_ty), mask=mine)


@triton.jit
def _write(
    z_ptr, y_ptr, logp_ptr, kl_ptr, entropy_ptr, low, edge, rate, cap, unit, m, s, h, u,
    CAPPED: tl.constexpr, STEPS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """``-p``, ``p (d - kl)`` and ``-p (log p + H)`` of a slice, times ∂z/∂x; latest columns first, as they are cached.

    With e = 2^(x unit - m), ``d - kl`` is ``ln 2 unit ((x - y) - u/s)`` and ``log p + H`` is ``ln 2 (log e - h/s)``.
    """
    scale = rate / s
    pull = scale * unit * LN2
    mean = u / s
    rest = h / s
    for back in tl.range(0, STEPS, num_stages=STAGES):
        at = low + (STEPS - 1 - back) * STEP + tl.arange(0, STEP)
        x = _logits(z_ptr, at, edge, rate, cap, CAPPED, WHOLE)
        a = x * unit - m
        e = tl.exp2(a)
        if CAPPED:
            e *= 1.0 - (x / cap) * (x / cap)
        if kl_ptr is not None:
            y = _logits(y_ptr, at, edge, rate, cap, CAPPED, WHOLE)
            _store(kl_ptr, at, edge, e * (pull * ((x - y) - mean)), WHOLE)
        if entropy_ptr is not None:
            # A token at -inf has no probability, and log p is no number.
            _store(entropy_ptr, at, edge, -scale * LN2 * e * (tl.maximum(a, LOWEST) - rest), WHOLE)
        if logp_ptr is not None:
            _store(logp_ptr, at, edge, -scale * e, WHOLE)


@triton.jit
def _store(ptr, at, edge, g, WHOLE: tl.constexpr):
    """One product reads it: no cache need keep it."""
    if WHOLE:
        tl.store(ptr + at, g.to(ptr.dtype.element_ty), eviction_policy="evict_first")
    else:
        tl.store(ptr + at, g.to(ptr.dtype.element_ty), mask=at < edge, eviction_policy="evict_first")


@triton.jit(
    do_not_specialize=["count", "chunk"], do_not_specialize_on_alignment=["index_ptr", "a_ptr", "b_ptr", "c_ptr"]
)
def _combine_rows(
    v_ptr, a_ptr, b_ptr, c_ptr, index_ptr, out_ptr, count, chunk, width, K: tl.constexpr, BLOCK: tl.constexpr
):
    """A row's ``Σ_s weight_s · vector_s``, rounded once, in its place; a weight that is None is 0."""
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start = row // chunk * chunk
    size = tl.minimum(chunk, count - start)
    v_ptr += (K * start + row - start).to(tl.int64) * width
    step = size.to(tl.int64) * width
    total = tl.zeros([BLOCK], tl.float32)
    if a_ptr is not None:
        total += tl.load(a_ptr + row).to(tl.float32) * tl.load(v_ptr + at, mask=at < width).to(tl.float32)
    if b_ptr is not None:
        total += tl.load(b_ptr + row).to(tl.float32) * tl.load(v_ptr + step + at, mask=at < width).to(tl.float32)
    if c_ptr is not None:
        total += tl.load(c_ptr + row).to(tl.float32) * tl.load(v_ptr + 2 * step + at, mask=at < width).to(tl.float32)
    place = row.to(tl.int64) if index_ptr is None else tl.load(index_ptr + row)
    tl.store(out_ptr + place * width + at, total.to(out_ptr.dtype.element_ty), mask=at < width)


@triton.jit(do_not_specialize=["count"])
def _scale(source_ptr, factor_ptr, out_ptr, count, BLOCK: tl.constexpr):
    """``out = factor · source``, rounded once."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(source_ptr + at, mask=at < count).to(tl.float32) * tl.load(factor_ptr).to(tl.float32)
    tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty), mask=at < count)
