"""How much of the logits the fused kernels hold at a time, and how they lie in memory. Plain arithmetic, no Triton.

All of it was chosen by measurement on an H200 (docs/performance.md); nothing is tuned at run time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from klamp.kernels.types import Scaling, Work

# Logits of both models and the gradient of the hidden states together, in bytes. Logits alone get at least FLOOR, so
# that the cost of a token does not depend on how many there are.
BUDGET, FLOOR = int(0.585 * 2**30), int(0.545 * 2**30)
# More rows than this make no matrix product faster.
ENOUGH = 6144
# Rows of the reference's logits, and of the gradient of the hidden states, at a time in a lead.
LEAD = 2048
# Columns a program takes at a time, and such steps in its slice of a loss. Longer slices spread the cost of meeting,
# until what all programs in flight have read (here 43 MB) no longer waits in the second-level cache to be read again.
STEP, STEPS = 2048, 5


class Lead(NamedTuple):
    """The first ``rows`` of a head that trains, all at once: their logits lie in the memory of the head's gradient, in
    blocks of ``width`` columns (:class:`Tiles`); the reference's come ``chunk`` rows at a time.
    """

    rows: int
    chunk: int
    width: int


class Plan(NamedTuple):
    """How many rows are held at a time: ``chunk`` of the reference's logits, ``block`` of the policy's, overwritten by
    their gradient. ``lead`` comes before them, where there is one."""

    chunk: int
    block: int
    lead: Lead | None = None


@dataclass(frozen=True, slots=True)
class Tiles:
    """Rows ``start:stop`` of logits [depth, V]: blocks of ``width`` columns lie one behind the other in ``memory``.

    A block is a contiguous matrix [depth, its columns]; the last one has what is left of the ``padded`` columns, the
    first ``vocabulary`` of which count.

    The float32 sum of a head's gradient, [V, H], is dead memory until something is summed into it, and as large as
    bfloat16 logits of 2 H rows. Cut into blocks of the vocabulary, both lie in the same places: a block of logits
    [2 H, B] where the block's gradient [B, H] is to be. So a block can be used up and overwritten while those behind it
    are still whole.
    """

    memory: Tensor
    depth: int
    vocabulary: int
    padded: int
    width: int
    start: int
    stop: int

    @property
    def count(self) -> int:
        """Blocks."""
        return -(-self.padded // self.width)

    @property
    def last(self) -> int:
        """Columns of the last block, with padding."""
        return self.padded - (self.count - 1) * self.width

    @property
    def shape(self) -> tuple[int, int]:
        return self.stop - self.start, self.vocabulary

    def __getitem__(self, rows: slice) -> Tiles:
        """Some of the rows, in the same places."""
        start, stop, _ = rows.indices(self.stop - self.start)
        return replace(self, start=self.start + start, stop=self.start + stop)

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Each block's columns and its matrix [rows, columns]."""
        for left in range(0, self.padded, self.width):
            columns = slice(left, min(left + self.width, self.vocabulary))
            own = min(self.width, self.padded - left)
            block = self.memory[left * self.depth : (left + own) * self.depth].view(self.depth, own)
            yield columns, block[self.start : self.stop, : columns.stop - left]


def plan(work: Work, *, trains_head: bool) -> Plan:
    """Rows at a time within BUDGET: the policy's ``block`` rows of logits, overwritten by their gradient, and the
    reference's ``chunk`` rows.

    Both tall, for the logits' products are most of the work. Taller blocks beside shorter chunks would read and write
    the float32 gradient of a head that trains less often, but lose as much in the reference's products. A small head,
    whose buffers are tall anyway, has tall blocks.
    """
    hidden = work.policy.hidden
    row = width(work.policy.head.shape[0]) * hidden.element_size()
    room = max(FLOOR, BUDGET - hidden.numel() * hidden.element_size())
    fits = min(ENOUGH, room // row)
    if fits < 384:
        rows = max(1, fits // 2)
        return Plan(rows, rows, lead(work, room, rows) if trains_head else None)
    half = fits // 2
    if half >= 2048:
        chunk, block = fits // 3 // 128 * 128, 2 * (fits // 3 // 128 * 128)
    else:
        chunk = block = 1024 if half >= 1024 else half // 64 * 64
    return Plan(chunk, block, lead(work, room, block) if trains_head else None)


def rows_at_a_time(work: Work, slots: int) -> int:
    """Rows whose logits fit ``slots`` times within FLOOR, where the vectors of their statistics take their place."""
    row = width(work.policy.head.shape[0]) * work.policy.hidden.element_size()
    fits = min(ENOUGH, FLOOR // row) // slots
    return max(1, fits if fits < 64 else 1024 if 1024 <= fits < 2048 else fits // 64 * 64)


def lead(work: Work, room: int, block: int) -> Lead | None:
    """The first rows of a head that trains, all whose logits the memory of its gradient holds, where that saves time.

    A block of rows costs a read and a write of the head's gradient. A lead costs three such moves, of half the width
    where no rows follow it: it pays where it stands for two blocks, or for all of several. Beside it ``room`` holds the
    reference's logits, and after them one block of columns of the head's gradient in float32.
    """
    hidden, n = work.policy.hidden, work.tokens.shape[0]
    vocabulary, size, h = work.policy.head.shape[0], hidden.element_size(), hidden.shape[1]
    rows = min(n, 4 * h // size)
    if rows < 2 * block and not rows == n > block:
        return None
    if work.index is not None:
        room -= rows * h * size  # counted rows are copied
    most = room // (width(vocabulary) * size)
    if most < 1:
        return None
    most = min(rows, LEAD, most if most < 128 else most // 128 * 128)
    parts = -(-rows // most)
    chunk = most if most < 128 else min(most, -(-rows // (parts * 128)) * 128)
    step, steps = slices(vocabulary)
    columns = (room // (4 * h) - chunk) // (step * steps) * (step * steps)
    return Lead(rows, chunk, min(columns, width(vocabulary))) if columns > 0 else None


def slices(vocabulary: int) -> tuple[int, int]:
    """Columns at a time, a power of two, and how many times a program takes so many: no more than needed."""
    step = min(STEP, max(128, 1 << (vocabulary - 1).bit_length()))
    return step, min(STEPS, -(-vocabulary // step))


def width(vocabulary: int) -> int:
    """Columns to allocate for a row of logits: every row starts on a 128-byte line, whatever the vocabulary."""
    return -(-vocabulary // 64) * 64


def scales(scaling: Scaling) -> tuple[float, float]:
    """``logit_scale / temperature`` and ``softcap / temperature``: slope at 0 and height of the scaled logits."""
    softcap = 1.0 if scaling.softcap is None else scaling.softcap
    return scaling.logit_scale / scaling.temperature, softcap / scaling.temperature
