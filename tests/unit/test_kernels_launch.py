"""Launches that go straight to compiled code: only ever with arguments for which Triton would have chosen that code.

Triton's own binder says what a launch is compiled for, and it needs no GPU. The kernels themselves do not run here.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from klamp.kernels.chunking import Tiles
from klamp.kernels.types import Form, RowStats, Scaling, Sheet, Terms, Upstream

pytest.importorskip("triton", reason="the kernels are Triton's")

V = 5000  # of a step and of slices that do not divide it


class Ledger:
    """A kernel that only writes down what each launch would be compiled for, by Triton's rules for a Hopper GPU."""

    def __init__(self, kernel: Any, made: Callable[[], Any]) -> None:
        from triton.backends.compiler import GPUTarget
        from triton.compiler import make_backend
        from triton.runtime.jit import create_function_from_signature

        self.bind = create_function_from_signature(
            kernel.signature, kernel.params, make_backend(GPUTarget("cuda", 90, 32))
        )
        self.names = list(inspect.signature(kernel.fn).parameters)
        self.made = made
        self.ordinary = self.direct = 0
        self.variants: set[str] = set()

    def compiled_for(self, args: tuple[Any, ...]) -> str:
        assert len(args) == len(self.names)
        return str(self.bind(*args)[1])

    def __getitem__(self, programs: tuple[int, int, int]) -> Callable[..., Any]:
        def launch(*args: Any, num_warps: int) -> Any:
            self.ordinary += 1
            self.variants.add(self.compiled_for(args))
            code = self.made()
            code.ledger, code.variant = self, self.compiled_for(args)
            return code

        return launch


def compiled_code(kind: type) -> Any:
    """A compiled kernel that, started, asserts that the arguments are those it was compiled for."""

    class Code(kind):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            """Nothing is loaded."""

        def __getitem__(self, programs: tuple[int, int, int]) -> Callable[..., None]:
            assert len(programs) == 3

            def start(*args: Any) -> None:
                self.ledger.direct += 1
                assert self.ledger.compiled_for(args) == self.variant

            return start

    return Code


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module with ledgers in place of its kernels, on CPU tensors."""
    from klamp.kernels import triton_launch as module
    from klamp.kernels import triton_statistics

    if triton_statistics.INTERPRETED or not triton_statistics.DIRECT:
        pytest.skip("launches go the ordinary way here")
    code = compiled_code(triton_statistics.DIRECT[0])
    for name in ("_scale", "_row_stats", "_row_gradient", "_one_pass", "_jacobians", "_combine_rows"):
        starter = getattr(module, name)
        monkeypatch.setattr(starter, "kernel", Ledger(starter.kernel, code))
        monkeypatch.setattr(starter, "compiled", {})
    monkeypatch.setattr(module, "_usable", lambda _: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return module


def losses() -> Iterator[tuple[Any, ...]]:
    """Arguments of ``loss_gradient`` that differ in every way a caller's can."""
    for n, dtype, width in itertools.product((1, 16, 17, 40), (torch.bfloat16, torch.float32), (V, 5056, 5057)):
        z, each = torch.empty(n, width, dtype=dtype)[:, :V], torch.zeros(n)
        refs = [None, *(torch.empty(n, wide, dtype=dtype)[:, :V] for wide in (V, 5056, 5057)), z.half()]
        for ref, given, tail in itertools.product(refs, (None, each), (None, 5, 0.5)):
            form: Form = "k3" if ref is None else "exact"
            terms = Terms(form, torch.zeros(3), tail, each, given, None, given, None, ref is None)
            for scaling in (Scaling(), Scaling(0.7), Scaling(1.0, 5.0)):
                yield z, ref, torch.zeros(n, dtype=torch.long), terms, scaling, sheet(n, ref)


def sheet(n: int, ref: Tensor | None) -> Sheet:
    return Sheet(torch.zeros(9, n), ref is not None)


def test_a_loss_starts_the_code_it_would_be_compiled_to(launch: ModuleType) -> None:
    for _ in range(2):
        for args in losses():
            launch.loss_gradient(*args)
    kernel = launch._one_pass.kernel
    assert kernel.direct > kernel.ordinary >= len(kernel.variants) > 10
    # Numbers that steer, and how many rows there are, are no part of any key.
    before = kernel.ordinary
    z, ref, tokens, terms, scaling, _ = next(losses())
    for n in (2, 3, 1000):
        many = Terms(terms.form, torch.rand(3), None, torch.rand(n), None, None, None, None, terms.once)
        launch.loss_gradient(z.new_empty(n, V), ref, tokens.new_zeros(n), many, scaling, sheet(n, ref))
    assert kernel.ordinary == before


