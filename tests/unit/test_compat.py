"""The fronts: the classes people already import, the same numbers, and an answer where the originals had a NaN."""

from __future__ import annotations

import math

import pytest
import torch

import klamp
from klamp import Stateful
from klamp.compat import (
    AdaptiveKLController,
    ExponentialKLController,
    FixedKLController,
    get_kl_controller,
    kl_controller,
)


class Original:
    """The rule as ROLL, trlx and verl have it in common, written from Ziegler et al. 2019 §2.2."""

    def __init__(self, value: float, target: float, horizon: float) -> None:
        self.value, self.target, self.horizon = value, target, horizon

    def update(self, current: float, n_steps: int) -> None:
        error = min(max(current / self.target - 1, -0.2), 0.2)
        self.value *= 1 + error * n_steps / self.horizon


def test_adaptive_is_the_original_to_the_bit() -> None:
    g = torch.Generator().manual_seed(0)
    ours, original = AdaptiveKLController(0.1, 6.0, 10_000), Original(0.1, 6.0, 10_000)
    for kl in (12 * torch.rand(300, generator=g, dtype=torch.float64)).tolist():
        assert ours.update(kl, 256) is None
        original.update(kl, 256)
        assert ours.value == original.value


def test_the_calls_of_every_framework() -> None:
    c = AdaptiveKLController(init_kl_coef=0.1, target=6.0, horizon=10_000)
    c.update(7.0, 64)  # trlx
    c.update(current=7.0, n_steps=64)  # ROLL
    c.update(current_kl=torch.tensor(7.0), n_steps=64)  # verl
    assert c.value > 0.1
    assert c.state.updates == 3
    f = FixedKLController(kl_coef=0.2)
    f.update(9.0, 64)
    assert f.value == 0.2


@pytest.mark.parametrize("make", [get_kl_controller, kl_controller])
def test_factories_are_fixed_without_a_target(make: object) -> None:
    fixed, adaptive = make(0.2), make(0.2, 6.0)  # type: ignore[operator]
    assert isinstance(fixed, Stateful)
    assert isinstance(fixed, FixedKLController)
    assert isinstance(adaptive, AdaptiveKLController)
    for _ in range(20):
        fixed.update(100.0, 256)
        adaptive.update(100.0, 256)
    assert fixed.value == 0.2
    assert adaptive.value == pytest.approx(0.2 * (1 + 0.2 * 256 / 10_000) ** 20, rel=1e-12)


def test_keywords_of_the_factories() -> None:
    assert get_kl_controller(init_kl_coef=0.1, target_kl=6.0, kl_horizon=500).controller.horizon == 500
    assert kl_controller(init_kl_coef=0.1, target=6.0, horizon=500).controller.horizon == 500
    assert klamp.kl_controller is kl_controller


def test_the_tutorials_controller_returns_the_coefficient_and_takes_floats_or_tensors() -> None:
    c = ExponentialKLController(init_kl_coef=0.1, target_kl=0.1, horizon=100)
    want = 0.1
    for kl in (0.3, torch.tensor(0.25), 0.01, 5.0):
        want = min(max(want * math.exp(0.1 * (float(kl) - 0.1)), 1e-4), 10.0)
        assert c.update(kl) == pytest.approx(want, rel=1e-12)
        assert c.kl_coef == c.value
    assert ExponentialKLController().value == 0.1
    assert c.update(1e9) == 10.0
    assert c.update(-1e9) == 1e-4


@pytest.mark.parametrize(
    "controller", [AdaptiveKLController(0.1, 6.0, 100), ExponentialKLController(), FixedKLController(1)]
)
def test_a_nan_leaves_the_coefficient_and_the_state_survives_a_checkpoint(controller: Stateful) -> None:
    controller.update(7.0, 10)
    value = controller.value
    controller.update(float("nan"), 10)
    assert controller.value == value
    assert controller.state.skipped == 1
    saved = controller.state_dict()
    controller.update(70.0, 10)
    controller.load_state_dict(saved)
    assert controller.value == value
