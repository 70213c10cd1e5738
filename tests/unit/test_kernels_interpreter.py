"""The Triton kernels in Triton's interpreter, on the CPU: small shapes, no autotuning, against float64.

The interpreter is chosen when Triton is imported, so the cases run in a process of their own: this file as a script.
There float64 takes the eager kernels and float32 the fused ones.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.slow

CASES: dict[str, dict[str, Any]] = {
    "one token, vocabulary of one": {"n": 1, "v": 1},
    "prime vocabulary, one slice": {"v": 127},
    "three slices": {"v": 300},
    "slices of two steps": {"v": 700, "steps": 2},
    "soft-cap, temperature, scale": {"v": 300, "options": {"softcap": 3.0, "temperature": 0.8, "logit_scale": 0.7}},
    "stale sampler, clip, weights": {"v": 131, "stale": True},
    "k2 with a tail": {"v": 131, "form": "k2", "tail": 0.5},
    "k3 with a tail": {"v": 131, "form": "k3", "tail": 0.5, "stale": True},
    "weighted k3": {"v": 131, "form": "weighted_k3", "stale": True},
    "weighted k3 with a tail": {"v": 131, "form": "weighted_k3", "stale": True, "tail": 0.5},
    "no KL term, no reference": {"v": 131, "form": None, "reference": False},
    "masked rows": {"v": 131, "masked": True},
    "tokens and advantages with gaps between them": {"v": 131, "gaps": True},
    "equal policies": {"v": 300, "equal": True},
    # A budget of a few rows, so that the first ones lie in the memory of the head's gradient: in float32 16 of them.
    "lead, rows behind it": {"v": 300, "n": 23, "room": 12800},
    "lead, all rows": {"v": 300, "n": 16, "room": 12800},
    "lead, fewer rows than it could have": {"v": 300, "n": 11, "room": 12800},
    "lead, masked": {"v": 307, "n": 40, "room": 12800, "masked": True},
    "lead, one block, no reference": {"v": 101, "n": 16, "room": 9600, "form": None, "reference": False},
    "lead, soft-cap": {"v": 300, "n": 16, "room": 12800, "options": {"softcap": 3.0, "temperature": 0.8}},
    # In bfloat16 32 rows; the head's gradient is rounded at once where none follow.
    "lead, bfloat16, all rows": {"v": 300, "n": 30, "room": 12800, "narrow": True},
    "lead, bfloat16, few rows": {"v": 300, "n": 13, "room": 12800, "narrow": True},
    "lead, bfloat16, rows behind it": {"v": 300, "n": 50, "room": 12800, "narrow": True},
}


def outcome(dtype: torch.dtype, case: dict[str, Any]) -> list[Tensor]:
    """Values and gradients of a policy loss and of a loss made of the statistics."""
    from klamp import kernels

    g = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> Tensor:
        drawn = torch.randn(*shape, generator=g, dtype=torch.float64)
        return (drawn.bfloat16() if case.get("narrow") else drawn).to(dtype)

    n, h, v = case.get("n", 5), 16 if "room" in case else 6, case["v"]
    hidden, head, bias = draw(n, h).requires_grad_(), draw(v, h).requires_grad_(), draw(v).requires_grad_()
    tokens, advantages = torch.randint(v, (n,), generator=g), draw(n)
    if case.get("gaps"):
        tokens, advantages = (torch.stack([x, x.flip(0)], 1)[:, 0] for x in (tokens, advantages))
    options = dict(case.get("options", {}), bias=bias)
    if case.get("reference", True):
        options["ref_hidden"] = hidden.detach() if case.get("equal") else draw(n, h)
        if not case.get("equal"):
            options["ref_head"], options["ref_bias"] = draw(v, h), draw(v)
    if case.get("masked"):
        options["mask"] = torch.tensor([True, False, True, True, False]).repeat(n // 5)
    extra: dict[str, Any] = {"beta": 0.3, "form": case.get("form", "exact"), "tail": case.get("tail")}
    if case.get("stale"):
        extra |= {"old_logp": -draw(n).abs() - 4, "clip": (0.2, 0.3), "kl_weights": draw(n).abs()}
        extra["unclipped_advantages"] = draw(n)
    priced = kernels.policy_loss(hidden, head, tokens, advantages, **extra, **options)
    out = [priced.loss, *(x for x in priced.stats if x is not None)]
    out += torch.autograd.grad(priced.loss, [hidden, head, bias])

    def any_loss(stats: Any, entropy: float) -> Tensor:
        loss = (stats.logp * advantages).sum() + (0 if stats.kl is None else stats.kl.square().sum())
        return loss + entropy * stats.entropy.square().sum() if entropy else loss

    stats = kernels.token_stats(hidden, head, tokens, **options)
    out += [x for x in stats if x is not None]
    out += torch.autograd.grad(any_loss(stats, 0.1), [hidden, head, bias])
    if "room" in case:
        return out
    # The same with the head frozen: the gradient is ready before the loss is known.
    options["bias"] = bias.detach()
    for names, entropy in ((("logp", "kl"), 0.0), (("logp", "kl", "entropy"), 0.1)):
        stats = kernels.token_stats(hidden, head.detach(), tokens, **options, gradient_of=names)
        out += [*(x for x in stats if x is not None), *torch.autograd.grad(any_loss(stats, entropy), [hidden])]
    return out


def main() -> None:
    """Relative errors of every case, as JSON."""
    from klamp.kernels import autograd, chunking

    errors, leads = {}, []
    add_lead = autograd.Gradients.add_lead
    autograd.Gradients.add_lead = lambda *a: (leads.append(a), add_lead(*a))[1]  # type: ignore[method-assign, misc]
    usual = chunking.BUDGET, chunking.FLOOR
    for name, case in CASES.items():
        chunking.STEP, chunking.STEPS = 128, case.get("steps", 1)
        chunking.BUDGET, chunking.FLOOR = (case["room"],) * 2 if "room" in case else usual
        leads.clear()
        mine = outcome(torch.bfloat16 if case.get("narrow") else torch.float32, case)
        assert len(leads) == (2 if "room" in case else 0), name
        truth = outcome(torch.float64, case)
        errors[name] = [
            ((a.double() - b).abs().max() / b.abs().max().clamp(min=1)).item() if a.numel() else 0.0
            for a, b in zip(mine, truth, strict=True)
        ]
        if case.get("equal"):
            errors[name].append(float(mine[3].abs().max()))
    print(json.dumps(errors))


@pytest.fixture(scope="module")
def errors() -> dict[str, list[float]]:
    pytest.importorskip("triton", reason="the interpreter is part of triton")
    env = {**os.environ, "TRITON_INTERPRET": "1", "KLAMP_KERNELS": "fused", "PYTHONWARNINGS": "ignore"}
    env["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE"  # a virtual machine may name AMX and not let one use it
    done = subprocess.run([sys.executable, __file__], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result: dict[str, list[float]] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize("name", list(CASES))
def test_fused_equals_the_specification(name: str, errors: dict[str, list[float]]) -> None:
    # float32 sums of a few hundred terms of size |z| ≈ 10: some 1e-6 of the largest value.
    # bfloat16: logits of size 16 rounded to 2^-4, and so p and everything made of it to some per cent.
    assert max(errors[name]) < (6e-2 if CASES[name].get("narrow") else 2e-5)
    if CASES[name].get("equal"):
        assert errors[name][-1] == 0


if __name__ == "__main__":
    main()
