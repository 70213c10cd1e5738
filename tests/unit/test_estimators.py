"""Estimators against enumeration: every value and every expected gradient over a vocabulary small enough to sum."""

from __future__ import annotations

import itertools
import math
from decimal import Decimal, getcontext

import pytest
import torch
from torch import Tensor

import klamp

getcontext().prec = 60
V = 5
SAMPLED = ["k1", "k2", "k3", "absolute", "k3_clamped", "r_log_r", "chi2_minus_kl"]
POISON = [float("nan"), float("inf"), -float("inf"), 300.0, -300.0, 1e38]


def rows(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of π (with a gradient), ref and μ over one position."""
    g = torch.Generator().manual_seed(seed)
    pi, ref, mu = (torch.randn(V, generator=g, dtype=torch.float64) for _ in range(3))
    return pi.requires_grad_(), ref, (pi.detach() + 0.3 * mu)


def grad(loss: Tensor, x: Tensor) -> Tensor:
    (g,) = torch.autograd.grad(loss, x, retain_graph=True)
    return g


def kl_by_definition(p: Tensor, q: Tensor) -> Tensor:
    return (p * (p / q).log()).sum()


# Values


@pytest.mark.parametrize("sign", [1, -1])
def test_k3_in_float32_keeps_its_digits_from_1e_8_to_30(sign: int) -> None:
    d = sign * torch.logspace(-8, math.log10(30), 400, dtype=torch.float32)
    got = klamp.k3(d, torch.zeros_like(d)).double()
    truth = torch.tensor([float((-Decimal(x)).exp() - 1 + Decimal(x)) for x in d.tolist()], dtype=torch.float64)
    assert (got >= 0).all()
    assert ((got - truth).abs() / truth).max() < 1e-4


def test_k3_is_never_negative_even_between_neighbouring_floats() -> None:
    a = torch.linspace(-20, 0, 2001)
    for _ in range(3):
        b = torch.nextafter(a, torch.tensor(1.0))
        assert (klamp.k3(a, b) >= 0).all()
        assert (klamp.k3(b, a) >= 0).all()
        a = b


EXPECTED_VALUES = {
    "k1": lambda p, q: kl_by_definition(p, q),
    "k2": lambda p, q: (p * (p / q).log() ** 2 / 2).sum(),
    "k3": lambda p, q: kl_by_definition(p, q),
    "absolute": lambda p, q: (p * (p / q).log().abs()).sum(),
    "k3_clamped": lambda p, q: (p * (q / p - 1 + (p / q).log()).clamp(max=10)).sum(),
    "r_log_r": lambda p, q: (p * p / q * (p / q).log()).sum(),
    "chi2_minus_kl": lambda p, q: ((p - q) ** 2 / q).sum() - kl_by_definition(p, q),
}


@pytest.mark.parametrize("name", SAMPLED)
@pytest.mark.parametrize("seed", range(3))
def test_expected_value_on_samples_of_the_policy(name: str, seed: int) -> None:
    pi, ref, _ = rows(seed)
    p, q = pi.detach().softmax(-1), ref.softmax(-1)
    got = (p * klamp.estimator(name)(p.log(), q.log())).sum()
    assert got.item() == pytest.approx(EXPECTED_VALUES[name](p, q).item(), rel=1e-9)


def test_r_log_r_is_the_kl_on_samples_of_the_reference_and_three_times_it_on_the_policys() -> None:
    pi, ref, _ = rows()
    p, q = pi.detach().softmax(-1), ref.softmax(-1)
    assert (q * klamp.r_log_r(p.log(), q.log())).sum().item() == pytest.approx(kl_by_definition(p, q).item(), rel=1e-9)
    near = (pi.detach() + 1e-3 * ref).softmax(-1)
    p = pi.detach().softmax(-1)
    ratio = (p * klamp.r_log_r(p.log(), near.log())).sum() / kl_by_definition(p, near)
    # 3 is the limit at zero drift; the next term is linear in it, 0.5 times a drift of 1e-3.
    assert ratio.item() == pytest.approx(3.0, rel=1e-3)


def test_exact_is_the_definition_in_both_directions_and_takes_logits_or_logp() -> None:
    pi, ref, _ = rows()
    p, q = pi.detach().softmax(-1), ref.softmax(-1)
    assert klamp.exact(pi, ref).item() == pytest.approx(kl_by_definition(p, q).item(), rel=1e-9)
    assert klamp.exact_forward(pi, ref).item() == pytest.approx(kl_by_definition(q, p).item(), rel=1e-9)
    assert klamp.exact(p.log(), q.log()).item() == pytest.approx(klamp.exact(pi, ref).item(), rel=1e-9)
    there, back = klamp.exact(pi, ref).item(), klamp.exact_forward(pi, ref).item()
    assert there != pytest.approx(back, rel=0.05), "1.57 and 1.75 nats: nearer ones would not tell the directions apart"


def test_exact_in_float32_keeps_its_digits_next_to_the_reference() -> None:
    g = torch.Generator().manual_seed(0)
    for size in (1e-6, 1e-4, 1e-2, 1.0, 10.0):
        ref = 3 * torch.randn(20, 2000, generator=g)
        pi = ref + size * torch.randn(20, 2000, generator=g)
        truth = klamp.exact(pi.double(), ref.double())
        got = klamp.exact(pi, ref).double()
        assert (got >= 0).all()
        # The log-ratios, of standard deviation √(2 KL), are rounded to a relative eps: at 1e-6 that is a third of the
        # KL, in whatever order the sums are taken.
        bound = torch.finfo(torch.float32).eps * (2 * truth).sqrt() + 1e-3 * truth
        assert ((got - truth).abs() <= bound).all()


@pytest.mark.parametrize("k", [1, 2, 3, V, 50])
def test_top_k_exact_is_unbiased_for_every_k(k: int) -> None:
    pi, ref, _ = rows()
    p = pi.detach().softmax(-1)
    each = klamp.top_k_exact(pi.detach().expand(V, V), ref.expand(V, V), torch.arange(V), k=k)
    assert (p * each).sum().item() == pytest.approx(klamp.exact(pi, ref).item(), rel=1e-9)
    assert torch.equal(each, klamp.top_k_exact(pi.detach().expand(V, V), ref.expand(V, V), torch.arange(V).int(), k=k))
    if k >= V:
        assert torch.allclose(each, klamp.exact(pi, ref).detach().expand(V), rtol=1e-9)
    else:
        assert each.std() > 0


def test_fitted_is_unbiased_because_lambda_comes_from_the_other_half() -> None:
    g = torch.Generator().manual_seed(1)
    p, q = (torch.randn(3, generator=g, dtype=torch.float64).softmax(-1) for _ in range(2))
    mean = torch.zeros(4, dtype=torch.float64)
    for tokens in itertools.product(range(3), repeat=4):
        index = torch.tensor(tokens).unsqueeze(-1)
        mean += p[index].prod() * klamp.fitted(p.log()[index], q.log()[index]).squeeze(-1)
    assert torch.allclose(mean, kl_by_definition(p, q).expand(4), rtol=1e-9)


def test_fitted_is_never_much_noisier_than_the_better_of_k1_and_k3() -> None:
    g = torch.Generator().manual_seed(0)
    for size in (0.1, 0.5, 1.5):
        ref = torch.randn(64, generator=g, dtype=torch.float64)
        p = (ref + size * torch.randn(64, generator=g, dtype=torch.float64)).log_softmax(-1)
        tokens = torch.multinomial(p.exp(), 64 * 100, replacement=True, generator=g).view(64, 100)
        logp, ref_logp = p[tokens], ref.log_softmax(-1)[tokens]
        best = min(klamp.k1(logp, ref_logp).std(), klamp.k3(logp, ref_logp).std())
        assert klamp.fitted(logp, ref_logp).std() < 1.05 * best  # λ is itself fitted on 3200 tokens


def test_fitted_is_not_fooled_by_tokens_that_are_all_alike() -> None:
    for d in torch.linspace(0.05, 3, 60).tolist():  # the spread is rounding alone: 0 here, 1e-16 there
        logp = torch.full((6, 7), d)
        zero = torch.zeros_like(logp)
        assert torch.allclose(klamp.fitted(logp, zero), klamp.k3(logp, zero), rtol=1e-5)  # float32


# Gradients


def test_expected_gradients_in_a_loss() -> None:
    """Σ_a μ(a) ∇k(a) against autograd through the closed forms, for the sampler that each estimator asks for."""
    pi, ref, mu = rows()
    logp, q, m = pi.log_softmax(-1), ref.softmax(-1), mu.softmax(-1)
    reverse, forward = grad(klamp.exact(pi, ref), pi), grad(klamp.exact_forward(pi, ref), pi)
    p = pi.softmax(-1)
    assert torch.allclose(reverse, grad(kl_by_definition(p, q), pi), rtol=1e-9)
    p = pi.softmax(-1)
    assert torch.allclose(forward, grad(kl_by_definition(q, p), pi), rtol=1e-9)
    variation = grad((pi.softmax(-1) - q).abs().sum(), pi)  # = 2 TV
    p, logq, logm = pi.detach().softmax(-1), q.log(), m.log()

    def w(k: object, **kw: bool) -> Tensor:
        return klamp.weighted(k, logp, logm, logq, **kw)

    cases = {
        "k1": (p, klamp.k1(logp, logq), torch.zeros(V, dtype=torch.float64)),
        "k2": (p, klamp.k2(logp, logq), reverse),
        "k3": (p, klamp.k3(logp, logq), forward),
        "k1+": (p, klamp.estimator("k1+")(logp, logq), reverse),
        "k3+": (p, klamp.estimator("k3+")(logp, logq), reverse),
        "absolute": (p, klamp.absolute(logp, logq), variation),
        "r_log_r on ref": (q, klamp.r_log_r(logp, logq), reverse),
        "weighted k1": (m, w("k1"), reverse),
        "weighted k3": (m, w("k3"), reverse),
        "detached-weight k2": (m, w("k2", detach_weight=True), reverse),
        "detached-weight k3": (m, w("k3", detach_weight=True), forward),
    }
    for name, (weights, values, expected) in cases.items():
        assert torch.allclose(grad((weights * values).sum(), pi), expected, rtol=1e-9, atol=1e-12), name
    assert not torch.allclose(reverse, forward, rtol=0.1), "gradients this near each other would not tell rows apart"


WEIGHTED = ["weighted k1", "weighted k2", "weighted k3"]


@pytest.mark.parametrize(
    ("name", "tail"),
    [(name, None) for name in [*SAMPLED, *WEIGHTED, "exact", "exact_forward"]] + [("k2", 1.0), ("k3", 1.0)],
)
def test_gradients_are_those_of_the_values_to_second_order(name: str, tail: float | None) -> None:
    g = torch.Generator().manual_seed(0)
    logp = (2 * torch.randn(3, 4, generator=g, dtype=torch.float64)).requires_grad_()
    ref, old = (2 * torch.randn(3, 4, generator=g, dtype=torch.float64) for _ in range(2))
    options = {} if tail is None else {"tail": tail}

    def f(x: Tensor) -> Tensor:
        if name in WEIGHTED:
            return klamp.weighted(name.removeprefix("weighted "), x, old, ref)
        return klamp.estimator(name)(x, ref, **options)

    assert torch.autograd.gradcheck(f, logp)
    assert name == "absolute" or torch.autograd.gradgradcheck(f, logp)


def test_functions_compose_with_torch_func() -> None:
    pi, ref, _ = rows()
    x = torch.stack([pi.detach(), ref])
    y = torch.stack([ref, pi.detach()])
    assert torch.equal(torch.func.vmap(klamp.exact)(x, y), klamp.exact(x, y))
    assert torch.allclose(torch.func.grad(lambda a: klamp.k3(a, y).sum())(x), -torch.expm1(y - x), rtol=1e-9)


def test_straight_through_has_the_value_of_one_and_the_gradient_of_the_other_to_the_bit() -> None:
    small = torch.tensor([1e-20], requires_grad=True)
    got = klamp.straight_through(torch.tensor([1e20]), small * 3)
    got.backward()
    assert got.item() == pytest.approx(1e20)
    assert small.grad is not None
    assert small.grad.item() == 3.0
    small_value = klamp.straight_through(torch.tensor([1e-20]), small * 1e20)
    assert small_value.item() == pytest.approx(1e-20)  # a - a.detach() + b.detach() keeps it only by luck
    assert klamp.straight_through(klamp.k3, klamp.k2).__name__ == "k3+"
    assert klamp.straight_through(klamp.k3, klamp.k1).__name__ == "k3+k1"


# Tails and clamps


@pytest.mark.parametrize("name", ["k2", "k3"])
def test_tail_is_the_formula_inside_and_its_tangent_outside(name: str) -> None:
    k = klamp.estimator(name)
    d = torch.linspace(-5, 5, 101, dtype=torch.float64)
    zero = torch.zeros_like(d)
    assert torch.equal(k(d, zero, tail=5.0), k(d, zero))
    for edge in (5.0, -5.0):
        x = torch.tensor([edge, edge * 1.4, edge * 60, edge * 6], dtype=torch.float64, requires_grad=True)
        y = k(x, torch.zeros_like(x), tail=5.0)
        slope = grad(y.sum(), x)
        assert torch.allclose(slope, slope[0].expand(4), rtol=1e-12)
        assert torch.allclose(y, y[0] + slope[0] * (x - edge), rtol=1e-12)
        assert slope[0] * edge > 0, "it must pull back towards the reference"


@pytest.mark.parametrize("far", [30.0, -30.0, 300.0, -300.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tails_keep_pulling_where_formulas_overflow_and_clamps_let_go(far: float, dtype: torch.dtype) -> None:
    logp = torch.tensor([far], dtype=dtype, requires_grad=True)
    zero = torch.zeros_like(logp)
    for kl in (
        klamp.k2(logp, zero, tail=5.0),
        klamp.k3(logp, zero, tail=5.0),
        klamp.weighted("k3", logp, zero, zero, tail=5.0),
        klamp.weighted("k2", logp, zero, zero, tail=5.0, detach_weight=True),
        klamp.weighted("k3", logp, logp.detach(), zero, tail=5.0),
    ):
        slope = grad(kl.sum(), logp)
        assert math.isfinite(kl.item())
        assert kl.item() > 0
        assert math.isfinite(slope.item())
        assert slope.item() * far > 0
    clamped = klamp.k3_clamped(logp, zero)
    assert clamped.item() == 10.0
    assert grad(clamped.sum(), logp).item() == 0.0  # and not 0 · inf = NaN


def test_weighted_tail_is_the_formula_inside() -> None:
    g = torch.Generator().manual_seed(0)
    logp = torch.randn(50, generator=g, dtype=torch.float64).requires_grad_()
    old, ref = (torch.randn(50, generator=g, dtype=torch.float64) for _ in range(2))
    for name, detach in itertools.product(("k2", "k3"), (False, True)):
        plain = klamp.weighted(name, logp, old, ref, detach_weight=detach)
        tailed = klamp.weighted(name, logp, old, ref, detach_weight=detach, tail=9.0)
        assert torch.allclose(plain, tailed, rtol=1e-12)
        assert torch.allclose(grad(plain.sum(), logp), grad(tailed.sum(), logp), rtol=1e-9, atol=1e-12)


def test_k3_clamped_clamps_the_value() -> None:
    d = torch.linspace(-4, 14, 50, dtype=torch.float64)
    zero = torch.zeros_like(d)
    assert torch.allclose(klamp.k3_clamped(d, zero), (torch.exp(-d) - 1 + d).clamp(-10, 10), rtol=1e-9, atol=1e-15)
    assert klamp.k3_clamped(d, zero, limit=0.5).max() == 0.5


# Shapes, dtypes, excluded tokens, masked places


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", [*SAMPLED, "exact", "exact_forward"])
def test_half_precision_is_widened_first(name: str, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    a, b = (torch.randn(4, 6, generator=g).to(dtype) for _ in range(2))
    k = klamp.estimator(name)
    assert k(a, b).dtype == torch.float32
    assert torch.equal(k(a, b), k(a.float(), b.float()))
    assert k(a.double(), b.double()).dtype == torch.float64


@pytest.mark.parametrize("shape", [(), (7,), (0, 5), (3, 0), (2, 3, 4)])
@pytest.mark.parametrize("name", SAMPLED)
def test_any_shape_and_stride(name: str, shape: tuple[int, ...]) -> None:
    a, b = torch.rand(*shape, 2).unbind(-1)
    assert a.numel() < 2 or not a.is_contiguous()
    k = klamp.estimator(name)
    assert torch.equal(k(a, b), k(a.contiguous(), b.contiguous()))
    assert k(a, b).shape == shape


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (1, 4), (5,)])
def test_fitted_answers_for_empty_and_short_batches(shape: tuple[int, ...]) -> None:
    a, b = torch.rand(shape), torch.rand(shape)
    assert klamp.fitted(a, b).shape == shape
    assert klamp.fitted(a, b).isfinite().all()
    nothing = torch.zeros(shape)
    assert klamp.mean(klamp.fitted(a, b, nothing), nothing).item() == 0


def test_tokens_excluded_by_both_cost_nothing_and_get_no_gradient() -> None:
    pi, ref, _ = rows()
    small = klamp.exact(pi, ref)
    gone = torch.full((2,), -math.inf, dtype=torch.float64)
    wide_pi = torch.cat([pi.detach(), gone]).requires_grad_()
    wide = klamp.exact(wide_pi, torch.cat([ref, gone]))
    assert wide.item() == pytest.approx(small.item(), rel=1e-12)
    slope = grad(wide, wide_pi)
    assert torch.allclose(slope[:V], grad(small, pi), rtol=1e-12)
    assert (slope[V:] == 0).all()
    both = torch.cat([ref, torch.zeros(2, dtype=torch.float64)])
    assert math.isfinite(klamp.exact(wide_pi, both).item())  # π excludes more than ref: top-k sampling
    assert grad(klamp.exact(wide_pi, both), wide_pi).isfinite().all()
    assert klamp.exact(both, torch.cat([ref, gone])).item() == math.inf  # ref excludes what π does


@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize("name", [*SAMPLED, "k3+", "weighted", "detached", "tail", "exact", "exact_forward"])
def test_what_stands_in_masked_places_reaches_neither_value_nor_gradient(name: str, poison: float) -> None:
    g = torch.Generator().manual_seed(0)
    shape = (3, 4, V) if name.startswith("exact") else (3, 4)
    mask = torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0], [1, 0, 0, 1]], dtype=torch.bool)
    a, b, c = (torch.randn(shape, generator=g) for _ in range(3))

    def run(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        logp, ref, old = inputs[0].clone().requires_grad_(), inputs[1], inputs[2]
        if name in ("weighted", "detached", "tail"):
            options = {"detach_weight": name == "detached", "tail": 5.0 if name == "tail" else None}
            kl = klamp.weighted("k3", logp, old, ref, **options)
        else:
            kl = klamp.estimator(name)(logp, ref)
        loss = klamp.in_loss(kl, 0.3, mask)
        return loss.detach(), grad(loss, logp)

    clean_value, clean_grad = run(a, b, c)
    assert clean_grad.abs().sum() > 0
    holes = ~mask if len(shape) == 2 else (~mask).unsqueeze(-1).expand(shape)
    for which in range(3):
        dirty = [x.masked_fill(holes, poison) if i == which else x for i, x in enumerate((a, b, c))]
        value, gradient = run(*dirty)
        assert torch.equal(value, clean_value)
        assert torch.equal(gradient.masked_fill(holes, 0.0), clean_grad.masked_fill(holes, 0.0))
        assert (gradient[holes] == 0).all()


@pytest.mark.parametrize("poison", POISON)
def test_measuring_estimators_ignore_masked_places(poison: float) -> None:
    g = torch.Generator().manual_seed(0)
    mask = torch.rand(6, 5, generator=g) > 0.4
    logits, ref = torch.randn(6, 5, V, generator=g), torch.randn(6, 5, V, generator=g)
    tokens = torch.randint(V, (6, 5), generator=g)
    pick = tokens.unsqueeze(-1)
    logp, ref_logp = (x.log_softmax(-1).gather(-1, pick).squeeze(-1) for x in (logits, ref))
    dirty, dirty_logits = logp.masked_fill(~mask, poison), logits.masked_fill(~mask.unsqueeze(-1), poison)
    assert torch.equal(klamp.fitted(dirty, ref_logp, mask)[mask], klamp.fitted(logp, ref_logp, mask)[mask])
    clean = klamp.top_k_exact(logits, ref, tokens, k=2)
    assert torch.equal(klamp.top_k_exact(dirty_logits, ref, tokens, k=2)[mask], clean[mask])


# Names


@pytest.mark.parametrize(
    ("alias", "name"),
    [("kl", "k1"), ("mse", "k2"), ("abs", "absolute"), ("full", "exact"), ("low_var_kl", "k3_clamped")],
)
def test_names_of_other_systems(alias: str, name: str) -> None:
    assert klamp.estimator(alias) is klamp.estimator(name) is getattr(klamp, name)
