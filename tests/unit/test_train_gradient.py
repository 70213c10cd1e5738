"""The trainer's loss has the gradient of the formula, for every accepted pair of estimator and placement.

The formula is written again here with whole logits, loops over tokens and autograd alone; nothing of klamp's
estimators, placements, objectives or kernels takes part. Everything runs at a temperature other than 1, with padding on
both sides and ends in the middle. Float32 through two layers: gradients agree to 2e-4 of their norm.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from klamp.placements import ACCEPTED
from klamp.sampling.rollout import Rollout
from klamp.train.algorithms import needs_look, prepare
from klamp.train.update import loss_of

BETA, TEMPERATURE = 0.37, 0.8
PAIRS = [(p.estimator, p.placement) for p in ACCEPTED]


@pytest.fixture(scope="module", params=["grpo", "ppo"])
def setting(request: pytest.FixtureRequest, tmp_path_factory: Any, words_model: str, words_prompts: str) -> Any:
    """A learner away from its reference, and samples with their rewards."""
    from klamp.train.config import AlgorithmConfig, KLConfig, LoraConfig, RolloutConfig, TrainConfig
    from klamp.train.loop import Trainer

    def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        return [len(set(c.split())) / 7 + 0.1 * (i % 3) for i, c in enumerate(completions)]

    made = Trainer(
        TrainConfig(
            model=words_model,
            prompts=words_prompts,
            run=str(tmp_path_factory.mktemp("run") / "run"),
            device="cpu",
            rollout=RolloutConfig(prompts=3, group_size=4, max_tokens=6, temperature=TEMPERATURE),
            algorithm=AlgorithmConfig(name=request.param, lam=0.9),
            kl=KLConfig(controller="fixed", beta=BETA, target=None),
            lora=LoraConfig(rank=4, alpha=8.0),
        ),
        rewards=[reward],
        quiet=True,
    )
    learner = made.learner
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in learner.policy.trainable().values():
            p.add_(torch.randn(p.shape, generator=generator), alpha=0.2)
    made.sampler.refresh()
    learner.control = learner.control.init()
    rollout = made.sample(1)
    assert rollout.mask.sum(1).unique().numel() > 1, "the samples should end at different places"
    return learner, rollout, made.scorer(rollout.prompts, rollout.completions, {})


def number(x: Tensor) -> float:
    return float(x.detach())


def gradient(learner: Any, rollout: Rollout, scored: Any, beta: float = BETA, **changes: Any) -> list[Tensor]:
    """klamp's: the loss of the whole batch as the update computes it."""
    anchors = learner.reference_states(rollout)
    look = learner.look(rollout, anchors) if needs_look(learner.config, False) else None
    prepared = prepare(learner.config, rollout, scored, look, BETA, lambda x: x)
    rows = torch.arange(len(rollout))
    loss = loss_of(learner, rollout, rows, replace(prepared, **changes), anchors, beta=beta)
    return list(torch.autograd.grad(loss, list(learner.policy.trainable().values()), allow_unused=True))


def token_table(learner: Any, rollout: Rollout) -> list[list[dict[str, Tensor]]]:
    """For every sequence its counted tokens, each with log-probs, exact KL and value, from whole logits."""
    model = learner.policy.model
    positions = (rollout.attention.long().cumsum(-1) - 1).clamp(min=0)
    inputs = {"input_ids": rollout.ids, "attention_mask": rollout.attention.long(), "position_ids": positions}
    out = model(**inputs, output_hidden_states=True)
    with torch.no_grad(), model.disable_adapter():
        ref = model(**inputs).logits
    before = slice(rollout.first - 1, -1)
    logp, ref_logp = ((x / TEMPERATURE)[:, before].log_softmax(-1) for x in (out.logits, ref))
    kl = (logp.exp() * (logp - ref_logp)).sum(-1)
    chosen = rollout.ids[:, rollout.first :, None]
    columns = {"logp": logp.gather(-1, chosen).squeeze(-1), "ref": ref_logp.gather(-1, chosen).squeeze(-1), "kl": kl}
    if learner.policy.value is not None:
        columns["value"] = learner.policy.value(out.hidden_states[-1][:, before]).squeeze(-1)
    return [
        [{k: v[n, c] for k, v in columns.items()} for c in range(rollout.mask.shape[1]) if rollout.mask[n, c]]
        for n in range(len(rollout))
    ]


