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


def first_step(tmp_path: Path, dtype: str) -> dict[str, float]:
    config = TrainConfig(model="tiny", run=str(tmp_path / dtype), steps=1, dtype=dtype, optim=OptimConfig(lr=1e-6))  # type: ignore[arg-type]
    trainer = Trainer(config, quiet=True)
    before = {n: p.detach().clone() for n, p in trainer.learner.policy.model.named_parameters()}
    trainer.learner.applied = 0
    trainer.run()
    moved = [n for n, p in trainer.learner.policy.model.named_parameters() if not p.equal(before[n])]
    assert all("lora" in name for name in moved)
    return json.loads((tmp_path / dtype / "metrics.jsonl").read_text().splitlines()[0])


@pytest.mark.slow
def test_bfloat16_has_a_floor_and_float32_has_none(tmp_path: Path) -> None:
    assert 1e-4 < first_step(tmp_path, "bfloat16")["kl/floor"] < 5e-3
    assert first_step(tmp_path, "float32")["kl/floor"] == 0


def test_at_the_floor_the_controller_reads_nothing_and_at_the_target_the_target() -> None:
    control = control_of(KLConfig(target=0.05, per="token")).init(floor=0.002)
    assert control._above_floor(0.002) == 0
    assert control._above_floor(0.0015) == 0
    assert control._above_floor(0.05) == pytest.approx(0.05)


def test_a_target_near_the_floor_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        warn_near_floor(0.009, "token", 0.002)
    assert "less than 5 times the floor" in caplog.text
    caplog.clear()
    warn_near_floor(0.02, "token", 0.002)
    assert not caplog.text
