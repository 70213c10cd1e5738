"""The fused kernels as the operations of :class:`~klamp.kernels.types.Ops`: shapes, launches, nothing else.

Imported at the first use of a GPU, for it brings in Triton. Shapes: [rows, V] logits, [rows] everything else.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from klamp.errors import ConfigError
from klamp.kernels import triton_one_pass, triton_statistics
from klamp.kernels.chunking import Tiles, plan, rows_at_a_time, scales, slices, width
from klamp.kernels.types import Logits, RowStats, Scaling, Sheet, Terms, Upstream


class Starter:
    """Starts one kernel, with ``warps`` warps a program."""

    def __init__(self, kernel: Any, warps: int) -> None:
        self.kernel, self.warps = kernel, warps
        self.compiled: dict[Hashable, Any] = {}

    def __call__(self, programs: tuple[int, int, int], args: tuple[Any, ...], key: tuple[Hashable, ...]) -> None:
        """Start it with all its arguments, by position. Equal keys promise equal code, but for those led by None."""
        known = self.compiled.get(key)
        if known is not None:
            known[programs](*args)
            return
        made = self.kernel[programs](*args, num_warps=self.warps)
        if key[0] is not None and isinstance(made, triton_statistics.DIRECT):
            self.compiled[key] = made


def common(*tensors: Tensor | None) -> Hashable:
    """What leads a key: the device, and the types of tensors on whose addresses compiled code depends.

    It may count on their being multiples of 16: those of our own are, and where one is not there is None to lead by.
    """
    if triton_statistics.INTERPRETED:
        return None
    address = 0
    for x in tensors:
        if x is not None:
            address |= x.data_ptr()
    if address % 16:
        return None
    return (torch.cuda.current_device(), *(None if x is None else x.dtype for x in tensors))


# mypy: disable-error-code="no-untyped-call, index"


__all__ = [
    "combine",
    "gradient",
    "jacobians",
    "loss_gradient",
    "plan",
    "rows_at_a_time",
    "scale",
    "statistics",
    "width",
]

# 16 columns a thread, in two 16-byte loads a model, prefetched STAGES - 1 steps ahead.
WARPS, STAGES = 4, 3
FORM = {None: 0, "k2": 1, "k3": 2, "weighted_k3": 3, "exact": 4, "sequence_exact": 4}
BLOCK = 4096

_scale = Starter(triton_one_pass._scale, 8)
_row_stats = Starter(triton_statistics._row_stats, WARPS)
_row_gradient = Starter(triton_statistics._row_gradient, WARPS)
_one_pass = Starter(triton_one_pass._one_pass, WARPS)
_jacobians = Starter(triton_one_pass._jacobians, WARPS)
_combine_rows = Starter(triton_one_pass._combine_rows, WARPS)


class Cuts(NamedTuple):
    """A row in ``number`` slices, ``most`` the power of two not below it: ``steps`` steps of ``step`` columns in each,
    ``tail`` of them in the last."""

    number: int
    most: int
    steps: int
    tail: int
    step: int


@functools.cache
def cuts(vocabulary: int, step: int, steps: int) -> Cuts:
    """The slices of a row, from :func:`~klamp.kernels.chunking.slices`."""
    number = _parts(vocabulary, steps * step)
    tail = _parts(vocabulary, step) - (number - 1) * steps
    return Cuts(number, 1 << (number - 1).bit_length(), steps, tail, step)


def scale(source: Tensor, factor: Tensor, out: Tensor) -> None:
    """``factor · source`` into ``out``, of another dtype maybe; contiguous, ``factor`` one number on the device."""
    count = source.numel()
    if count:
        key = (common(source, factor, out), count < 2**31)
        _scale((_parts(count, BLOCK), 1, 1), (source, factor, out, count, BLOCK), key)


def statistics(z: Tensor, ref: Tensor | None, tokens: Tensor, scaling: Scaling, out: Sheet) -> None:
    """logp, ref_logp, kl and entropy of each row into ``out``; one read of the logits."""
    _usable(z)
    rows, vocabulary = z.shape
    if rows == 0:
        return
    rate, cap = scales(scaling)
    step, _ = slices(vocabulary)
    strides = (z.stride(0), 0 if ref is None else ref.stride(0))
    fixed = (ref is not None, scaling.softcap is not None, _parts(vocabulary, step), step, 1)
    args = (z, ref, tokens, out.lines, out.lines.stride(0), vocabulary, *strides, rate, cap, *fixed)
    _row_stats((rows, 1, 1), args, (common(z, ref), strides, fixed))


def gradient(z: Logits, ref: Tensor | None, tokens: Tensor, stats: RowStats, up: Upstream, scaling: Scaling) -> None:
    """``Σ_s up_s · ∂s/∂x`` over s in (logp, kl, entropy), written over the logits x in ``z``."""
    memory, place = _placed(z)
    rows, vocabulary = z.shape
    if rows == 0:
        return
    rate, cap = scales(scaling)
    step, _ = slices(vocabulary)
    stride = 0 if ref is None else ref.stride(0)
    fixed = (scaling.softcap is not None, step)
    lines = (stats.kl, stats.ref_lse, up.logp, up.kl, up.entropy)
    key = (common(memory, ref), tuple(x is None for x in lines), place[2:4], stride, fixed)
    args = (memory, ref, tokens, stats.lse, stats.entropy, *lines, vocabulary, *place, stride, rate, cap, *fixed)
    _row_gradient((rows, _parts(vocabulary, step), 1), args, key)


def loss_gradient(z: Logits, ref: Tensor | None, tokens: Tensor, terms: Terms, scaling: Scaling, out: Sheet) -> None:
    """Each row's loss and statistics into ``out``, the loss's gradient over the logits in ``z``."""
    memory, place = _placed(z)
    rows, vocabulary = z.shape
    if rows == 0:
        return
    number, *cut = cuts(vocabulary, *slices(vocabulary))
    part = memory.new_empty(rows * 8 * cut[0], dtype=torch.float32)
    gate = out.lines[7:].view(torch.int32)
    stride = 0 if ref is None else ref.stride(0)
    given = (terms.old_logp, terms.ref_logp, terms.kl_weights, terms.unclipped)
    pointers = (memory, ref, tokens, terms.advantages, *given, terms.knobs, out.lines, part, gate)
    sizes = (out.lines.stride(0), vocabulary, number, *place, stride)
    numbers = (*scales(scaling), 1e30 if terms.tail is None else float(terms.tail))
    where, absent = common(memory, ref, terms.knobs, part), tuple(x is None for x in given)
    has_ref, capped, form = ref is not None, scaling.softcap is not None, FORM[terms.form]
    for phase in (1, 2) if triton_statistics.INTERPRETED and number > 1 else (0,):
        fixed = (has_ref, capped, form, phase, *cut, STAGES, terms.once)
        key = (where, absent, place[2:4], stride, fixed)
        _one_pass((rows * number, 1, 1), (*pointers, *sizes, *numbers, *fixed), key)


def jacobians(
    z: Tensor,
    ref: Tensor | None,
    into: list[Tensor],
    names: tuple[str, ...],
    tokens: Tensor,
    scaling: Scaling,
    out: Sheet,
) -> None:
    """The statistics into ``out``, and ``∂s/∂x`` of those in ``names`` into a buffer each, which z and ref may be."""
    _usable(z)
    rows, vocabulary = z.shape
    if rows == 0:
        return
    number, *cut = cuts(vocabulary, *slices(vocabulary))
    part = z.new_empty(rows * 8 * cut[0], dtype=torch.float32)
    gate = out.lines[7:].view(torch.int32)
    found = dict(zip(names, into, strict=False))
    given = tuple(found.get(name) for name in ("logp", "kl", "entropy"))
    stride, capped = z.stride(0), scaling.softcap is not None
    pointers = (z, ref, *given, tokens, out.lines, part, gate)
    sizes = (out.lines.stride(0), vocabulary, number, stride, *scales(scaling))
    where = common(z, ref, *given, part)
    for phase in (1, 2) if triton_statistics.INTERPRETED and number > 1 else (0,):
        fixed = (capped, phase, *cut, STAGES)
        _jacobians((rows * number, 1, 1), (*pointers, *sizes, *fixed), (where, stride, fixed))


def combine(vectors: Tensor, weights: list[Tensor | None], chunk: int, index: Tensor | None, out: Tensor) -> None:
    """``Σ_s weight_s · vector_s`` of each row into its place in ``out`` [N, H]; ``vectors`` as in ``jacobians``."""
    count, width = len(vectors) // len(weights), vectors.shape[1]
    if count == 0:
        return
    three = (*weights, None, None)[:3]
    fixed = (len(weights), min(2048, 1 << (width - 1).bit_length()))
    key = (common(vectors, out), tuple(None if x is None else x.dtype for x in (*three, index)), width, fixed)
    args = (vectors, *three, index, out, count, chunk, width, *fixed)
    _combine_rows((count, _parts(width, fixed[1]), 1), args, key)


def _placed(z: Logits) -> tuple[Tensor, tuple[int, int, int, int, int]]:
    """The memory of logits, and where in it they lie: rows above them, rows in a block, the columns of a block and of
    the last one with padding, blocks."""
    if isinstance(z, Tiles):
        _usable(z.memory)
        return z.memory, (z.start, z.depth, z.width, z.last, z.count)
    _usable(z)
    return z, (0, 0, z.stride(0), z.stride(0), 1)


def _usable(z: Tensor) -> None:
    if not (z.is_cuda or triton_statistics.INTERPRETED):
        raise ConfigError(
            f"KLAMP_KERNELS is 'fused' but the tensors are on {z.device}. Move them to a GPU, or unset the variable."
        )


def _parts(total: int, size: int) -> int:
    return -(-total // size)
