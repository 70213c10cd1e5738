# mypy: disable-error-code="no-untyped-call, index"
"""The fused kernels as the operations of :class:`~klamp.kernels.work.Ops`: shapes, launches, nothing else.

Imported at the first use of a GPU, for it brings in Triton. Shapes: [rows, V] logits, [rows] everything else.
"""

from __future__ import annotations

import torch
from torch import Tensor

from klamp.errors import ConfigError
from klamp.kernels import fused
from klamp.kernels.layout import plan, scales, slices, width
from klamp.kernels.tiles import Tiles
from klamp.kernels.work import Logits, RowStats, Scaling, Sheet, Terms, Upstream

__all__ = ["gradient", "loss_gradient", "plan", "scale", "statistics", "width"]

# 16 columns a thread, in two 16-byte loads a model, prefetched STAGES - 1 steps ahead.
WARPS, STAGES = 4, 3
FORM = {None: 0, "k2": 1, "k3": 2, "weighted_k3": 3, "exact": 4, "sequence_exact": 4}


def scale(source: Tensor, factor: Tensor, out: Tensor) -> None:
    """``factor · source`` into ``out``, of another dtype maybe; contiguous, ``factor`` one number on the device."""
    if source.numel():
        fused._scale[(_parts(source.numel(), 4096),)](source, factor, out, source.numel(), BLOCK=4096, num_warps=8)


def statistics(z: Tensor, ref: Tensor | None, tokens: Tensor, scaling: Scaling, out: Sheet) -> None:
    """logp, ref_logp, kl and entropy of each row into ``out``; one read of the logits."""
    _usable(z)
    rows, vocabulary = z.shape
    if rows == 0:
        return
    rate, cap = scales(scaling)
    step, _ = slices(vocabulary)
    fused._row_stats[(rows,)](
        z, ref, tokens, out.lines, out.lines.stride(0), vocabulary, z.stride(0), 0 if ref is None else ref.stride(0),
        rate, cap, HAS_REF=ref is not None, CAPPED=scaling.softcap is not None,
        STEPS=_parts(vocabulary, step), STEP=step, STAGES=1, num_warps=WARPS,
    )  # fmt: skip


def gradient(z: Logits, ref: Tensor | None, tokens: Tensor, stats: RowStats, up: Upstream, scaling: Scaling) -> None:
    """``Σ_s up_s · ∂s/∂x`` over s in (logp, kl, entropy), written over the logits x in ``z``."""
    memory, place = _placed(z)
    rows, vocabulary = z.shape
    if rows == 0:
        return
    rate, cap = scales(scaling)
    step, _ = slices(vocabulary)
    fused._row_gradient[(rows, _parts(vocabulary, step))](
        memory, ref, tokens, stats.lse, stats.entropy, stats.kl, stats.ref_lse, up.logp, up.kl, up.entropy,
        vocabulary, *place, 0 if ref is None else ref.stride(0), rate, cap,
        CAPPED=scaling.softcap is not None, STEP=step, num_warps=WARPS,
    )  # fmt: skip


def loss_gradient(z: Logits, ref: Tensor | None, tokens: Tensor, terms: Terms, scaling: Scaling, out: Sheet) -> None:
    """Each row's loss and statistics into ``out``, the loss's gradient over the logits in ``z``."""
    memory, place = _placed(z)
    rows, vocabulary = z.shape
    step, steps = slices(vocabulary)
    count = _parts(vocabulary, steps * step)
    tail = _parts(vocabulary, step) - (count - 1) * steps
    most = _power_of_two(count)
    part = memory.new_empty(rows * 8 * most, dtype=torch.float32)
    gate = out.lines[7:].view(torch.int32)
    rate, cap = scales(scaling)
    for phase in (1, 2) if fused.INTERPRETED and count > 1 else (0,):
        if rows:
            fused._one_pass[(rows * count,)](
                memory, ref, tokens, terms.advantages, terms.old_logp, terms.ref_logp, terms.kl_weights,
                terms.unclipped, terms.knobs, out.lines, part, gate, out.lines.stride(0), vocabulary, count, *place,
                0 if ref is None else ref.stride(0), rate, cap, 1e30 if terms.tail is None else terms.tail,
                HAS_REF=ref is not None, CAPPED=scaling.softcap is not None, FORM=FORM[terms.form], PHASE=phase,
                SLICES=most, STEPS=steps, TAIL=tail, STEP=step, STAGES=STAGES, ONCE=terms.once, num_warps=WARPS,
            )  # fmt: skip


def _placed(z: Logits) -> tuple[Tensor, tuple[int, int, int, int, int]]:
    """The memory of logits, and where in it they lie: rows above them, rows in a block, the columns of a block and of
    the last one with padding, blocks."""
    if isinstance(z, Tiles):
        _usable(z.memory)
        return z.memory, (z.start, z.depth, z.width, z.last, z.count)
    _usable(z)
    return z, (0, 0, z.stride(0), z.stride(0), 1)


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
