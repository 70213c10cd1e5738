"""Starting a Triton kernel a second time, with little Python.

``kernel[grid](...)`` asks at every launch what each argument may have been compiled for: type, alignment, divisibility.
For the many arguments of a loss that is tens of µs, on a GPU that may be idle. Here the caller says in a key all that
the compiled code depends on, and a launch whose key is known goes straight to that code.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from klamp.kernels import fused


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
        if key[0] is not None and isinstance(made, fused.DIRECT):
            self.compiled[key] = made


def common(*tensors: Tensor | None) -> Hashable:
    """What leads a key: the device, and the types of tensors on whose addresses compiled code depends.

    It may count on their being multiples of 16: those of our own are, and where one is not there is None to lead by.
    """
    if fused.INTERPRETED:
        return None
    address = 0
    for x in tensors:
        if x is not None:
            address |= x.data_ptr()
    if address % 16:
        return None
    return (torch.cuda.current_device(), *(None if x is None else x.dtype for x in tensors))
