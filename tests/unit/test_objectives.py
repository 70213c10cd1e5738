"""Advantages and losses against their definitions, written out token by token."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from klamp.errors import ConfigError
from klamp.objectives import gae, group_advantages, policy_loss, to_go, value_loss, whiten

D = torch.float64
floats = st.floats(-5, 5, allow_nan=False)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=D)


def holes(*shape: int, seed: int = 1) -> Tensor:
    """A mask with gaps in the middle: tool output between a model's own tokens."""
    mask = torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < 0.7
    mask[:, 0] = True
    return mask


def plain_gae(r: list[float], v: list[float], gamma: float, lam: float) -> list[float]:
    """Σ_k (γλ)^k δ_{t+k}, δ_t = r_t + γ V_{t+1} - V_t, V after the last token 0."""
    v = [*v, 0.0]
    delta = [r[t] + gamma * v[t + 1] - v[t] for t in range(len(r))]
    return [sum((gamma * lam) ** k * d for k, d in enumerate(delta[t:])) for t in range(len(r))]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8), (1.0, 1.0), (0.99, 0.0)])
def test_gae_is_its_definition_over_the_counted_tokens(gamma: float, lam: float) -> None:
    rewards, values, mask = random(5, 9), random(5, 9, seed=2), holes(5, 9)
    dirty = torch.where(mask, rewards, torch.nan), torch.where(mask, values, torch.inf)
    advantages, returns = gae(*dirty, mask, gamma=gamma, lam=lam)
    for n in range(5):
        keep = mask[n]
        expected = plain_gae(rewards[n][keep].tolist(), values[n][keep].tolist(), gamma, lam)
        torch.testing.assert_close(advantages[n][keep], torch.tensor(expected, dtype=D), rtol=0, atol=1e-9)
    assert torch.equal(advantages[~mask], torch.zeros_like(advantages[~mask]))
    torch.testing.assert_close(returns[mask], (advantages + values)[mask], rtol=0, atol=1e-9)


def test_gae_with_lambda_one_is_the_return_less_the_value() -> None:
    rewards, values, mask = random(4, 7), random(4, 7, seed=2), holes(4, 7)
    advantages, _ = gae(rewards, values, mask, lam=1.0)
    torch.testing.assert_close(advantages[mask], (to_go(rewards, mask) - values)[mask], rtol=0, atol=1e-9)


@given(rewards=st.lists(floats, min_size=12, max_size=12), std=st.booleans(), drop=st.sets(st.integers(0, 11)))
@settings(max_examples=60, deadline=None)
def test_group_advantages_are_their_definition(rewards: list[float], std: bool, drop: set[int]) -> None:
    valid = torch.tensor([i not in drop for i in range(12)])
    given = torch.tensor([math.nan if i in drop else r for i, r in enumerate(rewards)], dtype=D)
    got = group_advantages(given, 4, std=std, valid=valid)
    for start in range(0, 12, 4):
        group = [rewards[i] for i in range(start, start + 4) if i not in drop]
        mean = statistics.fmean(group) if group else 0.0
        scale = (statistics.stdev(group) if len(group) > 1 else 0.0) + 1e-4 if std else 1.0
        for i in range(start, start + 4):
            # 1e-9 of the quotient: where all rewards of a group are nearly alike it divides rounding by 1e-4.
            expected = 0.0 if i in drop else (rewards[i] - mean) / scale
            assert float(got[i]) == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_a_group_without_spread_has_no_advantage() -> None:
    assert torch.equal(group_advantages(torch.full((8,), 0.3, dtype=D), 4), torch.zeros(8, dtype=D))


@pytest.mark.parametrize("size", [3, 6, 7, 10])
@pytest.mark.parametrize("reward", [0.1, 0.7, -3.3, 700.1, 1e6 + 0.1])
def test_equal_rewards_have_no_advantage_though_their_mean_is_rounded(reward: float, size: int) -> None:
    alike = torch.full((size,), reward)
    assert torch.equal(group_advantages(alike, size), torch.zeros(size))
    left_out = torch.arange(size) == 1
    other = torch.where(left_out, math.nan, alike)
    assert torch.equal(group_advantages(other, size, valid=~left_out), torch.zeros(size))
    told = group_advantages(torch.cat([alike, torch.arange(size)]), size)
    assert told[:size].eq(0).all()
    assert told[size:].square().mean() > 0.5, "and the others have theirs"


def test_sums_that_are_equal_on_paper_are_equal_rewards() -> None:
    sums = torch.tensor([0.1 + 0.2, 0.3, 0.15 + 0.15, 0.1 + 0.1 + 0.1], dtype=D)
    assert sums.unique().numel() > 1
    assert torch.equal(group_advantages(sums, 4), torch.zeros(4, dtype=D))
    least = torch.tensor([0.3, 0.3 * (1 + 1e-14)], dtype=D)
    assert group_advantages(least, 2, eps=0.0).abs().min() > 0.5, "what differs by more is told apart"
    wild = torch.tensor([math.inf, 0.0], dtype=D)
    assert not torch.equal(group_advantages(wild, 2), torch.zeros(2, dtype=D)), "and infinity is not equal to 0"


