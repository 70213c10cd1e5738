"""Hold: the price finds beta*, whatever the unit, the start and the pace of the plant; and then it is quiet."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from klamp.controllers.base import State
from klamp.controllers.hold import Hold, HoldState
from klamp.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


def plant(rate: float, best: float, delay: int = 1) -> Callable[[float], float]:
    """KL / target after another step: ``x' = rate (1 - x beta / best)`` with the price of ``delay`` steps ago."""
    x, prices = 0.0, [None] * (delay - 1)

    def step(beta: float) -> float:
        nonlocal x
        prices.append(beta)  # type: ignore[arg-type]
        felt = next(p for p in prices if p is not None) if prices[-delay] is None else prices[-delay]
        x += rate * (1 - x * felt / best)
        x = max(x, 0.0)
        return x * x

    return step


def rising(seed: int) -> Callable[[float], float]:
    """KL / target as ``tiny`` answers constant prices (24 runs, 0.05 rms of x): beta* rises by 1 % a step, x follows it
    by its power 0.45, and a reading has 6.6 % of noise."""
    draw, t, x = random.Random(seed), 0, 0.0

    def step(beta: float) -> float:
        nonlocal t, x
        reading = (x * math.exp(draw.gauss(0, 0.033))) ** 2
        x += 0.087 * (1 - x * (beta / (0.6055 * math.exp(0.01 * t))) ** 0.447)
        t += 1
        return reading

    return step


def carrying(seed: int, momentum: float, undone: list[float] | None = None) -> Callable[[float], float]:
    """KL / target as SmolLM2 answers at a learning rate of 5e-5 (19 runs, 7 % of KL beyond the noise): x' is averaged
    as Adam averages, its rate grows as the adapters do, and a reading has 7.5 % of noise over a floor of bfloat16's.
    A clamp at the target writes into ``undone`` what it takes off log x each step."""
    draw, t, x, pace = random.Random(seed), 0, 0.0, 0.0
    knots = (0, 2, 5, 10, 20, 40, 60), (0.0087, 0.0159, 0.0338, 0.0431, 0.0544, 0.0738, 0.1673)

    def rate() -> float:
        after = next((i for i, at in enumerate(knots[0]) if at > t), 6)
        share = min((t - knots[0][after - 1]) / (knots[0][after] - knots[0][after - 1]), 1.0)
        return math.exp((1 - share) * math.log(knots[1][after - 1]) + share * math.log(knots[1][after]))

    def step(beta: float) -> float:
        nonlocal t, x, pace
        reading = (x * x + 0.045 * (t > 0)) * math.exp(draw.gauss(0, 0.075))
        pace = momentum * pace + (1 - momentum) * rate() * (1 - x * beta / (0.159 * math.exp(0.0084 * t)))
        t += 1
        x = max(x + pace / (1 - momentum**t), 0.0)
        if undone is not None:
            undone.append(math.log(max(x, 1.0)))
            x = min(x, 1.0)
        return reading

    return step


def swinging(seed: int) -> Callable[[float], float]:
    """KL / target as SmolLM2 answers at 5e-4: fast, averaged as Adam averages, and pushed about by its batches, so that
    under a constant price it swings by a quarter with a period of some 22 steps."""
    draw, t, x, pace = random.Random(seed), 0, 0.0, 0.0
    right = 0.28 * math.exp(draw.gauss(0, 0.04))

    def step(beta: float) -> float:
        nonlocal t, x, pace
        reading = (x * x + 0.045 * (t > 0)) * math.exp(draw.gauss(0, 0.065))
        rate = min(0.26 + 0.09 * t, 0.65)
        t += 1
        pace = 0.9 * pace + 0.1 * rate * (1 - x * (beta / right) ** 0.85 + draw.gauss(0, 0.13))
        x = max(x + pace / (1 - 0.9**t), 0.0)
        return reading

    return step


def told(beta: float) -> HoldState:
    """A start at ``beta``, as sure of it as the trainer's feed-forward is."""
    return Hold(0.05, "token").init(spread=beta / 0.65 * math.sqrt(2 * 0.05 * 24), length=24.0)


def follow(
    hold: Hold, step: Callable[[float], float], steps: int, start: HoldState | None = None
) -> tuple[list[float], list[float]]:
    """KL / target and price of a run."""
    state, kls, betas = start or hold.init(), [], []
    for _ in range(steps):
        kl = step(state.beta)
        kls.append(kl)
        betas.append(state.beta)
        state = hold.update(state, kl * hold.target)
    return kls, betas


def share_in_band(runs: Sequence[Sequence[float]]) -> float:
    """Of the steps from the first entry on."""
    entered = [run[next(t for t, kl in enumerate(run) if abs(kl - 1) <= 0.2) :] for run in runs]
    return fmean(abs(kl - 1) <= 0.2 for run in entered for kl in run)


