"""What a launcher may ask for. DeepSpeed itself is not needed: its part in a step is played by a stand-in."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from klamp.errors import ConfigError, TrainingError
from klamp.train import launch
from klamp.train.learner import Learner
from klamp.train.loop import Trainer

DEEPSPEED = {"ACCELERATE_USE_DEEPSPEED": "true", "LOCAL_RANK": "0"}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """``installed(stage)``: DeepSpeed is there and its configuration asks for this ZeRO stage."""

    def make(stage: int) -> None:
        monkeypatch.setattr("accelerate.utils.imports.is_deepspeed_available", lambda: True)
        monkeypatch.setattr("accelerate.utils.DeepSpeedPlugin", lambda: SimpleNamespace(zero_stage=stage))

    return make


@pytest.mark.parametrize(("device", "way_out"), [("cuda", "sees no GPU"), ("gpu", "auto, cpu"), ("cuda:3", "VISIBLE")])
def test_a_device_that_is_not_there_is_refused_not_replaced(
    config: Any, monkeypatch: pytest.MonkeyPatch, device: str, way_out: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=f"device '{device}' .*{way_out}"):
        launch.make_accelerator(config(device=device))


def test_deepspeed_that_is_not_installed_is_named(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelerate.utils.imports.is_deepspeed_available", lambda: False)
    with pytest.raises(ConfigError, match="not installed"):
        launch.check_launch(DEEPSPEED, config(), cpu=False)


@pytest.mark.parametrize(("stage", "why"), [(1, "clamp cannot scale"), (2, "FSDP2"), (3, "sampled from")])
def test_zero_stages_that_hide_the_weights_are_refused(config: Any, installed: Any, stage: int, why: str) -> None:
    installed(stage)
    with pytest.raises(ConfigError, match=f"stage {stage} .*{why}"):
        launch.check_launch(DEEPSPEED, config(), cpu=False)


def test_stage_0_passes_through(config: Any, installed: Any) -> None:
    installed(0)
    launch.check_launch(DEEPSPEED, config(), cpu=False)
    with pytest.raises(ConfigError, match="GPUs alone"):
        launch.check_launch(DEEPSPEED, config(), cpu=True)
    with pytest.raises(ConfigError, match=r"micro_batch 2 and DeepSpeed"):
        launch.check_launch(DEEPSPEED, config(optim={"micro_batch": 2}), cpu=False)
    settings: dict[str, Any] = {"gradient_clipping": "auto"}
    launch._settle_deepspeed(settings, config(optim={"max_grad_norm": 0.5}), processes=2)
    assert settings["gradient_clipping"] == 0.5
    assert settings["train_micro_batch_size_per_gpu"] == 4


class Engine:
    """An accelerator that does what accelerate's DeepSpeed wrapper does: backward clips, steps and zeroes."""

    distributed_type = "DEEPSPEED"
    num_processes = 1
    process_index = 0
    is_main_process = True
    is_fsdp2 = False

    def __init__(self) -> None:
        self.norm = 0.0

    def prepare(self, policy: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        self.optimizer, self.trained = optimizer, [p for p in policy.parameters() if p.requires_grad]
        wrapper = SimpleNamespace(param_groups=optimizer.param_groups, state=optimizer.state)
        wrapper.step, wrapper.zero_grad = lambda: None, lambda set_to_none=None: None
        return policy, wrapper

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]
        self.norm = float(torch.nn.utils.clip_grad_norm_(self.trained, self.limit))
        self.optimizer.step()
        self.optimizer.zero_grad()

    limit = 1.0

    def clip_grad_norm_(self, *_: Any) -> float:
        return self.norm

    def reduce(self, x: torch.Tensor, reduction: str) -> torch.Tensor:
        return x


def test_an_engine_that_steps_by_itself_takes_the_same_steps(trainer: Any, config: Any, tmp_path: Any) -> None:
    """The rate is set before the backward pass, nothing is stepped twice, the norm is the engine's."""
    made = trainer(optim={"schedule": "linear", "max_grad_norm": 1.0})
    other = trainer(run=str(tmp_path / "other"), optim={"schedule": "linear", "max_grad_norm": 1.0})
    engine = Engine()
    learner = Learner(other.config, other.learner.policy, engine, tmp_path / "other")
    for step in (1, 2):
        rollout = made.sample(step)
        scored = made.scorer(rollout.prompts, rollout.completions, rollout.columns)
        ours = made.learner.step(step, rollout, scored).metrics
        theirs = learner.step(step, rollout, scored).metrics
        made.sampler.refresh()
        assert ours == theirs
    for a, b in zip(made.learner.trained, learner.trained, strict=True):
        assert torch.equal(a, b)
    engine.limit = float("nan")
    engine.clip_grad_norm_ = lambda *_: float("nan")  # type: ignore[method-assign]
    with pytest.raises(TrainingError, match="not with DeepSpeed"):
        learner.step(3, rollout, scored)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("tensorbord", "track 'tensorbord' is not known. Did you mean 'tensorboard'?"),
        ("wandb", "track 'wandb' needs the package wandb, which is not installed. pip install wandb."),
    ],
)
def test_a_tracker_that_cannot_be_used_is_refused_at_the_start(
    config: Any, name: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate import tracking

    monkeypatch.setattr(tracking, "get_available_trackers", lambda: [tracking.LoggerType.TENSORBOARD])
    made = config(track=name)
    with pytest.raises(ConfigError, match=re.escape(says)):
        Trainer(made, quiet=True)
    assert not Path(made.run).exists()
    launch.check_tracker("tensorboard")
    launch.check_tracker(None)
