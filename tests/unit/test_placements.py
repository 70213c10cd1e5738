"""Placements against an enumerated language model of their own: expected gradients, invariances, verdicts."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import klamp
from klamp import ConfigError, SequenceKL

settings.register_profile("steady", deadline=None)  # a busy machine is no failure
settings.load_profile("steady")

V = 3
NAN = float("nan")


@dataclass
class Tree:
    """Four tokens; the second is a tool's: the environment draws it and the mask leaves it out."""

    theta: Tensor
    ref: Tensor
    mu: Tensor
    features: Tensor
    tokens: Tensor
    prefix: Tensor
    tool: Tensor

    @property
    def mask(self) -> Tensor:
        return torch.tensor([True, False, True, True]).expand(len(self.tokens), 4)

    def logits(self, theta: Tensor) -> Tensor:
        return (self.features @ theta)[self.prefix]

    def logp(self, theta: Tensor) -> Tensor:
        return self.logits(theta).log_softmax(-1).gather(-1, self.tokens.unsqueeze(-1)).squeeze(-1)

    def probability(self, theta: Tensor) -> Tensor:
        return torch.where(self.mask, self.logp(theta), 0.0).sum(-1).exp() * self.tool

    def kl(self, theta: Tensor) -> Tensor:
        p, q = self.logits(theta).log_softmax(-1), self.logits(self.ref).log_softmax(-1)
        return (p.exp() * (p - q)).sum(-1)

    def truth(self) -> Tensor:
        """∇ of KL between the whole distributions, by its definition: the tool's part cancels in the log-ratio."""
        x = self.theta.clone().requires_grad_()
        ratio = torch.where(self.mask, self.logp(x) - self.logp(self.ref), 0.0).sum(-1)
        return torch.autograd.grad((self.probability(x) * ratio).sum(), x)[0]

    def local(self, sampler: Tensor) -> Tensor:
        x = self.theta.clone().requires_grad_()
        kl = torch.where(self.mask, self.kl(x), 0.0).sum(-1)
        return torch.autograd.grad((self.probability(sampler) * kl).sum(), x)[0]


@functools.cache
def tree(seed: int = 0) -> Tree:
    g = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    rows = torch.tensor(list(itertools.product(range(V), repeat=4)))
    index: dict[tuple[int, ...], int] = {}
    prefix = [[index.setdefault(tuple(r[:t]), len(index)) for t in range(4)] for r in rows.tolist()]
    features, ref = noise(len(index), 6), 0.5 * noise(6, V)
    theta = ref + 0.5 * noise(6, V)
    tool = noise(V, V).softmax(-1)[rows[:, 0], rows[:, 1]]
    return Tree(theta, ref, theta + 0.2 * noise(6, V), features, rows, torch.tensor(prefix), tool)


def ratio_loss(t: Tree, x: Tensor, sampler: Tensor, advantages: Tensor) -> Tensor:
    """Σ_n -Σ_t w_t A_t, per sequence; at the tool's token nothing."""
    ratio = (t.logp(x) - t.logp(sampler)).exp()
    return -torch.where(t.mask, ratio * advantages, 0.0).sum(-1)


def expected(t: Tree, x: Tensor, sampler: Tensor, per_sequence: Tensor) -> Tensor:
    return torch.autograd.grad((t.probability(sampler).detach() * per_sequence).sum(), x)[0]


def poisoned(t: Tree, x: Tensor) -> Tensor:
    """What a tool's tokens really have for log-probs: anything."""
    return torch.where(t.mask, x, torch.full_like(x, NAN))


def sequence_gradient(t: Tree, sampler: Tensor, **options: object) -> Tensor:
    x = t.theta.clone().requires_grad_()
    objective = options.get("objective", "ratio")
    parts = klamp.sequence_exact(
        poisoned(t, t.kl(x)), 1.0, t.mask, logp=poisoned(t, t.logp(x)), old_logp=poisoned(t, t.logp(sampler)), **options
    )
    local = torch.where(t.mask, parts.local, 0.0).sum(-1)
    if objective == "ratio":
        return expected(t, x, sampler, local + ratio_loss(t, x, sampler, parts.advantage))
    score = -torch.where(t.mask, parts.advantage * t.logp(x), 0.0).sum(-1)
    return expected(t, x, sampler, local + score)


