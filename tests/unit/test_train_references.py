"""Every kind of reference: the KL is to the right weights, the base stays as it is, and the clamp holds with each.

KL is computed again from whole logits of models loaded by plain transformers and peft from what is on disk.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from klamp.controllers.hold import HoldState
from klamp.models import load_model
from klamp.references import parse
from klamp.references.spec import saved_steps
from klamp.references.states import REFERENCE, SecondModel, make_reference
from klamp.train import checkpoint
from klamp.train.loop import Trainer

LORA = ["base", "step:0", "model", "adapter", "lag:2", "ema:0.7", "periodic:2"]
FULL = ["base", "step:0", "model", "lag:2", "ema:0.7", "periodic:2"]
KINDS = [(k, False) for k in LORA] + [(k, True) for k in FULL]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="session")
def adapter(words_model: str, tmp_path_factory: Any) -> str:
    """A LoRA adapter of the small model that does something, saved by peft."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    model: Any = get_peft_model(load_model(words_model), LoraConfig(r=2, target_modules="all-linear"))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.1)
    folder = tmp_path_factory.mktemp("adapters") / "other"
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def sibling(words_model: str, tmp_path_factory: Any) -> str:
    """Another model with the same tokens."""
    from transformers import AutoTokenizer

    model = load_model(words_model)
    torch.manual_seed(4)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.02)
    folder = tmp_path_factory.mktemp("models") / "sibling"
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(words_model).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def spec(adapter: str, sibling: str) -> Callable[[str], str]:
    return lambda kind: {"model": f"model:{sibling}", "adapter": f"adapter:{adapter}"}.get(kind, kind)


