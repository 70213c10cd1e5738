"""The floor of KL: bfloat16 has one, float32 has none; Hold and the clamp do not read it as a climb."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from klamp.rounding_floor import warn_near_floor
from klamp.train.config import KLConfig, OptimConfig, TrainConfig
from klamp.train.kl_config import control_of
from klamp.train.loop import Trainer

TARGET = 4e-4
"""Less than five times the floor of a bfloat16 model."""


def first_step(tmp_path: Path, dtype: str) -> dict[str, float]:
    kl, optim = KLConfig(target=TARGET, per="token"), OptimConfig(lr=1e-6)
    config = TrainConfig(model="tiny", run=str(tmp_path / dtype), steps=1, dtype=dtype, kl=kl, optim=optim)  # type: ignore[arg-type]
    trainer = Trainer(config, quiet=True)
    before = {n: p.detach().clone() for n, p in trainer.learner.policy.model.named_parameters()}
    trainer.learner.applied = 0
    trainer.run()
    moved = [n for n, p in trainer.learner.policy.model.named_parameters() if not p.equal(before[n])]
    assert all("lora" in name for name in moved)
    return json.loads((tmp_path / dtype / "metrics.jsonl").read_text().splitlines()[0])


@pytest.mark.slow
def test_a_run_in_bfloat16_logs_its_floor_and_says_that_the_target_is_near_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert TARGET / 5 < first_step(tmp_path, "bfloat16")["kl/floor"] < 5e-3
    assert "the target 0.0004 is less than 5 times the floor" in caplog.text
    caplog.clear()
    assert first_step(tmp_path, "float32")["kl/floor"] == 0
    assert "floor" not in caplog.text


@pytest.mark.parametrize(("floor", "undone"), [(0.002, False), (0.0, True)])
def test_the_clamp_undoes_nothing_of_a_kl_that_is_rounding_alone(floor: float, undone: bool) -> None:
    control = control_of(KLConfig(target=0.001, per="token")).init(spread=1.0, length=24, floor=floor)
    control = control.before_update(0.002, spread=1.0, n=32)
    scales: list[float] = []
    after = control.after_update(lambda: 0.002, scales.append)  # however far the weights are scaled back
    assert after.clamped is not None
    assert (after.clamped.scale < 1) is undone
    assert bool(scales) is undone


@pytest.mark.parametrize("target", [0.001, 0.002, 0.0028, 0.004])
@pytest.mark.parametrize("reading", [0.0018, 0.0021, 0.0025])
def test_a_floor_that_scatters_is_not_scaled_away(target: float, reading: float) -> None:
    """SmolLM2 reads 0.002 to 0.0025 nats per token from its first update on, whatever the update was."""
    control = control_of(KLConfig(target=target, per="token")).init(spread=1.0, length=24, floor=0.002)
    scales: list[float] = []
    for _ in range(5):
        control = control.before_update(reading, spread=1.0, n=32).after_update(lambda: reading, scales.append)
    assert not scales


def test_at_the_floor_the_controller_reads_nothing_and_at_the_target_the_target() -> None:
    control = control_of(KLConfig(target=0.05, per="token")).init(floor=0.002)
    assert control._above_floor(0.002, 0.1)[0] == 0
    assert control._above_floor(0.0015, 0.1)[0] == 0
    assert control._above_floor(0.05, 0.0)[0] == pytest.approx(0.05)
    assert control._above_floor(0.004, 0.1)[1] == pytest.approx(0.2), "half of it is rounding, which has no noise"


def test_a_target_near_the_floor_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        warn_near_floor(0.009, "token", 0.002)
    assert "less than 5 times the floor" in caplog.text
    caplog.clear()
    warn_near_floor(0.02, "token", 0.002)
    assert not caplog.text
