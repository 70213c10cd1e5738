"""The clamp: exact where KL is quadratic, close where it is not, harmless where it cannot be measured."""

from __future__ import annotations

import math
import random
from dataclasses import asdict
from statistics import fmean
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from klamp.clamp import Clamped, Gauge, GaugeState, clamp, no_farther, scale_for
from klamp.clamp_scalers import lora_scaler, snapshot, weights_scaler
from klamp.errors import ConfigError


class Line:
    """A displacement of one number; KL is a function of it."""

    def __init__(self, kl: Any, at: float = 1.0) -> None:
        self.kl, self.at, self.measured = kl, at, 0

    def measure(self) -> float:
        self.measured += 1
        return float(self.kl(self.at))

    def scale(self, s: float) -> None:
        assert math.isfinite(s)
        assert s >= 0
        self.at *= s


@pytest.mark.parametrize(("kl", "scale"), [(0.2, 0.5), (0.05, 1.0), (0.04, 1.0), (0.0, 1.0), (-0.1, 1.0), (5.0, 0.1)])
def test_one_measurement_by_hand(kl: float, scale: float) -> None:
    assert scale_for(kl, 0.05) == pytest.approx(scale, rel=1e-12)


def test_one_measurement_from_another_origin() -> None:
    assert scale_for(0.16, 0.09, origin_kl=0.04) == pytest.approx(0.5, rel=1e-12)  # (0.3 - 0.2) / (0.4 - 0.2)
    assert scale_for(0.16, 0.01, origin_kl=0.04) == 0.0


@pytest.mark.parametrize("kl", [math.nan, math.inf, -math.inf])
def test_a_measurement_that_is_no_number_has_no_scale(kl: float) -> None:
    with pytest.raises(ConfigError, match="kl must be a finite number"):
        scale_for(kl, 0.05)


@pytest.mark.parametrize("limit", [0.0, -1.0, math.nan, math.inf])
def test_a_limit_is_a_positive_number(limit: float) -> None:
    with pytest.raises(ConfigError, match="limit"):
        scale_for(0.1, limit)
    with pytest.raises(ConfigError, match="limit"):
        clamp(lambda: 0.1, lambda s: None, limit)
    with pytest.raises(ConfigError, match="rounds"):
        clamp(lambda: 0.1, lambda s: None, 0.1, rounds=0)


def test_within_the_limit_nothing_is_touched() -> None:
    line = Line(lambda x: 0.04 * x * x)
    assert clamp(line.measure, line.scale, 0.05) == Clamped(0.04, 0.04)
    assert line.at == 1.0
    assert line.measured == 1
    assert clamp(line.measure, line.scale, 0.05, kl=0.04).rounds == 0
    assert line.measured == 1


@given(times=st.floats(1.001, 1e4), power=st.floats(1.0, 4.0))
def test_any_power_law_ends_just_under_the_limit_in_two_rounds(times: float, power: float) -> None:
    line = Line(lambda x: 0.05 * times * x**power)
    result = clamp(line.measure, line.scale, 0.05)
    assert result.held
    assert 0.97 * 0.05 - 1e-12 <= result.kl_after <= 0.05
    assert result.rounds <= 2
    assert result.scale == pytest.approx(line.at, rel=1e-9)
    assert result.effort == pytest.approx(-math.log(line.at), rel=1e-9)


@given(a=st.floats(0.01, 10), b=st.floats(0, 10), c=st.floats(0, 100))
def test_a_curve_that_bends_is_not_shrunk_needlessly(a: float, b: float, c: float) -> None:
    line = Line(lambda x: a * x**2 + b * x**3 + c * x**4)
    result = clamp(line.measure, line.scale, 0.05)
    assert result.held
    assert result.kl_after <= 0.05
    assert result.rounds <= 4
    if result.rounds:
        assert result.kl_after > 0.9 * 0.05


def test_backtracking_starts_from_where_the_step_began() -> None:
    line = Line(lambda x: (0.2 + 0.3 * x) ** 2)  # KL 0.04 before the step, 0.25 after
    result = clamp(line.measure, line.scale, 0.09, origin_kl=0.04)
    assert result.held
    assert result.rounds == 1
    assert 0.97 * 0.09 <= result.kl_after <= 0.09
    assert result.scale == pytest.approx(line.at)
    assert result.effort == pytest.approx(math.log(0.5 / math.sqrt(result.kl_after))), "of the distance, not the step"


