"""What would fail silently or late inside TRL is refused when KLControl is made, with the way out."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from klamp import ConfigError, Fixed, Hold
from klamp.integrations.trl import KlampGRPOTrainer, KLControl

Make = Callable[..., Any]
HOLD = Hold(target=0.05, per="token")


def adapted(folder: str, *, trained: bool) -> Any:
    """A model that already carries an adapter, as someone would pass who continues from an earlier LoRA."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), lora)
    if trained:
        with torch.no_grad():
            for name, p in model.named_parameters():
                if "lora_B" in name:
                    p.normal_(std=0.02)
    return model


def test_a_full_fine_tune_without_a_reference(trainer: Make) -> None:
    with pytest.raises(ConfigError, match=r"TRL made no reference model.*1e-6 will do"):
        KLControl(trainer(lora=False, beta=0.0), HOLD)


def test_a_checkpoint_with_a_hold_of_an_earlier_law(trainer: Make) -> None:
    control = KLControl(trainer(), HOLD)
    old = {"kind": "HoldState", "beta": 0.31, "updates": 9, "skipped": 0, "lean": 0.0, "moved": 8, "odds": -2.0}
    with pytest.raises(ConfigError, match=r"earlier law of Hold.*In TRL: remove 'klamp.KLControl' from stateful_call"):
        control.load_state_dict({**control.state_dict(), "controller": old})


def test_a_checkpoint_of_the_law_before(trainer: Make, caplog: pytest.LogCaptureFixture) -> None:
    control = KLControl(trainer(), HOLD)
    control.control = control.control.init(spread=1.0, length=24)
    saved = control.state_dict()
    control.load_state_dict(saved)
    assert "law" not in caplog.text
    control.load_state_dict({**saved, "controller": {**saved["controller"], "law": 10}})
    assert "the saved state of Hold was written under law 10." in caplog.text


def test_what_it_would_have_been(trainer: Make) -> None:
    t = trainer(lora=False, beta=0.0, max_steps=1)
    t.beta = 0.1
    with pytest.raises(AttributeError, match="peft_config"):
        t.train()


def test_a_trained_adapter_without_its_copy(trainer: Make, model_folder: str) -> None:
    t = trainer(policy=adapted(model_folder, trained=True), lora=False, beta=0.0)
    with pytest.raises(ConfigError, match="no copy of it to refer to"):
        KLControl(t, HOLD)


def test_a_trained_adapter_is_steered_but_not_clamped(trainer: Make, model_folder: str) -> None:
    t = trainer(policy=adapted(model_folder, trained=True), lora=False)
    with pytest.raises(ConfigError, match="base model, which is not the reference"):
        KLControl(t, HOLD, clamp=True)
    control = KLControl(t, HOLD)
    assert not control.clamp
    t.add_callback(control)
    t.train()
    kls = [row["klamp/kl"] for row in t.state.log_history if "klamp/kl" in row]
    assert kls[0] == pytest.approx(0.0, abs=1e-6)  # to the copy of the adapter, not to the base
    assert kls[-1] > 1e-4


def test_an_untrained_adapter_is_its_base(trainer: Make, model_folder: str) -> None:
    assert KLControl(trainer(policy=adapted(model_folder, trained=False), lora=False, beta=0.0), HOLD).clamp


def test_an_adapter_that_does_not_start_at_zero(trainer: Make) -> None:
    from peft import LoraConfig

    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    with pytest.raises(ConfigError, match="not at zero when training starts"):
        KLControl(trainer(lora=lora), HOLD)


def test_a_generated_batch_in_flight(trainer: Make) -> None:
    t = trainer(beta=0.0, max_steps=1, steps_per_generation=4)
    t.train()
    with pytest.raises(ConfigError, match="4 generated micro-batches without reference log-probs"):
        KLControl(t, HOLD)
    t.beta = 0.1
    t.args.max_steps = 2
    with pytest.raises(KeyError, match="ref_per_token_logps"):
        t.train()


def test_other_trainers_and_compiled_prices(trainer: Make) -> None:
    with pytest.raises(ConfigError, match=r"must be a TRL GRPOTrainer or RLOOTrainer, got types\.SimpleNamespace"):
        KLControl(SimpleNamespace(beta=0.1), HOLD)
    t = trainer()
    t.use_liger_loss = True
    with pytest.raises(ConfigError, match="compile-time constant"):
        KLControl(t, HOLD)
    t = trainer(trainer_class=type("UnslothGRPOTrainer", (KlampGRPOTrainer,), {}))
    with pytest.raises(ConfigError, match="Unsloth compiles beta into its loss"):
        KLControl(t, HOLD)


def test_units_the_trainer_does_not_measure(trainer: Make) -> None:
    with pytest.raises(ConfigError, match="RLOOTrainer prices KL as a sum over the sequence"):
        KLControl(trainer(kind="RLOO"), HOLD)
    with pytest.raises(ConfigError, match="cannot be had from the token mean"):
        KLControl(trainer(), Hold(target=0.05, per="sequence_mean"))


def test_a_clamp_that_cannot_act(trainer: Make) -> None:
    with pytest.raises(ConfigError, match="limit is missing: Fixed has no target"):
        KLControl(trainer(), Fixed(beta=0.1))
    with pytest.raises(ConfigError, match="sync_ref_model=True moves the reference"):
        KLControl(trainer(lora=False, sync_ref_model=True), HOLD, clamp=True)
    with pytest.raises(ConfigError, match="limit must be > 0"):
        KLControl(trainer(), HOLD, limit=0.0)
    with pytest.raises(ConfigError, match="floor must be > 0"):
        KLControl(trainer(), HOLD, floor=0.0)


def test_two_controls_of_one_price(trainer: Make) -> None:
    t = trainer()
    t.add_callback(KLControl(t, HOLD))
    with pytest.raises(ConfigError, match="fight over beta"):
        KLControl(t, HOLD)


def test_metrics_that_somebody_cleared(trainer: Make) -> None:
    from transformers import TrainerCallback

    from klamp import KlampError

    class Clears(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            t._metrics["train"].clear()

    t = trainer()
    t.add_callback(Clears())
    t.add_callback(KLControl(t, HOLD))
    with pytest.raises(KlampError, match="TRL logged no `kl` this step"):
        t.train()
