"""Numbers that are none: the step is left out and counted, or the run stops and says why, as configured.

Weights, optimiser, price and gauge are the same to the bit before and after a step that was left out, and the run goes
on as if it had not been.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from klamp.errors import CheckpointError, PreflightError, RewardError, TrainingError
from klamp.references.spec import saved_steps
from klamp.sampling.rollout import collate
from klamp.train import checkpoint
from klamp.train.config import RewardConfig
from klamp.train.learner import Learner
from klamp.train.loop import Trainer
from klamp.train.rewards import Scored
from klamp.train.run_folder import read_jsonl

pytestmark = pytest.mark.usefixtures("one_thread")
KINDS = [("grpo", False), ("grpo", True), ("ppo", False), ("ppo", True)]


def everything(learner: Learner) -> dict[str, Any]:
    """All that a later step depends on: weights, optimiser, controller, gauge, reference."""
    names = {id(p): n for n, p in learner.policy.named_parameters()}
    moments = {
        f"{names[id(p)]}::{k}": v.clone() if isinstance(v, Tensor) else v
        for p, state in learner.optimizer.state.items()
        for k, v in state.items()
    }
    steering = learner.control.to_dict()
    steering.pop("monitor")  # its window is for alarms; it counts every step
    return {
        "weights": {n: p.detach().clone() for n, p in learner.policy.named_parameters()},
        "optimiser": moments,
        "gradients": {n for n, p in learner.policy.named_parameters() if p.grad is not None},
        "steering": json.dumps(steering),
        "reference": {n: t.clone() for n, t in learner.reference.tensors().items()},
    }


def assert_untouched(now: dict[str, Any], before: dict[str, Any]) -> None:
    for part, old in before.items():
        new = now[part]
        if isinstance(old, dict):
            assert old.keys() == new.keys(), part
            assert all(torch.equal(a, new[n]) if isinstance(a, Tensor) else a == new[n] for n, a in old.items()), part
        else:
            assert old == new, part


def step(made: Trainer, number: int, change: Callable[[Scored], Scored] = lambda scored: scored) -> Any:
    rollout = made.sample(number)
    scored = change(made.scorer(rollout.prompts, rollout.completions, rollout.columns))
    outcome = made.learner.step(number, rollout, scored)
    made.sampler.refresh()
    return outcome


def algorithm(name: str) -> dict[str, Any]:
    return {"name": name, "epochs": 2, "minibatches": 2} if name == "ppo" else {"name": name}


class Spoiler:
    """Makes what a module puts out, or the gradient that comes back through it, NaN or infinite while it is on."""

    def __init__(self, learner: Learner, value: float, *, backward: bool = False) -> None:
        self.on, self.value = False, value
        model: Any = learner.policy.model
        inner = model.get_base_model() if learner.policy.lora else model
        layer = inner.model.layers[-1]
        layer.register_forward_hook(self._gradient if backward else self._output)

    def _output(self, module: Any, args: Any, out: Any) -> Any:
        return out * self.value if self.on else out

    def _gradient(self, module: Any, args: Any, out: Any) -> Any:
        if self.on and out.requires_grad:
            out.register_hook(lambda grad: torch.full_like(grad, self.value))
        return out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "value"),
    [(where, value) for where in ("log-probs and KL", "gradients") for value in (math.nan, math.inf)],
)
@pytest.mark.parametrize(("name", "full"), KINDS)
def test_what_is_not_finite_in_the_model_poisons_nothing(
    trainer: Any, name: str, full: bool, where: str, value: float
) -> None:
    made = trainer(full=full, algorithm=algorithm(name), preflight=False)
    spoiler = Spoiler(made.learner, value, backward=where == "gradients")
    for number in (1, 2):
        step(made, number)
    before = everything(made.learner)
    beta = made.learner.control.beta
    rollout = made.sample(3)
    scored = made.scorer(rollout.prompts, rollout.completions, rollout.columns)
    spoiler.on = True
    outcome = made.learner.step(3, rollout, scored)
    spoiler.on = False
    assert_untouched(everything(made.learner), before)
    assert outcome.metrics["train/skipped"] == (4.0 if name == "ppo" else 1.0), "each update that was left out"
    assert outcome.metrics["kl/beta"] == beta
    if where != "gradients":
        assert "non_finite" in {a.kind for a in outcome.alarms}
    # And it goes on as a run does that never saw it.
    twin = trainer(full=full, algorithm=algorithm(name), preflight=False, run=made.config.run + "-twin")
    for number in (1, 2):
        step(twin, number)
    step(made, 4), step(twin, 4)
    ours, theirs = everything(made.learner), everything(twin.learner)
    assert_untouched(ours, theirs)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_or_the_run_stops_as_configured(trainer: Any, value: float) -> None:
    made = trainer(optim={"on_nonfinite": "stop"}, preflight=False)
    spoiler = Spoiler(made.learner, value)
    step(made, 1)
    before = everything(made.learner)
    rollout = made.sample(2)
    spoiler.on = True
    scored = made.scorer(rollout.prompts, rollout.completions, rollout.columns)
    with pytest.raises(TrainingError, match=r"the gradient of step 2 is (nan|inf).*optim\.on_nonfinite=skip"):
        made.learner.step(2, rollout, scored)
    before.pop("gradients")
    assert_untouched(everything(made.learner), before)


def test_one_bad_minibatch_is_left_out_and_the_others_count(trainer: Any) -> None:
    made = trainer(algorithm={"name": "grpo", "minibatches": 2}, preflight=False)
    step(made, 1)

    def one_infinite(scored: Scored) -> Scored:
        given = torch.zeros(len(scored.total))
        given[0] = math.inf
        return replace(scored, advantages=given)

    before = everything(made.learner)
    outcome = step(made, 2, one_infinite)
    assert outcome.metrics["train/skipped"] == 1.0
    after = everything(made.learner)
    assert any(not torch.equal(w, after["weights"][n]) for n, w in before["weights"].items()), "the other counted"
    assert all(bool(torch.isfinite(t).all()) for t in after["weights"].values())
    assert all(bool(torch.isfinite(t).all()) for t in after["optimiser"].values())
    assert math.isfinite(made.learner.control.beta)


def test_a_first_step_that_is_left_out_sets_no_price(trainer: Any) -> None:
    """Hold's first price comes from the spread of the first batch that counts."""
    made = trainer(preflight=False)
    spoiler = Spoiler(made.learner, math.nan, backward=True)
    rollout = made.sample(1)
    scored = made.scorer(rollout.prompts, rollout.completions, rollout.columns)
    spoiler.on = True
    made.learner.step(1, rollout, replace(scored, total=torch.zeros(8)))  # no spread: nothing to price against
    spoiler.on = False
    assert not made.learner.control.started
    plain = trainer(preflight=False, run=made.config.run + "-plain")
    assert step(made, 2).metrics["kl/beta"] == step(plain, 2).metrics["kl/beta"]