def task_advantages(learner: Any, rows: list[Any], rewards: list[float], in_reward: bool) -> list[list[float]]:
    """GRPO's: (r - mean) / std within four samples of a prompt. PPO's: λ-returns less values, whitened over tokens."""
    if learner.policy.value is None:
        result = []
        for start in range(0, len(rewards), 4):
            group = rewards[start : start + 4]
            std = statistics.stdev(group)
            for n, r in enumerate(group, start):
                a = (r - statistics.fmean(group)) / (std + 1e-4)
                to_go = [0.0] * (len(rows[n]) + 1)
                for t in reversed(range(len(rows[n]))):
                    to_go[t] = to_go[t + 1] + number(rows[n][t]["logp"] - rows[n][t]["ref"])
                result.append([a - (BETA * to_go[t] if in_reward else 0.0) for t in range(len(rows[n]))])
        return result
    advantages = []
    for row, r in zip(rows, rewards, strict=True):
        values = [number(x["value"]) for x in row] + [0.0]
        per_token = [-BETA * number(x["logp"] - x["ref"]) if in_reward else 0.0 for x in row]
        per_token[-1] += r
        deltas = [per_token[t] + values[t + 1] - values[t] for t in range(len(row))]
        advantages.append([sum(0.9**k * d for k, d in enumerate(deltas[t:])) for t in range(len(row))])
    flat = [a for row in advantages for a in row]
    mean, std = statistics.fmean(flat), math.sqrt(statistics.pvariance(flat))
    for row, got in zip(rows, advantages, strict=True):
        for entry, a in zip(row, got, strict=True):
            entry["return"] = torch.tensor(a + number(entry["value"]))
    return [[(a - mean) / std for a in row] for row in advantages]


def price_of(
    estimator: str, placement: str, row: list[dict[str, Tensor]], mean_k1: float, known: Sequence[float] = ()
) -> Tensor:
    """The term whose gradient the pair stands for (kl-theory: what autograd makes of each form), times beta.

    ``known`` is what is taken off the KL to come after each token.
    """
    total = torch.zeros(())
    for t, x in enumerate(row):
        d = x["logp"] - x["ref"]
        weight = (x["logp"] - x["logp"].detach()).exp()
        if placement == "sequence_exact":
            future = sum((number(u["kl"]) for u in row[t + 1 :]), -known[t] if t < len(known) else 0.0)
            total = total + x["kl"] + future * x["logp"]
        elif placement == "in_advantage":
            total = total - (mean_k1 - number(d)) * x["logp"]
        elif placement == "in_loss":
            form = {
                "exact": x["kl"],
                "k2": d**2 / 2,
                "weighted_k1": weight * d,
                "weighted_k3": weight * (torch.exp(-d) - 1 + d),
            }
            total = total + form.get(estimator, d**2 / 2)  # k1+, k2+, k3+ and detached_weight_k2: k2's gradient
    return BETA * total


def expected(
    learner: Any, rollout: Rollout, scored: Any, estimator: str, placement: str, known: Sequence[float] = ()
) -> list[Tensor]:
    rows = token_table(learner, rollout)
    count = sum(map(len, rows))
    mean_k1 = sum(number(x["logp"] - x["ref"]) for row in rows for x in row) / count
    advantages = task_advantages(learner, rows, scored.total.tolist(), placement == "in_reward")
    loss = torch.zeros(())
    for row, own in zip(rows, advantages, strict=True):
        loss = loss - sum(a * x["logp"] for a, x in zip(own, row, strict=True))
        loss = loss + price_of(estimator, placement, row, mean_k1, known)
        if learner.policy.value is not None:
            loss = loss + 0.1 * sum((x["value"] - x["return"]) ** 2 / 2 for x in row)
    return list(torch.autograd.grad(loss / count, list(learner.policy.trainable().values()), allow_unused=True))


