"""Linear maps for decoding on a CPU: weights laid out for products with a few rows.

A decoding step multiplies every weight by one row a sequence. MKL rearranges a weight anew for each such product;
oneDNN reads one that was rearranged once. SmolLM2's head (49,152 x 576) takes 8 rows in 12 ms in place of 33 on one
core, the maps of its layers 0.4 in place of 0.6. The numbers are the same up to the order of summation.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

ROWS = 8
"""Rows that the layout is made for; others are correct too, and faster than unpacked up to about 128."""
WEIGHTS = 300_000
"""Weights below which a map stays as it is: they lie in the cache, and the call costs more than the layout saves."""


class Packed(nn.Module):
    """``x Wᵀ + b`` with W in oneDNN's own layout. ``pack`` gives it another W."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.bias = bias
        self.out_features, self.in_features = weight.shape
        self.weight: Tensor | None = None
        self.pack(weight)

    def pack(self, weight: Tensor) -> None:
        """Take ``weight``; it is copied."""
        self.weight = None  # its memory is free for the new one
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return found


def packs(weight: Tensor) -> bool:
    """Whether a weight gains by being packed, and can be: float32 on a CPU with oneDNN, and not small."""
    fits = weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.numel() >= WEIGHTS
    return fits and _works()


@functools.cache
def _works() -> bool:
    """Whether this torch has oneDNN, and the two operations, which are not part of its public interface."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(64, 32, generator=generator), torch.randn(3, 1, 32, generator=generator)
    try:
        return torch.allclose(Packed(weight, None)(x), nn.functional.linear(x, weight), atol=1e-4)
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return False