def replay(hold: Hold, kls: Sequence[float], effort: float = 0.0) -> HoldState:
    state = hold.init()
    for kl in kls:
        state = hold.update(state, kl, effort=effort)
    return state


@pytest.mark.parametrize("rate", [0.3, 0.1, 0.02, 0.005])
@pytest.mark.parametrize("wrong", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("delay", [1, 5])
def test_finds_the_price_at_any_pace_from_any_start(rate: float, wrong: float, delay: int) -> None:
    kls, betas = follow(Hold(0.05, "token", init_beta=0.3 * wrong), plant(rate, 0.3, delay), 1500)
    # What is left is the slowest plant's way back from ten times the price: 2 % of KL, 0.1 % of the price.
    assert all(abs(kl - 1) < 0.05 for kl in kls[1000:])
    assert fmean(betas[1200:]) == pytest.approx(0.3, rel=0.01)


@pytest.mark.parametrize("rate", [0.3, 0.1, 0.02])
def test_settled_it_is_quiet_and_does_not_oscillate(rate: float) -> None:
    _, betas = follow(Hold(6.0, "sequence", init_beta=0.3), plant(rate, 0.2, 3), 700)
    assert max(abs(math.log(b / a)) for a, b in pairwise(betas[500:])) < 0.02


@pytest.mark.parametrize("rate", [0.1, 0.03, 0.01])
def test_the_climb_from_zero_winds_nothing_up(rate: float) -> None:
    kls, _ = follow(Hold(0.05, "token", init_beta=0.3), plant(rate, 0.3), 600)
    assert max(kls) < 1.3


def test_a_price_far_too_low_on_a_fast_plant_is_raised_as_soon_as_kl_passes_the_target() -> None:
    kls, betas = follow(Hold(0.05, "token", init_beta=0.03), plant(0.2, 0.3), 40)
    passed = next(t for t, kl in enumerate(kls) if kl > 1.2)
    assert betas[passed + 3] > 1.5 * betas[0]
    assert betas[-1] > 0.15


def test_a_price_that_must_keep_rising_is_not_trailed() -> None:
    runs = [follow(Hold(0.05, "token", init_beta=0.45), rising(seed), 100)[0] for seed in range(12)]
    late = [kl for run in runs for kl in run[40:]]
    assert fmean(late) < 1.08, "1.06 here; 1.17 where the price trails by the filter's lag"
    assert fmean(abs(kl - 1) < 0.2 for kl in late) > 0.9, "0.96 here; 0.66 where it trails, 0.73 for the best constant"


@pytest.mark.parametrize("momentum", [0.8, 0.9])
def test_a_kl_that_carries_on_is_neither_overshot_nor_chased(momentum: float) -> None:
    runs = [follow(Hold(0.05, "token"), carrying(seed, momentum), 60, told(0.34))[0] for seed in range(20)]
    assert share_in_band(runs) > 0.8, (
        "0.85 and 0.93 here; direct model alone 0.76 and 0.64, best constant 0.83 and 0.85"
    )


def test_a_swing_that_batches_make_is_damped_and_not_followed() -> None:
    ours = [follow(Hold(0.05, "token"), swinging(seed), 60, told(0.34))[0] for seed in range(30)]
    best = max(
        share_in_band([[step(beta) for _ in range(60)] for step in map(swinging, range(30))])
        for beta in (0.25, 0.265, 0.28, 0.295, 0.31)
    )
    assert share_in_band(ours) > best, "0.63 against 0.61; 0.57 where the swing is read as one of beta*"


def test_a_fast_plant_that_has_settled_too_low_is_not_waited_for() -> None:
    _, betas = follow(Hold(0.05, "token"), plant(0.4, 0.3), 20, told(0.38))
    assert betas[14] < 0.33, "0.318; 0.341 where a climb that takes 40 steps counts as one, though KL settles in three"


def test_which_of_the_two_a_plant_is_shows() -> None:
    for step, inert in ((carrying(1, 0.9), True), (plant(0.06, 0.3), False)):
        hold, state = Hold(0.05, "token"), told(0.3)
        for _ in range(50):
            state = hold.update(state, step(state.beta) * 0.05)
        assert (state.odds > 0) is inert


@given(kls=st.lists(st.floats(0.001, 100.0), min_size=1, max_size=60), unit=st.sampled_from([1 / 120, 7.0, 120.0]))
@settings(max_examples=50)
def test_the_unit_does_not_matter(kls: list[float], unit: float) -> None:
    one = replay(Hold(0.05, "token"), [0.05 * kl for kl in kls])
    other = replay(Hold(0.05 * unit, "sequence"), [0.05 * unit * kl for kl in kls])
    assert one.beta == pytest.approx(other.beta, rel=1e-6)  # a rounding of KL passes through logs and clips


@given(
    kls=st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=80),
    efforts=st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=80, max_size=80),
)
@settings(max_examples=60)
def test_stays_in_bounds_and_finite_whatever_it_is_fed(kls: list[float], efforts: list[float]) -> None:
    hold = Hold(0.1, "token", bounds=(0.01, 5.0))
    state = hold.init()
    for kl, effort in zip(kls, efforts, strict=False):
        state = hold.update(state, kl, effort=effort)
        assert 0.01 <= state.beta <= 5.0
        assert State.from_json(state.to_json()) == state
    assert state.updates + state.skipped == len(kls)