@given(began=st.floats(0.001, 0.0999), step=st.floats(1e-6, 10.0), power=st.floats(0.5, 6.0))
def test_the_effort_of_backtracking_is_what_went_of_the_distance(began: float, step: float, power: float) -> None:
    """Also where all of a small step is undone: Hold would take the logarithm of its scale for a KL that is gone."""
    line = Line(lambda x: began + step * x**power)
    result = clamp(line.measure, line.scale, 0.1, origin_kl=began)
    assert result.effort == pytest.approx(math.log(result.kl_before / result.kl_after) / 2)
    assert result.effort <= math.log((began + step) / began) / 2 + 1e-12


@pytest.mark.parametrize("floor", [0.0, 0.002])
def test_rounding_is_no_part_of_the_distance_that_the_effort_is_of(floor: float) -> None:
    line = Line(lambda x: floor + 0.033 * x * x)  # from the reference, which reads the floor
    result = clamp(line.measure, line.scale, 0.01, floor=floor)
    assert result.held
    assert result.effort == pytest.approx(-math.log(line.at), rel=1e-12)
    assert result.effort == pytest.approx(math.log(0.033 / (result.kl_after - floor)) / 2), "the same above the floor"

    line = Line(lambda x: floor + (0.05 + 0.15 * x) ** 2)  # from elsewhere
    result = clamp(line.measure, line.scale, 0.01, origin_kl=floor + 0.05**2, floor=floor)
    assert result.effort == pytest.approx(math.log(0.2 / (0.05 + 0.15 * line.at)))
    line.at = 1.0
    undone = no_farther(line.measure, line.scale, floor + 0.05**2, floor=floor)
    assert undone.effort == pytest.approx(math.log(0.2 / (0.05 + 0.15 * line.at)))


def test_a_step_that_began_below_the_floor_is_scaled_as_from_where_it_began() -> None:
    line = Line(lambda x: 0.0020 + 0.0010 * x)  # readings near the floor of bfloat16
    result = clamp(line.measure, line.scale, 0.00217, origin_kl=0.0020, floor=0.0022)
    assert result.held
    assert 0.1 < line.at < 0.2
    assert result.effort == pytest.approx(-math.log(line.at))
    assert clamp(lambda: 0.002, lambda s: None, 0.0015, origin_kl=0.001, floor=0.002).scale > 0


def test_a_step_that_was_scaled_and_cannot_be_measured_again_has_the_effort_it_was_scaled_for() -> None:
    readings = iter([1.0, math.nan])
    result = clamp(lambda: next(readings), lambda s: None, 0.1, origin_kl=0.05)
    assert not result.held
    assert result.effort == pytest.approx(math.log(1.0 / (0.1 * 0.985)) / 2)


def test_an_origin_over_the_limit_is_as_far_as_it_goes() -> None:
    line = Line(lambda x: 0.2 + x)
    result = clamp(line.measure, line.scale, 0.1, origin_kl=0.2)
    assert (line.at, result.held, result.kl_after) == (0.0, False, 0.2)
    assert math.isfinite(result.effort)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_cannot_be_measured_is_left_alone(bad: float) -> None:
    line = Line(lambda x: bad)
    result = clamp(line.measure, line.scale, 0.05)
    assert (line.at, result.scale, result.effort, result.held) == (1.0, 1.0, 0.0, False)


def test_a_later_nan_leaves_finite_weights_and_says_so() -> None:
    line = Line(lambda x: 0.2 if x == 1.0 else math.nan)
    result = clamp(line.measure, line.scale, 0.05)
    assert not result.held
    assert 0 < line.at < 1


class Lora(nn.Module):
    """Names as peft gives them."""

    def __init__(self, adapters: tuple[str, ...] = ("default",)) -> None:
        super().__init__()
        self.base = nn.Linear(3, 3).requires_grad_(False)
        self.lora_A = nn.ModuleDict({a: nn.Linear(3, 2, bias=False) for a in adapters})
        self.lora_B = nn.ModuleDict({a: nn.Linear(2, 3, bias=False) for a in adapters})


def test_lora_scales_one_adapter_exactly() -> None:
    model = Lora(("default", "other"))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    scale = lora_scaler(model, "other")
    scale(1.0)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    scale(0.25)
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name] * (0.25 if name == "lora_B.other.weight" else 1.0))
    scale(0.0)
    assert not model.lora_B["other"].weight.any()


