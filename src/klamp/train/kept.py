"""Log-probs over the vocabulary, kept through a step where they are few: each product with the head is taken once.

The kernels hold a few rows of logits at a time, so their backward pass computes them again, the reference's too, and
the clamp's measurement the reference's once more: seven products with the head in a step. On a CPU, where a step waits
for arithmetic, four are enough if the reference's log-probs stay for the step and the policy's until its backward pass.

Shapes: [n, c] tokens of a part, k of them counted; H hidden, V vocabulary. With ``p = softmax(z)``, ``d = log p - log
p_ref`` and u the derivatives of the loss: ``∂L/∂z = p (u_kl (d - kl) - u_logp) + [j = a] u_logp``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from klamp.errors import KlampError
from klamp.kernels import HeadSpec, TokenStats, backend, eager

LEAST = eager.BUDGET
"""Bytes of log-probs above which they are kept: fewer the kernels hold in one piece anyway, and little is gained."""
MOST = 192 << 20
"""Bytes of log-probs that are kept, for the reference and for the policy each: 768 tokens of 49,152 words take 144 MiB.
"""
ROWS = 16
"""Rows looked at together: the passes over them find them in the cache. 4 to 32 took 35 to 50 ms where all 192 at once
took 80."""


class Words(NamedTuple):
    """The reference's log-probs of all words where a step's tokens stand."""

    logp: Tensor
    """[K, V]."""
    at: Tensor
    """[n, c] the row of each token."""


def keeps(head: HeadSpec | None, states: Tensor, rows: int) -> bool:
    """Whether log-probs of ``rows`` of states are kept: on a CPU, for a plain head, where that pays and they fit."""
    if head is None or head.bias is not None or head.softcap is not None or states.device.type != "cpu":
        return False
    wide = states.dtype == head.weight.dtype and states.dtype in (torch.float32, torch.float64)
    size = rows * head.weight.shape[0] * states.element_size()
    return wide and LEAST < size <= MOST and backend("cpu") == "eager"


def logits(head: HeadSpec, states: Tensor, temperature: float) -> Tensor:
    """[k, V] logits of the tempered distribution, in memory of their own."""
    z, factor = functional.linear(states, head.weight), head.logit_scale / temperature
    return z if factor == 1 else z.mul_(factor)


@torch.no_grad()
def log_probs(head: HeadSpec, states: Tensor, temperature: float) -> Tensor:
    """[k, V] log-probs of all words after each of ``states`` [k, H]."""
    z = logits(head, states, temperature)
    for rows in blocks(len(z)):
        z[rows] = z[rows].log_softmax(-1)
    return z


def kept_stats(
    head: HeadSpec, states: Tensor, tokens: Tensor, mask: Tensor, words: Words, temperature: float
) -> TokenStats:
    """What :func:`klamp.kernels.token_stats` gives, differentiable in ``logp`` and ``kl``."""
    index = mask.flatten().nonzero().squeeze(1)
    rows, own = words.at.flatten()[index], tokens.flatten()[index]
    ref = words.logp if torch.equal(rows, torch.arange(len(words.logp))) else words.logp.index_select(0, rows)
    z = logits(head, states.flatten(0, 1).index_select(0, index), temperature)
    logp, kl, entropy = Scores.apply(z, ref, own)  # type: ignore[no-untyped-call]

    def spread(x: Tensor) -> Tensor:
        return x.new_zeros(mask.numel()).index_copy(0, index, x).view(mask.shape)

    picked = ref.gather(1, own[:, None]).squeeze(1)
    return TokenStats(spread(logp), spread(picked), spread(kl), spread(entropy))


class Scores(torch.autograd.Function):
    """(logits z, the reference's log-probs) [k, V] → (logp, kl, entropy) [k], the first two differentiable, once.

    The log-probs are written over the logits, which nothing else needs, and their gradient over the log-probs.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor, ref: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logp, kl, entropy = (z.new_empty(len(z)) for _ in range(3))
        for rows in blocks(len(z)):
            own = z[rows].log_softmax(-1)
            logp[rows] = own.gather(1, tokens[rows, None]).squeeze(1)
            z[rows] = own
            p = own.exp_()
            entropy[rows] = -torch.linalg.vecdot(p, z[rows])
            kl[rows] = torch.linalg.vecdot(p, z[rows] - ref[rows]).clamp_(min=0)
        ctx.kept, ctx.ref, ctx.tokens, ctx.kl = z.detach(), ref, tokens, kl.detach()
        ctx.mark_non_differentiable(entropy)
        return logp, kl, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, logp: Tensor, kl: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        z, ctx.kept = ctx.kept, None
        if z is None:
            raise KlampError("the kept log-probs were differentiated twice; the first time used them up.")
        for rows in blocks(len(z)):
            p, own = z[rows].exp(), kl[rows, None]
            z[rows].sub_(ctx.ref[rows]).mul_(own).sub_(own * ctx.kl[rows, None] + logp[rows, None]).mul_(p)
        return z.scatter_add_(1, ctx.tokens[:, None], logp[:, None]), None, None


def blocks(count: int) -> Iterator[slice]:
    """``count`` rows, :data:`ROWS` at a time."""
    return (slice(a, a + ROWS) for a in range(0, count, ROWS))
