"""Drawing a token in two kernels, in Triton's interpreter: the right distribution, and its log-probs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")
CODE = """
import torch, triton, triton.language as tl
from klamp.kernels import triton_draw
torch.manual_seed(0)

@triton.jit
def clocks(out_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    for part in tl.static_range(4):
        tl.store(out_ptr + part * SIZE + at, triton_draw._ahead(tl.philox(7, at, at * 0, at * 0, at * 0)[part]))

# -log E has the distribution exp(-exp(-x)): the largest deviation of 16384 of them is below 1.6 / 128.
ahead = torch.empty(4 * 4096)
clocks[(1,)](ahead, SIZE=4096)
u = torch.exp(-torch.exp(-ahead.double())).sort().values
assert (u - torch.linspace(0, 1, len(u), dtype=torch.float64)).abs().max() < 1.6 / 128

# Log-probs are those of the token drawn, whatever the width, the strides and the temperature.
triton_draw.BLOCK = 64  # several blocks a row
for width in (5, 64, 200):
    whole = 3 * torch.randn(3, width + 7)
    whole[:, 3] = -torch.inf
    logits = whole[:, :width]
    token, logp = triton_draw.draw(logits, 0.7, torch.Generator().manual_seed(1))
    right = (logits.double() / 0.7).log_softmax(-1).gather(1, token[:, None]).squeeze(1)
    torch.testing.assert_close(logp.double(), right, rtol=0, atol=1e-5)
    assert token.dtype == torch.long and (token != 3).all()

# One seed, one draw; another, another. Rows that are alike draw for themselves.
draw = lambda seed: triton_draw.draw(torch.zeros(8, 100), 1.0, torch.Generator().manual_seed(seed))[0]
assert torch.equal(draw(1), draw(1)) and not torch.equal(draw(1), draw(2))
assert len(set(draw(1).tolist())) > 4

# Blocks of which nothing is possible, and rows with one token.
logits = torch.full((2, 200), -torch.inf)
logits[:, 150] = 4.0
token, logp = triton_draw.draw(logits, 1.0, torch.Generator().manual_seed(1))
assert token.tolist() == [150, 150] and logp.abs().max() < 1e-6

# The tokens' shares: chi-square with 9 degrees of freedom exceeds 28 once in a thousand times.
triton_draw.BLOCK = 16
p = torch.randn(10).softmax(-1)
token, _ = triton_draw.draw(p.log().expand(240, -1), 1.0, torch.Generator().manual_seed(3))
counts = torch.bincount(token, minlength=10)
chi = ((counts - 240 * p) ** 2 / (240 * p)).sum()
assert chi < 28, (chi, counts, 240 * p)
print("right")
"""


@pytest.mark.slow
def test_the_kernels_draw_from_the_distribution() -> None:
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", CODE], env=env, capture_output=True, text=True)
    assert done.stdout.strip() == "right", done.stderr[-2000:]
