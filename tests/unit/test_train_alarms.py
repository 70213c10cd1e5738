"""What a run says while it goes: where KL is, and alarms that are printed once and name what to change."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import Any

import pytest
import torch

from klamp.config_io import fields_of
from klamp.monitor import ADVICE, Alarm, Monitor
from klamp.progress import Display, place
from klamp.train.config import KLConfig, TrainConfig
from klamp.train.kl_config import advice
from klamp.train.loop import Trainer
from klamp.train.metrics import without_signal

SETTINGS = [
    KLConfig(),
    KLConfig(clamp=False),
    KLConfig(controller="ziegler"),
    KLConfig(controller="fixed", beta=0.1),
    KLConfig(controller="fixed", beta=0.1, clamp=False),
]


@pytest.mark.parametrize("kl", SETTINGS, ids=lambda kl: f"{kl.controller}-{kl.clamp}")
def test_every_alarm_names_a_field_and_none_a_price_that_is_steered(kl: KLConfig) -> None:
    fields = [name for name, _ in fields_of(TrainConfig)]
    told = advice(kl)
    assert told.keys() == ADVICE.keys()
    for sentence in told.values():
        assert any(name in sentence for name in fields), sentence
        assert ("kl.beta" in sentence) <= (kl.controller == "fixed"), sentence


def test_without_a_clamp_it_is_offered_and_with_one_it_is_not() -> None:
    assert "kl.clamp=true" in advice(KLConfig(clamp=False))["drifting"]
    assert "kl.clamp" not in advice(KLConfig())["drifting"]


def test_most_groups_without_a_signal_are_an_alarm() -> None:
    def kinds(share: float) -> list[str]:
        monitor = Monitor()
        return [a.kind for step in range(20) for a in monitor.record(step, kl=0.1, no_signal=share)]

    assert kinds(0.6) == ["no_signal"]
    assert kinds(0.5) == []


def test_a_group_has_no_signal_where_all_its_valid_rewards_are_one() -> None:
    rewards = torch.tensor([[1.0, 1.0, 1.0], [1.0, 2.0, 1.0], [3.0, 5.0, 3.0], [7.0, 7.0, 7.0]])
    valid = torch.tensor([[True] * 3, [True] * 3, [True, False, True], [False] * 3])
    assert without_signal(rewards.flatten(), valid.flatten(), 3).tolist() == [True, False, True]


def test_a_reward_that_never_differs_is_told_once_on_the_screen_and_counted(
    config: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    made = Trainer(config(steps=8), rewards=[lambda prompts, completions: [0.25] * len(completions)])
    last = made.run()
    said = capfd.readouterr().err
    assert said.count("alarm no_signal") == said.count("every completion has the same reward") == 1
    assert "reward.functions" in said
    assert said.splitlines()[0].endswith(
        "8 steps of 2 × 4 completions of up to 6 tokens, learning rate 0.01, KL to 0.05 nats per token. "
        f"Run: {made.config.run}"
    )
    assert last["reward/no_signal"] == 1.0


def test_one_that_does_is_not(trainer: Any) -> None:
    made = trainer(steps=6)
    assert made.run()["reward/no_signal"] < 0.5
    assert not made.folder.alarms.exists()


def test_an_alarm_that_comes_again_is_counted_and_not_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    display = Display(10)
    metrics = {"reward/mean": 0.0, "kl/steered": 0.1, "kl/beta": 0.1}
    for step in (3, 6, 9):
        display.step(step, metrics, [Alarm("spike", step, "KL jumped.")])
    display.repeated("alarms.jsonl")
    said = capsys.readouterr().err
    assert said.count("KL jumped.") == 1
    assert "alarms that came again: spike 3 times. All are in alarms.jsonl" in said


def test_a_log_that_somebody_set_up_still_hears_of_it(caplog: pytest.LogCaptureFixture) -> None:
    Display(10)
    monitor = Monitor(0.05, "token")
    with caplog.at_level(logging.WARNING):
        for step in range(6):
            monitor.record(step, kl=0.5)
    assert "drifting" in caplog.text


@pytest.mark.parametrize(
    ("kl", "recent", "where"),
    [
        (0.0, [], "below"),
        (0.01, [0.0, 0.002, 0.005], "approaching"),
        (0.01, [0.04, 0.03, 0.02], "below"),
        (0.041, [0.02], "in band"),
        (0.0599, [0.02], "in band"),
        (0.061, [0.08], "above"),
        (float("nan"), [0.02], "not measured"),
        (0.01, [float("nan")], "below"),
    ],
)
def test_where_kl_is(kl: float, recent: list[float], where: str) -> None:
    assert place(kl, 0.05, recent) == where


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 41])
def test_train_with_no_flags_is_in_its_band_within_forty_steps(seed: int, tmp_path: Any) -> None:
    config = replace(TrainConfig(run=str(tmp_path / "run"), seed=seed, device="cpu").resolved(), steps=40)
    assert Trainer(config, quiet=True).run()["kl/target"] == 0.05
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert any(row["kl/in_band"] for row in rows)
    late = [row["kl/steered"] for row in rows[-10:]]
    assert 0.04 <= sum(late) / len(late) <= 0.06