@pytest.mark.parametrize("objective", ["ratio", "score"])
@pytest.mark.parametrize("stale", [False, True])
@pytest.mark.parametrize("with_baseline", [False, True])
def test_sequence_exact_is_the_true_gradient(objective: str, stale: bool, with_baseline: bool) -> None:
    t = tree()
    sampler = t.mu if stale else t.theta
    # Any function of the tokens before t may be the baseline; the index of the prefix is one.
    baseline = torch.sin(t.prefix.double()) if with_baseline else None
    got = sequence_gradient(t, sampler, max_weight=None, objective=objective, baseline=baseline)
    truth = t.truth()
    assert (got - truth).norm() < 1e-9 * truth.norm()
    assert (t.local(sampler) - truth).norm() > 0.05 * truth.norm(), "the future part must matter here"


def test_without_old_logp_the_samples_are_the_policys_own() -> None:
    t = tree()
    x = t.theta.clone().requires_grad_()
    parts = klamp.sequence_exact(t.kl(x), 1.0, t.mask)
    got = expected(t, x, t.theta, parts.local.sum(-1) + ratio_loss(t, x, t.theta, parts.advantage))
    assert (got - t.truth()).norm() < 1e-9 * t.truth().norm()
    assert (parts.weights == 1).all()


def test_truncation_bounds_the_weights_and_biases_only_then() -> None:
    t = tree()
    x = t.theta
    options = {"logp": t.logp(x), "old_logp": t.logp(t.mu)}
    exact = klamp.sequence_exact(t.kl(x), 1.0, t.mask, max_weight=None, **options)
    top = exact.weights.max().item()
    assert top > 1.2
    cut = klamp.sequence_exact(t.kl(x), 1.0, t.mask, max_weight=1.2, **options)
    assert torch.equal(cut.weights, exact.weights.clamp(max=1.2))
    loose = klamp.sequence_exact(t.kl(x), 1.0, t.mask, max_weight=top, **options)
    assert all(torch.equal(a, b) for a, b in zip(loose, exact, strict=True))
    assert (sequence_gradient(t, t.mu, max_weight=1.2) - t.truth()).norm() > 1e-4 * t.truth().norm()


def test_weights_skip_the_tools_token_and_exclude_the_present_one() -> None:
    log_w = torch.tensor([[0.1, NAN, 0.2, 0.3]], dtype=torch.float64)
    mask = torch.tensor([[1, 0, 1, 1]])
    parts = klamp.sequence_exact(torch.ones_like(log_w), 2.0, mask, logp=log_w, old_logp=torch.zeros_like(log_w))
    w = torch.tensor([0.0, 0.1, 0.1, 0.3], dtype=torch.float64).exp()
    assert torch.allclose(parts.weights, w, rtol=1e-12)
    assert torch.allclose(parts.local, 2 * w * mask, rtol=1e-12)
    ratio = log_w.nan_to_num(0.0).exp()[0]
    future = torch.stack([w[2] + w[3], torch.zeros_like(w[0]), w[3], torch.zeros_like(w[0])])
    assert torch.allclose(parts.advantage[0], -2 * future / ratio, rtol=1e-12)
    assert not parts.advantage.requires_grad
    known = torch.tensor([[5.0, NAN, 7.0, 9.0]], dtype=torch.float64)
    less = klamp.sequence_exact(
        torch.ones_like(log_w), 2.0, mask, logp=log_w, old_logp=torch.zeros_like(log_w), baseline=known
    )
    assert torch.allclose(less.advantage - parts.advantage, 2 * w * known.nan_to_num(0.0), rtol=1e-12)


@pytest.mark.parametrize("objective", ["ratio", "score"])
def test_a_large_ratio_does_not_enlarge_the_baseline(objective: str) -> None:
    """What multiplies a score is the weighted KL to come less the weighted baseline, and no weight is above 2."""
    log_w = torch.tensor([[0.1, 8.0, -0.2, 0.3]], dtype=torch.float64)
    known = torch.tensor([[0.6, 0.4, 0.2, 0.0]], dtype=torch.float64)
    options = {"logp": log_w, "old_logp": torch.zeros_like(log_w), "objective": objective}
    parts = klamp.sequence_exact(torch.full_like(log_w, 0.2), 1.0, baseline=known, **options)
    on_score = parts.advantage * (log_w.exp() if objective == "ratio" else 1.0)
    through = log_w.cumsum(-1).exp().clamp(max=2.0)[0]
    to_come = torch.stack([0.2 * through[t:-1].sum() for t in range(4)])
    assert torch.allclose(on_score[0], -(to_come - through * known[0]), rtol=1e-12)


