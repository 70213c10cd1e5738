"""KL after the update from a share of the sequences: only where the limit is far, and never where it is crossed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from klamp.control import FADES, Control
from klamp.train.config import KLConfig
from klamp.train.control import control_of
from klamp.train.reading import FEWEST, SPARSE, Reading, Sums, carried

pytestmark = pytest.mark.usefixtures("one_thread")

KLS = torch.linspace(0.2, 1.8, 16, dtype=torch.float64)
"""KL of 16 sequences before a step: they differ more than the step changes them."""


def made(growth: float, rows: Tensor | None = None, sequences: int = 16) -> tuple[Reading, list[list[int]]]:
    """A reading of sequences whose KL grew by a factor alike, and the rows it asked for."""
    asked: list[list[int]] = []

    def now(rows: Tensor) -> Sums:
        asked.append(rows.tolist())
        return Sums(float(growth * KLS[rows].sum()), len(rows))

    def before(rows: Tensor) -> Sums:
        return Sums(float(KLS[rows].sum()), len(rows))

    return Reading(torch.arange(16) if rows is None else rows, sequences, before, now), asked


def test_far_from_the_limit_a_share_tells_the_whole() -> None:
    """The share's own mean is 0.84, 16 % low; by its growth of 1.3 the whole is known to 2.1 %."""
    reading, asked = made(1.3)
    assert reading.first(1.0, 1.2, lambda kl: kl < 10) == pytest.approx(1.3, rel=0.022)
    assert asked == [[0, 4, 8, 12]]
    assert reading.share == 1 / SPARSE


def test_near_the_limit_everything_is_measured_at_once() -> None:
    for expected, limit in ((1.2, 1.1), (math.nan, 10)):
        reading, asked = made(1.3)
        assert reading.first(1.0, expected, lambda kl, limit=limit: kl < limit) == pytest.approx(1.3, rel=1e-12)
        assert asked == [list(range(16))]
        assert reading.share == 1.0


@pytest.mark.parametrize("growth", [3.0, math.nan, math.inf])
def test_where_the_share_leaves_a_doubt_the_rest_is_measured_too(growth: float) -> None:
    reading, asked = made(growth)
    found = reading.first(1.0, 1.2, lambda kl: kl < 2)
    assert found == pytest.approx(growth, rel=1e-12, nan_ok=True)
    assert sorted(row for rows in asked for row in rows) == list(range(16)), "every sequence once"
    assert reading.share == 1.0


@pytest.mark.parametrize(("sequences", "share"), [(2, 1), (7, 1), (8, 2), (12, 3), (16, 4), (1000, SPARSE)])
def test_a_share_has_a_few_sequences_at_the_least(sequences: int, share: int) -> None:
    reading, _ = made(1.0, sequences=sequences)
    assert reading.stride == share
    assert sequences // share >= min(FEWEST, sequences)


def test_two_processes_take_the_sequences_that_one_takes() -> None:
    _, alone = run = made(1.3)
    run[0].first(1.0, 1.2, lambda kl: True)
    halves = [made(1.3, rows=torch.arange(a, a + 8)) for a in (0, 8)]
    for reading, _ in halves:
        reading.first(1.0, 1.2, lambda kl: True)
    assert halves[0][1][0] + halves[1][1][0] == alone[0]


def test_a_carried_kl() -> None:
    assert carried(0.3, 0.3, 0.5) == pytest.approx(0.5, rel=1e-12), "a share like the whole"
    assert carried(0.0, 0.0, 0.5) == pytest.approx(0.5, rel=1e-12), "from the reference"
    assert carried(0.3, 0.2, 0.2) == pytest.approx(0.3, rel=1e-12), "nothing moved"
    assert carried(0.1, 0.9, 0.0) == 0.0
    assert all(math.isnan(carried(*kls)) for kls in ((math.nan, 1, 1), (1, 1, math.inf), (1, -1e-9, 1)))


def step(made: Any, number: int) -> dict[str, float]:
    rollout = made.sample(number)
    scored = made.scorer(rollout.prompts, rollout.completions, rollout.columns)
    metrics: dict[str, float] = made.learner.step(number, rollout, scored).metrics
    made.sampler.refresh()
    return metrics


