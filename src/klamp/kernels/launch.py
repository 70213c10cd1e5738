# mypy: disable-error-code="no-untyped-call, index"
"""The fused kernels as the operations of :class:`~klamp.kernels.work.Ops`: shapes, launches, nothing else.

Imported at the first use of a GPU, for it brings in Triton. Shapes: [rows, V] logits, [rows] everything else.
"""

from __future__ import annotations

import torch
from torch import Tensor

from klamp.errors import ConfigError
from klamp.kernels import fused
from klamp.kernels.layout import plan, scales, width
from klamp.kernels.work import RowStats, Scaling, Terms, Upstream

__all__ = ["gradient", "loss_gradient", "plan", "scale", "statistics", "width"]

# Columns a program takes at a time, and its warps; 16 columns a thread, in two 16-byte loads a model.
STEP, WARPS = 2048, 4
# Steps in a slice of a loss, prefetched STAGES - 1 ahead. Longer slices spread the cost of meeting, until what all
# programs in flight have read (here 38 MB) no longer waits in the second-level cache to be read again.
STEPS, STAGES = 6, 3
FORM = {None: 0, "k2": 1, "k3": 2, "weighted_k3": 3, "exact": 4, "sequence_exact": 4}


def scale(source: Tensor, factor: Tensor, out: Tensor) -> None:
    """``factor · source`` into ``out``, of another dtype maybe; contiguous, ``factor`` one number on the device."""
    if source.numel():
        fused._scale[(_parts(source.numel(), 4096),)](source, factor, out, source.numel(), BLOCK=4096, num_warps=8)


def statistics(z: Tensor, ref: Tensor | None, tokens: Tensor, scaling: Scaling) -> RowStats:
    """logp, ref_logp, kl and entropy of each row; one read of the logits."""
    _usable(z)
    rows, vocabulary = z.shape
    out = z.new_empty(7, rows, dtype=torch.float32)
    if rows:
        rate, cap = scales(scaling)
        step = _step(vocabulary)
        fused._row_stats[(rows,)](
            z, ref, tokens, out, rows, vocabulary, z.stride(0), 0 if ref is None else ref.stride(0), rate, cap,
            HAS_REF=ref is not None, CAPPED=scaling.softcap is not None,
            STEPS=_parts(vocabulary, step), STEP=step, STAGES=1, num_warps=WARPS,
        )  # fmt: skip
    return _row_statistics(out, ref is not None)


def gradient(z: Tensor, ref: Tensor | None, tokens: Tensor, stats: RowStats, up: Upstream, scaling: Scaling) -> None:
    """``Σ_s up_s · ∂s/∂x`` over s in (logp, kl, entropy), written over the logits x in ``z``."""
    _usable(z)
    rows, vocabulary = z.shape
    if rows == 0:
        return
    rate, cap = scales(scaling)
    step = _step(vocabulary)
    fused._row_gradient[(rows, _parts(vocabulary, step))](
        z, ref, tokens, stats.lse, stats.entropy, stats.kl, stats.ref_lse, up.logp, up.kl, up.entropy,
        vocabulary, z.stride(0), 0 if ref is None else ref.stride(0), rate, cap,
        CAPPED=scaling.softcap is not None, STEP=step, num_warps=WARPS,
    )  # fmt: skip


def loss_gradient(
    z: Tensor, ref: Tensor | None, tokens: Tensor, terms: Terms, scaling: Scaling
) -> tuple[Tensor, RowStats]:
    """Each row's loss, with its gradient written over the logits in ``z``."""
    _usable(z)
    rows, vocabulary = z.shape
    out = z.new_empty(7, rows, dtype=torch.float32)
    step = _step(vocabulary)
    steps = min(STEPS, _parts(vocabulary, step))
    count = _parts(vocabulary, steps * step)
    most = _power_of_two(count)
    part = z.new_empty(rows * 8 * most, dtype=torch.float32)
    gate = z.new_zeros(rows + 1, dtype=torch.int32)
    rate, cap = scales(scaling)
    for phase in (1, 2) if fused.INTERPRETED and count > 1 else (0,):
        if rows:
            fused._one_pass[(rows * count,)](
                z, ref, tokens, terms.advantages, terms.old_logp, terms.ref_logp, terms.kl_weights, terms.unclipped,
                terms.knobs, out, part, gate, rows, vocabulary, count, z.stride(0), 0 if ref is None else ref.stride(0),
                rate, cap, 1e30 if terms.tail is None else terms.tail,
                HAS_REF=ref is not None, CAPPED=scaling.softcap is not None, FORM=FORM[terms.form], PHASE=phase,
                SLICES=most, STEPS=steps, STEP=step, STAGES=STAGES, num_warps=WARPS,
            )  # fmt: skip
    return out[6], _row_statistics(out, ref is not None)


def _row_statistics(out: Tensor, has_ref: bool) -> RowStats:
    logp, entropy, lse, ref_logp, kl, ref_lse, _ = out.unbind()
    if not has_ref:
        return RowStats(logp, None, None, entropy, lse, None)
    return RowStats(logp, ref_logp, kl, entropy, lse, ref_lse)


def _step(vocabulary: int) -> int:
    """Columns at a time: a power of two, no wider than needed."""
    return min(STEP, max(128, _power_of_two(vocabulary)))


def _usable(z: Tensor) -> None:
    if not (z.is_cuda or fused.INTERPRETED):
        raise ConfigError(
            f"KLAMP_KERNELS is 'fused' but the tensors are on {z.device}. Move them to a GPU, or unset the variable."
        )


def _parts(total: int, size: int) -> int:
    return -(-total // size)


def _power_of_two(n: int) -> int:
    """The least one that is not below n."""
    return 1 << (n - 1).bit_length()
