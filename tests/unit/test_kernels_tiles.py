"""Logits in the memory of a head's gradient: every block where it belongs, and none overwritten before it is used."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from klamp.kernels.autograd import replace
from klamp.kernels.chunking import Tiles


def tiled(logits: Tensor, hidden: int, width: int) -> tuple[Tiles, Tensor]:
    """Tiles that hold ``logits``, and the float32 memory they lie in."""
    depth, vocabulary = logits.shape
    padded = -(-vocabulary // 8) * 8
    memory = torch.full((padded * hidden,), torch.nan)
    own = memory.view(logits.dtype)[: padded * depth]
    tiles = Tiles(own, depth, vocabulary, padded, width, 0, depth)
    for columns, block in tiles.blocks():
        block.copy_(logits[:, columns])
    return tiles, memory


@pytest.mark.parametrize("width", [8, 16, 40, 64])
@pytest.mark.parametrize("vocabulary", [1, 8, 37, 40, 61])
def test_blocks_hold_every_column_once(vocabulary: int, width: int) -> None:
    logits = torch.randn(6, vocabulary)
    tiles, _ = tiled(logits, 6, width)
    assert tiles.shape == (6, vocabulary)
    assert tiles.count == len(list(tiles.blocks()))
    assert torch.equal(torch.cat([block for _, block in tiles.blocks()], 1), logits)
    some = tiles[1:5][1:3]
    assert some.shape == (2, vocabulary)
    assert torch.equal(torch.cat([block for _, block in some.blocks()], 1), logits[2:4])


@pytest.mark.parametrize("to", [torch.float32, torch.float16])
@pytest.mark.parametrize("depth", [1, 3, 5, 6, 7, 9, 11, 12])
@pytest.mark.parametrize("width", [8, 16, 64])
def test_a_gradient_takes_the_place_of_the_logits(depth: int, width: int, to: torch.dtype) -> None:
    # Small whole numbers: every sum is exact in any dtype.
    g = torch.randint(-2, 3, (depth, 61)).half()
    hidden = torch.randint(-2, 3, (depth, 6)).half()
    tiles, memory = tiled(g, 6, width)
    head = memory.view(to)[: 61 * 6].view(61, 6)
    replace(tiles, hidden, head)
    assert torch.equal(head.float(), g.float().T @ hidden.float())
