"""A run that stops and continues from TRL's own checkpoint is the run that never stopped, to the bit on the CPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from klamp import ConfigError, Hold, Ziegler
from klamp.integrations.trl import KlampGRPOTrainer, KLControl
from klamp.integrations.trl.callback import SAVED

Make = Callable[..., Any]
HOLD = Hold(target=0.05, per="token")
# What depends on the clock, or is counted from the start of the process.
TIMED = ("step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second", "train_loss", "total_flos")

# accelerate saves and loads the random state of a lone process through pickle's allow-list, with a warning of its own.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*weights_only.*:FutureWarning")]


def run(t: Any, controller: Any = HOLD, resume: str | None = None, **settings: Any) -> tuple[Any, KLControl]:
    control = KLControl(t, controller, **settings)
    t.add_callback(control)
    t.train(resume_from_checkpoint=resume)
    return t, control


def rows(t: Any) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k not in TIMED} for row in t.state.log_history]


def weights(t: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in t.model.parameters() if p.requires_grad])


SLOW = pytest.mark.slow
ACCUMULATED = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}
RUNS = [
    pytest.param({}, id="lora"),
    pytest.param({"kind": "RLOO"}, id="rloo"),
    pytest.param({"restore_callback_states_from_checkpoint": True}, id="restored callbacks"),
    pytest.param(ACCUMULATED, id="accumulation", marks=SLOW),
    pytest.param({"lora": False, "learning_rate": 5e-3}, id="full", marks=SLOW),
    pytest.param({"trainer_class": KlampGRPOTrainer}, id="exact", marks=SLOW),
]


@pytest.mark.parametrize("settings", RUNS)
def test_resumed_is_uninterrupted(trainer: Make, tmp_path: Path, settings: dict[str, Any]) -> None:
    often = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6, **settings}
    hold = Hold(target=0.4, per="sequence") if settings.get("kind") == "RLOO" else HOLD
    whole, one = run(trainer(out=tmp_path / "a", **often), hold, clamp=True)
    again, two = run(trainer(out=tmp_path / "b", **often), hold, str(tmp_path / "a" / "checkpoint-3"), clamp=True)
    assert rows(again) == rows(whole)
    assert torch.equal(weights(again), weights(whole))
    assert two.state_dict() == one.state_dict()
    assert again.beta == whole.beta


def test_the_state_is_plain_json_in_trainer_state(trainer: Make, tmp_path: Path) -> None:
    t, control = run(trainer(save_strategy="steps", save_steps=3, max_steps=3))
    saved = json.loads((Path(t.args.output_dir) / "checkpoint-3" / "trainer_state.json").read_text())
    assert saved["stateful_callbacks"][SAVED] == json.loads(json.dumps(control.state_dict(), allow_nan=False))


def test_a_checkpoint_of_another_controller_or_unit_is_refused(trainer: Make, tmp_path: Path) -> None:
    run(trainer(out=tmp_path / "a", save_strategy="steps", save_steps=2, max_steps=2))
    ziegler = Ziegler(target=0.05, per="token")
    with pytest.raises(ConfigError, match="the HoldState of another controller than Ziegler"):
        run(trainer(out=tmp_path / "b"), ziegler, str(tmp_path / "a" / "checkpoint-2"))
    with pytest.raises(ConfigError, match="steered per token, this controller is per sequence"):
        run(trainer(out=tmp_path / "b"), Hold(target=0.4, per="sequence"), str(tmp_path / "a" / "checkpoint-2"))


def test_a_checkpoint_made_without_klamp_can_be_continued_with_it(trainer: Make, tmp_path: Path) -> None:
    plain = trainer(out=tmp_path / "a", save_strategy="steps", save_steps=2, max_steps=2)
    plain.train()
    t, control = run(trainer(out=tmp_path / "b", max_steps=4), resume=str(tmp_path / "a" / "checkpoint-2"))
    assert control.state.updates == 2
    assert "klamp/alarm/off_reference" not in t.state.log_history[-2]
