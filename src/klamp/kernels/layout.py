"""How much of the logits the fused kernels hold at a time, and how they lie in memory. Plain arithmetic, no Triton.

All of it was chosen by measurement on an H200 (docs/performance.md); nothing is tuned at run time.
"""

from __future__ import annotations

from klamp.kernels.work import Plan, Scaling, Work

# Logits of both models and the gradient of the hidden states together, in bytes. Logits alone get at least FLOOR, so
# that the cost of a token does not depend on how many there are.
BUDGET, FLOOR = int(0.585 * 2**30), int(0.545 * 2**30)
# More rows than this make no matrix product faster.
ENOUGH = 6144


def plan(work: Work, *, trains_head: bool) -> Plan:
    """Rows at a time within BUDGET: the policy's ``block`` rows of logits, overwritten by their gradient, and the
    reference's ``chunk`` rows.

    A frozen head wants both tall: the logits' products are most of the work. A head that trains wants tall blocks, for
    each block reads and writes its float32 gradient once; so does a small head, whose buffers are tall anyway.
    """
    hidden = work.policy.hidden
    row = width(work.policy.head.shape[0]) * hidden.element_size()
    fits = min(ENOUGH, max(FLOOR, BUDGET - hidden.numel() * hidden.element_size()) // row)
    if fits < 384:
        rows = max(1, fits // 2)
        return Plan(rows, rows)
    half = fits // 2
    if trains_head or half >= 2048:
        chunk = fits // 3 // 128 * 128
        return Plan(chunk, 2 * chunk)
    rows = 1024 if half >= 1024 else half // 64 * 64
    return Plan(rows, rows)


def width(vocabulary: int) -> int:
    """Columns to allocate for a row of logits: every row starts on a 128-byte line, whatever the vocabulary."""
    return -(-vocabulary // 64) * 64


def scales(scaling: Scaling) -> tuple[float, float]:
    """``logit_scale / temperature`` and ``softcap / temperature``: slope at 0 and height of the scaled logits."""
    softcap = 1.0 if scaling.softcap is None else scaling.softcap
    return scaling.logit_scale / scaling.temperature, softcap / scaling.temperature