CASES = [
    {},
    {"full": True},
    {"algorithm": {"name": "ppo", "epochs": 2, "minibatches": 2}},
    {"kl": {"reference": "lag:3"}},
    {"kl": {"reference": "periodic:4"}, "full": True},
]


@pytest.mark.parametrize("settings", CASES)
def test_a_sudden_step_is_caught_within_it(trainer: Any, settings: dict[str, Any]) -> None:
    """Small steps far below the limit, measured on a share; then one a thousand times as large."""
    made = trainer(**{"optim": {"lr": 2e-4}, "rollout": {"prompts": 4, "group_size": 4}, "save_every": 1} | settings)
    calm = [step(made, number) for number in (1, 2, 3)]
    assert [m["kl/clamp/share"] for m in calm] == [1.0, 0.25, 0.25], "a first step may be of any size"
    assert all(m["kl/clamp/effort"] == 0 for m in calm)
    assert max(m["kl/steered"] for m in calm) < 0.055 / 8
    for group in made.learner.optimizer.param_groups:
        group["initial_lr"] *= 1000
    sudden = step(made, 4)
    assert sudden["kl/steered"] < 0.055 / 8, "nothing before the update told of it"
    assert sudden["kl/clamp/share"] == 1.0
    assert sudden["kl/clamp/before"] > 0.055
    assert sudden["kl/clamp/effort"] > 0
    assert sudden["kl/clamp/after"] <= sudden["kl/clamp/limit"] * (1 + 1e-6)


@pytest.mark.parametrize("settings", CASES)
def test_the_share_reads_what_all_would(trainer: Any, settings: dict[str, Any], monkeypatch: Any) -> None:
    """A third is what four sequences are trusted with."""
    pairs: list[tuple[float, float]] = []
    first = Reading.first

    def both(self: Reading, *given: Any) -> float:
        pairs.append((first(self, *given), self()))
        return pairs[-1][0]

    monkeypatch.setattr(Reading, "first", both)
    made = trainer(**{"optim": {"lr": 2e-4}, "rollout": {"prompts": 4, "group_size": 4}} | settings)
    assert [step(made, number)["kl/clamp/share"] for number in (1, 2, 3, 4)] == [1.0, 0.25, 0.25, 0.25]
    for share, whole in pairs:
        assert share == pytest.approx(whole, rel=1 / 3)


def test_near_the_limit_no_share_is_taken(trainer: Any) -> None:
    made = trainer(optim={"lr": 2e-2}, rollout={"prompts": 4, "group_size": 4}, kl={"target": 0.01, "per": "token"})
    assert {step(made, number)["kl/clamp/share"] for number in range(1, 6)} == {1.0}


def test_a_reference_that_moved_is_a_first_step_again(trainer: Any) -> None:
    settings = {"optim": {"lr": 2e-4}, "rollout": {"prompts": 4, "group_size": 4}}
    made = trainer(**settings, kl={"reference": "periodic:3"})
    shares = [step(made, number)["kl/clamp/share"] for number in range(1, 7)]
    assert shares == [1.0, 0.25, 0.25, 1.0, 0.25, 0.25]


def test_how_large_steps_were_is_saved_and_fades() -> None:
    def step(control: Control, kl: float, own: float) -> Control:
        return control.before_update(kl).after_update(lambda: own, lambda _: None)

    control = control_of(KLConfig(target=1.0, per="token")).init()
    assert math.isnan(control.expected(0.01))
    control = step(control, 0.01, 0.04)
    assert control.expected(0.01) == pytest.approx(0.04, rel=1e-12)
    control = step(control, 0.04, 0.04)
    assert control.expected(0.0) == pytest.approx((FADES * 0.1) ** 2, rel=1e-12)
    saved = control.to_dict()
    assert control_of(KLConfig()).from_dict(saved).state.jump == control.state.jump
    earlier = {k: v for k, v in saved.items() if k != "jump"}
    assert control.from_dict(earlier).state.jump is None, "saved by an earlier version"
    assert step(control, 0.01, math.nan).state.jump is None
