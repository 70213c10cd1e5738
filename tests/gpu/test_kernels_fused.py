"""The fused kernels against the eager ones in float64, on a GPU: values and gradients, every dtype, awkward sizes.

Tolerances. A logit is rounded once to the dtype (unit roundoff u = eps/2) and its gradient once more, the products are
summed in float32, and a result is rounded to the dtype. So with Z the largest logit:

* log-probs, KL and entropy move by at most 4 u Z through the logits (twice that of one, for two models), beside float32
  arithmetic: FLOAT32 relative and absolute;
* where the logits are exact by construction (one-hot states pick columns of the head), float32 arithmetic alone counts;
* the gradient of a logit is a sum of ``p u_kl d``, ``p u_kl kl``, ``p u_logp``, ``p u_H log p``, ``p u_H H`` and
  ``[j = a] u_logp``. Float32 gets it right up to FLOAT32 · T, T these terms' magnitudes added up, however they cancel;
  d and log p, being differences of logits of size Z, count Z/16 more each (50 ulps of Z). The sum G is rounded to the
  dtype, as is the result. So gradients of the hidden states are good to ``(4 u |G| + FLOAT32 · T) |W|`` and those of
  the head to ``(4 u |G| + FLOAT32 · T)ᵀ |h|``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from klamp import kernels
from klamp.kernels import autograd, chunking, eager
from klamp.kernels.types import Ops, Scaling, Side, Work, prepare

FLOAT32 = 5e-5
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
VOCABULARIES = [1, 2, 7, 1009, 12289, 32003, 49152, 128256, 151936]


@dataclass(frozen=True)
class Inputs:
    """Hidden states, heads and per-token values of a loss, on the GPU."""

    hidden: Tensor
    head: Tensor
    tokens: Tensor
    advantages: Tensor
    ref_hidden: Tensor
    ref_head: Tensor
    old_logp: Tensor

    def to(self, dtype: torch.dtype) -> Inputs:
        """Copies in another dtype; per-token values in float32 or wider."""
        wide = torch.promote_types(dtype, torch.float32)
        return Inputs(
            *(x.detach().clone().to(dtype) for x in (self.hidden, self.head)),
            self.tokens,
            self.advantages.to(wide),
            *(x.detach().clone().to(dtype) for x in (self.ref_hidden, self.ref_head)),
            self.old_logp.to(wide),
        )


def generator(seed: int) -> torch.Generator:
    return torch.Generator("cuda").manual_seed(seed)


def dense(n: int, h: int, v: int, dtype: torch.dtype, seed: int = 0) -> Inputs:
    """Random states and heads with logits of size about 6; the reference is another model."""
    g = generator(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, device="cuda")

    scale = 1.5 / h**0.5
    tokens = torch.randint(v, (n,), generator=g, device="cuda")
    both = [draw(n, h).to(dtype), (scale * draw(v, h)).to(dtype), draw(n, h).to(dtype), (scale * draw(v, h)).to(dtype)]
    return Inputs(both[0], both[1], tokens, draw(n), both[2], both[3], -draw(n).abs() - math.log(v))


def picked(columns: Tensor, ref_columns: Tensor, n: int, dtype: torch.dtype) -> Inputs:
    """Row i has the logits ``columns[:, i % 16]`` exactly: states are one-hot, so nothing is rounded on the way."""
    g = generator(1)
    v, h = columns.shape
    hidden = torch.eye(h, device="cuda").repeat(-(-n // h), 1)[:n].to(dtype)
    tokens = torch.randint(v, (n,), generator=g, device="cuda")
    advantages = torch.randn(n, generator=g, device="cuda")
    old = torch.full((n,), -math.log(v) - 1, device="cuda")
    return Inputs(hidden, columns.to(dtype), tokens, advantages, hidden.clone(), ref_columns.to(dtype), old)


def adversarial(kind: str, v: int, dtype: torch.dtype) -> Inputs:
    """Exact logits: uniform in ±80, policies that agree to the bit, policies on one token, or that on another."""
    g = generator(v)
    wide = 160 * torch.rand(v, 16, generator=g, device="cuda") - 80
    other = 160 * torch.rand(v, 16, generator=g, device="cuda") - 80
    if kind == "±80":
        return picked(wide, other, 33, dtype)
    if kind == "equal":
        return picked(wide, wide, 33, dtype)
    certain = torch.full((v, 16), -40.0, device="cuda")
    certain[torch.randint(v, (16,), generator=g, device="cuda"), torch.arange(16, device="cuda")] = 40.0
    if kind == "one-hot":
        return picked(certain, wide / 16, 33, dtype)
    assert kind == "one-hot, elsewhere"
    return picked(certain, certain.roll(1, 0), 33, dtype)


def loss_of(x: Inputs, ops: str = "policy", **options: Any) -> tuple[list[Tensor], list[Tensor]]:
    """(values, gradients of hidden and head) of a policy loss, or of a loss made of the statistics."""
    hidden, head = x.hidden.detach().clone().requires_grad_(), x.head.detach().clone().requires_grad_()
    both = {"ref_hidden": x.ref_hidden, "ref_head": x.ref_head}
    if ops == "policy":
        settings = {"beta": 0.3, "denominator": 1.0, **options}
        out = kernels.policy_loss(hidden, head, x.tokens, x.advantages, **both, **settings)
        out.loss.backward()
        values = [v for v in out.stats if v is not None]
    else:
        stats = kernels.token_stats(hidden, head, x.tokens, **both, **options)
        assert stats.kl is not None
        (stats.kl.sum() + (x.advantages * stats.logp).sum() + 0.1 * stats.entropy.sum()).backward()
        values = [v.detach() for v in stats if v is not None]
    assert hidden.grad is not None
    assert head.grad is not None
    return values, [hidden.grad, head.grad]


def logit_gradient(x: Inputs, ops: str) -> tuple[Tensor, Tensor]:
    """|∂L/∂logits| in float64 from whole logits, and the magnitudes its terms had before they cancelled."""
    z = (x.hidden @ x.head.T).requires_grad_()
    logp, ref = z.log_softmax(-1), (x.ref_hidden @ x.ref_head.T).log_softmax(-1)
    kl, entropy = (logp.exp() * (logp - ref)).sum(-1), -(logp.exp() * logp).sum(-1)
    token = logp.gather(1, x.tokens[:, None]).squeeze(1)
    price, slope, bonus = (0.3, -x.advantages, 0.0) if ops == "policy" else (1.0, x.advantages, 0.1)
    (g,) = torch.autograd.grad((price * kl + slope * token + bonus * entropy).sum(), z)
    with torch.no_grad():
        size = z.abs().amax(1, keepdim=True) / 16
        inner = price * ((logp - ref).abs() + kl[:, None] + size) + slope.abs()[:, None]
        terms = logp.exp() * (inner + bonus * (logp.abs() + entropy[:, None] + size))
        terms.scatter_add_(1, x.tokens[:, None], slope.abs()[:, None])
    return g.abs(), terms


def compare(x: Inputs, dtype: torch.dtype, ops: str, *, exact_logits: bool) -> None:
    """Fused in ``dtype`` against eager in float64, within the module's tolerances."""
    truth = x.to(torch.float64)
    (values, grads), (expected, exact) = loss_of(x, ops), loss_of(truth, ops)
    u = torch.finfo(dtype).eps / 2
    largest = max((truth.hidden @ truth.head.T).abs().max().item(), 1.0)
    slack = 0.0 if exact_logits else 4 * u * largest
    for a, b in zip(values, expected, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a.double(), b, rtol=FLOAT32, atol=FLOAT32 + slack)
    g, terms = logit_gradient(truth, ops)
    # Rounded logits move p by a factor e^(2 slack); float16 has no numbers below 6e-8, and gradients were scaled.
    least = 1e-6 if dtype == torch.float16 else 0.0
    error = 4 * u * g + (FLOAT32 + math.expm1(2 * slack)) * terms + least
    bounds = [error @ truth.head.abs() + least, error.T @ truth.hidden.abs() + least]
    for a, b, bound in zip(grads, exact, bounds, strict=True):
        assert a.dtype == dtype
        assert ((a.double() - b).abs() <= bound + 1e-30).all(), ((a.double() - b).abs() / (bound + 1e-30)).max()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("v", VOCABULARIES)
