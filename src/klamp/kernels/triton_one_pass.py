# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped, index"
"""In one pass over a row's logits, in Triton: a loss with its gradient, or ``∂s/∂x`` of the row's statistics.

The first is that of :func:`klamp.kernels.policy_loss`. From the second :func:`klamp.kernels.token_stats` makes the
gradient of any loss. Both are made of parts of :mod:`~klamp.kernels.triton_statistics`: a program takes a slice of a
row, publishes its partial sums, waits for those of the others, and finds its logits again in the second-level cache.
"""

from __future__ import annotations

import triton
import triton.language as tl

from klamp.kernels.triton_statistics import (
    LN2,
    LOG2E,
    LOWEST,
    _finish,
    _logits,
    _place,
    _row_sums,
    _slice_of,
    _token_logits,
)


@triton.jit
def _bregman(d):
    """``expm1(-d) + d``, by its series where the two cancel."""
    series = 0.5 * d * d * (1.0 - d / 3.0 * (1.0 - d / 4.0 * (1.0 - d / 5.0 * (1.0 - d / 6.0 * (1.0 - d / 7.0)))))
    return tl.where(tl.abs(d) < 0.25, series, tl.exp(-d) - 1.0 + d)


@triton.jit
def _sampled(logp, ref, log_ratio, tail, FORM: tl.constexpr):
    """Value and slope in logp of k2, k3 or weighted k3, continued linearly beyond ``tail``."""
    d = logp - ref
    held = tl.minimum(tl.maximum(d, -tail), tail)
    if FORM == 1:
        return 0.5 * held * held + held * (d - held), held
    value = _bregman(held)
    slope = held - value  # 1 - e^-d
    value += slope * (d - held)
    if FORM == 3:
        weight = tl.exp(tl.minimum(tl.maximum(log_ratio, -tail), tail))
        return weight * value, weight * held
    return value, slope


@triton.jit
def _price(logp, ref, kl, log_ratio, advantage, extra, beta, lower, upper, tail, FORM: tl.constexpr):
    """A row's loss and its slopes in logp and kl: ``token_loss`` of the specification."""
    ratio = tl.exp(log_ratio)
    free = ratio * advantage
    clipped = tl.minimum(tl.maximum(ratio, 1.0 - lower), 1.0 + upper) * advantage
    loss = -tl.minimum(free, clipped) - ratio * extra
    slope = tl.where(free <= clipped, -free, 0.0) - ratio * extra
    kl_slope = 0.0
    if FORM > 0:
        if FORM == 4:
            loss += beta * kl
            kl_slope += beta
        else:
            value, pull = _sampled(logp, ref, log_ratio, tail, FORM)
            loss += beta * value
            slope += beta * pull
    return loss, slope, kl_slope


