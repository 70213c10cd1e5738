"""Preflight catches what failed silently elsewhere, and leaves no trace when all is well."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest
import torch

from klamp.errors import PreflightError
from klamp.placements import ACCEPTED
from klamp.train import update
from klamp.train.preflight import preflight

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def ready(trainer: Any) -> Any:
    made = trainer()
    return made, made.sample(1)


def everything(learner: Any) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in learner.policy.named_parameters()}


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_all_is_well_and_nothing_moved(trainer: Any, full: bool, name: str) -> None:
    made = trainer(full=full, algorithm={"name": name})
    before, draw = everything(made.learner), torch.get_rng_state()
    found = preflight(made.learner, made.sample(1))
    assert abs(found["preflight/kl"]) < 1e-6
    assert found["preflight/pull"] > 0
    after = everything(made.learner)
    assert all(torch.equal(after[n], before[n]) for n in before)
    assert all(p.grad is None for p in made.learner.policy.parameters())
    assert not made.learner.control.started
    assert torch.equal(torch.get_rng_state(), draw)


def test_every_accepted_pair_passes(ready: Any) -> None:
    made, rollout = ready
    for pair in ACCEPTED:
        kl = replace(made.learner.config.kl, estimator=pair.estimator, placement=pair.placement)
        made.learner.config = replace(made.learner.config, kl=kl)
        assert preflight(made.learner, rollout)["preflight/pull"] > 0


def test_dropout_that_is_on(ready: Any) -> None:
    made, rollout = ready
    layer = made.learner.policy.model.get_base_model().model.layers[0].mlp
    layer.add_module("late", torch.nn.Dropout(0.1))
    with pytest.raises(PreflightError, match=r"dropout is on in .*late"):
        preflight(made.learner, rollout)


def test_an_adapter_that_is_not_off(ready: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fresh adapter is 0: on or off, KL is 0. It shows only when the policy is moved."""
    made, rollout = ready
    monkeypatch.setattr(made.learner.policy, "without_adapter", contextlib.nullcontext)
    with pytest.raises(PreflightError, match="moved along"):
        preflight(made.learner, rollout)


def test_a_kl_term_without_a_graph(ready: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made, rollout = ready
    plain = update.price_of

    def detached(*args: Any) -> Any:
        advantages, unclipped, price = plain(*args)
        none = None if unclipped is None else torch.zeros_like(unclipped)
        return update.Priced(advantages, none, price.detach())

    monkeypatch.setattr(update, "price_of", detached)
    with pytest.raises(PreflightError, match="does not reach the update"):
        preflight(made.learner, rollout)


def test_a_reference_that_differs_where_it_should_not(ready: Any, displace: Any) -> None:
    made, rollout = ready
    displace(made.learner)
    with pytest.raises(PreflightError, match="same weights and yet"):
        preflight(made.learner, rollout)


def test_it_runs_before_step_one(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = trainer(steps=1)
    monkeypatch.setattr(made.learner.policy, "without_adapter", contextlib.nullcontext)
    with pytest.raises(PreflightError):
        made.run()
    assert not made.folder.metrics.is_file()


def test_a_sampler_that_draws_from_something_else(ready: Any) -> None:
    made, rollout = ready
    assert preflight(made.learner, rollout, sampled=True)["preflight/sampler"] < 1e-5
    logp = rollout.sampler_logp.clone()
    logp[2, 0] += 0.41
    wrong = replace(rollout, sampler_logp=logp)
    with pytest.raises(PreflightError, match=r"differ by 0\.41 nats on token 1 of completion 3.*preflight=false"):
        preflight(made.learner, wrong, sampled=True)
    assert preflight(made.learner, wrong), "recorded by somebody else, it is not compared"


def test_a_nucleus_is_allowed_for(trainer: Any) -> None:
    with pytest.warns(UserWarning, match="cut distribution"):
        made = trainer(rollout={"top_p": 0.6})
    rollout = made.sample(1)
    assert preflight(made.learner, rollout, sampled=True)["preflight/sampler"] < 1e-5


def test_a_model_that_does_not_see_padding(ready: Any) -> None:
    made, rollout = ready
    backbone = made.learner.policy.model.get_base_model().model
    own = type(backbone).forward

    class Blind(type(backbone)):  # type: ignore[misc]
        def forward(self, input_ids: Any, attention_mask: Any = None, position_ids: Any = None, **other: Any) -> Any:
            return own(self, input_ids=input_ids, **other)

    backbone.__class__ = Blind
    with pytest.raises(
        PreflightError, match=r"in a batch and the same one alone differ by .* see which tokens are padding"
    ):
        preflight(made.learner, rollout)


def test_the_loop_asks_for_the_sampler(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = trainer(steps=1)
    sample = made.sampler.sample

    def off(*args: Any) -> Any:
        rollout = sample(*args)
        return replace(rollout, sampler_logp=rollout.sampler_logp - 0.3)

    monkeypatch.setattr(made.sampler, "sample", off)
    with pytest.raises(PreflightError, match=r"sampler and trainer differ by 0\.3 nats"):
        made.run()