@pytest.mark.parametrize("kl", [math.nan, math.inf, -math.inf])
def test_a_kl_that_is_no_number_only_counts(kl: float) -> None:
    hold = Hold(0.1, "token")
    state = replay(hold, [0.02, 0.05, 0.09])
    after = hold.update(state, kl, effort=0.3)
    assert after == HoldState(**{**vars(state), "skipped": 1})


def test_update_is_pure_and_resume_is_invisible() -> None:
    hold, kls = Hold(0.1, "token"), [0.01 * t for t in range(1, 40)]
    half = replay(hold, kls[:20])
    copy = HoldState(**vars(half))
    resumed = State.from_json(half.to_json())
    for kl in kls[20:]:
        half, resumed = hold.update(half, kl), hold.update(resumed, kl)  # type: ignore[arg-type]
    assert half == resumed
    assert copy == replay(hold, kls[:20])


@pytest.mark.parametrize(("times", "higher"), [(2.0, True), (0.5, False)])
@pytest.mark.parametrize("init_beta", [0.001, 0.1, 10.0])
def test_ends_higher_at_twice_the_target_and_lower_at_half(times: float, higher: bool, init_beta: float) -> None:
    beta = replay(Hold(0.1, "token", init_beta=init_beta), [0.1 * times] * 200).beta
    assert (beta > 1.2 * init_beta) if higher else (beta < init_beta / 1.2)


def test_nothing_winds_up_at_a_bound() -> None:
    hold = Hold(0.1, "token", bounds=(0.01, 1.0))
    state = replay(hold, [0.001] * 2000)
    assert state.beta == 0.01
    for _ in range(40):
        state = hold.update(state, 0.4)
    assert state.beta > 0.1


def test_a_policy_that_has_not_moved_is_waited_for_but_not_for_ever() -> None:
    hold = Hold(0.1, "token", init_beta=0.3)
    assert replay(hold, [0.0] * 5).beta == 0.3
    assert replay(hold, [0.0] * 60).beta < 0.1


def test_effort_says_that_the_price_is_too_low() -> None:
    """KL is held at the target by a clamp that undoes 5 % a step: the price must take over."""
    hold = Hold(0.1, "token", init_beta=0.1)
    climb = [0.1 * min(t / 8, 1) ** 2 for t in range(1, 41)]
    with_effort = hold.init()
    for kl in climb:
        with_effort = hold.update(with_effort, kl, effort=0.05 if kl >= 0.1 else 0.0)
    assert with_effort.beta > 1.2 * replay(hold, climb).beta


def test_low_kl_with_an_idle_clamp_says_that_the_price_is_too_high() -> None:
    hold, kls = Hold(0.1, "token"), [0.02, 0.04, 0.06, *[0.07] * 30]
    beside = Hold(0.1, "token", clamped=True)
    assert replay(beside, kls).beta < replay(hold, kls).beta


def test_starts_where_it_is_told() -> None:
    assert Hold(6.0, "sequence").init(spread=2.0).beta == pytest.approx(0.65 * 2 / math.sqrt(12), rel=1e-12)
    for per in ("token", "sequence_mean"):
        state = Hold(0.05, per).init(spread=1.0, length=120)  # type: ignore[arg-type]
        assert state.beta == pytest.approx(0.65 / math.sqrt(12), rel=1e-12)
        with pytest.raises(ConfigError, match="length"):
            Hold(0.05, per).init(spread=1.0)  # type: ignore[arg-type]
    assert Hold(0.05, "token", init_beta=0.4).init().beta == 0.4


