"""Any loss in one pass over the logits of a frozen head, on a GPU: fused against eager in float64.

Tolerances. The vectors ``Wᵀ ∂s/∂x`` of logp, kl and entropy are each rounded to the dtype (unit roundoff u), as are the
logits they come from (size Z = 10, so 2 u Z of p and of d) and the rows of ``∂s/∂x``. Errors of the summed gradient are
measured against the vectors' norms added up, however they cancel: 3 roundings and the logits'. Float16 has no numbers
below 6e-8, which many a p is.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from klamp import kernels

NAMES = ("logp", "kl", "entropy")


def draw(n: int, h: int, v: int, dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    g = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, device="cuda")

    scale = 1.5 / h**0.5
    return {
        "hidden": normal(n, h).to(dtype),
        "head": (scale * normal(v, h)).to(dtype),
        "tokens": torch.randint(v, (n,), generator=g, device="cuda"),
        "ref_hidden": normal(n, h).to(dtype),
        "ref_head": (scale * normal(v, h)).to(dtype),
        "weights": normal(3, n),
    }


def gradient(x: dict[str, Tensor], names: tuple[str, ...], dtype: torch.dtype, **options: Any) -> list[Tensor]:
    """Statistics and the gradient of ``Σ_s weights_s · s``, in ``dtype``."""
    own = {k: v.to(dtype) for k, v in x.items() if k not in ("tokens", "weights")}
    hidden = own.pop("hidden").requires_grad_()
    stats = kernels.token_stats(hidden, own.pop("head"), x["tokens"], **own, **options)
    loss = sum(
        (w.to(s.dtype) * s).sum()
        for w, n in zip(x["weights"], NAMES, strict=True)
        if n in names
        for s in [getattr(stats, n)]
    )
    (found,) = torch.autograd.grad(loss, hidden)
    return [*(s.detach() for s in stats if s is not None), found]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("v", [1, 7, 1009, 12289, 32003, 151936])
@pytest.mark.parametrize("names", [("logp", "kl"), NAMES, ("kl",)], ids=str)
def test_fused_equals_eager_in_float64(v: int, dtype: torch.dtype, names: tuple[str, ...]) -> None:
    x, wide = draw(37, 64, v, dtype, seed=v), torch.float64
    mine, truth = gradient(x, names, dtype, gradient_of=names), gradient(x, names, wide, gradient_of=names)
    u = torch.finfo(dtype).eps / 2
    for a, b in zip(mine[:-1], truth[:-1], strict=True):
        torch.testing.assert_close(a.double(), b, rtol=5e-5, atol=5e-5 + 40 * u)
    size = sum(gradient(x, (n,), wide, gradient_of=(n,))[-1].norm() for n in names)
    least = 1e-3 if dtype == torch.float16 else 1e-5
    assert mine[-1].dtype == dtype
    assert (mine[-1].double() - truth[-1]).norm() <= (3 * u + 40 * u + least) * size + 1e-9


@pytest.mark.parametrize(
    "options", [{"softcap": 5.0, "temperature": 0.8, "logit_scale": 0.7}, {"temperature": 0.7}], ids=str
)
def test_scalings(options: dict[str, float]) -> None:
    x = draw(300, 64, 12289, torch.float32)
    mine, truth = (gradient(x, NAMES, d, gradient_of=NAMES, **options) for d in (torch.float32, torch.float64))
    for a, b in zip(mine, truth, strict=True):
        assert (a.double() - b).norm() <= 1e-4 * b.norm()


def test_a_statistic_that_was_not_named_is_computed_again() -> None:
    x = draw(300, 64, 12289, torch.float32)
    mine, truth = (gradient(x, NAMES, d) for d in (torch.float32, torch.float64))
    assert (mine[-1].double() - truth[-1]).norm() <= 1e-4 * truth[-1].norm()


@pytest.mark.parametrize(("n", "h", "v"), [(700, 64, 151936), (5000, 64, 49152), (5000, 1024, 128256)])
def test_repeats_are_bit_identical_and_masked_rows_never_read(n: int, h: int, v: int) -> None:
    x = draw(n, h, v, torch.bfloat16)
    keep = torch.rand(n, generator=torch.Generator("cuda").manual_seed(1), device="cuda") < 0.6
    x["hidden"][~keep] = torch.nan
    x["tokens"][~keep] = -100
    first = gradient(x, ("logp", "kl"), torch.bfloat16, mask=keep)
    assert not first[-1][~keep].any()
    assert first[-1][keep].isfinite().all()
    for _ in range(4):
        again = gradient(x, ("logp", "kl"), torch.bfloat16, mask=keep)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("shape", [(8192, 4096, 128256), (16384, 896, 151936), (16384, 576, 49152)], ids=str)
def test_memory_of_a_pass(shape: tuple[int, int, int]) -> None:
    x = draw(*shape, torch.bfloat16)
    hidden = x["hidden"].requires_grad_()
    for _ in range(2):  # the first call also makes cuBLAS's own workspace
        hidden.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        s = kernels.token_stats(hidden, x["head"], x["tokens"], ref_hidden=x["ref_hidden"])
        assert s.kl is not None
        (s.logp + s.kl).sum().backward()
        extra = torch.cuda.max_memory_allocated() - before
        del s
    assert extra < 0.75 * 2**30
