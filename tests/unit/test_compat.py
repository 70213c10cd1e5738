"""The fronts: the classes people already import, the same numbers, and an answer where the originals had a NaN."""

from __future__ import annotations

import math

import pytest
import torch

import klamp
from klamp import ConfigError, Stateful
from klamp.compat import (
    AdaptiveKLController,
    ExponentialKLController,
    FixedKLController,
    get_kl_controller,
    kl_controller,
    tutorial,
    verl,
)


class Original:
    """The rule as ROLL, trlx and verl have it in common, written from Ziegler et al. 2019 §2.2."""

    def __init__(self, value: float, target: float, horizon: float) -> None:
        self.value, self.target, self.horizon = value, target, horizon

    def update(self, current: float, n_steps: float) -> None:
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


@pytest.mark.parametrize("make", [AdaptiveKLController, verl.AdaptiveKLController])
def test_attributes_set_later_have_their_effect_to_the_bit(make: type[Stateful]) -> None:
    ours, original = make(0.1, 6.0, 10_000), Original(0.1, 6.0, 10_000)
    for name, value in (("target", 3.0), ("horizon", 500), ("value", 0.3), ("target", 9)):
        for controller in (ours, original):
            setattr(controller, name, value)
            controller.update(7.1, 64)
        assert ours.value == original.value
        assert (ours.target, ours.horizon) == (original.target, original.horizon)  # type: ignore[attr-defined]


def test_a_price_can_be_set_on_every_front_and_on_hold() -> None:
    fixed, hold = FixedKLController(0.1), Stateful(klamp.Hold(0.05, per="token"))
    for controller in (fixed, hold):
        controller.value = 0.25
        assert controller.value == 0.25
        assert controller.state_dict()["beta"] == 0.25
        with pytest.raises(ConfigError, match=r"\.value must be >=? 0, got -1"):
            controller.value = -1
    with pytest.raises(ConfigError, match=r"value must be > 0, got 0.*use Fixed\(0.0\)"):
        hold.value = 0.0
    hold.value = 1e-310
    hold.update(0.1, 8)
    klamp.State.from_dict(hold.state_dict())
    fixed.value = 0.0
    fixed.update(7.0, 8)
    assert fixed.value == 0.0


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [("target", 0, "target must be > 0"), ("horizon", -1, "horizon must be > 0"), ("value", 0.0, "0 would stay 0")],
)
def test_what_would_break_the_rule_is_refused_when_it_is_set(name: str, value: float, said: str) -> None:
    c = AdaptiveKLController(0.1, 6.0, 10_000)
    with pytest.raises(ConfigError, match=said):
        setattr(c, name, value)
    assert (c.value, c.target, c.horizon) == (0.1, 6.0, 10_000)


def test_an_attribute_that_nothing_reads_cannot_be_set() -> None:
    for c in (AdaptiveKLController(0.1, 6.0), FixedKLController(0.1), Stateful(klamp.Hold(0.05, per="token"))):
        with pytest.raises(AttributeError):
            c.kl_target = 3.0  # type: ignore[attr-defined]


@pytest.mark.parametrize("n", [0.5, 64.7, 0, 1e-3])
def test_n_steps_is_not_cut_to_a_whole_number(n: float) -> None:
    ours, original = AdaptiveKLController(0.1, 6.0, 100), Original(0.1, 6.0, 100)
    for controller in (ours, original):
        controller.update(9.0, n)
    assert ours.value == original.value
    assert type(ours.value) is float


@pytest.mark.parametrize("n", [float("nan"), -1, "many", None])
def test_n_steps_that_is_no_count_is_refused(n: object) -> None:
    with pytest.raises(ConfigError, match="n_steps"):
        AdaptiveKLController(0.1, 6.0, 100).update(9.0, n)  # type: ignore[arg-type]


def test_the_name_that_two_systems_share_is_never_guessed() -> None:
    with pytest.raises(ConfigError, match=r"klamp\.compat\.tutorial.*klamp\.compat\.verl"):
        AdaptiveKLController(init_kl_coef=0.1, target_kl=0.1, horizon=100)
    with pytest.raises(ConfigError, match=r"klamp\.compat\.tutorial"):  # the tutorial's call, in the tutorial's order
        AdaptiveKLController(0.1, 0.1, 100).update(0.3)
    with pytest.raises(ConfigError, match="target is missing"):
        AdaptiveKLController(0.1)


def test_verls_keywords() -> None:
    ours, original = verl.AdaptiveKLController(init_kl_coef=0.2, target_kl=0.1, horizon=900), Original(0.2, 0.1, 900)
    ours.update(current_kl=0.4, n_steps=32)
    original.update(0.4, 32)
    assert ours.value == original.value


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


def test_the_tutorials_class_has_the_tutorials_attributes() -> None:
    c = tutorial.AdaptiveKLController(init_kl_coef=0.1, target_kl=0.1, horizon=100)
    assert (c.kl_coef, c.target_kl, c.horizon, c.step_count) == (0.1, 0.1, 100, 0)
    assert c.update(torch.tensor(0.6)) == pytest.approx(0.1 * math.exp(0.05), rel=1e-7)
    assert c.step_count == 1
    c.target_kl, c.kl_coef, c.horizon = 0.4, 1.0, 7
    assert c.update(0.9) == c.kl_coef == pytest.approx(math.exp(0.05), rel=1e-12)
    assert (c.step_count, c.target_kl, c.horizon) == (2, 0.4, 7)
    assert ExponentialKLController is tutorial.AdaptiveKLController


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
