"""A small problem for the kernels, and its answer from whole logits."""

from __future__ import annotations

import torch
from torch import Tensor

from klamp import kernels

FLOAT64 = 1e-9


def problem(
    n: int = 5, h: int = 4, v: int = 7, *, h_ref: int | None = None, seed: int = 0, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    """Random states and heads of a policy and another model as its reference."""
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    k = h if h_ref is None else h_ref
    return {
        "hidden": draw(n, h).requires_grad_(),
        "head": draw(v, h).requires_grad_(),
        "bias": draw(v).requires_grad_(),
        "tokens": torch.randint(v, (n,), generator=g),
        "ref_hidden": draw(n, k),
        "ref_head": draw(v, k),
        "ref_bias": draw(v),
        "advantages": draw(n),
        "old_logp": -draw(n).abs(),
        "weights": draw(n).abs(),
    }


def written_out(
    p: dict[str, Tensor], temperature: float = 1.0, softcap: float | None = None, logit_scale: float = 1.0
) -> kernels.TokenStats:
    """The definition over whole logits, for autograd."""

    def logits(hidden: Tensor, head: Tensor, bias: Tensor) -> Tensor:
        x = logit_scale * (hidden @ head.T + bias)
        return (x if softcap is None else softcap * torch.tanh(x / softcap)) / temperature

    logp = logits(p["hidden"], p["head"], p["bias"]).log_softmax(-1)
    ref = logits(p["ref_hidden"], p["ref_head"], p["ref_bias"]).log_softmax(-1)
    at = p["tokens"].unsqueeze(-1)
    return kernels.TokenStats(
        logp.gather(-1, at).squeeze(-1),
        ref.gather(-1, at).squeeze(-1),
        (logp.exp() * (logp - ref)).sum(-1),
        -(logp.exp() * logp).sum(-1),
    )


def close(a: Tensor | None, b: Tensor | None, tolerance: float = FLOAT64) -> None:
    assert a is not None
    assert b is not None
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


SCALINGS = [{}, {"temperature": 0.7}, {"softcap": 2.0}, {"temperature": 1.3, "softcap": 3.0, "logit_scale": 0.5}]