@triton.jit(
    do_not_specialize=["lines", "vocabulary", "slices", "above", "depth", "blocks"],
    do_not_specialize_on_alignment=[
        "tokens_ptr", "a_ptr", "old_ptr", "ref_ptr", "w_ptr", "x_ptr", "out_ptr", "gate_ptr"
    ],
)  # fmt: skip
def _one_pass(
    z_ptr, y_ptr, tokens_ptr, a_ptr, old_ptr, ref_ptr, w_ptr, x_ptr, knobs_ptr, out_ptr, part_ptr, gate_ptr,
    lines, vocabulary, slices, above, depth, width, last, blocks, ref_stride, rate, cap, tail,
    HAS_REF: tl.constexpr, CAPPED: tl.constexpr, FORM: tl.constexpr, PHASE: tl.constexpr,
    SLICES: tl.constexpr, STEPS: tl.constexpr, TAIL: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
    ONCE: tl.constexpr,
):  # fmt: skip
    """One program a slice of a row: its partial sums (phase 1), then the gradient of the row's loss over it (phase 2);
    phase 0 is both, with a wait between them. Lines of out and gate are ``lines`` apart; gate's two count the programs
    that have come, by row and in all.
    """
    row, here = _slice_of(gate_ptr, lines, slices, PHASE, SLICES)
    low = here * (STEPS * STEP)
    unit = LOG2E * (1.0 if CAPPED else rate)
    z_ptr, edge = _place(z_ptr, row + above, low, depth, width, last, blocks)
    if HAS_REF:
        y_ptr += row.to(tl.int64) * ref_stride
    # All that the row's price needs is asked for now, so that nobody waits for it later.
    token = tl.load(tokens_ptr + row)
    advantage = tl.load(a_ptr + row)
    extra = 0.0 if x_ptr is None else tl.load(x_ptr + row)
    old = 0.0 if old_ptr is None else tl.load(old_ptr + row)
    beta = tl.load(knobs_ptr) * (1.0 if w_ptr is None else tl.load(w_ptr + row))
    lower = tl.load(knobs_ptr + 1)
    upper = tl.load(knobs_ptr + 2)
    mine, xa, ya = _token_logits(
        z_ptr, y_ptr, token, low, low + STEPS * STEP, vocabulary, edge, ref_stride, rate, cap, HAS_REF, CAPPED
    )
    whole = low + STEPS * STEP <= vocabulary
    m, s, h, u, n, t, xa, ya = _row_sums(
        z_ptr, y_ptr, part_ptr, gate_ptr, row, here, slices, low, whole, token, xa, ya, vocabulary, edge, ref_stride,
        rate, cap, unit, HAS_REF, CAPPED, PHASE, SLICES, STEPS, TAIL, STEP, STAGES,
    )  # fmt: skip
    if PHASE != 1:
        logp, ref, kl = _finish(out_ptr, row, lines, here == 0, xa, ya, m, s, h, u, n, t, unit, HAS_REF)
        if ref_ptr is not None:
            ref = tl.load(ref_ptr + row)
        log_ratio = 0.0 if old_ptr is None else logp - old
        loss, slope, kl_slope = _price(logp, ref, kl, log_ratio, advantage, extra, beta, lower, upper, tail, FORM)
        tl.store(out_ptr + 6 * lines + row, loss, mask=here == 0)
        scale = rate / s
        pull = scale * kl_slope * unit * LN2
        level = scale * slope + pull * (u / s)
        if whole:
            _descend(
                z_ptr, y_ptr, low, edge, ref_stride, rate, cap, unit, m, pull, level,
                CAPPED, FORM, STEPS, STEP, STAGES, True, ONCE,
            )  # fmt: skip
        else:
            _descend(
                z_ptr, y_ptr, low, edge, ref_stride, rate, cap, unit, m, pull, level,
                CAPPED, FORM, TAIL, STEP, STAGES, False, ONCE,
            )  # fmt: skip
        # The token's own column once more, after all the others: asking every column whether it is the one costs more.
        tl.debug_barrier()
        g = _slope(xa, ya, cap, unit, m, pull, level, slope * rate, CAPPED, FORM).to(z_ptr.dtype.element_ty)
        tl.store(z_ptr + token, g, mask=mine)


@triton.jit
def _descend(
    z_ptr, y_ptr, low, edge, ref_edge, rate, cap, unit, m, pull, level,
    CAPPED: tl.constexpr, FORM: tl.constexpr, STEPS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
    WHOLE: tl.constexpr, ONCE: tl.constexpr,
):  # fmt: skip
    """The gradient over the logits of a slice, but for what the token adds to its own column.

    They are read again, latest first, from the second-level cache: held in registers they would leave too few programs
    in flight to keep the memory busy.
    """
    for back in tl.range(0, STEPS, num_stages=STAGES):
        at = low + (STEPS - 1 - back) * STEP + tl.arange(0, STEP)
        x = _logits(z_ptr, at, edge, rate, cap, CAPPED, WHOLE)
        y = _logits(y_ptr, at, ref_edge, rate, cap, CAPPED, WHOLE) if FORM == 4 else x
        g = _slope(x, y, cap, unit, m, pull, level, 0.0, CAPPED, FORM).to(z_ptr.dtype.element_ty)
        if WHOLE and ONCE:
            tl.store(z_ptr + at, g, eviction_policy="evict_first")
        elif WHOLE:
            tl.store(z_ptr + at, g)
        elif ONCE:
            tl.store(z_ptr + at, g, mask=at < edge, eviction_policy="evict_first")
        else:
            tl.store(z_ptr + at, g, mask=at < edge)


@triton.jit
def _slope(x, y, cap, unit, m, pull, level, spike, CAPPED: tl.constexpr, FORM: tl.constexpr):
    """``e (pull · (x - y) - level) + spike``, through the soft-cap where there is one."""
    g = tl.exp2(x * unit - m)
    if FORM == 4:
        g *= pull * (x - y) - level
    else:
        g *= -level
    g += spike
    if CAPPED:
        g *= 1.0 - (x / cap) * (x / cap)
    return g


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
    """One program a slice of a row, as in :func:`_one_pass`. The buffers for ``∂s/∂x``, None where
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