def whole_logits(model: Any, rollout: Any) -> Tensor:
    positions = (rollout.attention.long().cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        out = model(input_ids=rollout.ids, attention_mask=rollout.attention.long(), position_ids=positions)
    return out.logits[:, rollout.first - 1 : -1].log_softmax(-1)


def plain_kl(policy: Any, reference: Any, rollout: Any) -> Tensor:
    p, q = whole_logits(policy, rollout), whole_logits(reference, rollout)
    return (p.exp() * (p - q)).sum(-1)[rollout.mask]


class History:
    """The policy's weights after every step, as a plain model of its own."""

    def __init__(self, made: Trainer) -> None:
        self.made = made
        self.models = [self.plain()]

    def plain(self) -> Any:
        model: Any = copy.deepcopy(self.made.learner.policy.model)
        if self.made.learner.policy.lora:
            if REFERENCE in model.peft_config:
                model.delete_adapter(REFERENCE)
            model.set_adapter("default")
        return model

    def expected(self, kind: str, step: int, spec: str) -> Any:
        """The model that step ``step`` (from 1) is held to."""
        made = self.made
        if kind in ("base", "step:0"):
            return load_model(made.config.model)
        if kind == "model":
            return load_model(spec.removeprefix("model:"))
        if kind == "adapter":
            from peft import PeftModel

            return PeftModel.from_pretrained(load_model(made.config.model), spec.removeprefix("adapter:"))
        if kind == "lag:2":  # saved every step: the state two before the last finished one
            return self.models[max(step - 1 - 2, 0)]
        if kind == "periodic:2":
            return self.models[(step - 1) // 2 * 2]
        average = copy.deepcopy(self.models[0])
        with torch.no_grad():
            for model in self.models[1:step]:
                for ours, theirs in zip(average.parameters(), model.parameters(), strict=True):
                    ours.copy_(0.7 * ours + 0.3 * theirs)
        return average


def steps_of(made: Trainer) -> Iterator[tuple[int, Any, Any]]:
    """The loop's own steps, by hand: (step, rollout, outcome)."""
    for step in range(1, made.config.steps + 1):
        rollout = made.sample(step)
        scored = made.scorer(rollout.prompts, rollout.completions, rollout.columns)
        outcome = made.learner.step(step, rollout, scored)
        made.sampler.refresh()
        checkpoint.save(made.folder.path, step, made.learner, made.tokenizer, made.config)
        yield step, rollout, outcome


@pytest.mark.parametrize(("kind", "full"), KINDS)
def test_kl_is_to_the_right_weights(trainer: Any, spec: Any, kind: str, full: bool) -> None:
    made = trainer(steps=5, full=full, save_every=1, kl={"reference": spec(kind), "clamp": False})
    base = {n: p.detach().clone() for n, p in made.learner.policy.model.named_parameters() if not p.requires_grad}
    history, seen = History(made), []
    for step, rollout, outcome in steps_of(made):
        policy = history.models[-1]
        kl = plain_kl(policy, history.expected(kind, step, spec(kind)), rollout)
        torch.testing.assert_close(outcome.token_kl[rollout.mask], kl, rtol=2e-3, atol=2e-5)  # float32, cancellation
        assert outcome.metrics["kl/ref/exact"] == pytest.approx(float(kl.mean()), rel=2e-3, abs=2e-5)
        assert abs(outcome.metrics["kl/sampler/k1"]) < 1e-5
        seen.append(outcome.metrics["kl/ref/exact"])
        history.models.append(history.plain())
    assert max(seen) > 1e-3, "the policy never left its reference"
    for name, p in made.learner.policy.model.named_parameters():
        if name in base and REFERENCE not in name:
            assert torch.equal(p, base[name]), f"{name} of the base moved"


@pytest.mark.parametrize(("kind", "full"), [k for k in KINDS if k[0] != "step:0"])
def test_the_clamp_holds_at_an_absurd_learning_rate(trainer: Any, spec: Any, kind: str, full: bool) -> None:
    """Own tokens end under the limit they were given, or no higher than they began where they began above it."""
    made = trainer(
        steps=3,
        full=full,
        save_every=1,
        optim={"lr": 0.5},
        kl={"reference": spec(kind), "target": 0.02, "limit": 0.03, "per": "token"},
    )
    effort = 0.0
    for _, _, outcome in steps_of(made):
        m = outcome.metrics
        limit = m["kl/clamp/limit"]
        began = m["kl/steered"] if made.learner.reference.origin() is None and kind not in ("base", "step:0") else 0.0
        assert m["kl/clamp/after"] <= max(limit, began) * (1 + 1e-6)
        effort += m["kl/clamp/effort"]
    assert effort > 0.1


def test_far_from_its_reference_a_run_may_come_nearer(trainer: Any, sibling: str) -> None:
    """A limit below where the run begins stops it from going away, not from coming back."""
    made = trainer(
        rewards=lambda prompts, completions: [0.0] * len(completions),
        kl={
            "reference": f"model:{sibling}",
            "controller": "fixed",
            "beta": 20.0,
            "target": None,
            "limit": 0.01,
            "per": "token",
        },
    )
    for _, _, outcome in steps_of(made):
        m = outcome.metrics
        assert m["kl/steered"] > 0.01
        assert m["kl/clamp/after"] < 0.99 * m["kl/steered"]
        assert m["kl/clamp/effort"] == 0.0


def test_above_the_limit_a_step_that_goes_farther_is_taken_back() -> None:
    from klamp.clamp import no_farther

    x = [1.0]  # the displacement; KL is 1 at its start, falls, and rises again

    def scale(s: float) -> None:
        x[0] *= s

    done = no_farther(lambda: 1 - x[0] + 2 * x[0] ** 2, scale, 1.0)
    assert (x[0], done.kl_after, done.rounds) == (0.5, 1.0, 1)
    x[0] = 1.0
    done = no_farther(lambda: 1 + x[0], scale, 1.0)
    assert (x[0], done.kl_after, done.scale) == (0.0, 1.0, 0.0)
    assert done.effort < 3, "an effort that a controller can take"
    x[0] = 1.0
    assert not no_farther(lambda: float("nan"), scale, 1.0).held
    assert x[0] == 0.0


@pytest.mark.parametrize("kind", ["adapter", "ema:0.7", "lag:2"])
def test_reference_adapters_never_reach_a_checkpoint(trainer: Any, spec: Any, kind: str) -> None:
    made = trainer(steps=4, save_every=1, keep=0, kl={"reference": spec(kind)})
    made.run()
    model: Any = made.learner.policy.model
    assert set(model.peft_config) == {"default", REFERENCE}, "one adapter of the reference's at a time"
    for step in saved_steps(made.folder.path):
        folder = made.folder.path / "checkpoints" / f"step-{step:06d}"
        names = set(load_file(folder / "adapter_model.safetensors"))
        assert names
        assert not any(REFERENCE in n for n in names)
        assert REFERENCE not in (folder / "adapter_config.json").read_text()
        assert not [p for p in folder.iterdir() if p.is_dir()]
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert trained
    assert all(".default." in n for n in trained)


def test_a_lagging_reference_unloads_the_step_before(trainer: Any) -> None:
    made = trainer(steps=6, save_every=1, keep=1, kl={"reference": "lag:2"})
    made.run()
    assert made.learner.reference.loaded.name == "step-000004"
    names = [n for n, _ in made.learner.policy.model.named_parameters() if f".{REFERENCE}." in n]
    assert len(names) == len([n for n, p in made.learner.policy.model.named_parameters() if p.requires_grad])
    assert saved_steps(made.folder.path) == [4, 5, 6], "kept: the newest, and what the lag will still ask for"


@pytest.mark.parametrize("full", [False, True])
def test_resuming_with_a_saved_step_as_anchor(trainer: Any, full: bool) -> None:
    trainer(steps=4, save_every=2, keep=0, full=full).run()
    made = trainer(steps=7, save_every=1, keep=1, full=full, resume=True, kl={"reference": "step:4"})
    last = made.run()
    rows = [json.loads(line) for line in made.folder.metrics.read_text().splitlines()]
    assert [r["step"] for r in rows] == list(range(1, 8))
    assert rows[4]["kl/ref/exact"] < 1e-6, "step 5 begins at step 4, which is its reference"
    assert last["kl/ref/exact"] > 1e-6
    assert 4 in saved_steps(made.folder.path), "retention keeps what the reference needs"


@pytest.mark.parametrize(
    ("reference", "known"),
    [
        ("base", [True, True, True, True]),
        ("ema:0.7", [True, True, True, True]),  # it moves in every step, and little
        ("periodic:2", [True, False, True, False]),
        ("lag:1", [True, False, False, False]),
    ],
)
def test_a_new_reference_makes_the_kl_to_come_unknown(trainer: Any, reference: str, known: list[bool]) -> None:
    made = trainer(steps=4, save_every=1, kl={"reference": reference})
    assert [len(made.learner.future_kl) > 0 for _ in steps_of(made)] == known


@pytest.mark.parametrize(("reference", "readings"), [("periodic:3", HoldState(beta=1.0).steps), ("ema:0.7", 2)])
def test_hold_begins_anew_where_the_policy_became_its_reference(trainer: Any, reference: str, readings: int) -> None:
    """Also where the reference was put in place after the learner was made, as LocalBackend does."""
    made = trainer(steps=3, save_every=1)
    policy, forward = made.learner.policy, made.learner._forward
    made.learner.reference = make_reference(policy, forward, parse(reference), made.folder.path)
    assert len(list(steps_of(made))) == 3
    assert made.learner.control.state.price.steps == readings


def test_a_run_resumed_with_another_reference_does_not_know_the_kl_to_come(trainer: Any) -> None:
    trainer(steps=2, save_every=2).run()
    for kl, known in (({}, True), ({"reference": "step:2"}, False)):
        made = trainer(steps=3, save_every=2, resume=True, kl=kl)
        checkpoint.load(checkpoint.newest(made.folder.path), made.learner)
        assert bool(made.learner.future_kl.any()) == known


def test_a_second_model_can_wait_in_cpu_memory(trainer: Any, sibling: str, tmp_path: Path) -> None:
    """The swap changes no number (on a CPU it moves nothing; on a GPU tests/gpu moves it)."""
    plain = trainer(run=str(tmp_path / "a"), steps=2, kl={"reference": f"model:{sibling}"})
    swapped = trainer(run=str(tmp_path / "b"), steps=2, kl={"reference": f"model:{sibling}", "reference_on_cpu": True})
    assert isinstance(swapped.learner.reference, SecondModel)
    for step in (1, 2):
        outcomes = []
        for made in (plain, swapped):
            rollout = made.sample(step)
            scored = made.scorer(rollout.prompts, rollout.completions, rollout.columns)
            outcomes.append(made.learner.step(step, rollout, scored).metrics)
            made.sampler.refresh()
        assert outcomes[0] == outcomes[1]


def test_ema_keeps_every_digit_of_its_decay() -> None:
    from klamp.references import Ema

    for decay in (0.99, 0.9999999, 1 - 2**-40):
        assert parse(str(Ema(decay))) == Ema(decay)


def test_the_gauge_reads_one_reference_at_a_time(trainer: Any) -> None:
    """After a reset the fresh KL is 0: set against the last own KL, it would loosen the clamp threefold."""
    made = trainer(steps=4, kl={"reference": "periodic:1"})
    limits = [outcome.metrics["kl/clamp/limit"] for _, _, outcome in steps_of(made)]
    assert limits == limits[:1] * 4
    assert limits[0] < 0.055


@torch.no_grad()
def test_the_mean_of_bfloat16_weights_follows_them(words_model: str, tmp_path: Path) -> None:
    """As of a full fine-tune with adamw8bit: a hundredth of the way is less than half of a weight's last place."""
    from klamp.models.policy import Policy
    from klamp.references import Ema
    from klamp.references.states import make_reference

    policy = Policy(load_model(words_model, dtype=torch.bfloat16), value_head=False, temperature=1.0, lora=False)
    reference = make_reference(policy, policy, Ema(0.99), tmp_path)
    assert isinstance(reference, SecondModel)
    start = torch.cat([p.float().flatten() for p in policy.model.parameters()])
    for p in policy.model.parameters():
        p.mul_(1 + 2**-6)  # a few units in the last place
    moved = torch.cat([p.float().flatten() for p in policy.model.parameters()]) - start
    for step in range(1, 51):
        reference.after_step(step)
    followed = torch.cat([p.float().flatten() for p in reference.side.model.parameters()]) - start
    share = float((followed * moved).sum() / moved.square().sum())
    # 0.395: a million weights come within 3e-4 of it, the few of this model, rounded at random, within 0.024.
    assert share == pytest.approx(1 - 0.99**50, abs=0.03)
