"""RLOO prices the sum over a sequence and measures it once for each generated batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from klamp import Hold
from klamp.integrations.trl import KLControl

pytestmark = pytest.mark.slow

Make = Callable[..., Any]
HOLD = Hold(target=0.4, per="sequence")


def run(t: Any, **settings: Any) -> tuple[Any, KLControl]:
    control = KLControl(t, HOLD, **settings)
    t.add_callback(control)
    t.train()
    return t, control


def logged(t: Any, key: str) -> list[float]:
    return [row[key] for row in t.state.log_history if key in row]


def test_kl_is_the_sum_over_the_sequence(trainer: Make) -> None:
    t, control = run(trainer(kind="RLOO", max_steps=5), clamp=False)
    sums = [kl * n for kl, n in zip(logged(t, "kl"), logged(t, "completions/mean_length"), strict=True)]
    assert logged(t, "klamp/kl") == pytest.approx(sums, rel=1e-5, abs=1e-9)
    assert control.state.updates == 4
    assert t.beta == control.state.beta


def test_the_clamp_holds_the_sum(trainer: Make) -> None:
    free, _ = run(trainer(kind="RLOO", max_steps=4, learning_rate=0.1), clamp=False)
    held, control = run(trainer(kind="RLOO", max_steps=4, learning_rate=0.1))
    assert control.clamp
    assert max(logged(free, "klamp/kl")) > 1.0
    for own, limit in zip(logged(held, "klamp/own_kl"), logged(held, "klamp/own_limit"), strict=True):
        assert own <= limit * (1 + 1e-6)


def test_steps_between_two_generations_are_clamped_and_not_steered(trainer: Make) -> None:
    t, control = run(trainer(kind="RLOO", max_steps=6, steps_per_generation=2, num_iterations=1))
    assert len(logged(t, "klamp/kl")) == 3
    assert len(logged(t, "klamp/effort")) == 6
    assert control.state.updates == 2  # the first generation is the reference's own


@pytest.mark.parametrize("steps", [1, 2])
def test_without_a_clamp_the_first_price_counts_the_completions_of_an_update(trainer: Make, steps: int) -> None:
    settings = {"per_device_train_batch_size": 32, "steps_per_generation": steps, "num_iterations": 1}
    _, control = run(trainer(kind="RLOO", max_steps=1, **settings), clamp=False)
    assert math.exp(control.state.log_rho) == pytest.approx(2**0.5 * 2 * control.state.lowest)  # 32, not 64


def test_several_generations_in_one_step(trainer: Make) -> None:
    parts = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 1}
    t, _ = run(trainer(kind="RLOO", max_steps=3, **parts))
    assert len(logged(t, "klamp/kl")) == 3


def test_all_groups_count_as_having_a_signal(trainer: Make) -> None:
    """The advantages hold the price as well, so equal rewards have one as soon as KL differs."""

    def sparse(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        return [float(len(c)) if p == prompts[0] else 0.0 for p, c in zip(prompts, completions, strict=True)]

    t, _ = run(trainer(kind="RLOO", max_steps=2, reward_funcs=sparse, per_device_train_batch_size=32), clamp=False)
    assert logged(t, "klamp/signal") == [1.0, 1.0]


def test_normalised_advantages_say_nothing_about_the_price(trainer: Make) -> None:
    _, control = run(trainer(kind="RLOO", max_steps=1, normalize_advantages=True), clamp=False)
    assert control.state.beta == HOLD.init().beta