def test_a_model_of_nans_is_named_before_the_first_step(trainer: Any) -> None:
    made = trainer()
    with torch.no_grad():
        dict(made.learner.policy.model.named_parameters())["base_model.model.model.embed_tokens.weight"].fill_(math.nan)
    with pytest.raises(PreflightError, match=r"KL .* is nan.*weights"):
        made.run()
    assert not saved_steps(made.folder.path)


@pytest.mark.parametrize("full", [False, True])
def test_weights_that_are_not_finite_are_never_saved(trainer: Any, full: bool) -> None:
    """They would push out the last good ones: a checkpoint is deleted for each that is saved."""
    made = trainer(steps=2, save_every=1, keep=1, full=full)
    made.run()
    broken = trainer(steps=4, save_every=1, keep=1, full=full, resume=True)
    checkpoint.load(checkpoint.newest(broken.folder.path), broken.learner)
    parameter = next(iter(broken.learner.policy.trainable().values()))
    with torch.no_grad():
        parameter.view(-1)[0] = math.inf
    with pytest.raises(CheckpointError, match=r"the weights after step 3 are not finite.*Saved steps: 2"):
        checkpoint.save(broken.folder.path, 3, broken.learner, broken.tokenizer, broken.config)
    assert saved_steps(broken.folder.path) == [2]


# Rewards


def rewarded(values: Callable[[int], float]) -> Callable[..., list[float]]:
    return lambda prompts, completions: [values(i) for i in range(len(completions))]


def raises(prompts: list[str], completions: list[str]) -> list[float]:
    raise ValueError("the judge is out")


def hangs(prompts: list[str], completions: list[str]) -> list[float]:
    threading.Event().wait()
    return []


