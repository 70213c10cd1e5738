"""KL after the update from a share of the sequences: by how it changed on them, or by all of them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from klamp.train.kl_after_update import ENOUGH, FEWEST, SPARSE, KLMeasurement, Sums, carried, stride_of

pytestmark = pytest.mark.usefixtures("one_thread")

KLS = torch.linspace(0.2, 1.8, 16, dtype=torch.float64)
"""KL of 16 sequences before a step: they differ more than the step changes them."""


def made(growth: float, rows: Tensor | None = None, sequences: int = 16) -> tuple[KLMeasurement, list[list[int]]]:
    """A reading of sequences whose KL grew by a factor alike, and the rows it asked for."""
    asked: list[list[int]] = []

    def now(rows: Tensor) -> Sums:
        asked.append(rows.tolist())
        return Sums(float(growth * KLS[rows].sum()), len(rows))

    def before(rows: Tensor) -> Sums:
        return Sums(float(KLS[rows].sum()), len(rows))

    return KLMeasurement(torch.arange(16) if rows is None else rows, sequences, before, now), asked


def near(kl: float) -> bool:
    return False


def test_far_from_the_limit_a_few_sequences_tell_the_whole() -> None:
    """The share's own mean is 0.84, 16 % low; by its growth of 1.3 the whole is known to 2.1 %."""
    reading, asked = made(1.3)
    assert reading.first(1.0, lambda kl: kl < 10) == pytest.approx(1.3, rel=0.022)
    assert asked == [[0, 4, 8, 12]]
    assert reading.share == 1 / SPARSE


@pytest.mark.parametrize(("sequences", "share"), [(16, 1), (31, 1), (32, 0.5), (48, 0.5), (64, 0.25), (1000, 0.25)])
def test_near_the_limit_sixteen_are_measured_at_the_least(sequences: int, share: float) -> None:
    reading, asked = made(1.3, sequences=sequences)
    # By its growth the whole is known to 2.1 %, as above.
    assert reading.first(1.0, near) == pytest.approx(1.3, rel=0.022)
    assert reading.share == share
    assert sequences * share >= min(ENOUGH, sequences)
    assert [len(rows) for rows in asked] == [16 * share], "in one pass: a batch that began near the limit is near it"


def test_what_the_clamp_reads_next_is_the_same_share_carried_to_the_whole() -> None:
    reading, asked = made(1.3, sequences=64)
    first = reading.first(1.0, near)
    assert reading() == first
    assert asked[-1] == [0, 4, 8, 12]


@pytest.mark.parametrize(("sequences", "few"), [(16, [0, 4, 8, 12]), (32, [0, 8]), (64, [0])])
def test_what_scaling_made_of_kl_is_told_by_a_few(sequences: int, few: list[int]) -> None:
    """A displacement that is scaled by s makes s² of every sequence's KL, however they differ."""
    reading, _ = made(1.3, sequences=sequences)
    reading.last = reading.now
    first = reading.first(1.0, near)
    for s in (0.98, 0.93):
        scaled, asked = made(1.3 * s * s)
        reading.now = scaled.now
        assert reading() == pytest.approx(first * s * s, rel=1e-12)
        assert asked == [few]
    scaled, asked = made(1.3 * 0.7)
    reading.now = scaled.now
    # The growth of the share stands for that of the whole: 2.9 % apart at the most between these two readings.
    assert reading() == pytest.approx(first * 0.7, rel=0.05)
    assert [len(rows) for rows in asked] == [len(few), 16 * reading.share], "a large fall is measured on the share"


def test_a_few_that_count_nothing_tell_nothing() -> None:
    reading, asked = made(1.3, sequences=64)
    first = reading.first(1.0, near)
    reading.last = lambda rows: Sums(0.0, 0.0)
    assert reading() == first
    assert asked[-1] == [0, 4, 8, 12]


@pytest.mark.parametrize("growth", [1.9, 0.5, math.nan, math.inf])
def test_where_kl_changed_too_much_everything_is_measured(growth: float) -> None:
    """sqrt(1.9) is more than a quarter above 1: what the share reads is a level, and not a change."""
    reading, asked = made(growth, sequences=64)
    found = reading.first(1.0, near)
    assert found == pytest.approx(growth, rel=1e-12, nan_ok=True)
    assert sorted(row for rows in asked for row in rows) == list(range(16)), "every sequence once"
    assert reading.share == 1.0
    assert reading() == pytest.approx(growth, rel=1e-12, nan_ok=True)


@pytest.mark.parametrize(("sequences", "stride"), [(2, 1), (7, 1), (8, 2), (12, 2), (16, 4), (1000, SPARSE)])
def test_a_share_has_a_few_sequences_at_the_least(sequences: int, stride: int) -> None:
    assert stride_of(sequences, FEWEST) == stride
    assert sequences // stride >= min(FEWEST, sequences)


def test_two_processes_take_the_sequences_that_one_takes() -> None:
    _, alone = run = made(1.3)
    run[0].first(1.0, lambda kl: True)
    halves = [made(1.3, rows=torch.arange(a, a + 8)) for a in (0, 8)]
    for reading, _ in halves:
        reading.first(1.0, lambda kl: True)
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
    assert [m["kl/clamp/share"] for m in calm] == [0.25] * 3
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
    first = KLMeasurement.first

    def both(self: KLMeasurement, *given: Any) -> float:
        pairs.append((first(self, *given), self()))
        return pairs[-1][0]

    monkeypatch.setattr(KLMeasurement, "first", both)
    made = trainer(**{"optim": {"lr": 2e-4}, "rollout": {"prompts": 4, "group_size": 4}} | settings)
    assert [step(made, number)["kl/clamp/share"] for number in (1, 2, 3, 4)] == [0.25] * 4
    for share, whole in pairs:
        assert share == pytest.approx(whole, rel=1 / 3)


@pytest.mark.slow
def test_near_the_limit_a_share_holds_kl_as_well(trainer: Any, monkeypatch: Any) -> None:
    """The same run with all sequences and with a quarter of them: KL goes alike, and the clamp acts in both."""
    runs = {}
    for sparse in (1, SPARSE):
        monkeypatch.setattr("klamp.train.kl_after_update.SPARSE", sparse)
        kl = {"controller": "fixed", "beta": 0.05, "target": 0.01, "per": "token"}  # leaves the clamp something to do
        made = trainer(optim={"lr": 3e-3}, rollout={"prompts": 8, "group_size": 8}, kl=kl, steps=20)
        runs[sparse] = [step(made, number) for number in range(1, 21)]
    late = {sparse: [m["kl/steered"] for m in run[10:]] for sparse, run in runs.items()}
    assert min(m["kl/clamp/share"] for m in runs[SPARSE]) == 0.25
    assert any(m["kl/clamp/share"] == 0.25 and m["kl/clamp/effort"] > 0 for m in runs[SPARSE]), "it acts on a share"
    # A reading of 16 sequences is known to 3 to 8 %, and two runs that read differently draw different samples.
    assert max(late[SPARSE]) <= 1.15 * max(max(late[1]), 0.011)
    assert sum(late[SPARSE]) == pytest.approx(sum(late[1]), rel=0.15)
