# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped, index"
"""The kernels of :mod:`~klamp.kernels.eager` in Triton: logits are read once and written once, whatever the loss.

Matrix products stay with cuBLAS. For a row of logits z and reference logits y, over slices of the vocabulary::

    m = max z    s = Σ e^(z-m)    h = Σ e^(z-m) (z-m)    u = Σ e^(z-m) (z-y)    and m', s' of y
    lse = m + log s      kl = u/s - (lse - lse')      entropy = log s - h/s

A loss is one pass (:func:`_one_pass`): every slice of a row stays in the registers of its program, which publishes its
partial sums, waits for those of the row's other slices, and writes the gradient over the logits. The partial sums are
combined in the order of the slices, so results repeat to the bit. No number that steers is a compile-time constant.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from klamp.errors import ConfigError
from klamp.kernels.work import Plan, RowStats, Scaling, Terms, Upstream, Work

# Bytes of logits at a time, policy and reference together.
BUDGET = 512 * 2**20
# Columns a program holds in registers, and its warps: 32 values a thread of each model.
SLICE, WARPS = 8192, 8
# Columns a program takes at a time where it walks along a row.
STEP = 4096
LOWEST = tl.constexpr(-1.0e18)  # below every logit; finite, and its square too: no NaN outside the vocabulary
LOG2E = tl.constexpr(1.4426950408889634)
FORM = {None: 0, "k2": 1, "k3": 2, "weighted_k3": 3, "exact": 4, "sequence_exact": 4}
INTERPRETED = bool(triton.knobs.runtime.interpret)


@triton.jit
def _logits(ptr, at, valid, gain, cap, CAPPED: tl.constexpr):
    """Scaled logits in float32, LOWEST outside the vocabulary. gain is scale/T; capped scale/softcap, cap softcap/T."""
    x = tl.load(ptr + at, mask=valid, other=0.0).to(tl.float32) * gain
    if CAPPED:
        x = cap * (1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0))
    return tl.where(valid, x, LOWEST)


@triton.jit
def _add4(a, b, c, d, e, f, g, h):
    return a + e, b + f, c + g, d + h


@triton.jit
def _add2(a, b, c, d):
    return a + c, b + d


@triton.jit
def _max2(a, b, c, d):
    return tl.maximum(a, c), tl.maximum(b, d)


@triton.jit
def _measure(z, y, HAS_REF: tl.constexpr):
    """Partial sums of a slice held in registers: (m, s, h, u, m', s'), with e = e^(z-m) and d = z-y of each column."""
    if HAS_REF:
        m, n = tl.reduce((z, y), 0, _max2)
        n = tl.maximum(n, LOWEST)
    else:
        m = tl.max(z, 0)
        n = m
    m = tl.maximum(m, LOWEST)
    e = tl.exp2((z - m) * LOG2E)
    c = tl.where(e > 0, z - m, 0.0)
    d = z
    if HAS_REF:
        d = tl.where(e > 0, z - y, 0.0)
        s, h, u, t = tl.reduce((e, e * c, e * d, tl.exp2((y - n) * LOG2E)), 0, _add4)
    else:
        s, h = tl.reduce((e, e * c), 0, _add2)
        u = s
        t = s
    return e, d, m, s, h, u, n, t


@triton.jit
def _walk(
    z_ptr, y_ptr, vocabulary, gain, cap,
    HAS_REF: tl.constexpr, CAPPED: tl.constexpr, STEPS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """The same partial sums of a whole row, a step at a time."""
    m = LOWEST + 0.0
    n = LOWEST + 0.0
    s = 0.0
    h = 0.0
    u = 0.0
    t = 0.0
    for i in range(STEPS):
        at = i * STEP + tl.arange(0, STEP)
        valid = at < vocabulary
        z = _logits(z_ptr, at, valid, gain, cap, CAPPED)
        y = _logits(y_ptr, at, valid, gain, cap, CAPPED) if HAS_REF else z
        _, _, m1, s1, h1, u1, n1, t1 = _measure(z, y, HAS_REF)
        top = tl.maximum(m, m1)
        f = tl.exp2((m - top) * LOG2E)
        f1 = tl.exp2((m1 - top) * LOG2E)
        h = f * (h + s * (m - top)) + f1 * (h1 + s1 * (m1 - top))
        s = f * s + f1 * s1
        u = f * u + f1 * u1
        m = top
        top = tl.maximum(n, n1)
        t = t * tl.exp2((n - top) * LOG2E) + t1 * tl.exp2((n1 - top) * LOG2E)
        n = top
    return m, s, h, u, n, t


@triton.jit
def _gather(part_ptr, slices, SLICES: tl.constexpr):
    """The partial sums of a row's slices as those of the row, and its token's two logits; always in the same order."""
    i = tl.arange(0, SLICES)
    live = i < slices
    # Written by other programs moments ago: read past this multiprocessor's own cache.
    m1 = tl.load(part_ptr + i, mask=live, other=LOWEST, volatile=True)
    s1 = tl.load(part_ptr + SLICES + i, mask=live, other=0.0, volatile=True)
    h1 = tl.load(part_ptr + 2 * SLICES + i, mask=live, other=0.0, volatile=True)
    u1 = tl.load(part_ptr + 3 * SLICES + i, mask=live, other=0.0, volatile=True)
    n1 = tl.load(part_ptr + 4 * SLICES + i, mask=live, other=LOWEST, volatile=True)
    t1 = tl.load(part_ptr + 5 * SLICES + i, mask=live, other=0.0, volatile=True)
    a1 = tl.load(part_ptr + 6 * SLICES + i, mask=live, other=LOWEST, volatile=True)
    b1 = tl.load(part_ptr + 7 * SLICES + i, mask=live, other=LOWEST, volatile=True)
    m = tl.max(m1, 0)
    n = tl.max(n1, 0)
    f = tl.exp2((m1 - m) * LOG2E)
    s = tl.sum(f * s1, 0)
    h = tl.sum(f * (h1 + s1 * (m1 - m)), 0)
    u = tl.sum(f * u1, 0)
    t = tl.sum(t1 * tl.exp2((n1 - n) * LOG2E), 0)
    return m, s, h, u, n, t, tl.max(a1, 0), tl.max(b1, 0)


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
def _price(logp, ref, kl, row, a_ptr, old_ptr, w_ptr, x_ptr, knobs_ptr, tail, FORM: tl.constexpr):
    """A row's loss and its slopes in logp and kl: ``token_loss`` of the specification."""
    advantage = tl.load(a_ptr + row)
    log_ratio = 0.0
    if old_ptr is not None:
        log_ratio = logp - tl.load(old_ptr + row)
    ratio = tl.exp(log_ratio)
    clipped = tl.minimum(tl.maximum(ratio, 1.0 - tl.load(knobs_ptr + 1)), 1.0 + tl.load(knobs_ptr + 2))
    free = ratio * advantage
    loss = -tl.minimum(free, clipped * advantage)
    slope = tl.where(free <= clipped * advantage, -free, 0.0)
    if x_ptr is not None:
        loss -= ratio * tl.load(x_ptr + row)
        slope -= ratio * tl.load(x_ptr + row)
    kl_slope = 0.0
    if FORM > 0:
        beta = tl.load(knobs_ptr)
        if w_ptr is not None:
            beta *= tl.load(w_ptr + row)
        if FORM == 4:
            loss += beta * kl
            kl_slope += beta
        else:
            value, pull = _sampled(logp, ref, log_ratio, tail, FORM)
            loss += beta * value
            slope += beta * pull
    return loss, slope, kl_slope


