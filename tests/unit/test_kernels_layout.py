"""How the fused kernels divide the rows: inside their memory, and alike for few tokens and many."""

from __future__ import annotations

import pytest
import torch

from klamp.kernels import chunking
from klamp.kernels.chunking import Plan
from klamp.kernels.types import Scaling, Side, Work

GIB = 2**30
SHAPES = {"8B": (8192, 4096, 128256), "0.5B": (16384, 896, 151936), "135M": (16384, 576, 49152)}


def plan(
    n: int, h: int, v: int, trains_head: bool, dtype: torch.dtype = torch.bfloat16, *, masked: bool = False
) -> Plan:
    hidden = torch.empty(n, h, dtype=dtype, device="meta")
    head = torch.empty(v, h, dtype=dtype, device="meta")
    tokens = torch.empty(n, dtype=torch.long, device="meta")
    index = tokens if masked else None
    return chunking.plan(Work(Side(hidden, head), None, tokens, index, Scaling(), (n,)), trains_head=trains_head)


@pytest.mark.parametrize("trains_head", [False, True])
@pytest.mark.parametrize("name", list(SHAPES))
def test_extra_memory_is_below_six_tenths_of_a_gib(name: str, trains_head: bool) -> None:
    n, h, v = SHAPES[name]
    rows = plan(n, h, v, trains_head)
    logits = (rows.chunk + rows.block) * chunking.width(v) * 2
    assert logits + n * h * 2 < 0.595 * GIB


@pytest.mark.parametrize("trains_head", [False, True])
@pytest.mark.parametrize("name", list(SHAPES))
def test_rows_do_not_depend_on_how_many_tokens_there_are(name: str, trains_head: bool) -> None:
    _, h, v = SHAPES[name]
    few, many = plan(2048, h, v, trains_head), plan(131072, h, v, trains_head)
    # Within a fifth, one step of 128 rows on the widest head: no product slows by more than 2 % for that.
    assert many.chunk >= 0.8 * few.chunk
    assert many.block >= 0.8 * few.block


@pytest.mark.parametrize("v", [1, 7, 1009, 262144, 4_000_000])
@pytest.mark.parametrize("trains_head", [False, True])
def test_every_vocabulary_gets_rows_and_chunks_divide_blocks(v: int, trains_head: bool) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        chunk, block, _ = plan(1000, 64, v, trains_head, dtype)
        assert chunk >= 1
        assert block % chunk == 0
        assert (chunk + block) * chunking.width(v) * dtype.itemsize <= chunking.BUDGET
        assert chunking.width(v) >= v
        assert chunking.width(v) % 64 == 0


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "shape", [(8192, 4096, 128256), (16384, 4096, 128256), (5000, 2048, 151936), (20000, 8192, 32003)]
)
def test_a_lead_stays_inside_the_memory_it_is_given(
    shape: tuple[int, int, int], dtype: torch.dtype, masked: bool
) -> None:
    n, h, v = shape
    rows = plan(n, h, v, True, dtype, masked=masked)
    if rows.lead is None:
        # Copies of 8192 states of size 8192 leave no room for a block of the head's gradient; short leads do not pay.
        assert (masked and h == 8192) or rows.block > min(n, 4 * h // dtype.itemsize) // 2
        return
    first, chunk, width = rows.lead
    assert first * dtype.itemsize <= 4 * h
    assert first <= n
    room = max(chunking.FLOOR, chunking.BUDGET - n * h * dtype.itemsize) - masked * first * h * dtype.itemsize
    assert chunk * chunking.width(v) * dtype.itemsize <= room
    assert 4 * h * (chunk + width) <= room
    step, steps = chunking.slices(v)
    assert width % (step * steps) == 0 or width == chunking.width(v)


def test_the_largest_head_is_all_lead_and_small_ones_have_none() -> None:
    lead = plan(*SHAPES["8B"], True).lead
    assert lead is not None
    assert lead[:2] == (8192, 2048)
    assert plan(*SHAPES["8B"], False).lead is None
    assert plan(*SHAPES["0.5B"], True).lead is None
    assert plan(*SHAPES["135M"], True).lead is None
