"""Log-probs kept through a step: the kernels' numbers and gradients, with fewer products."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from klamp.errors import KlampError
from klamp.kernels import HeadSpec, token_stats
from klamp.train import kept, policy
from klamp.train.kept import Words, keeps, kept_stats, log_probs

pytestmark = pytest.mark.usefixtures("one_thread")


def head(dtype: torch.dtype = torch.float64, **other: Any) -> HeadSpec:
    weight = torch.randn(41, 6, generator=torch.Generator().manual_seed(1), dtype=dtype).requires_grad_()
    return HeadSpec(weight, **({"bias": None, "softcap": None, "logit_scale": 1.5, "backbone": nn.Identity()} | other))


@pytest.mark.parametrize("temperature", [1.5, 0.7])
def test_statistics_and_gradients_are_the_kernels(temperature: float) -> None:
    """More tokens than a block, some not counted, in another order than the reference's rows."""
    g = torch.Generator().manual_seed(0)
    own = head()
    states, ref = torch.randn(2, 5, 9, 6, generator=g, dtype=torch.float64)
    tokens, mask = torch.randint(0, 41, (5, 9), generator=g), torch.rand(5, 9, generator=g) < 0.8
    ups = torch.randn(2, 5, 9, generator=g, dtype=torch.float64)
    assert int(mask.sum()) > 2 * kept.ROWS
    order = torch.randperm(45, generator=g)
    words = Words(log_probs(own, ref.view(45, 6)[order], temperature), order.argsort().view(5, 9))
    outcomes = []
    for way in ("kernels", "kept"):
        leaf = states.clone().requires_grad_()
        if way == "kept":
            found = kept_stats(own, leaf, tokens, mask, words, temperature)
        else:
            found = token_stats(
                leaf, own.weight, tokens, ref_hidden=ref, mask=mask, temperature=temperature, logit_scale=1.5
            )
        assert found.kl is not None
        loss = (found.logp * ups[0] + found.kl * ups[1]).sum()
        outcomes.append([*(x.detach() for x in found), *torch.autograd.grad(loss, [leaf, own.weight])])
    torch.testing.assert_close(outcomes[1], outcomes[0], rtol=1e-9, atol=1e-9)


def test_an_equal_policy_has_a_kl_of_zero_and_no_gradient_of_it() -> None:
    states = torch.randn(1, 40, 6, dtype=torch.float64).requires_grad_()
    own, everything = head(), torch.ones(1, 40, dtype=torch.bool)
    words = Words(log_probs(own, states.detach()[0], 1.0), torch.arange(40).view(1, 40))
    found = kept_stats(own, states, torch.zeros(1, 40, dtype=torch.long), everything, words, 1.0)
    assert found.kl is not None
    (grad,) = torch.autograd.grad(found.kl.sum(), states, retain_graph=True)
    assert float(found.kl.detach().abs().max()) < 1e-14
    assert float(grad.abs().max()) < 1e-14
    with pytest.raises(KlampError, match="twice"):
        torch.autograd.grad(found.logp.sum(), states)


def test_kept_where_it_pays_and_can_be(monkeypatch: Any) -> None:
    states, plain = torch.zeros(1, 6), head(torch.float32)
    row = 41 * 4
    monkeypatch.setattr(kept, "LEAST", 10 * row)
    monkeypatch.setattr(kept, "MOST", 20 * row)
    assert [keeps(plain, states, rows) for rows in (10, 11, 20, 21)] == [False, True, True, False]
    assert not keeps(None, states, 15), "full logits"
    assert not keeps(head(torch.float32, softcap=3.0), states, 15)
    assert not keeps(head(torch.float32, bias=torch.zeros(41)), states, 15)
    assert not keeps(plain, states.bfloat16(), 15)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"optim": {"lr": 1e-2, "micro_batch": 3}},
        {"full": True},
        {"algorithm": {"name": "ppo", "epochs": 2, "minibatches": 2}},
        {"kl": {"reference": "ema:0.5"}},
        {"rollout": {"temperature": 0.6}},
    ],
)
def test_a_step_is_the_same(trainer: Any, tmp_path: Any, settings: dict[str, Any], monkeypatch: Any) -> None:
    """Three steps under a clamp that has to work, with the reference's log-probs computed once in each."""
    monkeypatch.setattr(kept, "LEAST", 0)
    passes: list[int] = []
    own = policy.log_probs
    monkeypatch.setattr(policy, "log_probs", lambda *given: (passes.append(1), own(*given))[1])
    outcomes = []
    for most in (0, kept.MOST):
        monkeypatch.setattr(kept, "MOST", most)
        made = trainer(**{"run": str(tmp_path / str(most)), "kl": {"target": 0.002, "per": "token"}} | settings)
        metrics = []
        for number in (1, 2, 3):
            rollout = made.sample(number)
            scored = made.scorer(rollout.prompts, rollout.completions, rollout.columns)
            metrics.append(made.learner.step(number, rollout, scored).metrics)
            made.sampler.refresh()
        outcomes.append((metrics, torch.cat([p.detach().flatten() for p in made.learner.policy.trainable().values()])))
    assert len(passes) == 3
    (plain, before), (found, after) = outcomes
    for ours, theirs in zip(found, plain, strict=True):
        # float32: KLs of 1e-4 are differences of log-probs good to 1e-6
        assert ours == pytest.approx(theirs, rel=2e-3, abs=2e-6)
    # Adam divides by the root of a second moment: where a gradient is of the size of its rounding, so is its sign.
    assert float((before - after).norm() / before.norm()) < 1e-3
