"""The loop: what is sampled, what counts, what is measured; every accepted pair trains with both algorithms."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from klamp.placements import ACCEPTED
from klamp.train.config import RewardConfig
from klamp.train.run_folder import read_jsonl

pytestmark = pytest.mark.usefixtures("one_thread")


def step(made: Any, number: int) -> Any:
    rollout = made.sample(number)
    scored = made.scorer(rollout.prompts, rollout.completions, rollout.columns)
    outcome = made.learner.step(number, rollout, scored)
    made.sampler.refresh()
    return outcome


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_every_accepted_pair_trains(trainer: Any, name: str) -> None:
    """Two epochs of two minibatches: the stale forms are at work, weights move, everything stays finite."""
    made = trainer(algorithm={"name": name, "epochs": 2, "minibatches": 2})
    learner = made.learner
    for number, pair in enumerate(ACCEPTED, 1):
        kl = replace(learner.config.kl, estimator=pair.estimator, placement=pair.placement)
        learner.config = replace(learner.config, kl=kl)
        before = torch.cat([p.detach().flatten() for p in learner.policy.trainable().values()])
        metrics = step(made, number).metrics
        after = torch.cat([p.detach().flatten() for p in learner.policy.trainable().values()])
        assert all(math.isfinite(v) for v in metrics.values())
        assert torch.isfinite(after).all()
        assert not torch.equal(before, after)
        assert abs(metrics["kl/sampler/k1"]) < 1e-5, "of the batch before its updates, not in the middle of them"


def test_the_end_token_counts_and_nothing_after_it(trainer: Any) -> None:
    made = trainer(rollout={"prompts": 4, "group_size": 4, "max_tokens": 12})
    with torch.no_grad():  # make ending likely
        made.learner.policy.model.get_base_model().lm_head.weight[1] *= 3
    rollout = made.sample(1)
    tokens, ends = rollout.tokens, []
    for n in range(len(rollout)):
        length = int(rollout.mask[n].sum())
        assert rollout.mask[n, :length].all()
        own = tokens[n, :length].tolist()
        assert 1 not in own[:-1]
        assert bool(rollout.ended[n]) == (own[-1] == 1)
        assert own[-1] == 1 or length == rollout.mask.shape[1]
        assert (tokens[n, length:] == 0).all()
        ends.append(own[-1] == 1)
    assert any(ends)
    assert rollout.mask.shape[1] <= 12
    look = made.learner.look(rollout, made.learner.reference_states(rollout))
    torch.testing.assert_close(rollout.sampler_logp[rollout.mask], look.logp[rollout.mask], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("temperature", [0.5, 1.7])
def test_samples_and_kl_are_those_of_the_tempered_distribution(trainer: Any, displace: Any, temperature: float) -> None:
    made = trainer(rollout={"prompts": 12, "group_size": 40, "max_tokens": 1, "temperature": temperature})
    displace(made.learner, 0.2)
    made.sampler.refresh()
    rollout = made.sample(1)
    model = made.learner.policy.model
    positions = (rollout.attention.long().cumsum(-1) - 1).clamp(min=0)
    inputs = {"input_ids": rollout.ids, "attention_mask": rollout.attention.long(), "position_ids": positions}
    with torch.no_grad():
        logp = (model(**inputs).logits[:, rollout.first - 1] / temperature).log_softmax(-1)
        with model.disable_adapter():
            ref = (model(**inputs).logits[:, rollout.first - 1] / temperature).log_softmax(-1)
    expected = (logp.exp() * (logp - ref)).sum(-1)
    look = made.learner.look(rollout, made.learner.reference_states(rollout))
    torch.testing.assert_close(look.kl[:, 0], expected, rtol=2e-3, atol=2e-5)
    # The draws themselves: mean log-prob of 480 samples is minus the entropy, within four standard errors.
    p = logp.exp()
    mean, square = (p * logp).sum(-1), (p * logp**2).sum(-1)
    drawn = rollout.sampler_logp[:, 0]
    error = math.sqrt(float((square - mean**2).sum())) / len(drawn)
    assert abs(float(drawn.mean() - mean.mean())) < 4 * error


def test_top_p_draws_only_from_the_nucleus(trainer: Any) -> None:
    with pytest.warns(UserWarning, match="top_p"):
        made = trainer(rollout={"prompts": 12, "group_size": 20, "max_tokens": 1, "top_p": 0.5})
    rollout = made.sample(1)
    look = made.learner.look(rollout, made.learner.reference_states(rollout))
    # Renormalised over the nucleus, a log-prob rises by at most log 2 and never falls.
    gain = (rollout.sampler_logp - look.logp)[rollout.mask]
    assert float(gain.min()) >= -1e-5
    assert float(gain.max()) <= math.log(2) + 1e-5
    assert float(gain.max()) > 0.1


def test_at_beta_zero_kl_is_measured_and_alarmed_on(trainer: Any) -> None:
    made = trainer(
        steps=8,
        optim={"lr": 0.05},
        kl={"controller": "fixed", "beta": 0.0, "target": 0.001, "per": "token", "clamp": False},
    )
    made.run()
    rows = list(read_jsonl(made.folder.metrics))
    assert all(row["kl/beta"] == 0.0 for row in rows)
    assert rows[-1]["kl/ref/exact"] > 0.01
    alarms = {row["kind"] for row in read_jsonl(made.folder.alarms)}
    assert "drifting" in alarms


@pytest.mark.parametrize(("given", "far"), [(0.01, True), ("near", False), (None, False)])
def test_a_first_price_far_from_the_computed_one_is_charged_once_and_said(
    trainer: Any, caplog: pytest.LogCaptureFixture, tmp_path: Any, given: float | str | None, far: bool
) -> None:
    usual = trainer(steps=1)
    usual.run()
    [computed] = [row["kl/beta"] for row in read_jsonl(usual.folder.metrics)]
    beta = 0.7 * computed if given == "near" else given
    made = trainer(steps=2, run=str(tmp_path / "given"), kl={"beta": beta})
    made.run()
    first, second = [row["kl/beta"] for row in read_jsonl(made.folder.metrics)]
    assert first == (beta or computed)
    assert second == pytest.approx(0.7 * computed if given == "near" else computed)  # the first KL is 0
    assert ("the first price 0.01 is far from" in caplog.text) == far


@pytest.mark.parametrize(("minibatches", "epochs"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_without_a_clamp_the_first_price_knows_how_many_sequences_are_drawn_for_an_update(
    trainer: Any, tmp_path: Any, minibatches: int, epochs: int
) -> None:
    first = {}
    for clamp in (True, False):
        made = trainer(
            steps=1,
            run=str(tmp_path / str(clamp)),
            rollout={"prompts": 16, "group_size": 4},
            algorithm={"minibatches": minibatches, "epochs": epochs},
            kl={"clamp": clamp},
        )
        made.run()
        [first[clamp]] = [row["kl/beta"] for row in read_jsonl(made.folder.metrics)]
    assert first[False] / first[True] == pytest.approx(math.sqrt(1 / 2 + 48 * minibatches * epochs / 64), rel=1e-6)


def test_a_limit_works_without_a_target(trainer: Any) -> None:
    made = trainer(
        steps=6,
        optim={"lr": 0.3},
        kl={"controller": "fixed", "beta": 0.0, "target": None, "limit": 0.02, "per": "token"},
    )
    made.run()
    rows = list(read_jsonl(made.folder.metrics))
    assert sum(row["kl/clamp/effort"] for row in rows) > 0.5
    assert all(row["kl/clamp/after"] <= row["kl/clamp/limit"] * (1 + 1e-6) for row in rows)
    assert "kl/target" not in rows[0]


@pytest.mark.parametrize("full", [False, True])
def test_fresh_samples_are_under_the_limit_at_an_absurd_learning_rate(trainer: Any, full: bool) -> None:
    """Every prompt every step, so that batches can be compared; the mean over steps after the first few."""
    made = trainer(
        full=full,
        optim={"lr": 0.3},
        rollout={"prompts": 12, "group_size": 4},
        kl={"target": 0.05, "per": "token"},
        save_every=100,
    )
    kls = [step(made, n).metrics["kl/ref/exact"] for n in range(1, 16)]
    assert sum(kls[4:]) / len(kls[4:]) < 0.055
    assert max(kls[4:]) < 2 * 0.055


@pytest.mark.parametrize("share", [0.5, 0.25])
def test_the_clamp_may_look_at_a_share(trainer: Any, share: float) -> None:
    made = trainer(optim={"lr": 0.3}, kl={"target": 0.02, "per": "token", "clamp_share": share})
    for number in range(1, 4):
        metrics = step(made, number).metrics
        assert metrics["kl/clamp/after"] <= metrics["kl/clamp/limit"] * (1 + 1e-6)


def test_a_step_in_which_every_reward_failed_changes_nothing(trainer: Any) -> None:
    calls = []

    def fails_later(prompts: list[str], completions: list[str]) -> list[float]:
        calls.append(1)
        return [float(len(c)) if len(calls) == 1 else math.nan for c in completions]

    made = trainer(rewards=fails_later, reward=RewardConfig(on_error="mask"))
    step(made, 1)
    beta = made.learner.control.beta
    before = [p.detach().clone() for p in made.learner.policy.trainable().values()]
    outcome = step(made, 2)
    after = made.learner.policy.trainable().values()
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True)), "momentum alone is no step"
    assert outcome.metrics["reward/failed"] == 8.0
    assert outcome.metrics["train/skipped"] == 1.0
    assert made.learner.control.beta == beta, "nothing measured is not a KL of 0"
    assert "non_finite" in {a.kind for a in outcome.alarms}


def test_prompts_go_round_and_columns_reach_the_reward(trainer: Any, tmp_path: Any) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"w{i}", "answer": i}) + "\n" for i in range(5)))
    seen: list[tuple[str, int]] = []

    def reward(prompts: list[str], completions: list[str], answer: list[int]) -> list[float]:
        seen.extend(zip(prompts, answer, strict=True))
        return [float(a) for a in answer]

    made = trainer(rewards=reward, prompts=str(file), steps=5)
    made.run()
    assert all(prompt == f"w{answer}" for prompt, answer in seen)
    drawn = [answer for _, answer in seen[::4]]  # one of each group
    assert sorted(drawn[:5]) == sorted(drawn[5:]) == list(range(5)), "every prompt once an epoch"


def test_a_run_is_a_folder(trainer: Any) -> None:
    made = trainer(steps=3, sample_every=2)
    last = made.run()
    rows = list(read_jsonl(made.folder.metrics))
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert {k: v for k, v in rows[-1].items() if k != "step"} == last
    samples = list(read_jsonl(made.folder.samples))
    assert {row["step"] for row in samples} == {1, 2, 3}
    for row in samples:
        assert len(row["tokens"]) == len(row["kl"])
    assert not list(made.folder.path.glob(".config*")), "nothing written aside is left"


def test_the_same_seed_is_the_same_run_and_another_is_not(trainer: Any, tmp_path: Any) -> None:
    runs = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        made = trainer(run=str(tmp_path / name), seed=seed)
        made.run()
        runs.append([{k: v for k, v in r.items() if "time/" not in k} for r in read_jsonl(made.folder.metrics)])
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_gradients_are_clipped_to_their_norm(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = trainer(optim={"max_grad_norm": 0.01})
    norms = []
    plain = made.learner.optimizer.step

    def spy(*args: Any, **kwargs: Any) -> Any:
        grads = [p.grad for p in made.learner.policy.trainable().values() if p.grad is not None]
        norms.append(float(torch.stack([g.norm() for g in grads]).norm()))
        return plain(*args, **kwargs)

    monkeypatch.setattr(made.learner.optimizer, "step", spy)
    metrics = step(made, 1).metrics
    assert norms[0] == pytest.approx(0.01, rel=1e-3)
    assert metrics["train/grad_norm"] > 0.01, "what is logged is the norm before"


def test_a_finished_run_resumed_says_what_it_reached(trainer: Any) -> None:
    last = trainer(steps=2).run()
    assert trainer(steps=2, resume=True).run() == last