def test_tiles_and_parts_of_them(launch: ModuleType) -> None:
    n, scaling = 12, Scaling()
    memory = torch.empty(n * 5056, dtype=torch.bfloat16)
    for width in (5056, 2560, 1280):
        tiles = Tiles(memory, n, V, 5056, width, 0, n)
        for z in (tiles, tiles[0:5], tiles[5:12]):
            rows = z.shape[0]
            lines = torch.zeros(rows)
            terms = Terms(None, torch.zeros(3), None, lines, None, None, None, None)
            tokens = torch.zeros(rows, dtype=torch.long)
            launch.loss_gradient(z, None, tokens, terms, scaling, sheet(rows, None))
            launch.gradient(
                z, None, tokens, RowStats(lines, None, None, lines, lines, None), Upstream(lines, None, None), scaling
            )
    assert launch._one_pass.kernel.direct > 0
    assert launch._row_gradient.kernel.direct > 0


def test_statistics_and_their_gradient(launch: ModuleType) -> None:
    for _ in range(2):
        for z, ref, tokens, _, scaling, out in losses():
            launch.statistics(z, ref, tokens, scaling, out)
            stats = out.stats()
            for up in (Upstream(stats.logp, None, None), Upstream(None, stats.kl, stats.entropy)):
                launch.gradient(z, None if up.kl is None else ref, tokens, stats, up, scaling)
    assert launch._row_stats.kernel.direct > launch._row_stats.kernel.ordinary
    assert launch._row_gradient.kernel.direct > launch._row_gradient.kernel.ordinary


def test_jacobians_and_the_rows_made_of_them(launch: ModuleType) -> None:
    each = ("logp", "kl", "entropy")
    for _ in range(2):
        for z, ref, tokens, _, scaling, out in losses():
            if ref is not None and (ref.dtype != z.dtype or ref.stride() != z.stride()):
                continue  # all buffers are parts of one
            for names in (each[:1], each[:2], each):
                kept = tuple(n for n in names if ref is not None or n != "kl")
                into = [z, torch.empty_like(z) if ref is None else ref, torch.empty_like(z)]
                launch.jacobians(z, ref, into, kept, tokens, scaling, out)
    kernel = launch._jacobians.kernel
    assert kernel.direct > kernel.ordinary >= len(kernel.variants) > 10
    for _ in range(2):
        for n, width, dtype in itertools.product((1, 16, 17), (16, 100), (torch.bfloat16, torch.float32)):
            weight, out = torch.zeros(n), torch.empty(n, width, dtype=dtype)
            for k, index in itertools.product((1, 2, 3), (None, torch.arange(n))):
                vectors = torch.empty(k * n, width, dtype=dtype)
                for weights in ([weight] * k, [None] * (k - 1) + [weight]):
                    launch.combine(vectors, weights, 7, index, out)
    kernel = launch._combine_rows.kernel
    assert kernel.direct > kernel.ordinary >= len(kernel.variants) > 10


def test_layers_without_a_gradient(launch: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from klamp.kernels import triton_layers, triton_statistics

    for name in ("_gated", "_rotate"):
        starter = getattr(triton_layers, f"_start{name}")
        monkeypatch.setattr(
            starter, "kernel", Ledger(getattr(triton_layers, name), compiled_code(triton_statistics.DIRECT[0]))
        )
        monkeypatch.setattr(starter, "compiled", {})
    for _ in range(2):
        for n, stepwise, dtype in itertools.product((1, 5, 16, 48), (False, True), (torch.bfloat16, torch.float32)):
            x = torch.empty(n, dtype=dtype)
            triton_layers.gated(x, x)
            for heads, size, back in itertools.product((1, 3, 16), (16, 32), (False, True)):
                turn = torch.empty(n, size, dtype=dtype)
                triton_layers.rotate(torch.empty(n, heads, size, dtype=dtype), turn, turn, back=back, stepwise=stepwise)
    for starter in (triton_layers._start_gated, triton_layers._start_rotate):
        assert starter.kernel.direct > starter.kernel.ordinary >= len(starter.kernel.variants) > 4


def test_addresses_that_sixteen_does_not_divide_go_the_ordinary_way(launch: ModuleType) -> None:
    values, factor = torch.zeros(4096), torch.ones(())
    for start in (0, 4, 8, 1, 2, 3, 5):
        for to in (torch.float32, torch.bfloat16):
            source, out = values[start:], torch.empty(4096, dtype=to)[start:]
            launch.scale(source, factor, out)
            launch.scale(source, factor, out)
    kernel = launch._scale.kernel
    # Straight: float32 at 0, and at 4 and 8 again, which share its code; bfloat16 at 0 and 8.
    assert kernel.direct == 1 + 2 + 2 + 1 + 2
    assert kernel.direct + kernel.ordinary == 28


def test_what_is_no_compiled_kernel_is_not_kept(launch: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from klamp.kernels import triton_statistics

    monkeypatch.setattr(triton_statistics, "DIRECT", ())
    for _ in range(3):
        launch.scale(torch.zeros(64), torch.ones(()), torch.zeros(64))
    assert launch._scale.kernel.ordinary == 3
    assert launch._scale.compiled == {}
