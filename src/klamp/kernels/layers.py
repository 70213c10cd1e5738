"""Parts of a layer with their gradients written out: fewer passes over memory, and less of it kept for the way back.

* :func:`lora_linear`: ``x Wᵀ + b + s (x Aᵀ) Bᵀ``, the first product added to the second in place, there and back.
* :func:`gated_down`: the same of ``x = silu(gate) · up``, which is computed again on the way back, not kept.
* :func:`rotated`: rotary positions.

W and b are frozen; A and B train in float32, and enter the products in the dtype of x, as under autocast. Gradients of
A and B are summed in float32. Elementwise work is a Triton kernel on a GPU and PyTorch's elsewhere.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from klamp.kernels.autograd import product


class Lora(NamedTuple):
    """A frozen map and the trained one beside it."""

    weight: Tensor
    """W [O, I]."""
    bias: Tensor | None
    down: Tensor
    """A [r, I]."""
    up: Tensor
    """B [O, r]."""
    scale: float


def lora_linear(x: Tensor, lora: Lora) -> Tensor:
    """``x Wᵀ + b + s (x Aᵀ) Bᵀ``."""
    found: Tensor = _LoraLinear.apply(x, *lora)  # type: ignore[no-untyped-call]
    return found


def gated_down(gate: Tensor, up: Tensor, lora: Lora) -> Tensor:
    """:func:`lora_linear` of ``silu(gate) · up``."""
    found: Tensor = _GatedDown.apply(gate, up, *lora)  # type: ignore[no-untyped-call]
    return found


def gated_product(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) · up`` [..., I], rounded once as :func:`gated` rounds it, with its gradient."""
    found: Tensor = _Gated.apply(gate, up)  # type: ignore[no-untyped-call]
    return found


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads x [n, L, heads, D] at positions with cos and sin [n, L, D], whose two halves are alike."""
    found: Tensor = _Rotated.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    return found


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) · up``, without a gradient."""
    if gate.is_cuda:
        from klamp.kernels import triton_layers

        return triton_layers.gated(gate.contiguous(), up.contiguous())
    return functional.silu(gate) * up


def adapted(x: Tensor, weight: Tensor, bias: Tensor | None, low: Tensor, up: Tensor, scale: float) -> Tensor:
    """``x Wᵀ + b + s low Bᵀ`` [n, O] of x [n, I] and low [n, r], in one dtype; no gradient.

    The small product comes first: it writes the result, and the large one reads it while it multiplies. The other way
    round the small one, which has nothing to multiply meanwhile, would read and write it.
    """
    if bias is None:
        result = x.new_empty(len(x), len(weight))
        torch.addmm(result, low, up.t(), beta=0, alpha=scale, out=result)
    else:
        result = torch.addmm(bias, low, up.t(), alpha=scale)
    return result.addmm_(x, weight.t())


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scale: float) -> Any:
    """The result [n, O], and ``x Aᵀ`` [n, r] for the way back."""
    low = x @ down.to(x.dtype).t()
    return adapted(x, weight, bias, low, up.to(x.dtype), scale), low


def _backward(
    grad: Tensor, x: Tensor, low: Tensor, lora: tuple[Tensor, Tensor, Tensor, float], needs: bool
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Gradients of x, A and B from that of the result."""
    weight, down, up, scale = lora
    inner = (grad @ up.to(grad.dtype)).mul_(scale)
    of_x = (inner @ down.to(grad.dtype)).addmm_(grad, weight) if needs else None
    of_down = product(inner.t(), x, torch.empty_like(down))
    of_up = product(grad.t(), low, torch.empty_like(up)).mul_(scale)
    return of_x, of_down, of_up


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scale: float
    ) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        out, low = _forward(flat, weight, bias, down, up, scale)
        ctx.save_for_backward(flat, low, weight, down, up)
        ctx.scale, ctx.shape = scale, x.shape
        return out.view(*x.shape[:-1], -1)  # type: ignore[no-any-return]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, low, weight, down, up = ctx.saved_tensors
        flat = grad.reshape(-1, grad.shape[-1])
        of_x, of_down, of_up = _backward(flat, x, low, (weight, down, up, ctx.scale), ctx.needs_input_grad[0])
        return None if of_x is None else of_x.view(ctx.shape), None, None, of_down, of_up, None


class _GatedDown(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float
    ) -> Tensor:
        flat = [t.reshape(-1, t.shape[-1]).contiguous() for t in (gate, up)]
        out, low = _forward(gated(*flat), weight, bias, a, b, scale)
        ctx.save_for_backward(*flat, low, weight, a, b)
        ctx.scale, ctx.shape = scale, gate.shape
        return out.view(*gate.shape[:-1], -1)  # type: ignore[no-any-return]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        gate, up, low, weight, a, b = ctx.saved_tensors
        flat = grad.reshape(-1, grad.shape[-1])
        inner, of_a, of_b = _backward(flat, gated(gate, up), low, (weight, a, b, ctx.scale), True)
        assert inner is not None
        of_gate, of_up = _gated_gradient(gate, up, inner)
        return of_gate.view(ctx.shape), of_up.view(ctx.shape), None, None, of_a, of_b, None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        flat = [t.reshape(-1, t.shape[-1]).contiguous() for t in (gate, up)]
        ctx.save_for_backward(*flat)
        return gated(*flat).view(gate.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        gate, up = ctx.saved_tensors
        own = grad.reshape(-1, grad.shape[-1]).clone(memory_format=torch.contiguous_format)
        return tuple(t.view(grad.shape) for t in _gated_gradient(gate, up, own))


def _gated_gradient(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up from that of ``silu(gate) · up``; ``grad`` may be written over."""
    if gate.is_cuda:
        from klamp.kernels import triton_layers

        return triton_layers.gated_gradient(gate, up, grad)
    s = gate.sigmoid()
    return grad * up * s * (1 + gate * (1 - s)), grad * gate * s


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, back=False)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _rotate(grad, *ctx.saved_tensors, back=True), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool) -> Tensor:
    """``x cos + turned(x) sin``; as the halves of cos and sin are alike, the other way is by ``-sin``."""
    shape = x.shape
    x, cos, sin = x.reshape(-1, *shape[-2:]), cos.reshape(-1, shape[-1]), sin.reshape(-1, shape[-1])
    if x.is_cuda:
        from klamp.kernels import triton_layers

        x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
        return triton_layers.rotate(x, cos, sin, back=back).view(shape)
    first, second = x.chunk(2, -1)
    turned = torch.cat([-second, first], -1)
    return (x * cos[:, None] + turned * (-sin if back else sin)[:, None]).to(x.dtype).view(shape)