def test_lora_finds_the_active_adapter_or_asks() -> None:
    model = Lora(("default", "other"))
    with pytest.raises(ConfigError, match="adapter="):
        lora_scaler(model)
    model.active_adapter = "default"
    lora_scaler(model)(0.0)
    assert not model.lora_B["default"].weight.any()
    assert model.lora_B["other"].weight.any()
    with pytest.raises(ConfigError, match="has no lora_B"):
        lora_scaler(model, "third")
    with pytest.raises(ConfigError, match="weights_scaler"):
        lora_scaler(nn.Linear(2, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_weights_interpolate_and_are_exact_at_both_ends(dtype: torch.dtype) -> None:
    model = nn.Linear(4, 4).to(dtype)
    origin = snapshot(model)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p))
    after = snapshot(model)
    scale = weights_scaler(model, origin)
    scale(1.0)
    assert all(torch.equal(p, after[n]) for n, p in model.named_parameters())
    scale(0.5)
    for name, p in model.named_parameters():
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        middle = origin[name].to(wide) + 0.5 * (after[name].to(wide) - origin[name].to(wide))
        if dtype == torch.bfloat16:  # rounded up or down: less than one unit in the last of its eight bits away
            assert bool(((p.float() - middle).abs() <= middle.abs() * 2**-7).all())
        else:
            assert torch.equal(p, middle.to(dtype))
    scale(0.0)
    assert all(torch.equal(p, origin[n]) for n, p in model.named_parameters())


def test_a_bfloat16_displacement_of_one_last_place_is_scaled_on_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("klamp.clamp_scalers.CHUNK", 1 << 14)  # several parts
    model = nn.Linear(256, 256, bias=False).bfloat16()
    with torch.no_grad():
        model.weight.fill_(1.0)
    origin = snapshot(model)
    ends = []
    for _ in range(2):
        with torch.no_grad():
            model.weight.fill_(1.0 + 2**-7)  # the next bfloat16
        weights_scaler(model, origin)(0.97)
        ends.append(model.weight.detach().clone())
    assert torch.equal(*ends), "the same factor rounds alike, wherever it is computed"
    left = (ends[0].float() - 1).mean().item() / 2**-7
    # 65536 weights, each left where it is with a probability of 0.97: a deviation of 0.0007. To the nearest it is 1.
    assert left == pytest.approx(0.97, abs=0.003)
    assert set(ends[0].flatten().tolist()) == {1.0, 1.0 + 2**-7}


def test_bfloat16_halved_again_and_again_is_right_on_the_mean_in_every_tensor_and_step() -> None:
    model = nn.ModuleList(nn.Linear(256, 256, bias=False).bfloat16() for _ in range(2))
    unit = 2**-7

    def fill(value: float) -> None:
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(value)

    fill(1.0)
    origin = snapshot(model)
    fill(1.0 + unit)
    scale = weights_scaler(model, origin)
    for left in (0.5, 0.25, 0.125):
        scale(0.5)
        one, two = ((p.float() - 1) / unit for p in model.parameters())
        # 65536 weights, each left with that probability: a deviation of 0.002. Rounded alike, all would stay at 0.5.
        assert one.mean().item() == pytest.approx(left, abs=0.01)
        assert (one * two).mean().item() == pytest.approx(left * left, abs=0.01), "tensors round independently"
    ends = []
    for grown in (1.0 + unit, 1.0 + 3 * unit):  # half a unit more after each step
        fill(grown)
        weights_scaler(model, origin)(0.5)
        ends.append(model[0].weight.float() - (grown - unit - 1) / 2 > 1)
    # A deviation of 0.002 again.
    assert (ends[0] & ends[1]).float().mean().item() == pytest.approx(0.25, abs=0.01), "steps round independently"


def test_an_origin_in_float32_stays_as_it_is_under_a_bfloat16_model() -> None:
    model, reference = nn.Linear(8, 8).bfloat16(), nn.Linear(8, 8)
    kept = snapshot(reference)
    scale = weights_scaler(model, dict(reference.named_parameters()))
    scale(0.5)
    assert all(torch.equal(p, kept[n]) for n, p in reference.named_parameters())
    scale(0.0)
    assert all(torch.equal(p, kept[n].bfloat16()) for n, p in model.named_parameters())


def test_weights_refuse_an_origin_of_another_model() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="snapshot"):
        weights_scaler(model, {})
    with pytest.raises(ConfigError, match="shape"):
        weights_scaler(model, {n: torch.zeros(7) for n, _ in model.named_parameters()})


@pytest.mark.parametrize("bad", [math.nan, math.inf, -0.5])
def test_no_scaler_takes_a_factor_that_ruins_weights(bad: float) -> None:
    model = nn.Linear(2, 2)
    for scale in (weights_scaler(model, snapshot(model)), lora_scaler(Lora())):
        with pytest.raises(ConfigError, match="s must be"):
            scale(bad)


