"""The eager kernels are the specification: enumerated answers, gradcheck, and what must not change a result."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from klamp import estimators, kernels
from klamp.errors import ConfigError, KlampError
from klamp.kernels import autograd, eager
from written_out import SCALINGS, close, problem, written_out


@pytest.fixture(autouse=True)
def _native_products() -> Iterator[None]:
    """Some virtual machines advertise AMX and trap on it; PyTorch's own products do not use it."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    yield
    torch._C._set_mkldnn_enabled(before)


def ask(p: dict[str, Tensor], **options: object) -> kernels.TokenStats:
    names = ("ref_hidden", "ref_head", "bias", "ref_bias")
    return kernels.token_stats(p["hidden"], p["head"], p["tokens"], **{k: p[k] for k in names}, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", SCALINGS)
def test_values_are_the_definition(options: dict[str, float]) -> None:
    p = problem(h_ref=3)
    for mine, truth in zip(ask(p, **options), written_out(p, **options), strict=True):
        close(mine, truth)


@pytest.mark.parametrize("options", SCALINGS)
@pytest.mark.parametrize("chunk", [1, 2, 100])
def test_gradients_of_any_loss_are_autograds(
    options: dict[str, float], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = problem(h_ref=3)
    monkeypatch.setattr(eager, "BUDGET", 4 * 7 * chunk)

    def loss(s: kernels.TokenStats) -> Tensor:
        assert s.kl is not None
        return (s.logp.exp() * p["weights"] + s.kl.square() + s.kl * s.entropy - 0.3 * s.entropy).sum()

    inputs = [p["hidden"], p["head"], p["bias"]]
    mine = torch.autograd.grad(loss(ask(p, **options)), inputs)
    truth = torch.autograd.grad(loss(written_out(p, **options)), inputs)
    for a, b in zip(mine, truth, strict=True):
        close(a, b)


@pytest.mark.parametrize("options", SCALINGS)
def test_gradcheck(options: dict[str, float]) -> None:
    p = problem(3, 3, 5)

    def f(hidden: Tensor, head: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        s = ask({**p, "hidden": hidden, "head": head, "bias": bias}, **options)
        assert s.kl is not None
        return s.logp, s.kl, s.entropy

    assert torch.autograd.gradcheck(f, (p["hidden"], p["head"], p["bias"]))


@pytest.mark.parametrize("used", ["logp", "kl", "entropy"])
def test_each_statistic_has_its_own_gradient(used: str) -> None:
    p = problem()
    mine = torch.autograd.grad(getattr(ask(p), used).sum(), [p["hidden"], p["head"]])
    truth = torch.autograd.grad(getattr(written_out(p), used).sum(), [p["hidden"], p["head"]])
    for a, b in zip(mine, truth, strict=True):
        close(a, b)


def naive_loss(p: dict[str, Tensor], form: str | None, old: Tensor | None, **o: object) -> Tensor:
    """The policy loss from whole logits, each term as in its definition."""
    s = written_out(p)
    assert s.ref_logp is not None
    ref = s.ref_logp.detach()
    behind = s.logp.detach() if old is None else old
    ratio = (s.logp - behind).exp()
    advantages = p["advantages"]
    clip = o.get("clip")
    held = ratio if clip is None else ratio.clamp(1 - clip[0], 1 + clip[1])  # type: ignore[index]
    loss = -torch.minimum(ratio * advantages, held * advantages)
    if o.get("unclipped_advantages") is not None:
        loss = loss - ratio * o["unclipped_advantages"]  # type: ignore[operator]
    tail = o.get("tail")
    term = {
        None: lambda: torch.zeros_like(s.logp),
        "k2": lambda: estimators.k2(s.logp, ref, tail=tail),  # type: ignore[arg-type]
        "k3": lambda: estimators.k3(s.logp, ref, tail=tail),  # type: ignore[arg-type]
        "weighted_k3": lambda: estimators.weighted("k3", s.logp, behind, ref, tail=tail),  # type: ignore[arg-type]
        "exact": lambda: s.kl,
        "sequence_exact": lambda: s.kl,
    }[form]()
    assert term is not None
    weights = o.get("kl_weights")
    return (loss + o.get("beta", 0.0) * (term if weights is None else weights * term)).sum() / len(loss)  # type: ignore[operator]


def my_loss(p: dict[str, Tensor], form: str | None, old: Tensor | None, **o: object) -> kernels.PolicyLoss:
    names = ("ref_hidden", "ref_head", "bias", "ref_bias")
    return kernels.policy_loss(
        p["hidden"], p["head"], p["tokens"], p["advantages"], form=form, old_logp=old, **{k: p[k] for k in names}, **o
    )  # type: ignore[arg-type]


@pytest.mark.parametrize("form", [None, "k2", "k3", "weighted_k3", "exact", "sequence_exact"])
@pytest.mark.parametrize("stale", [False, True])
@pytest.mark.parametrize("extras", [False, True])
def test_policy_loss_is_its_formula(form: str | None, stale: bool, extras: bool) -> None:
    p = problem(9, h_ref=3)
    options: dict[str, object] = {"beta": 0.3}
    if extras:
        options |= {"clip": (0.2, 0.3), "kl_weights": p["weights"], "tail": 0.5}
        options["unclipped_advantages"] = p["weights"].flip(0)
    old = p["old_logp"] if stale else None
    inputs = [p["hidden"], p["head"], p["bias"]]
    mine, truth = my_loss(p, form, old, **options), naive_loss(p, form, old, **options)
    close(mine.loss, truth)
    for a, b in zip(torch.autograd.grad(mine.loss, inputs), torch.autograd.grad(truth, inputs), strict=True):
        close(a, b)
    for a, b in zip(mine.stats, written_out(p), strict=True):
        close(a, b.detach() if b is not None else None)


def test_knobs_may_be_tensors_and_scale_what_they_say() -> None:
    p = problem()
    plain = my_loss(p, "exact", p["old_logp"], beta=0.3, clip=(0.1, 0.2), denominator=17.0)
    held = my_loss(
        p,
        "exact",
        p["old_logp"],
        beta=torch.tensor(0.3, dtype=torch.float64),
        clip=(torch.tensor(0.1, dtype=torch.float64), 0.2),
        denominator=torch.tensor(17.0, dtype=torch.float64),
    )
    assert torch.equal(plain.loss, held.loss)
    close(plain.loss * 17, my_loss(p, "exact", p["old_logp"], beta=0.3, clip=(0.1, 0.2)).loss * 5)


def test_reference_log_probs_instead_of_states() -> None:
    p = problem()
    given = ask(p).ref_logp
    assert given is not None
    stats = kernels.token_stats(p["hidden"], p["head"], p["tokens"], bias=p["bias"], ref_logp=given)
    assert stats.kl is None
    close(stats.ref_logp, given)
    loss = kernels.policy_loss(
        p["hidden"], p["head"], p["tokens"], p["advantages"], bias=p["bias"], form="k3", ref_logp=given, beta=0.2
    ).loss
    close(loss, naive_loss(p, "k3", None, beta=0.2))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=9), st.integers(1, 4))
def test_masked_rows_change_nothing_and_may_hold_anything(keep: list[bool], chunk: int) -> None:
    n = len(keep)
    p = problem(n)
    mask = torch.tensor(keep)
    poisoned = {k: v.detach().clone() for k, v in p.items()}
    for name in ("hidden", "ref_hidden", "advantages", "old_logp"):
        poisoned[name][~mask] = math.nan
    poisoned["tokens"][~mask] = -100
    for name in ("hidden", "head", "bias"):
        poisoned[name].requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eager, "BUDGET", 4 * 7 * chunk)
        whole = my_loss(poisoned, "exact", poisoned["old_logp"], beta=0.4, mask=mask)
        stats = ask(poisoned, mask=mask)
        whole.loss.backward()
    few = {k: (v[mask].detach() if k not in ("head", "bias", "ref_head", "ref_bias") else v) for k, v in p.items()}
    few["hidden"].requires_grad_()
    alone = my_loss(few, "exact", few["old_logp"], beta=0.4)
    alone.loss.backward()
    close(whole.loss, alone.loss)
    assert poisoned["hidden"].grad is not None
    assert torch.equal(poisoned["hidden"].grad[~mask], torch.zeros_like(poisoned["hidden"].grad[~mask]))
    close(poisoned["hidden"].grad[mask], few["hidden"].grad)
    close(poisoned["head"].grad, p["head"].grad)
    for x, y in zip(stats, written_out(p), strict=True):
        close(x[mask], y[mask])  # type: ignore[index]
        assert not x[~mask].any()  # type: ignore[index]