@pytest.mark.parametrize("ops", ["policy", "statistics"])
def test_random_inputs(v: int, dtype: torch.dtype, ops: str) -> None:
    compare(dense(37, 64, v, dtype, seed=v), dtype, ops, exact_logits=False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("v", [2, 1009, 12289, 151936])
@pytest.mark.parametrize("kind", ["±80", "equal", "one-hot", "one-hot, elsewhere"])
@pytest.mark.parametrize("ops", ["policy", "statistics"])
def test_adversarial_inputs(kind: str, v: int, dtype: torch.dtype, ops: str) -> None:
    x = adversarial(kind, v, dtype)
    compare(x, dtype, ops, exact_logits=True)
    if kind == "equal":
        kl = loss_of(x, ops)[0][2]
        assert torch.equal(kl, torch.zeros_like(kl))


@pytest.mark.parametrize("n", [1, 2, 129, 4097, 16384])
def test_any_number_of_tokens(n: int) -> None:
    x = dense(n, 64, 1009, torch.bfloat16, seed=n)
    (values, grads), (expected, exact) = loss_of(x), loss_of(x.to(torch.float64))
    for a, b in zip(values, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=FLOAT32, atol=FLOAT32 + 4 * 2**-9 * 8)
    for a, b in zip(grads, exact, strict=True):
        assert (a.double() - b).norm() <= 1e-2 * b.norm()


def test_sixteen_thousand_tokens_of_a_real_head() -> None:
    x = dense(16384, 576, 49152, torch.bfloat16)
    (values, grads), (expected, exact) = loss_of(x), loss_of(x.to(torch.float64))
    for a, b in zip(values, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=FLOAT32, atol=FLOAT32 + 4 * 2**-9 * 10)
    for a, b in zip(grads, exact, strict=True):
        assert (a.double() - b).norm() <= 1e-2 * b.norm()


OPTIONS: list[dict[str, Any]] = [
    {"form": "k2"},
    {"form": "k3", "tail": 0.5},
    {"form": "weighted_k3", "stale": True},
    {"form": "weighted_k3", "stale": True, "tail": 0.5},
    {"form": "exact", "stale": True, "clip": (0.2, 0.3)},
    {"form": "sequence_exact", "weights": True},
    {"form": "exact", "softcap": 5.0, "temperature": 0.8, "logit_scale": 0.7},
    {"form": None},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_form_of_the_loss(options: dict[str, Any]) -> None:
    x = dense(300, 64, 12289, torch.float32)
    truth = x.to(torch.float64)
    asked = {k: v for k, v in options.items() if k not in ("stale", "weights")}
    results = []
    for y in (x, truth):
        own = dict(asked)
        if options.get("stale"):
            own["old_logp"] = y.old_logp
        if options.get("weights"):
            own["kl_weights"] = y.advantages.abs()
            own["unclipped_advantages"] = y.advantages.flip(0)
        results.append(loss_of(y, **own))
    (values, grads), (expected, exact) = results
    for a, b in zip(values, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=FLOAT32, atol=FLOAT32)
    for a, b in zip(grads, exact, strict=True):
        assert (a.double() - b).norm() <= 1e-4 * b.norm()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_masked_rows_are_never_read(dtype: torch.dtype) -> None:
    x = dense(700, 64, 12289, dtype)
    keep = torch.rand(700, generator=generator(3), device="cuda") < 0.6
    few = Inputs(x.hidden[keep], x.head, x.tokens[keep], x.advantages[keep], x.ref_hidden[keep], x.ref_head, x.old_logp)
    spoilt = replace(x, hidden=x.hidden.clone(), tokens=x.tokens.clone(), ref_hidden=x.ref_hidden.clone())
    spoilt.hidden[~keep], spoilt.ref_hidden[~keep], spoilt.tokens[~keep] = math.nan, math.nan, -100
    (values, grads), (alone, exact) = loss_of(spoilt, mask=keep), loss_of(few)
    for a, b in zip(values, alone, strict=True):
        assert torch.equal(a[keep], b)
        assert not a[~keep].any()
    assert torch.equal(grads[0][keep], exact[0])
    assert not grads[0][~keep].any()
    assert torch.equal(grads[1], exact[1])


def test_all_rows_masked_and_no_rows_at_all() -> None:
    x = dense(64, 32, 1009, torch.bfloat16)
    _, grads = loss_of(x, mask=torch.zeros(64, dtype=torch.bool, device="cuda"))
    assert not any(g.any() for g in grads)
    none = Inputs(x.hidden[:0], x.head, x.tokens[:0], x.advantages[:0], x.ref_hidden[:0], x.ref_head, x.old_logp[:0])
    values, grads = loss_of(none)
    assert values[0].shape == (0,)
    assert not grads[1].any()


def test_a_token_outside_the_vocabulary_is_nan_not_a_number() -> None:
    x = dense(8, 32, 1009, torch.bfloat16)
    x.tokens[3] = 1009
    for ops in ("policy", "statistics"):
        values, _ = loss_of(x, ops)
        assert values[0].isnan().tolist() == [i == 3 for i in range(8)]


@pytest.mark.parametrize(("n", "v"), [(700, 151936), (5000, 49152)])
def test_repeated_runs_are_bit_identical(n: int, v: int) -> None:
    x = dense(n, 64, v, torch.bfloat16)
    for ops in ("policy", "statistics"):
        first = [t for part in loss_of(x, ops) for t in part]
        for _ in range(5):
            again = [t for part in loss_of(x, ops) for t in part]
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


LEADS = [
    # tokens, H, V: logits of the first 2 H tokens (H in float32) lie in the memory of the head's gradient
    (5000, 4096, 32003),  # all tokens, fewer than would fit; a prime vocabulary in three blocks
    (8192, 4096, 32003),  # exactly as many as fit
    (9000, 4096, 32003),  # more: ordinary blocks follow
    (4500, 2048, 128256),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", LEADS, ids=str)
@pytest.mark.parametrize("ops", ["policy", "statistics"])
def test_a_lead_in_the_memory_of_the_head_gradient(shape: tuple[int, int, int], dtype: torch.dtype, ops: str) -> None:
    x = dense(*shape, dtype, seed=4)
    # Float32 logits are twice as wide: a lead of H tokens pays on the widest head only.
    assert chunking.plan(_work_of(x), trains_head=True).lead is not None or dtype == torch.float32
    truth = x.to(torch.float64)
    (values, grads), (expected, exact) = loss_of(x, ops), loss_of(truth, ops)
    u = torch.finfo(dtype).eps / 2
    for a, b in zip(values, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=FLOAT32, atol=FLOAT32 + 4 * u * 10)
    for a, b in zip(grads, exact, strict=True):
        assert a.dtype == dtype
        # Float16 loses gradients of logits below 6e-8 altogether.
        assert (a.double() - b).norm() <= (5 * u + (4e-3 if dtype == torch.float16 else 1e-4)) * b.norm()
    again = loss_of(x, ops)
    assert all(torch.equal(a, b) for a, b in zip(values + grads, again[0] + again[1], strict=True))


def _work_of(x: Inputs, mask: Tensor | None = None) -> Work:
    return prepare(Side(x.hidden, x.head), Side(x.ref_hidden, x.ref_head), x.tokens, mask, Scaling())


@pytest.mark.parametrize("n", [7000, 12000])
def test_a_lead_under_a_mask_is_the_lead_of_the_rows_that_count(n: int) -> None:
    x = dense(n, 4096, 32003, torch.bfloat16)
    keep = torch.rand(n, generator=generator(3), device="cuda") < 0.8
    assert chunking.plan(_work_of(x, keep), trains_head=True).lead is not None
    few = Inputs(x.hidden[keep], x.head, x.tokens[keep], x.advantages[keep], x.ref_hidden[keep], x.ref_head, x.old_logp)
    (values, grads), (alone, exact) = loss_of(x, mask=keep), loss_of(few)
    for a, b in zip(values, alone, strict=True):
        # Other chunks, other products: a bf16 logit of 8 to 16 may be rounded the other way, by 0.0625.
        torch.testing.assert_close(a[keep], b, rtol=FLOAT32, atol=0.0625)
        assert not a[~keep].any()
    assert (grads[0][keep].float() - exact[0].float()).norm() <= 1e-2 * exact[0].float().norm()
    assert not grads[0][~keep].any()
    assert (grads[1].float() - exact[1].float()).norm() <= 1e-2 * exact[1].float().norm()


@pytest.mark.parametrize("options", [{"softcap": 5.0, "temperature": 0.8}, {"form": "k3", "tail": 0.5}], ids=str)
def test_a_lead_with_bias_and_every_form(options: dict[str, Any]) -> None:
    """The same loss with and without a lead, bias and its gradient included."""
    x = dense(6000, 4096, 32003, torch.bfloat16)
    results = []
    for most in (chunking.lead, lambda *_: None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(chunking, "lead", most)
            inputs = [x.hidden.clone(), x.head.clone(), torch.linspace(-1, 1, 32003, device="cuda").bfloat16()]
            hidden, head, bias = (t.requires_grad_() for t in inputs)
            out = kernels.policy_loss(
                hidden, head, x.tokens, x.advantages, beta=0.3, bias=bias, ref_bias=bias.detach(),
                ref_hidden=x.ref_hidden, ref_head=x.ref_head, **options,
            )  # fmt: skip
            results.append([out.loss.detach(), *torch.autograd.grad(out.loss, [hidden, head, bias])])
    for a, b in zip(*results, strict=True):
        assert (a.float() - b.float()).norm() <= 1e-2 * b.float().norm()


def test_a_lead_stays_inside_its_memory() -> None:
    n, h, v = 8192, 4096, 128256
    x = dense(n, h, v, torch.bfloat16)
    hidden, head = x.hidden.requires_grad_(), x.head.requires_grad_()
    for _ in range(2):  # the first call also makes cuBLAS's own workspace
        hidden.grad = head.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        kernels.policy_loss(
            hidden, head, x.tokens, x.advantages, beta=0.3, ref_hidden=x.ref_hidden, ref_head=x.ref_head
        ).loss.backward()
        extra = torch.cuda.max_memory_allocated() - before
    assert extra - 4 * v * h < 0.6 * 2**30


def test_steering_never_recompiles() -> None:
    from klamp.kernels import triton_one_pass

    def compiled() -> int:
        return sum(len(cache[0]) for cache in triton_one_pass._one_pass.device_caches.values())

    x = dense(256, 64, 12289, torch.bfloat16)
    loss_of(x, clip=(0.2, 0.2), old_logp=x.old_logp)
    before = compiled()
    assert before > 0
    for beta in (0.0, 1.0, 0.05, 16.0, 1e-6, torch.tensor(0.7, device="cuda")):
        for clip in ((0.2, 0.28), (1.0, 16.0)):
            loss_of(x, beta=beta, clip=clip, old_logp=x.old_logp)
    for n in (1, 16, 17, 255):
        y = dense(n, 64, 12289, torch.bfloat16)
        loss_of(y, clip=(0.2, 0.2), old_logp=y.old_logp)
    assert compiled() == before


@pytest.mark.parametrize("ops", ["policy", "statistics"])
def test_a_direct_launch_gives_the_bits_of_an_ordinary_one(ops: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from klamp.kernels import triton_launch, triton_statistics

    starters = (
        [triton_launch._scale, triton_launch._one_pass]
        if ops == "policy"
        else [triton_launch._row_stats, triton_launch._row_gradient]
    )
    for starter in starters:
        monkeypatch.setattr(starter, "compiled", {})
    x = dense(300, 64, 12289, torch.bfloat16)

    def outcome() -> list[Tensor]:
        values, grads = loss_of(x, ops)
        return values + grads

    results = [outcome() for _ in range(3)]  # the first ordinary, the others direct
    if triton_statistics.DIRECT:
        assert all(starter.compiled for starter in starters)
    monkeypatch.setattr(triton_statistics, "DIRECT", ())
    for starter in starters:
        starter.compiled.clear()
    results.append(outcome())
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_from_whole_logits() -> None:
    x = dense(50, 64, 12289, torch.float32)
    logits, ref = x.hidden @ x.head.T, x.ref_hidden @ x.ref_head.T
    logits[:, 5], ref[:, 7] = -math.inf, -80
    tokens = x.tokens.clamp(min=8)
    results = []
    for z, y in ((logits, ref), (logits.double(), ref.double())):
        z = z.clone().requires_grad_()
        s = kernels.token_stats_from_logits(z, tokens, ref_logits=y, temperature=0.9)
        assert s.kl is not None
        (s.kl + s.logp + s.entropy).sum().backward()
        assert z.grad is not None
        results.append([*s, z.grad])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=FLOAT32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("size", [1, 4095, 4097, 3_000_001])
@pytest.mark.parametrize("spare", [0, 2**29], ids=["in place", "beside it"])
def test_narrowing(size: int, dtype: torch.dtype, spare: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from klamp.kernels import triton_launch

    monkeypatch.setattr(autograd, "SPARE", spare)
    monkeypatch.setattr(autograd, "NEAR", 4096)
    total = torch.randn(size, device="cuda")
    factor = torch.tensor(0.3, device="cuda")
    expected = (total * factor).to(dtype)
    assert torch.equal(autograd.narrow(triton_launch, total.clone(), factor, dtype), expected)  # type: ignore[arg-type]


def test_the_choice_is_fused_here_and_eager_in_float64() -> None:
    assert kernels.backend("cuda") == "fused"
    ops: Ops = kernels._ops(torch.zeros(1, dtype=torch.float64, device="cuda"))
    assert ops is eager