@pytest.mark.parametrize("known", [0.0, 0.1])
def test_gauge_follows_the_level_better_than_a_batch_reads_it(known: float) -> None:
    noise = torch.Generator().manual_seed(0)
    gauge, state, last, level, errors = Gauge(), Gauge().init(), None, 0.05, []
    for _ in range(300):
        batch = math.exp(0.1 * torch.randn((), generator=noise).item())  # reads before and after alike
        state = gauge.update(state, level * batch, last, known)
        errors.append(math.log(state.level / level))
        grown = level * math.exp(0.05 * torch.randn((), generator=noise).item())
        last = Clamped(grown * batch, grown * batch)
        level = grown * math.exp(0.04 * torch.randn((), generator=noise).item())  # what own tokens show nothing of
    assert float(torch.tensor(errors[20:]).std()) < 0.075, "three quarters of the batch's own error"
    assert GaugeState(**asdict(state)) == state


def test_gauge_learns_how_much_of_a_growth_is_fresh() -> None:
    gauge, state, last, level = Gauge(), Gauge().init(), None, 0.05
    for _ in range(100):  # own tokens double where fresh KL grows by sqrt(2); the clamp halves both
        state = gauge.update(state, level, last)
        own = level * 2
        last, level = Clamped(own, own * 0.7, 0.84, 0.18, 1), level * math.sqrt(2) * 0.7
    # A growth that is always the same is learned twice, as a share and as a bias: together they are exact.
    assert state.share * math.log(2) + state.bias == pytest.approx(math.log(2) / 2, rel=1e-6)
    assert state.share == pytest.approx(0.5, abs=0.06), "the bias has no more than an eighth of it"


def climb_at_the_limit(beyond: float, seed: int, noise: float = 0.08) -> list[float]:
    """Fresh KL over its limit, where a step moves it by ``beyond`` (in logarithms) more than its own tokens show."""
    draw, gauge, state, last, level, found = random.Random(seed), Gauge(), Gauge().init(), None, 0.02, []
    for _ in range(80):
        found.append(level / 0.055)
        reading = level * math.exp(draw.gauss(0, noise))
        state = gauge.update(state, reading, last, noise)
        grown = math.exp(0.1 + draw.gauss(0, 0.03))
        after = min(reading * grown, gauge.limit(state, 0.055, reading * grown))
        level, last = level * math.exp(beyond) * after / reading, Clamped(reading * grown, after)
    return found


@pytest.mark.parametrize("beyond", [0.0, 0.03, 0.1, 0.15])
def test_fresh_kl_that_grows_beyond_own_tokens_is_held_too(beyond: float) -> None:
    """On ``tiny`` at four times its usual rate it is some 0.15 a step: own tokens are pulled back, others are not."""
    runs = [climb_at_the_limit(beyond, seed) for seed in range(20)]
    late = [kl for run in runs for kl in run[40:]]
    assert 0.8 < fmean(late) < 0.97
    assert sorted(late)[int(0.99 * len(late))] < 1.1


def test_noisy_batches_are_no_reason_to_let_kl_stay_above_its_limit() -> None:
    """Readings good to a quarter, as with a sparse reward, of a KL that grows by 15 % a step more than they show."""
    late = [kl for seed in range(20) for kl in climb_at_the_limit(0.15, seed, noise=0.24)[40:]]
    assert 0.7 < fmean(late) < 0.97
    assert sorted(late)[int(0.97 * len(late))] < 1.1


@given(st.lists(st.tuples(st.floats(), st.floats(), st.floats(), st.floats()), max_size=20))
def test_gauge_limits_are_finite_whatever_it_sees(steps: list[tuple[float, float, float, float]]) -> None:
    gauge, state = Gauge(), Gauge().init()
    for fresh, before, after, own in steps:
        state = gauge.update(state, fresh, Clamped(before, after))
        assert 0 < gauge.limit(state, 0.05, own) <= 0.15


def test_the_first_steps_of_a_fast_run_neither_clamp_a_low_kl_nor_leave_the_level_low_behind_them() -> None:
    """A run on ``tiny`` at twice its usual rate: (fresh, own after the update), where own tokens leap at first."""
    gauge, limit, state, last = Gauge(), 0.055, Gauge().init(), None
    run = [(2e-6, 0.041), (0.002, 0.038), (0.007, 0.025), (0.010, 0.024), (0.016, 0.027), (0.025, 0.033)]
    run += [(fresh, fresh * 1.06) for fresh in (0.027, 0.029, 0.032, 0.035, 0.038, 0.042, 0.045, 0.048, 0.050)]
    for fresh, own in run:
        state = gauge.update(state, fresh, last, noise=0.08)
        allowed = gauge.limit(state, limit, own)
        last = Clamped(own, min(own, allowed))
        assert own <= allowed or fresh > 0.85 * limit, f"fresh KL {fresh} is low, and {own} of {allowed} was undone"
    # Readings that are good to 8 % count for a part, so the level trails a climb of 4 to 8 % a step.
    assert state.level == pytest.approx(0.050, rel=0.05)
    assert allowed < 1.1 * limit