@pytest.mark.parametrize("n", [0, 1])
@pytest.mark.parametrize("v", [1, 2, 13])
def test_any_vocabulary_and_no_token_at_all(n: int, v: int) -> None:
    p = problem(n, v=v)
    stats = ask(p)
    for x, y in zip(stats, written_out(p), strict=True):
        close(x, y)
    out = my_loss(p, "exact", None, beta=0.1)
    out.loss.backward()
    assert torch.isfinite(out.loss)
    assert p["head"].grad is not None
    assert torch.isfinite(p["head"].grad).all()


def test_all_rows_masked_is_an_answer() -> None:
    p = problem()
    out = my_loss(p, "exact", None, beta=0.1, mask=torch.zeros(5, dtype=torch.bool))
    out.loss.backward()
    assert out.loss.item() == 0
    assert p["hidden"].grad is not None
    assert not p["hidden"].grad.any()
    assert ask(p, mask=torch.zeros(5)).logp.shape == (5,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equal_policies_have_no_kl(dtype: torch.dtype) -> None:
    p = problem(64, 16, 997, dtype=dtype)
    s = kernels.token_stats(p["hidden"], p["head"], p["tokens"], ref_hidden=p["hidden"].detach())
    assert s.kl is not None
    assert torch.equal(s.kl, torch.zeros_like(s.kl))
    assert s.kl.dtype == torch.float32


def test_extreme_logits_stay_finite() -> None:
    p = problem(6, 4, 50, dtype=torch.float32)
    big = {**p, "head": (80 * p["head"].detach()).requires_grad_(), "ref_head": -80 * p["ref_head"]}
    s = ask(big)
    assert s.kl is not None
    (s.kl.sum() + s.logp.sum() + s.entropy.sum()).backward()
    assert big["head"].grad is not None
    assert torch.isfinite(big["head"].grad).all()
    for x, y in zip(
        s, written_out({k: v.double() for k, v in big.items() if k != "tokens"} | {"tokens": p["tokens"]}), strict=True
    ):
        # float32 sums of terms of size |z| ≈ 300.
        close(x.double(), y, 2e-5)  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_agree_with_float64_up_to_their_logits(dtype: torch.dtype) -> None:
    p = problem(40, 16, 101, dtype=dtype)
    truth = {
        k: (v if k == "tokens" else v.detach().double().requires_grad_(k in ("hidden", "head", "bias")))
        for k, v in p.items()
    }
    mine, exact = my_loss(p, "exact", p["old_logp"], beta=0.3), my_loss(truth, "exact", truth["old_logp"], beta=0.3)
    # A logit of size 12 is rounded by eps/2 · 12, and a log-prob or a KL moves by at most twice that.
    slack = 2 * 16 * torch.finfo(dtype).eps
    close(mine.stats.logp.double(), exact.stats.logp, slack)
    close(mine.stats.kl.double(), exact.stats.kl, slack)  # type: ignore[union-attr]
    mine.loss.backward()
    exact.loss.backward()
    for name in ("hidden", "head", "bias"):
        a, b = p[name].grad, truth[name].grad
        assert a is not None
        assert b is not None
        assert a.dtype == dtype
        assert (a.double() - b).norm() <= slack * b.norm()


def test_frozen_head_gets_no_gradient_and_a_head_of_another_dtype_keeps_its_own() -> None:
    p = problem(8, dtype=torch.bfloat16)
    head = p["head"].detach()
    kernels.policy_loss(p["hidden"], head, p["tokens"], p["advantages"], form=None).loss.backward()
    assert head.grad is None
    master = head.float().requires_grad_()
    kernels.policy_loss(p["hidden"], master, p["tokens"], p["advantages"], form=None).loss.backward()
    assert master.grad is not None
    assert master.grad.dtype == torch.float32


def test_tied_embedding_collects_both_gradients() -> None:
    p = problem()
    ids = torch.tensor([0, 1, 2, 3, 4])
    table = p["head"]
    loss = kernels.policy_loss(table[ids] * p["hidden"], table, p["tokens"], p["advantages"], form=None).loss
    (mine,) = torch.autograd.grad(loss, table)
    logp = ((table[ids] * p["hidden"]) @ table.T).log_softmax(-1).gather(1, p["tokens"][:, None]).squeeze(1)
    (truth,) = torch.autograd.grad(-(logp * p["advantages"]).mean(), table)
    close(mine, truth)


def test_no_grad_computes_no_gradient() -> None:
    p = problem()
    with torch.no_grad():
        assert not my_loss(p, "exact", None, beta=0.1).loss.requires_grad
        assert not ask(p).logp.requires_grad


def test_autocast_takes_the_heads_dtype() -> None:
    p = problem(16, 8, 33, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = kernels.token_stats(p["hidden"], p["head"], p["tokens"])
        plain = torch.nn.functional.linear(p["hidden"], p["head"])
    assert plain.dtype == torch.bfloat16
    close(out.logp, plain.float().log_softmax(-1).gather(1, p["tokens"][:, None]).squeeze(1), 1e-6)
    out.logp.sum().backward()
    assert p["hidden"].grad is not None


def test_backward_twice_is_refused() -> None:
    loss = my_loss(problem(), "exact", None, beta=0.1).loss
    loss.backward(retain_graph=True)
    with pytest.raises(KlampError, match="differentiated twice"):
        loss.backward()


@pytest.mark.parametrize("size", [1, 2, 3, 64, 1001, 5000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("spare", [0, 2**29], ids=["in place", "beside it"])
def test_narrowing(size: int, dtype: torch.dtype, spare: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autograd, "SPARE", spare)
    monkeypatch.setattr(autograd, "NEAR", 64)
    x = torch.randn(size, 3)
    expected = (x * 0.5).to(dtype)
    assert torch.equal(autograd.narrow(eager, x.clone(), torch.tensor(0.5), dtype), expected)


def test_from_logits_agrees_and_honours_excluded_tokens() -> None:
    p = problem()
    logits = (p["hidden"] @ p["head"].T + p["bias"]).detach().requires_grad_()
    ref = p["ref_hidden"] @ p["ref_head"].T + p["ref_bias"]
    keep = torch.tensor([True, False, True, True, True])
    mine = kernels.token_stats_from_logits(logits, p["tokens"], ref_logits=ref, mask=keep, temperature=0.7)
    truth = ask(p, mask=keep, temperature=0.7)
    for a, b in zip(mine, truth, strict=True):
        close(a, b)
    (mine.kl.square() + mine.logp + mine.entropy).sum().backward()  # type: ignore[union-attr]
    x = logits.detach().requires_grad_()
    logp, ref_logp = (x / 0.7).log_softmax(-1), (ref / 0.7).log_softmax(-1)
    kl, entropy = (logp.exp() * (logp - ref_logp)).sum(-1), -(logp.exp() * logp).sum(-1)
    (kl.square() + logp.gather(1, p["tokens"][:, None]).squeeze(1) + entropy)[keep].sum().backward()
    close(logits.grad, x.grad)

    banned = logits.detach().clone()
    banned[:, 6] = -math.inf
    banned.requires_grad_()
    s = kernels.token_stats_from_logits(banned, p["tokens"].clamp(max=5), ref_logits=ref)
    (s.kl + s.entropy).sum().backward()  # type: ignore[operator]
    assert torch.isfinite(s.kl).all()  # type: ignore[arg-type]
    assert banned.grad is not None
    assert torch.isfinite(banned.grad).all()
    assert not banned.grad[:, 6].any()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"ref_logp": torch.zeros(5)}, "both given"),
        ({"temperature": 0.0}, "temperature must be > 0"),
        ({"softcap": -1.0}, "softcap must be > 0"),
        ({"logit_scale": 0.0}, "logit_scale must be > 0"),
        ({"mask": torch.ones(4)}, "same shape"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ask(problem(), **change)


def test_bad_shapes_and_forms_are_named() -> None:
    p = problem()
    with pytest.raises(ConfigError, match=r"head must be \[V, 4\]"):
        kernels.token_stats(p["hidden"], p["head"].T.contiguous(), p["tokens"])
    with pytest.raises(ConfigError, match="tokens must be in"):
        kernels.token_stats(p["hidden"], p["head"], p["tokens"] + 7)
    with pytest.raises(ConfigError, match="5 rows for 4 tokens"):
        kernels.token_stats(p["hidden"], p["head"], p["tokens"][:4])
    with pytest.raises(ConfigError, match="Did you mean 'exact'"):
        my_loss(p, "exakt", None)
    with pytest.raises(ConfigError, match="needs ref_hidden"):
        kernels.policy_loss(p["hidden"], p["head"], p["tokens"], p["advantages"], form="exact")
    with pytest.raises(ConfigError, match="one vocabulary"):
        kernels.token_stats(p["hidden"], p["head"], p["tokens"], ref_hidden=p["ref_hidden"], ref_head=p["head"][:5])