@pytest.mark.parametrize("count", [2, 3])
def test_the_position_baseline_is_unbiased_over_all_batches(count: int) -> None:
    """E over every batch of ``count`` sequences of [B, T] tokens, the batch's own mean as baseline for the others."""
    g = torch.Generator().manual_seed(3)
    table, ref = (torch.randn(3, 2, generator=g, dtype=torch.float64) for _ in range(2))
    rows, prefix = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]]), torch.tensor([[0, 1], [0, 1], [0, 2], [0, 2]])
    mask = torch.tensor([[1, 1], [1, 1], [1, 0], [1, 0]])  # token 1 ends the sequence: a mask that depends on tokens
    mask[:, 1] = (rows[:, 0] == 0).long()

    def pieces(x: Tensor) -> tuple[Tensor, Tensor]:
        logp = x.log_softmax(-1)
        kl = klamp.exact(x, ref)
        return logp[prefix, rows], kl[prefix]

    total = {name: torch.zeros_like(table) for name in ("position", None)}
    for name, batch in itertools.product(total, itertools.product(range(4), repeat=count)):
        x = table.clone().requires_grad_()
        (logp, kl), index = pieces(x), torch.tensor(batch)
        keep = mask[index].bool()
        probability = torch.where(mask.bool(), logp, 0.0).sum(-1).exp() / torch.tensor([1.0, 1.0, 2.0, 2.0])
        parts = klamp.sequence_exact(kl[index], 1.0, keep, baseline=name)
        loss = parts.local.sum() - torch.where(keep, logp[index] * parts.advantage, 0.0).sum()
        total[name] += probability[index].prod().detach() * torch.autograd.grad(loss, x)[0]
    assert torch.allclose(total["position"], total[None], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("max_weight", [2.0, None])
def test_sequence_exact_stays_finite_at_any_ratio(sign: float, dtype: torch.dtype, max_weight: float | None) -> None:
    kl = torch.rand(1, 6, dtype=dtype)
    for size in (30.0, 100.0, 300.0, float("inf")):
        logp = torch.zeros(1, 6, dtype=dtype)
        logp[0, 1] = logp[0, 3] = sign * size
        parts = klamp.sequence_exact(kl, 0.1, logp=logp, old_logp=torch.zeros_like(logp), max_weight=max_weight)
        ratio = logp.clamp(max=40).exp()
        assert all(part.isfinite().all() for part in (*parts, ratio * parts.advantage))


# k1 in reward and advantage


def test_k1_in_reward_with_returns_to_go_is_the_true_gradient() -> None:
    t = tree()
    x = t.theta.clone().requires_grad_()
    k1 = klamp.k1(poisoned(t, t.logp(x)), t.logp(t.ref))
    rewards = klamp.in_reward(torch.zeros_like(k1), k1, 1.0, t.mask)
    returns = rewards.flip(-1).cumsum(-1).flip(-1)
    got = expected(t, x, t.theta, ratio_loss(t, x, t.theta, returns))
    assert (got - t.truth()).norm() < 1e-9 * t.truth().norm()


@pytest.mark.parametrize("centre", ["batch", "none"])
@pytest.mark.parametrize("stale", [False, True])
def test_k1_in_advantage_is_the_token_local_gradient(centre: str, stale: bool) -> None:
    t = tree()
    sampler = t.mu if stale else t.theta
    x = t.theta.clone().requires_grad_()
    k1 = klamp.k1(t.logp(x), t.logp(t.ref))
    mean = 0.37 if centre == "batch" else None  # any constant has no expected score
    advantages = klamp.in_advantage(torch.zeros_like(k1), k1, 1.0, t.mask, centre=centre, mean=mean)
    got = expected(t, x, sampler, ratio_loss(t, x, sampler, advantages))
    local = t.local(sampler)
    assert (got - local).norm() < 1e-9 * local.norm()


def test_in_advantage_is_arts_formula() -> None:
    a, kl = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, NAN]]), torch.tensor([[0.1, 0.2, 0.6], [0.7, 0.4, NAN]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    got = klamp.in_advantage(a, kl, 0.5, mask)
    assert torch.allclose(got[mask.bool()], (a + 0.5 * (0.4 - kl))[mask.bool()])
    assert got[1, 2].isnan(), "places outside the mask come back as they went in"
    each = torch.tensor([[0.3], [0.55]])
    got = klamp.in_advantage(a, kl, 0.5, mask, centre="sequence")
    assert torch.allclose(got[mask.bool()], (a + 0.5 * (each - kl))[mask.bool()])
    got = klamp.in_advantage(a, kl, 0.5, mask, centre="none")
    assert torch.allclose(got[mask.bool()], (a - 0.5 * kl)[mask.bool()])
    halves = [klamp.in_advantage(a[i : i + 1], kl[i : i + 1], 0.5, mask[i : i + 1], mean=0.4) for i in range(2)]
    assert torch.allclose(torch.cat(halves)[mask.bool()], klamp.in_advantage(a, kl, 0.5, mask)[mask.bool()])


# Invariances of every placement

Batch = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    b, t = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    g = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    kl, logp, old, x = (torch.randn(b, t, generator=g, dtype=torch.float64) for _ in range(4))
    bits = draw(st.lists(st.booleans(), min_size=b * t, max_size=b * t))
    return kl.abs(), logp, old, x, torch.tensor(bits).view(b, t)


def everything(kl: Tensor, logp: Tensor, old: Tensor, x: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Every per-token result, and every gradient, where the mask counts; ``mean`` is given, as over processes."""
    leaf = kl.clone().requires_grad_()
    parts: SequenceKL = klamp.sequence_exact(leaf, 0.2, mask, logp=logp, old_logp=old)
    own = klamp.sequence_exact(leaf, 0.2, mask, max_weight=None, objective="score")
    loss = klamp.in_loss(leaf, 0.2, mask, count=7)
    (loss + torch.where(mask, parts.local, 0.0).sum()).backward()
    return {
        "reward": klamp.in_reward(x, kl, 0.2, mask)[mask],
        "advantage": klamp.in_advantage(x, kl, 0.2, mask, mean=0.3)[mask],
        "sequence": klamp.in_advantage(x, kl, 0.2, mask, centre="sequence")[mask],
        "local": parts.local[mask].detach(),
        "future": parts.advantage[mask],
        "own": own.advantage[mask],
        "loss": loss.detach(),
        "gradient": leaf.grad[mask],  # type: ignore[index]
    }


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    for name, value in one.items():
        assert torch.allclose(value, other[name], rtol=1e-9, atol=1e-12), name


@given(batches(), st.sampled_from([NAN, float("inf"), -float("inf"), 1e300]), st.integers(1, 3))
def test_masked_places_and_padding_change_nothing(batch: Batch, poison: float, right: int) -> None:
    mask = batch[-1]
    clean = everything(*batch)
    dirty = [x.masked_fill(~mask, poison) for x in batch[:4]]
    assert_same(clean, everything(*dirty, mask))
    pad = torch.full((mask.shape[0], right), poison, dtype=torch.float64)
    padded = [torch.cat([x, pad], 1) for x in dirty]
    assert_same(clean, everything(*padded, torch.cat([mask, torch.zeros_like(pad, dtype=torch.bool)], 1)))


@given(batches(), st.data())
def test_permutation_and_split_change_nothing(batch: Batch, data: st.DataObject) -> None:
    rows = batch[-1].shape[0]
    whole = everything(*batch)
    order = torch.tensor(data.draw(st.permutations(range(rows))))
    back = order.argsort()
    permuted = [x[order] for x in batch]
    again = everything(*permuted)
    lengths = permuted[-1].sum(-1).tolist()
    for name, value in whole.items():
        pieces = again[name].split(lengths) if name != "loss" else None
        joined = torch.cat([pieces[i] for i in back]) if pieces else again[name]
        assert torch.allclose(value, joined, rtol=1e-9, atol=1e-12), name
    cut = data.draw(st.integers(0, rows))
    first, second = (everything(*(x[s] for x in batch)) for s in (slice(0, cut), slice(cut, None)))
    split = {name: torch.cat([first[name], second[name]]) for name in whole if name != "loss"}
    split["loss"] = first["loss"] + second["loss"]
    assert_same(whole, split)


def test_in_loss_is_the_mean_and_a_count_makes_parts_add_up() -> None:
    kl, mask = torch.rand(4, 5), torch.rand(4, 5) > 0.3
    assert klamp.in_loss(kl, 0.3, mask).item() == pytest.approx(0.3 * kl[mask].mean().item())
    parts = sum(klamp.in_loss(kl[i : i + 1], 0.3, mask[i : i + 1], count=mask.sum()) for i in range(4))
    assert parts.item() == pytest.approx(klamp.in_loss(kl, 0.3, mask).item())


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (2, 3)])
def test_an_all_masked_batch_is_an_answer(shape: tuple[int, int]) -> None:
    kl = torch.full(shape, NAN).requires_grad_()
    mask = torch.zeros(shape, dtype=torch.bool)
    zero = torch.zeros(shape)
    for count in (None, 0, torch.tensor(0)):
        loss = klamp.in_loss(kl, 0.1, mask, count=count)
        assert loss.item() == 0
        assert (torch.autograd.grad(loss, kl)[0] == 0).all()
    assert torch.equal(klamp.in_reward(zero, kl, 0.1, mask), zero)
    assert torch.equal(klamp.in_advantage(zero, kl, 0.1, mask), zero)
    parts = klamp.sequence_exact(kl, 0.1, mask, logp=kl, old_logp=kl, baseline="position")
    assert (parts.local == 0).all()
    assert (parts.advantage == 0).all()


@pytest.mark.parametrize("beta", [torch.tensor(0.25), torch.tensor([0.25], requires_grad=True), 0.25])
def test_beta_is_a_number_or_a_tensor_of_one_without_gradient(beta: float | Tensor) -> None:
    kl, x = torch.rand(2, 3, requires_grad=True), torch.rand(2, 3)
    assert torch.equal(klamp.in_reward(x, kl, beta), klamp.in_reward(x, kl, 0.25))
    assert torch.equal(klamp.in_advantage(x, kl, beta), klamp.in_advantage(x, kl, 0.25))
    assert torch.equal(klamp.sequence_exact(kl, beta).local, 0.25 * kl)
    loss = klamp.in_loss(kl, beta)
    assert loss.item() == pytest.approx(0.25 * kl.mean().item())
    loss.backward()
    assert not isinstance(beta, Tensor) or beta.grad is None
    assert klamp.in_loss(kl.bfloat16(), beta).dtype == torch.float32


# Verdicts

ACCEPTED = {
    ("k1", "in_reward"),
    ("k1", "in_advantage"),
    *((k, "in_loss") for k in ("k2", "weighted_k1", "weighted_k3", "detached_weight_k2", "exact", "k1+", "k2+", "k3+")),
    ("exact", "sequence_exact"),
}
NAMES = [*klamp.estimators.ESTIMATORS, "weighted_k1", "weighted_k2", "weighted_k3", "detached_weight_k2", "k1+", "k2+"]


@pytest.mark.parametrize("name", [*NAMES, "k3+", "weighted_absolute", "detached_weight_k3", "absolute+"])
@pytest.mark.parametrize("placement", ["in_reward", "in_advantage", "in_loss", "sequence_exact"])
def test_only_pairs_that_descend_the_kl_are_accepted(name: str, placement: str) -> None:
    if (name, placement) in ACCEPTED:
        pair = klamp.check(name, placement)
        assert pair.accepted
        assert pair.on_policy.startswith("KL(π‖ref)")
        return
    with pytest.raises(ConfigError, match="allow_biased=True") as error:
        klamp.check(name, placement)
    pair = klamp.check(name, placement, allow_biased=True)
    assert not pair.accepted
    assert pair.on_policy in str(error.value)
    assert pair.instead in str(error.value)
    assert any(word in pair.instead for word in ("exact", "k2", "k3", "k1"))


def test_check_takes_functions_partials_aliases_and_short_placements() -> None:
    assert klamp.check(klamp.k1, klamp.in_reward) == klamp.check("kl", "reward")
    assert klamp.check(functools.partial(klamp.k2, tail=5.0), "loss").estimator == "k2"
    assert klamp.check(klamp.straight_through(klamp.k3, klamp.k2), klamp.in_loss).estimator == "k3+"
    assert klamp.check("weighted k3", "in_loss").estimator == "weighted_k3"
    with pytest.raises(ConfigError):
        klamp.check(klamp.straight_through(klamp.k3, klamp.k1), klamp.in_loss)
    with pytest.raises(ConfigError, match="zero"):
        klamp.check("k1", "in_loss")
    with pytest.raises(ConfigError, match=r"KL\(ref‖π\)"):
        klamp.check("low_var_kl", "in_loss")
