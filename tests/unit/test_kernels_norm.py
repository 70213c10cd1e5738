"""The norm of a decoding step in one kernel, in Triton's interpreter, against the formula in float64."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")
CODE = """
import torch
from klamp.kernels.triton_layers import rms_norm
for dtype in (torch.float32, torch.bfloat16):
    for shape in ((3, 1, 48), (2, 4, 1, 8), (5, 300), (0, 8)):
        x, w = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
        for shift in (0.0, 1.0):
            d = x.double()
            right = d * torch.rsqrt(d.square().mean(-1, keepdim=True) + 1e-6) * (shift + w.double())
            # Rounded once, by the interpreter downwards: one unit in the last place.
            ours, ulp = rms_norm(x, w, 1e-6, shift).double(), torch.finfo(dtype).eps
            torch.testing.assert_close(ours, right, rtol=ulp, atol=1e-6)
print("right")
"""


def test_the_kernel_is_the_formula() -> None:
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", CODE], env=env, capture_output=True, text=True)
    assert done.stdout.strip() == "right", done.stderr[-2000:]