@given(
    rewards=st.lists(floats, min_size=8, max_size=8),
    shift=floats,
    scale=st.floats(0.5, 4),
    order=st.permutations(range(4)),
)
@settings(max_examples=40, deadline=None)
def test_group_advantages_ignore_shift_and_follow_order(
    rewards: list[float], shift: float, scale: float, order: list[int]
) -> None:
    r = torch.tensor(rewards, dtype=D)
    plain = group_advantages(r, 4, std=False)
    torch.testing.assert_close(group_advantages(r + shift, 4, std=False), plain, rtol=0, atol=1e-9)
    torch.testing.assert_close(group_advantages(scale * r, 4, std=False), scale * plain, rtol=0, atol=1e-9)
    mixed = torch.cat([r[:4][order], r[4:]])
    torch.testing.assert_close(group_advantages(mixed, 4)[:4], group_advantages(r, 4)[:4][order], rtol=0, atol=1e-9)


def test_a_group_size_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ConfigError, match="group_size 3 does not divide the batch of 8"):
        group_advantages(torch.zeros(8), 3)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_to_go_sums_what_is_still_to_come(gamma: float) -> None:
    x, mask = random(3, 6), holes(3, 6)
    got = to_go(torch.where(mask, x, torch.nan), mask, gamma)
    for n in range(3):
        for t in range(6):
            expected = sum(gamma ** (u - t) * float(x[n, u]) for u in range(t, 6) if mask[n, u])
            assert float(got[n, t]) == pytest.approx(expected, abs=1e-9)


def test_whitening_a_batch_in_parts_is_whitening_it_whole() -> None:
    x, mask = random(6, 5), holes(6, 5)
    whole = whiten(torch.where(mask, x, torch.nan), mask)
    values = x[mask]
    moments = values.mean(), values.var(unbiased=False)
    parts = torch.cat([whiten(x[:2], mask[:2], moments=moments), whiten(x[2:], mask[2:], moments=moments)])
    torch.testing.assert_close(whole, parts, rtol=0, atol=1e-9)
    assert float(whole[mask].mean()) == pytest.approx(0, abs=1e-9)
    assert float(whole[mask].std(unbiased=False)) == pytest.approx(1, abs=1e-7)  # 1e-8 is added to the variance


def test_policy_loss_is_ppos() -> None:
    logp, old, a, extra = random(4, 5), random(4, 5, seed=2), random(4, 5, seed=3), random(4, 5, seed=4)
    got = policy_loss(logp, old, a, clip=(0.1, 0.3), unclipped=extra)
    for i in range(20):
        r = math.exp(float((logp - old).flatten()[i]))
        adv = float(a.flatten()[i])
        expected = -min(r * adv, min(max(r, 0.9), 1.3) * adv) - r * float(extra.flatten()[i])
        assert float(got.flatten()[i]) == pytest.approx(expected, abs=1e-9)


def test_on_its_own_samples_the_gradient_is_the_score_and_no_clip_bites() -> None:
    logp, a = random(3, 4).requires_grad_(True), random(3, 4, seed=3)
    policy_loss(logp, logp.detach(), a, clip=(0.2, 0.2)).sum().backward()
    torch.testing.assert_close(logp.grad, -a, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("ratio", "advantage", "pulls"), [(2.0, 1.0, False), (2.0, -1.0, True), (0.5, -1.0, False)])
def test_a_clipped_token_lets_go_of_the_task_but_not_of_the_kl_to_come(
    ratio: float, advantage: float, pulls: bool
) -> None:
    logp = torch.tensor([[math.log(ratio)]], dtype=D, requires_grad=True)
    old, a = torch.zeros(1, 1, dtype=D), torch.tensor([[advantage]], dtype=D)
    policy_loss(logp, old, a, clip=(0.2, 0.2)).sum().backward()
    assert logp.grad is not None
    assert (abs(float(logp.grad)) > 0) is pulls
    logp.grad = None
    policy_loss(logp, old, a, clip=(0.2, 0.2), unclipped=-torch.ones(1, 1, dtype=D)).sum().backward()
    assert float(logp.grad) == pytest.approx(ratio - (ratio * advantage if pulls else 0), abs=1e-12)


def test_value_loss_is_the_worse_of_the_two() -> None:
    v, old, ret = random(3, 4), random(3, 4, seed=2), random(3, 4, seed=3)
    got = value_loss(v, old, ret, clip=0.2)
    for i in range(12):
        x, o, r = (float(t.flatten()[i]) for t in (v, old, ret))
        near = o + min(max(x - o, -0.2), 0.2)
        assert float(got.flatten()[i]) == pytest.approx(0.5 * max((x - r) ** 2, (near - r) ** 2), abs=1e-9)
    torch.testing.assert_close(value_loss(v, old, ret, clip=None), 0.5 * (v - ret) ** 2, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "call",
    [
        lambda: gae(random(2, 3), random(2, 4)),
        lambda: policy_loss(random(2, 3), random(2, 3), random(2, 1)),
        lambda: value_loss(random(2, 3), random(2, 3), random(3)),
    ],
)
def test_nothing_is_broadcast(call: Any) -> None:
    with pytest.raises(ConfigError):
        call()
