"""KLControl as TRL's users write callbacks: it finds its trainer, and says where it was not added or does not clamp."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import Any

import pytest
from transformers import TrainerCallback

from klamp import ConfigError, Hold
from klamp.integrations.trl import KLControl

Make = Callable[..., Any]


def steered(trainer: Any, key: str = "klamp/kl") -> list[float]:
    return [row[key] for row in trainer.state.log_history if key in row]


def weights(trainer: Any) -> list[Any]:
    return [p.detach().clone() for p in trainer.model.parameters() if p.requires_grad]


@pytest.mark.parametrize(("kind", "per", "target"), [("GRPO", "token", 0.05), ("RLOO", "sequence", 0.4)])
def test_callbacks_takes_a_control_that_knows_no_trainer(trainer: Make, kind: str, per: Any, target: float) -> None:
    control = KLControl(target=target, per=per)
    t = trainer(kind=kind, trainer_kwargs={"callbacks": [control]})
    t.train()
    assert control.trainer is t
    assert control.clamp
    assert steered(t, "klamp/target") == [target] * 3
    assert t.beta == pytest.approx(control.state.beta)
    assert t.beta != 0.1  # the config's


def test_it_is_the_run_of_the_control_that_was_told(trainer: Make) -> None:
    """To the bit: how the trainer was found changes nothing."""

    def run(attach: Callable[[Any], KLControl] | None, **kwargs: Any) -> Any:
        t = trainer(trainer_kwargs=kwargs)  # seeds everything
        if attach is not None:
            t.add_callback(attach(t))
        t.train()
        return t

    told = run(lambda t: KLControl(t, Hold(target=0.05, per="token")))
    added = run(lambda t: KLControl(target=0.05, per="token"))
    found = run(None, callbacks=[KLControl(target=0.05, per="token")])
    for other in (found, added):
        assert steered(other) == steered(told)
        assert other.beta == told.beta
        assert all((a == b).all() for a, b in zip(weights(other), weights(told), strict=True))


def test_two_trainers_in_one_process_each_find_their_own(trainer: Make) -> None:
    """One trains inside an event of the other: the nearest trainer on the stack is not always the right one."""
    inner_control, outer_control = KLControl(target=0.02, per="token"), KLControl(target=0.05, per="token")
    inner = trainer(max_steps=1, trainer_kwargs={"callbacks": [inner_control]})

    class TrainsAnother(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            inner.train()

    outer = trainer(max_steps=1, trainer_kwargs={"callbacks": [TrainsAnother(), outer_control]})
    outer.train()
    assert inner_control.trainer is inner
    assert outer_control.trainer is outer


def test_resuming_continues_its_state(trainer: Make, tmp_path: Any) -> None:
    def made(steps: int) -> Any:
        return trainer(
            max_steps=steps,
            save_strategy="steps",
            save_steps=2,
            trainer_kwargs={"callbacks": [KLControl(target=0.05, per="token")]},
        )

    made(2).train()
    resumed = made(4)
    resumed.train(resume_from_checkpoint=True)
    straight = trainer(
        max_steps=4, out=tmp_path / "straight", trainer_kwargs={"callbacks": [KLControl(target=0.05, per="token")]}
    )
    straight.train()
    assert resumed.beta == straight.beta


@pytest.mark.parametrize("keep", [True, False])
def test_a_control_that_holds_a_trainer_and_was_never_added_says_so(trainer: Make, keep: bool) -> None:
    t = trainer()
    kept = KLControl(t, target=0.05, per="token")
    if not keep:  # KLControl(trainer, ...) as a statement of its own
        del kept
        gc.collect()
    with pytest.raises(ConfigError, match=r"never added to it, so nothing would hold KL.*trainer\.add_callback"):
        t.train()
    assert t.state.global_step == 0


def test_one_that_was_used_may_be_removed(trainer: Make) -> None:
    t = trainer(max_steps=1)
    KLControl(t, target=0.02, per="token")  # made and thrown away for the next one
    control = KLControl(t, target=0.05, per="token")
    t.add_callback(control)
    t.train()
    assert steered(t, "klamp/target") == [0.05]
    t.remove_callback(control)
    t.args.max_steps = 2
    t.train()
    assert len(steered(t)) <= 1


def test_a_control_of_another_trainer_is_refused(trainer: Make) -> None:
    one, other = trainer(), trainer()
    control = KLControl(one, target=0.05, per="token")
    other.add_callback(control)
    with pytest.raises(ConfigError, match="belongs to another trainer"):
        other.train()


def test_a_trainer_that_is_none_of_trls_is_refused_when_it_is_made(model_folder: str, tmp_path: Any) -> None:
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    args = TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True)
    with pytest.raises(ConfigError, match="must be a TRL GRPOTrainer or RLOOTrainer"):
        Trainer(
            AutoModelForCausalLM.from_pretrained(model_folder), args, callbacks=[KLControl(target=0.05, per="token")]
        )


def test_traps_are_refused_before_the_first_step(trainer: Make) -> None:
    t = trainer(lora=False, beta=0.0, trainer_kwargs={"callbacks": [KLControl(target=0.05, per="token")]})
    with pytest.raises(ConfigError, match="TRL made no reference model"):
        t.train()
    two = [KLControl(target=0.05, per="token"), KLControl(target=0.1, per="token")]
    t = trainer(trainer_kwargs={"callbacks": two})
    with pytest.raises(ConfigError, match="two of them would fight"):
        t.train()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, r"target and per are missing.*KLControl\(target=0\.05, per='token'\)"),
        ({"target": 0.05}, "per is missing"),
        ({"controller": Hold(0.05, "token"), "target": 0.1}, "Set them in the controller"),
        (
            {"trainer": Hold(0.05, "token"), "target": 0.1, "per": "token"},
            r"Write KLControl\(controller=Hold\(\.\.\.\)\)",
        ),
        ({"target": -1, "per": "token"}, "target must be > 0"),
    ],
)
def test_settings_that_mean_nothing_are_refused_when_made(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        KLControl(**settings)


@pytest.mark.parametrize("clamp", [None, False, True])
def test_a_full_fine_tune_that_is_not_clamped_says_so_at_the_start(
    trainer: Make, caplog: pytest.LogCaptureFixture, clamp: bool | None
) -> None:
    control = KLControl(target=0.05, per="token", clamp=clamp)
    t = trainer(lora=False, max_steps=1, trainer_kwargs={"callbacks": [control]})
    assert not caplog.records
    with caplog.at_level(logging.WARNING, "klamp"):
        t.train()
    said = [r.getMessage() for r in caplog.records if "does not clamp" in r.getMessage()]
    assert len(said) == (1 if clamp is None else 0)
    if clamp is None:
        assert "beta alone holds KL at 0.05 nats per token" in said[0]
        assert "clamp=True stops each update at 0.055 nats per token" in said[0]


def test_why_it_does_not_clamp_is_said(trainer: Make, caplog: pytest.LogCaptureFixture) -> None:
    kwargs = {"callbacks": [KLControl(target=0.05, per="token")]}
    t = trainer(lora=False, sync_ref_model=True, max_steps=1, trainer_kwargs=kwargs)
    with caplog.at_level(logging.WARNING, "klamp"):
        t.train()
    said = [r.getMessage() for r in caplog.records]
    assert any("does not clamp here: sync_ref_model=True moves the reference" in line for line in said)
