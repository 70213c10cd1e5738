"""Logits of many rows in memory that is about to be something else, block of columns by block of columns.

The float32 sum of a head's gradient, [V, H], is dead memory until something is summed into it, and as large as bfloat16
logits of 2 H rows. Cut into blocks of the vocabulary, both lie in the same places: a block of logits [2 H, B] where the
block's gradient [B, H] is to be. So a block can be used up and overwritten while those behind it are still whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Tiles:
    """Rows ``start:stop`` of logits [depth, V]: blocks of ``width`` columns lie one behind the other in ``memory``.

    A block is a contiguous matrix [depth, its columns]; the last one has what is left of the ``padded`` columns, the
    first ``vocabulary`` of which count.
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