def test_presets_and_refusals() -> None:
    targets = {name: Hold.preset(name).target for name in ("conservative", "moderate", "aggressive")}
    assert targets == {"conservative": 0.02, "moderate": 0.08, "aggressive": 0.15}
    with pytest.raises(ConfigError, match="moderate"):
        Hold.preset("moderat")
    with pytest.raises(ConfigError, match="per"):
        Hold(0.1)
    for target in (0.0, -1.0, math.nan):
        with pytest.raises(ConfigError, match="target"):
            Hold(target, "token")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> object:
    """benchmarks/controllers.py as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    for name in [m for m in sys.modules if m == "plants" or m.startswith("plants.")]:
        monkeypatch.delitem(sys.modules, name)
    import controllers

    return controllers


@pytest.mark.slow
def test_ahead_of_every_tuned_rival_on_the_ensemble_and_in_its_corners(bench) -> None:  # type: ignore[no-untyped-def]
    plants = bench.ensemble.draw(31337, 40)
    for where in (plants, *(plants.corner(name) for name in bench.ensemble.CORNERS)):
        hold = bench.ensemble_row(where, lambda p: bench.held(p.beta0, int, target=p.target))[0]
        made = bench.ENSEMBLE.items()
        rivals = {k: bench.ensemble_row(where, lambda p, m=m: m(p.target, p.beta0))[0] for k, m in made}
        assert hold > max(rivals.values()), rivals


@pytest.mark.slow
@pytest.mark.parametrize("ramp", [2.5, 8.0, 25.0])
def test_within_five_points_of_the_best_constant_in_hindsight(bench, ramp: float) -> None:  # type: ignore[no-untyped-def]
    runs = bench.policy.draw(31337, 15, ramp)
    best = bench.train.constants(runs, 21)
    trace = bench.train.train(runs, bench.held(runs.feed_forward, int, told=True), runs.feed_forward)
    assert bench.train.in_band(trace.kl).mean() > best.best.mean() - 5


@pytest.mark.slow
@pytest.mark.parametrize("ramp", [2.5, 8.0, 25.0])
@pytest.mark.parametrize("wrong", [0.1, 1.0, 10.0])
def test_with_the_clamp_kl_stays_in_band(bench, ramp: float, wrong: float) -> None:  # type: ignore[no-untyped-def]
    runs = bench.policy.draw(31337, 12, ramp)
    beta0 = runs.feed_forward * wrong
    hold = bench.held(beta0, int, told=wrong == 1.0, clamped=True)
    trace = bench.train.train(runs, hold, beta0, clamped=True)
    assert bench.train.in_band(trace.kl).mean() > 97.5  # 98 is the aim; a mean over 12 runs is good to half a point
    assert (trace.kl / bench.train.LIMIT).max() < 1.1
    # Reward against a constant price at the same KL: the mean over 12 runs is good to about 1 %, the aim is -1 %.
    assert bench.train.constants(runs, 15).gain(trace) > -2


def test_under_a_clamp_the_strain_reads_off_the_price() -> None:
    # A plant that climbs by 0.05 (1 - beta / 0.5) at x = 1, all of which the clamp undoes.
    hold = Hold(0.1, "token", init_beta=0.05, clamped=True)
    state, x = hold.init(), 0.0
    for _ in range(80):
        x = max(x + 0.05 * (1 - x * state.beta / 0.5), 0.0)
        effort = max(math.log(x), 0.0)
        x = min(x, 1.0)
        state = hold.update(state, 0.1 * x * x, effort=effort)
    strain = 1 - state.beta / 0.5
    assert 0.02 < strain < 0.2, state


def test_the_clamp_is_left_little_to_undo_on_a_fast_plant() -> None:
    # What it undoes is what was learnt at no KL, too: 2.5 % of the displacement a step, not a third of the free pace.
    hold = Hold(0.1, "token", init_beta=0.2, clamped=True)
    state, x, efforts = hold.init(), 0.0, []
    for _ in range(80):
        x = max(x + 0.25 * (1 - x * state.beta / 0.5), 0.0)
        efforts.append(max(math.log(x), 0.0))
        x = min(x, 1.0)
        state = hold.update(state, 0.1 * x * x, effort=efforts[-1])
    assert 0.01 < fmean(efforts[40:]) < 0.035


def test_a_slow_plant_is_given_back_its_push_before_it_meets_the_clamp() -> None:
    total, runs = [], []
    for seed in range(20):
        undone: list[float] = []
        hold, step = Hold(0.05, "token", clamped=True), carrying(seed, 0.9, undone)
        state, kls = replace(told(0.34), lean=1.0), []
        for _ in range(60):
            kls.append(step(state.beta))
            state = hold.update(state, kls[-1] * 0.05, effort=undone[-1])
        total.append(sum(undone))
        runs.append(kls)
    assert fmean(total) < 0.17, "0.26 where the price rises only once the clamp has acted"
    assert share_in_band(runs) > 0.95


def test_a_laxer_clamp_does_not_let_kl_rest_above_the_target() -> None:
    hold = Hold(0.1, "token", init_beta=0.1, clamped=True)
    state, x = hold.init(), 0.0
    for _ in range(200):
        x = max(x + 0.05 * (1 - x * state.beta / 0.5), 0.0)
        effort = max(math.log(x / 1.4), 0.0)  # held at twice the target only
        x = min(x, 1.4)
        state = hold.update(state, 0.1 * x * x, effort=effort)
    assert x < 1.12, (x, state)