@triton.jit
def _finish(out_ptr, row, rows, first, za, ya, m, s, h, u, n, t, HAS_REF: tl.constexpr):
    """logp, ref_logp and kl from a row's sums; the row's ``first`` program writes them to out [7, rows]."""
    log_s = tl.log(s)
    logp = (za - m) - log_s
    ref = logp
    kl = 0.0
    if HAS_REF:
        log_t = tl.log(t)
        ref = (ya - n) - log_t
        # Equal sums cancel exactly; what rounding leaves below zero is not a distance.
        kl = tl.maximum((u / s - (m - n)) - (log_s - log_t), 0.0)
        tl.store(out_ptr + 3 * rows + row, ref, mask=first)
        tl.store(out_ptr + 4 * rows + row, kl, mask=first)
        tl.store(out_ptr + 5 * rows + row, n + log_t, mask=first)
    tl.store(out_ptr + row, logp, mask=first)
    tl.store(out_ptr + rows + row, log_s - h / s, mask=first)
    tl.store(out_ptr + 2 * rows + row, m + log_s, mask=first)
    return logp, ref, kl


@triton.jit(do_not_specialize=["rows", "vocabulary"], do_not_specialize_on_alignment=["tokens_ptr", "out_ptr"])
def _row_stats(
    z_ptr, y_ptr, tokens_ptr, out_ptr, rows, vocabulary, stride, ref_stride, gain, cap,
    HAS_REF: tl.constexpr, CAPPED: tl.constexpr, STEPS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One program a row: its statistics."""
    row = tl.program_id(0)
    z_ptr += row.to(tl.int64) * stride
    if HAS_REF:
        y_ptr += row.to(tl.int64) * ref_stride
    m, s, h, u, n, t = _walk(z_ptr, y_ptr, vocabulary, gain, cap, HAS_REF, CAPPED, STEPS, STEP)
    token = tl.load(tokens_ptr + row)
    known = (token >= 0) & (token < vocabulary)
    za = tl.where(known, _logits(z_ptr, token, known, gain, cap, CAPPED), float("nan"))
    ya = _logits(y_ptr, token, known, gain, cap, CAPPED) if HAS_REF else za
    _finish(out_ptr, row, rows, row >= 0, za, ya, m, s, h, u, n, t, HAS_REF)


@triton.jit(
    do_not_specialize=["vocabulary"],
    do_not_specialize_on_alignment=[
        "tokens_ptr", "lse_ptr", "entropy_ptr", "kl_ptr", "ref_lse_ptr", "up_logp_ptr", "up_kl_ptr", "up_entropy_ptr"
    ],
)  # fmt: skip
def _row_gradient(
    z_ptr, y_ptr, tokens_ptr, lse_ptr, entropy_ptr, kl_ptr, ref_lse_ptr, up_logp_ptr, up_kl_ptr, up_entropy_ptr,
    vocabulary, stride, ref_stride, gain, cap, CAPPED: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One program a row and step: ``p (u_kl (d - kl) - u_logp - u_H (log p + H)) + [j = a] u_logp`` over the logits."""
    row = tl.program_id(0)
    at = tl.program_id(1) * STEP + tl.arange(0, STEP)
    valid = at < vocabulary
    z_ptr += row.to(tl.int64) * stride
    z = _logits(z_ptr, at, valid, gain, cap, CAPPED)
    log_p = z - tl.load(lse_ptr + row)
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
        d = log_p - (_logits(y_ptr, at, valid, gain, cap, CAPPED) - tl.load(ref_lse_ptr + row))
        slope += tl.load(up_kl_ptr + row) * (d - tl.load(kl_ptr + row))
    g = tl.where(p > 0, p * slope, 0.0) + tl.where(at == tl.load(tokens_ptr + row), up_logp, 0.0)
    if CAPPED:
        g *= cap * (1.0 - (z / cap) * (z / cap))
    tl.store(z_ptr + at, (g * gain).to(z_ptr.dtype.element_ty), mask=valid)


@triton.jit(
    do_not_specialize=["rows", "vocabulary", "slices"],
    do_not_specialize_on_alignment=["tokens_ptr", "a_ptr", "old_ptr", "ref_ptr", "w_ptr", "x_ptr", "out_ptr"],
)
def _one_pass(
    z_ptr, y_ptr, tokens_ptr, a_ptr, old_ptr, ref_ptr, w_ptr, x_ptr, knobs_ptr, out_ptr, part_ptr, gate_ptr,
    rows, vocabulary, slices, stride, ref_stride, gain, cap, tail,
    HAS_REF: tl.constexpr, CAPPED: tl.constexpr, FORM: tl.constexpr, PHASE: tl.constexpr,
    SLICES: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """One program a slice of a row: its partial sums (phase 1), then the gradient of the row's loss over it (phase 2).

    Phase 0 is both, with a wait between them. A program takes its number when it starts, not from its place in the
    grid: then the programs it waits for have started too, and the wait ends whatever order the hardware chose.
    """
    number = tl.program_id(0)
    if PHASE == 0 and SLICES > 1:
        number = tl.atomic_add(gate_ptr + rows, 1, sem="relaxed")
    row = number // slices
    here = number % slices
    z_ptr += row.to(tl.int64) * stride
    if HAS_REF:
        y_ptr += row.to(tl.int64) * ref_stride
    part_ptr += row.to(tl.int64) * (8 * SLICES)
    at = here * SLICE + tl.arange(0, SLICE)
    valid = at < vocabulary
    token = tl.load(tokens_ptr + row)
    z = _logits(z_ptr, at, valid, gain, cap, CAPPED)
    y = _logits(y_ptr, at, valid, gain, cap, CAPPED) if HAS_REF else z
    e, d, m, s, h, u, n, t = _measure(z, y, HAS_REF)
    own = m
    if PHASE != 2 or SLICES == 1:
        mine = (token >= here * SLICE) & (token < here * SLICE + SLICE) & (token < vocabulary)
        za = _logits(z_ptr, token, mine, gain, cap, CAPPED)
        ya = _logits(y_ptr, token, mine, gain, cap, CAPPED) if HAS_REF else za
    if PHASE != 2 and SLICES > 1:
        _publish(part_ptr + here, SLICES, m, s, h, u, n, t, za, ya)
    if PHASE == 0 and SLICES > 1:
        tl.atomic_add(gate_ptr + row, 1, sem="release")
        while tl.atomic_add(gate_ptr + row, 0, sem="acquire") < slices:
            pass
    if PHASE != 1:
        if SLICES > 1:
            m, s, h, u, n, t, za, ya = _gather(part_ptr, slices, SLICES)
        za = tl.where((token >= 0) & (token < vocabulary), za, float("nan"))
        logp, ref, kl = _finish(out_ptr, row, rows, here == 0, za, ya, m, s, h, u, n, t, HAS_REF)
        if ref_ptr is not None:
            ref = tl.load(ref_ptr + row)
        loss, slope, kl_slope = _price(logp, ref, kl, row, a_ptr, old_ptr, w_ptr, x_ptr, knobs_ptr, tail, FORM)
        tl.store(out_ptr + 6 * rows + row, loss, mask=here == 0)
        inner = -slope + tl.zeros_like(e)
        if FORM == 4:
            inner += kl_slope * (d - u / s)
        g = e * (tl.exp2((own - m) * LOG2E) / s) * inner + tl.where(at == token, slope, 0.0)
        if CAPPED:
            g *= cap * (1.0 - (z / cap) * (z / cap))
        tl.store(z_ptr + at, (g * gain).to(z_ptr.dtype.element_ty), mask=valid)


@triton.jit
def _publish(ptr, SLICES: tl.constexpr, m, s, h, u, n, t, za, ya):
    """A slice's partial sums, where :func:`_gather` finds them."""
    tl.store(ptr, m)
    tl.store(ptr + SLICES, s)
    tl.store(ptr + 2 * SLICES, h)
    tl.store(ptr + 3 * SLICES, u)
    tl.store(ptr + 4 * SLICES, n)
    tl.store(ptr + 5 * SLICES, t)
    tl.store(ptr + 6 * SLICES, za)
    tl.store(ptr + 7 * SLICES, ya)


def plan(work: Work, *, trains_head: bool) -> Plan:
    """Rows at a time within BUDGET bytes of logits."""
    vocabulary = work.policy.head.shape[0]
    both = max(2, BUDGET // (width(vocabulary) * work.policy.hidden.element_size()))
    rows = max(1, min(2048, both // 2))
    rows = rows // 128 * 128 if rows >= 128 else rows
    return Plan(rows, rows)


def width(vocabulary: int) -> int:
    """Columns to allocate for a row of logits: every row starts on a 128-byte line, whatever the vocabulary."""
    return -(-vocabulary // 64) * 64


def statistics(z: Tensor, ref: Tensor | None, tokens: Tensor, scaling: Scaling) -> RowStats:
    """logp, ref_logp, kl and entropy of each row; one read of the logits."""
    _usable(z)
    rows, vocabulary = z.shape
    out = z.new_empty(7, rows, dtype=torch.float32)
    if rows:
        gain, cap = _scales(scaling)
        step = _step(vocabulary)
        _row_stats[(rows,)](
            z, ref, tokens, out, rows, vocabulary, z.stride(0), 0 if ref is None else ref.stride(0), gain, cap,
            HAS_REF=ref is not None, CAPPED=scaling.softcap is not None,
            STEPS=triton.cdiv(vocabulary, step), STEP=step, num_warps=WARPS,
        )  # fmt: skip
    return _row_statistics(out, ref is not None)


def gradient(z: Tensor, ref: Tensor | None, tokens: Tensor, stats: RowStats, up: Upstream, scaling: Scaling) -> None:
    """``Σ_s up_s · ∂s/∂x`` over s in (logp, kl, entropy), written over the logits x in ``z``."""
    _usable(z)
    rows, vocabulary = z.shape
    if rows == 0:
        return
    gain, cap = _scales(scaling)
    step = _step(vocabulary)
    _row_gradient[(rows, triton.cdiv(vocabulary, step))](
        z, ref, tokens, stats.lse, stats.entropy, stats.kl, stats.ref_lse, up.logp, up.kl, up.entropy,
        vocabulary, z.stride(0), 0 if ref is None else ref.stride(0), gain, cap,
        CAPPED=scaling.softcap is not None, STEP=step, num_warps=WARPS,
    )  # fmt: skip


def loss_gradient(
    z: Tensor, ref: Tensor | None, tokens: Tensor, terms: Terms, scaling: Scaling
) -> tuple[Tensor, RowStats]:
    """Each row's loss, with its gradient written over the logits in ``z``."""
    _usable(z)
    rows, vocabulary = z.shape
    out = z.new_empty(7, rows, dtype=torch.float32)
    size = min(SLICE, max(128, triton.next_power_of_2(vocabulary)))
    count = triton.cdiv(vocabulary, size)
    most = triton.next_power_of_2(count)
    part = z.new_empty(rows * 8 * most, dtype=torch.float32)
    gate = z.new_zeros(rows + 1, dtype=torch.int32)
    gain, cap = _scales(scaling)
    for phase in (1, 2) if INTERPRETED and count > 1 else (0,):
        if rows:
            _one_pass[(rows * count,)](
                z, ref, tokens, terms.advantages, terms.old_logp, terms.ref_logp, terms.kl_weights, terms.unclipped,
                terms.knobs, out, part, gate, rows, vocabulary, count, z.stride(0), 0 if ref is None else ref.stride(0),
                gain, cap, 1e30 if terms.tail is None else terms.tail,
                HAS_REF=ref is not None, CAPPED=scaling.softcap is not None, FORM=FORM[terms.form], PHASE=phase,
                SLICES=most, SLICE=size, num_warps=WARPS,
            )  # fmt: skip
    return out[6], _row_statistics(out, ref is not None)


def _row_statistics(out: Tensor, has_ref: bool) -> RowStats:
    logp, entropy, lse, ref_logp, kl, ref_lse, _ = out.unbind()
    if not has_ref:
        return RowStats(logp, None, None, entropy, lse, None)
    return RowStats(logp, ref_logp, kl, entropy, lse, ref_lse)


def _scales(scaling: Scaling) -> tuple[float, float]:
    """The two factors of :func:`_logits`."""
    if scaling.softcap is None:
        return scaling.logit_scale / scaling.temperature, 1.0
    return scaling.logit_scale / scaling.softcap, scaling.softcap / scaling.temperature


def _step(vocabulary: int) -> int:
    """Columns at a time: a power of two, no wider than needed."""
    return min(STEP, max(128, int(triton.next_power_of_2(vocabulary))))


def _usable(z: Tensor) -> None:
    if not (z.is_cuda or INTERPRETED):
        raise ConfigError(
            f"KLAMP_KERNELS is 'fused' but the tensors are on {z.device}. Move them to a GPU, or unset the variable."
        )
