"""Parts of a layer with gradients written out: autograd's, in float64, and the Triton kernels in the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from klamp.kernels.layers import Lora, gated_down, lora_linear, rotated


def drawn(*shapes: tuple[int, ...]) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(*s, generator=g, dtype=torch.float64).requires_grad_() for s in shapes]


@pytest.mark.parametrize("biased", [False, True])
def test_a_lora_layer(biased: bool) -> None:
    x, weight, bias, down, up = drawn((2, 3, 4), (5, 4), (5,), (2, 4), (5, 2))
    weight, b = weight.detach(), bias.detach() if biased else None

    def mine(x: Tensor, down: Tensor, up: Tensor) -> Tensor:
        return lora_linear(x, Lora(weight, b, down, up, 0.7))

    truth = functional.linear(x, weight, b) + 0.7 * (x @ down.T) @ up.T
    torch.testing.assert_close(mine(x, down, up), truth, rtol=1e-9, atol=1e-9)
    assert torch.autograd.gradcheck(mine, (x, down, up))
    mine(x.detach(), down, up).sum().backward()
    assert down.grad is not None, "the first layer's input needs no gradient"


def test_a_gated_feed_forward() -> None:
    gate, up, weight, a, b = drawn((2, 3, 4), (2, 3, 4), (5, 4), (2, 4), (5, 2))
    weight = weight.detach()

    def mine(gate: Tensor, up: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return gated_down(gate, up, Lora(weight, None, a, b, 0.7))

    inner = functional.silu(gate) * up
    torch.testing.assert_close(mine(gate, up, a, b), inner @ weight.T + 0.7 * (inner @ a.T) @ b.T, rtol=1e-9, atol=1e-9)
    assert torch.autograd.gradcheck(mine, (gate, up, a, b))


def test_rotary_positions() -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    x, angle = drawn((2, 3, 4, 6), (2, 3, 3))
    cos, sin = (torch.cat([t, t], -1).detach() for t in (angle.cos(), angle.sin()))
    truth, _ = apply_rotary_pos_emb(x.transpose(1, 2), x.transpose(1, 2), cos, sin)
    torch.testing.assert_close(rotated(x, cos, sin).transpose(1, 2), truth, rtol=1e-9, atol=1e-9)
    assert torch.autograd.gradcheck(lambda x: rotated(x, cos, sin), (x,))


CODE = """
import torch
from torch.nn import functional
from klamp.kernels import triton_layers as f
torch.manual_seed(0)
for shape in ((3, 50), (2, 5000), (1, 1)):
    g, u, up = (torch.randn(shape, dtype=torch.float64).requires_grad_() for _ in range(3))
    right = functional.silu(g) * u
    grads = torch.autograd.grad(right, [g, u], up)
    mine = f.gated(g.float().detach(), u.float().detach())
    both = f.gated_gradient(g.float().detach(), u.float().detach(), up.float().detach().clone())
    for a, b in zip((mine, *both), (right, *grads)):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-6)
x, t = torch.randn(5, 3, 8), torch.randn(5, 4)
cos, sin = torch.cat([t.cos()] * 2, -1), torch.cat([t.sin()] * 2, -1)
first, second = x.chunk(2, -1)
right = x * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]
torch.testing.assert_close(f.rotate(x, cos, sin, back=False), right)
torch.testing.assert_close(f.rotate(right, cos, sin, back=True), x)

# Rounding by bits is rounding to bfloat16, ties included.
import triton, triton.language as tl

@triton.jit
def rounded(x_ptr, out_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out_ptr + at, f._rounded(tl.load(x_ptr + at)))

x = torch.cat([torch.randn(2046) * 10 ** torch.linspace(-20, 20, 2046), torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8])])
mine = torch.empty(2048)
rounded[(1,)](x, mine, SIZE=2048)
assert torch.equal(mine, x.bfloat16().float())
print("right")
"""


def test_the_kernels_are_the_formulas() -> None:
    pytest.importorskip("triton")
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", CODE], env=env, capture_output=True, text=True)
    assert done.stdout.strip() == "right", done.stderr[-2000:]