def distance(ours: list[Tensor], theirs: list[Tensor]) -> float:
    a, b = (torch.cat([g.flatten() for g in side if g is not None]) for side in (ours, theirs))
    return float((a - b).norm() / b.norm())


def set_pair(learner: Any, estimator: str, placement: str, **optim: Any) -> None:
    kl = replace(learner.config.kl, estimator=estimator, placement=placement)
    learner.config = replace(learner.config, kl=kl, optim=replace(learner.config.optim, **optim))


@pytest.mark.parametrize(("estimator", "placement"), PAIRS)
def test_the_loss_has_the_gradient_of_the_formula(setting: Any, estimator: str, placement: str) -> None:
    learner, rollout, scored = setting
    set_pair(learner, estimator, placement)
    ours = gradient(learner, rollout, scored)
    assert distance(ours, expected(learner, rollout, scored, estimator, placement)) < 2e-4


@pytest.mark.parametrize(
    ("estimator", "placement"), [("exact", "sequence_exact"), ("k1", "in_reward"), ("k2", "in_loss")]
)
@pytest.mark.parametrize("size", [1, 5])
def test_micro_batches_change_nothing(setting: Any, estimator: str, placement: str, size: int) -> None:
    learner, rollout, scored = setting
    set_pair(learner, estimator, placement)
    whole = gradient(learner, rollout, scored)
    set_pair(learner, estimator, placement, micro_batch=size)
    try:
        assert distance(gradient(learner, rollout, scored), whole) < 1e-5  # the order of float32 sums
    finally:
        set_pair(learner, estimator, placement, micro_batch=0)


@pytest.mark.parametrize("known", [(), (0.9, 0.4), (1.5, 1.2, 0.8, 0.5, 0.3, 0.1, 0.05, 0.01)])
@pytest.mark.parametrize("micro_batch", [0, 5])
def test_the_future_kl_of_the_step_before_is_taken_off(
    setting: Any, known: tuple[float, ...], micro_batch: int
) -> None:
    """Shorter and longer than the completions; where nothing is known nothing is taken off."""
    learner, rollout, scored = setting
    set_pair(learner, "exact", "sequence_exact", micro_batch=micro_batch)
    learner.future_kl = torch.tensor(known, dtype=torch.float64)
    try:
        ours = gradient(learner, rollout, scored, future_kl=learner._expected_future(rollout))
    finally:
        learner.future_kl = torch.zeros(0)
        set_pair(learner, "exact", "sequence_exact", micro_batch=0)
    assert distance(ours, expected(learner, rollout, scored, "exact", "sequence_exact", known)) < 2e-4


def test_weighted_sequences_have_no_baseline(setting: Any) -> None:
    """A weight such as 1 / length depends on the tokens, and a score times it and the baseline has a mean."""
    learner, rollout, scored = setting
    set_pair(learner, "exact", "sequence_exact")
    weights = 1 / rollout.mask.sum(1)
    plain = gradient(learner, rollout, scored, weights=weights)
    known = gradient(learner, rollout, scored, weights=weights, future_kl=torch.ones(rollout.mask.shape))
    assert all(a is b or torch.equal(a, b) for a, b in zip(plain, known, strict=True))


def test_a_step_keeps_the_kl_to_come_after_each_position(setting: Any) -> None:
    learner, rollout, _ = setting
    rows = token_table(learner, rollout)
    seen = learner.look(rollout, learner.reference_states(rollout))
    learner._keep_future(seen.kl, rollout.mask)
    found, learner.future_kl = learner.future_kl, torch.zeros(0)
    for t in range(max(map(len, rows))):
        to_come = [sum(number(x["kl"]) for x in row[t + 1 :]) for row in rows if t < len(row)]
        assert number(found[t]) == pytest.approx(statistics.fmean(to_come), rel=1e-5, abs=1e-6)  # float32 KL
    assert not found[max(map(len, rows)) :].any()