BROKEN = {
    "nan": (rewarded(lambda i: math.nan), "is nan for sample 0"),
    "inf": (rewarded(lambda i: math.inf), "is inf for sample 0"),
    "-inf": (rewarded(lambda i: -math.inf), "is -inf for sample 0"),
    "more than float32 holds": (rewarded(lambda i: 1e39), r"is 1e\+39 for sample 0"),
    "raises": (raises, r"raised ValueError \(the judge is out\) for sample 0"),
    "hangs": (hangs, r"took more than reward\.timeout=0\.2 s"),
    "too few": (lambda prompts, completions: [1.0], "returned 1 rewards for 8 completions"),
    "too many": (lambda prompts, completions: [1.0] * 9, "returned 9 rewards for 8 completions"),
    "none": (lambda prompts, completions: None, "returned None"),
    "words": (lambda prompts, completions: ["good"] * len(completions), "is 'good' for sample 0"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_reward_that_fails_stops_the_run_with_its_sample(trainer: Any, kind: str) -> None:
    function, says = BROKEN[kind]
    made = trainer(rewards=function, reward=RewardConfig(timeout=0.2 if kind == "hangs" else None))
    begun = time.monotonic()
    with pytest.raises(RewardError, match=says) as error:
        made.run()
    assert "reward.on_error=mask" in str(error.value)
    assert time.monotonic() - begun < 30
    assert not list(read_jsonl(made.folder.metrics))


@pytest.mark.slow
@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_or_its_step_is_left_out_and_counted(trainer: Any, kind: str, name: str) -> None:
    """Good rewards, then broken ones, then good ones: as if the broken step had not been."""
    good = rewarded(lambda i: float(i % 3))
    broken = [False]

    def sometimes(prompts: list[str], completions: list[str]) -> Any:
        return BROKEN[kind][0](prompts, completions) if broken[0] else good(prompts, completions)

    # Long enough for the good ones on a machine that is busy with other things.
    reward = RewardConfig(on_error="mask", timeout=3.0 if kind == "hangs" else None)
    made = trainer(rewards=sometimes, reward=reward, algorithm=algorithm(name), preflight=False)
    step(made, 1)
    before = everything(made.learner)
    broken[0] = True
    outcome = step(made, 2)
    assert_untouched(everything(made.learner), before)
    assert outcome.metrics["reward/failed"] == 8.0
    assert outcome.metrics["train/skipped"] == (4.0 if name == "ppo" else 1.0)
    broken[0] = False
    step(made, 3)
    assert made.learner.control.state.price.updates == 2


def test_one_bad_reward_is_masked_alone(trainer: Any) -> None:
    made = trainer(
        rewards=rewarded(lambda i: math.nan if i == 3 else float(i)), reward=RewardConfig(on_error="mask"), steps=2
    )
    last = made.run()
    assert last["reward/failed"] == 1.0
    assert last["train/skipped"] == 0.0
    assert all(bool(torch.isfinite(p).all()) for p in made.learner.policy.trainable().values())


def test_weighted_rewards_that_overflow_are_named(trainer: Any, tmp_path: Path) -> None:
    one = rewarded(lambda i: 1e38)
    settings = {"functions": ("a", "b"), "weights": (1e30, 1.0)}
    with pytest.raises(RewardError, match=r"weighted sum of the rewards is inf for sample 0.*reward\.weights"):
        trainer(rewards=[one, one], reward=RewardConfig(**settings)).run()
    made = trainer(
        rewards=[one, one], reward=RewardConfig(**settings, on_error="mask"), steps=1, run=str(tmp_path / "mask")
    )
    assert made.run()["reward/failed"] == 8.0


# Nothing counts


@pytest.mark.parametrize(("name", "full"), KINDS)
def test_a_batch_of_empty_completions(trainer: Any, name: str, full: bool) -> None:
    """Every sequence ends at once. Its end token was drawn and counts, so the step is one like any other."""
    made = trainer(full=full, algorithm=algorithm(name), rewards=rewarded(lambda i: float(i % 2)))
    made.sampler.decoder.draw = lambda logits, generator: (
        torch.full((len(logits),), 1),
        logits.float().log_softmax(-1)[:, 1],
    )
    outcome = step(made, 1)
    assert outcome.metrics["length/mean"] == 1.0
    assert outcome.metrics["train/skipped"] == 0.0
    assert math.isfinite(outcome.metrics["kl/steered"])
    assert all(bool(torch.isfinite(p).all()) for p in made.learner.policy.trainable().values())


@pytest.mark.parametrize("width", [0, 3])
@pytest.mark.parametrize(("name", "full"), KINDS)
def test_a_batch_in_which_no_token_counts(trainer: Any, name: str, full: bool, width: int) -> None:
    """All of it prompt, or tool output: left out and counted, and nothing is touched."""
    made = trainer(full=full, algorithm=algorithm(name), preflight=False)
    step(made, 1)
    before = everything(made.learner)
    length = 3 + width
    sequences, counted = [[5, 6, 7, 8, 9, 10][:length]] * 8, [[False] * length] * 8
    rollout = collate(sequences, counted, [[0.0] * length] * 8, pad=0, group_size=4)
    if width:
        mask = torch.zeros(8, width, dtype=torch.bool)
        rollout = replace(rollout, mask=mask, sampler_logp=torch.zeros(8, width), first=3)
    scored = Scored(torch.arange(8.0), torch.ones(8, dtype=torch.bool), {})
    outcome = made.learner.step(2, rollout, scored)
    assert_untouched(everything(made.learner), before)
    assert outcome.metrics["train/skipped"] == (4.0 if name == "ppo" else 1.0)
    assert math.isnan(outcome.metrics["kl/steered"]), "nothing measured is not a KL of 0"


def test_a_skipped_step_is_written_down_and_resumed_over(trainer: Any) -> None:
    """Through the loop: the count is in metrics.jsonl and survives a resumption; NaN is written as text."""
    calls: list[int] = []

    def second_fails(prompts: list[str], completions: list[str]) -> list[float]:
        calls.append(1)
        return [math.nan if len(calls) == 2 else float(i) for i in range(len(completions))]

    reward = RewardConfig(on_error="mask")
    made = trainer(rewards=second_fails, reward=reward, steps=3, save_every=1)
    made.run()
    found = [json.loads(line) for line in Path(made.folder.metrics).read_text().splitlines()]
    assert [row["train/skipped"] for row in found] == [0.0, 1.0, 1.0]
    assert found[1]["kl/steered"] == "nan"
    again = trainer(rewards=second_fails, reward=reward, steps=4, save_every=1, resume=True)
    assert again.run()["train/skipped"] == 1.0