@pytest.mark.parametrize(("estimator", "placement"), [PAIRS[0], PAIRS[1], PAIRS[2], PAIRS[-1]])
def test_without_reward_spread_the_price_is_still_paid(setting: Any, estimator: str, placement: str) -> None:
    learner, rollout, scored = setting
    if learner.policy.value is not None:
        pytest.skip("GRPO's case: PPO has no groups")
    set_pair(learner, estimator, placement)
    flat = replace(scored, total=torch.ones(len(rollout)))
    ours = gradient(learner, rollout, flat)
    rows = token_table(learner, rollout)
    count = sum(map(len, rows))
    mean_k1 = sum(number(x["logp"] - x["ref"]) for row in rows for x in row) / count
    loss = torch.zeros(())
    for row in rows:
        loss = loss + price_of(estimator, placement, row, mean_k1)
        if placement == "in_reward":
            for t, x in enumerate(row):
                loss = loss + BETA * x["logp"] * sum(number(u["logp"] - u["ref"]) for u in row[t:])
    theirs = list(torch.autograd.grad(loss / count, list(learner.policy.trainable().values()), allow_unused=True))
    assert distance(ours, theirs) < 2e-4


def test_a_masked_sample_takes_no_part(setting: Any) -> None:
    learner, rollout, scored = setting
    set_pair(learner, "exact", "sequence_exact")
    valid = torch.ones(len(rollout), dtype=torch.bool)
    valid[4:8] = False  # a whole group, so that the others' statistics stay as they are
    part = gradient(learner, rollout, replace(scored, valid=valid))
    keep = torch.tensor([0, 1, 2, 3, 8, 9, 10, 11])
    fewer = replace(
        rollout,
        ids=rollout.ids[keep],
        attention=rollout.attention[keep],
        mask=rollout.mask[keep],
        sampler_logp=rollout.sampler_logp[keep],
    )
    alone = gradient(learner, fewer, replace(scored, total=scored.total[keep], valid=valid[keep]))
    assert distance(part, alone) < 1e-5


def test_beta_is_the_only_price(setting: Any) -> None:
    """At beta 0 the gradient is the task's alone, whatever the pair; the KL is measured all the same."""
    learner, rollout, scored = setting
    found = []
    for estimator, placement in (("exact", "sequence_exact"), ("k2", "in_loss"), ("k1", "in_advantage")):
        set_pair(learner, estimator, placement)
        found.append(gradient(learner, rollout, scored, beta=0.0))
    assert distance(found[0], found[1]) < 1e-6
    assert distance(found[0], found[2]) < 1e-6
    assert float(learner.look(rollout, learner.reference_states(rollout)).kl.sum()) > 0.1


def test_stats_are_those_of_whole_logits(setting: Any) -> None:
    """Log-probs, reference log-probs and KL at the sampling temperature, and the sampler's own beside them."""
    learner, rollout, _ = setting
    look = learner.look(rollout, learner.reference_states(rollout))
    with torch.no_grad():
        rows = token_table(learner, rollout)
    for name, ours in (("logp", look.logp), ("ref", look.ref_logp), ("kl", look.kl)):
        theirs = torch.tensor([float(x[name]) for row in rows for x in row])
        torch.testing.assert_close(ours[rollout.mask], theirs, rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(rollout.sampler_logp[rollout.mask], look.logp[rollout.mask], rtol=1e-4, atol=2e-5)


def test_several_updates_on_stale_samples_stay_close_to_the_sampler(setting: Callable[..., Any]) -> None:
    """old_logp is what the ratio is taken to; with the sampler's own it is 1 and the gradient that of one update."""
    learner, rollout, scored = setting
    for estimator, placement in (("exact", "sequence_exact"), ("weighted_k3", "in_loss")):
        set_pair(learner, estimator, placement)
        look = learner.look(rollout, learner.reference_states(rollout))
        assert (
            distance(gradient(learner, rollout, scored, old_logp=look.logp), gradient(learner, rollout, scored)) < 1e-4
        )
