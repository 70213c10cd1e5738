"""One Control for any loop: pure, the same through JSON, the trainer's prices to the bit, and a bound that holds."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import klamp
from klamp.clamp import Gauge
from klamp.control import Control
from klamp.controllers.hold import Hold, HoldState
from klamp.train.config import KLConfig, OptimConfig, RolloutConfig, TrainConfig
from klamp.train.kl_config import control_of
from klamp.train.loop import Trainer

CONTROLLERS = [
    klamp.Hold(0.05, per="token"),
    klamp.Ziegler(0.05, per="token", horizon=200),
    klamp.Exponential(0.05, per="token", gain=5.0),
    klamp.Doubling(0.05, per="token"),
    klamp.Fixed(0.1),
    klamp.Scheduled(lambda n: 0.1 / (n + 1)),
]


def made(controller: klamp.Controller, **more: Any) -> Control:
    monitor = klamp.Monitor(0.05, "token", window=4)
    return Control(controller, clamp=0.055, monitor=monitor, **more)


def through_json(control: Control) -> Control:
    """The control after its program ended and another read the file: new settings, a state from text alone."""
    text = json.dumps(control.to_dict(), allow_nan=False)
    monitor = klamp.Monitor(0.05, "token", window=4)
    fresh = Control(copy.deepcopy(control.controller), clamp=control.clamp, monitor=monitor, gauge=control.gauge)
    return fresh.from_dict(json.loads(text))


class Plant:
    """A displacement whose KL is its square; ``scale`` multiplies it."""

    def __init__(self, x: float) -> None:
        self.x = x

    def measure(self) -> float:
        return self.x**2

    def scale(self, s: float) -> None:
        self.x *= s


def step(control: Control, kl: float, own: float, *, spread: float = 1.0, noise: float = 0.1) -> Control:
    """A step whose update carries KL to ``own`` on its own tokens."""
    plant = Plant(math.sqrt(own))
    return control.before_update(kl, spread, 32, noise=noise).after_update(plant.measure, plant.scale)


READINGS = [(0.0, 0.01), (0.008, 0.03), (0.02, 0.09), (0.05, 0.07), (math.nan, 0.05), (0.06, 0.2), (0.04, 0.04)]


# -- it is a value -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("controller", CONTROLLERS, ids=lambda c: type(c).__name__)
def test_no_method_changes_the_control_it_is_called_on(controller: klamp.Controller) -> None:
    control = made(controller).init(spread=1.0, length=20.0)
    for kl, own in READINGS:
        text, monitored = json.dumps(control.to_dict()), control.monitor
        read = control.before_update(kl, 1.0, 32, noise=0.1)
        between = json.dumps(read.to_dict())
        plant = Plant(math.sqrt(own))
        after = read.after_update(plant.measure, plant.scale)
        for other in (control.skip(kl), control.new_reference(), control.retarget(0.05, 0.1), control.init()):
            assert other is not control
        assert json.dumps(control.to_dict()) == text
        assert json.dumps(read.to_dict()) == between
        assert control.monitor is monitored
        assert monitored is not None
        assert monitored.steps == 0, "the monitor given is settings; what it saw is in the state"
        control = after
    with pytest.raises(FrozenInstanceError):
        control.state = made(controller).state  # type: ignore[misc]


def test_the_same_step_twice_gives_the_same_control() -> None:
    control = made(CONTROLLERS[0]).init(spread=1.0, length=20.0)
    for kl, own in READINGS:
        first, second = step(control, kl, own), step(control, kl, own)
        assert first.to_dict() == second.to_dict()
        assert (first.clamped, first.own_limit) == (second.clamped, second.own_limit)
        control = first


def test_the_price_waits_for_the_update() -> None:
    """``beta`` is what the step is charged, until the step is done."""
    control = made(klamp.Doubling(0.05, per="token")).init()
    read = control.before_update(0.5, n=8)
    assert read.beta == control.beta == 1.0
    assert read.after_update(lambda: 0.01, lambda _: None).beta == 2.0


def test_a_step_without_an_update_moves_the_monitor_alone() -> None:
    control = step(made(CONTROLLERS[0]).init(spread=1.0, length=20.0), 0.02, 0.03)
    skipped = control.skip(math.nan, step=7)
    assert [alarm.kind for alarm in skipped.alarms] == ["non_finite"]
    assert skipped.alarms[0].step == 7
    assert replace(skipped.state, monitor=control.state.monitor) == control.state
    assert skipped.state.monitor.steps == control.state.monitor.steps + 1


# -- JSON --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("controller", [c for c in CONTROLLERS if not isinstance(c, klamp.Scheduled)], ids=repr)
def test_through_json_before_and_within_every_step(controller: klamp.Controller) -> None:
    """A program that ends at any point, in the middle of a step too, goes on to the bit."""
    straight = resumed = made(controller).init(spread=1.3, length=20.0)
    for kl, own in READINGS:
        one, other = Plant(math.sqrt(own)), Plant(math.sqrt(own))
        straight = straight.before_update(kl, 1.0, 32, noise=0.1).after_update(one.measure, one.scale)
        resumed = through_json(through_json(resumed).before_update(kl, 1.0, 32, noise=0.1))
        resumed = resumed.after_update(other.measure, other.scale)
        assert resumed.to_dict() == straight.to_dict()
        assert (resumed.beta, one.x) == (straight.beta, other.x)


@settings(max_examples=30, deadline=None)
@given(
    readings=st.lists(st.tuples(st.floats(0, 2), st.floats(1e-6, 2), st.floats(0, 3)), min_size=1, max_size=30),
    at=st.integers(0, 30),
)
def test_resumption_is_invisible(readings: list[tuple[float, float, float]], at: int) -> None:
    straight = resumed = made(CONTROLLERS[0]).init(spread=1.0, length=20.0)
    for i, (kl, own, spread) in enumerate(readings):
        straight, resumed = (step(c, kl, own, spread=spread) for c in (straight, resumed))
        if i == at:
            resumed = through_json(resumed)
    assert resumed.to_dict() == straight.to_dict()


BEFORE = json.loads(
    """{"settings": "Hold(target=0.05, per='token', init_beta=0.1, bounds=(1e-06, 10000.0))",
    "controller": {"kind": "HoldState", "beta": 0.5682058996608319, "updates": 3, "skipped": 0,
     "log_rho": -0.49821190087138284, "lowest": 0.2994247358081712, "x": 0.24214056554581212,
     "pace": 0.13989517776607685, "log_rate": -2.352778673529077, "square": 0.8744859496752421, "steps": 2},
    "gauge": {"level": 0.002911216407056476, "reading": 0.0023697842806176036, "share": 0.9733966536592078, "pairs": 1,
     "spread": 0.013177131907027956, "surprise": -0.4167857593390778, "bias": 0.0},
    "last": {"kl_before": 0.009672403978208968, "kl_after": 0.009672403978208968, "scale": 1.0, "effort": 0.0,
     "rounds": 0, "held": true}, "jump": 0.12789836684276865, "floor": 0.0,
    "monitor": {"window": [{"kl": 0.0, "beta": 0.56, "effort": 0.0, "no_signal": 0.0, "kl/k3": 0.0},
     {"kl": 0.0023697842806176036, "beta": 0.5618814000959254, "effort": 0.0, "no_signal": 0.0}],
     "steps": 3, "raised": []}}"""
)
"""What the trainer saved of its steering before there was a Control, with the present names of Hold's numbers."""


def test_what_the_trainer_saved_before_goes_on() -> None:
    control = control_of(KLConfig()).from_dict(BEFORE)
    assert control.beta == BEFORE["controller"]["beta"]
    kept = {k: v for k, v in BEFORE.items() if k != "jump"}  # the clamp goes by no forecast any more
    kept["settings"] = repr(Hold(0.05, "token", init_beta=0.1))  # whose bounds were narrower then
    kept["controller"] = {"law": HoldState.law, **kept["controller"]}
    assert control.to_dict() == {**kept, "reading": None}
    least = {k: v for k, v in kept.items() if k not in ("floor", "settings")}
    assert control_of(KLConfig()).from_dict(least).state == control.state


def test_a_reading_from_before_groups_without_signal_were_told_apart_goes_on() -> None:
    waiting = Control(Hold(0.05, "token")).init(spread=1.0, length=20).before_update(0.01, 0.8, 8, noise=math.inf)
    saved = waiting.to_dict()
    del saved["reading"]["signal"]
    assert Control(Hold(0.05, "token")).from_dict(saved).state == waiting.state


@pytest.mark.parametrize(
    ("saved", "says"),
    [
        (None, "must hold controller, gauge and monitor"),
        ({"controller": None}, "must hold controller, gauge and monitor"),
        ({**BEFORE, "floor": -1.0}, "control.floor"),
        ({**BEFORE, "floor": "low"}, "control.floor"),
        ({**BEFORE, "gauge": {}}, "GaugeState"),
        ({**BEFORE, "gauge": {**BEFORE["gauge"], "pairs": -2}}, "gauge.pairs must be from 0"),
        ({**BEFORE, "gauge": {**BEFORE["gauge"], "spread": -1.0}}, "gauge.spread must be from 0 to 1"),
        ({**BEFORE, "gauge": {**BEFORE["gauge"], "bias": 1e6}}, "gauge.bias"),
        ({**BEFORE, "controller": {**BEFORE["controller"], "beta": 0.0}}, "HoldState.beta must be from"),
        ({**BEFORE, "controller": {**BEFORE["controller"], "log_rho": 1e4}}, "HoldState.log_rho must be from"),
        ({**BEFORE, "controller": {**BEFORE["controller"], "log_rate": 9.0}}, "HoldState.log_rate must be from"),
        ({**BEFORE, "controller": {**BEFORE["controller"], "updates": -1}}, "HoldState.updates must be from"),
        ({**BEFORE, "monitor": {"window": 3}}, "monitor is damaged"),
        ({**BEFORE, "reading": {"kl": 0.1}}, "BatchKL"),
        ({**BEFORE, "reading": []}, "BatchKL"),
        (
            {**BEFORE, "controller": {"kind": "State", "beta": 0.1, "updates": 0, "skipped": 0}},
            "State of another controller than Hold",
        ),
    ],
)
def test_a_damaged_or_foreign_state_is_named(saved: Any, says: str) -> None:
    with pytest.raises(klamp.ConfigError, match=says):
        made(klamp.Hold(0.05, per="token")).from_dict(saved)


def test_a_batch_that_is_read_and_then_skipped_leaves_the_level_where_it_was() -> None:
    control = made(klamp.Hold(0.05, per="token")).init(spread=1.0, length=20.0)
    for _ in range(10):
        control = step(control, 0.05, 0.05)
    skipped = control.before_update(0.05, noise=0.1).skip(0.05)
    for other in (control, skipped):
        after = other.before_update(0.1, noise=0.5)
        assert after.state.gauge.level < 0.06, "one noisy reading of twice the KL counts for little"


# -- the same prices ---------------------------------------------------------------------------------------------------


def test_it_is_controller_gauge_clamp_and_monitor_called_in_turn() -> None:
    """The plain specification: the parts, written out, in the order in which the trainer has always called them."""
    hold, gauge, monitor = klamp.Hold(0.05, per="token"), Gauge(), klamp.Monitor(0.05, "token", window=4)
    state, read, last = hold.init(spread=1.3, length=20.0), gauge.init(), None
    control = made(hold).init(spread=1.3, length=20.0)
    for i, (kl, own) in enumerate(READINGS, 1):
        one, other = Plant(math.sqrt(own)), Plant(math.sqrt(own))
        beta = state.beta
        read = gauge.update(read, kl, last, 0.1)
        first = one.measure()
        last = klamp.clamp_kl(one.measure, one.scale, gauge.limit(read, 0.055, first), kl=first)
        state = hold.update(state, kl, 32, effort=last.effort, spread=1.0, noise=0.1)
        alarms = monitor.record(i, kl=kl, beta=beta, effort=last.effort)
        assert control.beta == beta
        control = control.before_update(kl, 1.0, 32, noise=0.1).after_update(other.measure, other.scale)
        assert (control.clamped, one.x) == (last, other.x)
        assert list(control.alarms) == alarms
        assert (control.state.price, control.state.gauge) == (state, read)
        assert control.state.monitor == monitor.state


def some_told(prompts: list[str], completions: list[str]) -> list[float]:
    """The length of the first prompt's completions; one reward for those of the others."""
    return [float(len(c)) if p == prompts[0] else 0.7 for p, c in zip(prompts, completions, strict=True)]


@pytest.mark.parametrize("sparse", [False, True])
def test_a_logged_run_replayed_has_the_trainers_prices(tmp_path: Path, sparse: bool) -> None:
    """What a run wrote down is enough to find each of its prices again, to the bit, in a loop of one's own."""
    rollout = RolloutConfig(prompts=2, group_size=4, max_tokens=6)
    optim = OptimConfig(lr=3e-4)
    config = TrainConfig(run=str(tmp_path / "run"), steps=5, rollout=rollout, optim=optim, preflight=False)
    Trainer(config, rewards=[some_told] if sparse else None, quiet=True).run()
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["policy/signal"] for row in rows] == [0.5 if sparse else 1.0] * 5
    hold = klamp.Hold(target=0.05, per="token")
    first = {"spread": rows[0]["policy/spread"], "signal": rows[0]["policy/signal"]}
    control = Control(hold, clamp=True).init(length=rows[0]["length/mean"], **first)
    for row in rows:
        assert row["kl/clamp/effort"] == 0.0, "so near the start nothing is scaled, and one measurement says it all"
        assert control.beta == row["kl/beta"]
        known = {"signal": row["policy/signal"], "noise": row["kl/noise"]}
        control = control.before_update(row["kl/steered"], row["policy/spread"], 8, **known)
        control = control.after_update(lambda kl=row["kl/clamp/before"]: kl, lambda _: None)
        assert (control.own_limit, control.state.gauge.level) == (row["kl/clamp/limit"], row["kl/clamp/level"])
    assert len({row["kl/beta"] for row in rows}) > 1


# -- the bound ---------------------------------------------------------------------------------------------------------


class Enumerable:
    """A policy of three tokens in two steps: KL to its reference is a sum over all nine sequences."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.first = torch.randn(3, generator=generator, dtype=torch.float64)
        self.second = torch.randn(3, 3, generator=generator, dtype=torch.float64)
        self.reference = [x.clone() for x in self.weights]
        self.reward = torch.randn(3, 3, generator=generator, dtype=torch.float64)

    @property
    def weights(self) -> list[Tensor]:
        return [self.first, self.second]

    @staticmethod
    def logp(first: Tensor, second: Tensor) -> Tensor:
        return first.log_softmax(-1)[:, None] + second.log_softmax(-1)

    def kl(self) -> Tensor:
        """Per sequence, exact."""
        logp, ref = self.logp(*self.weights), self.logp(*self.reference)
        return (logp.exp() * (logp - ref)).sum()

    def update(self, beta: float, rate: float) -> None:
        """One step up the exact objective ``E[reward] - beta KL``."""
        leaves = [x.clone().requires_grad_() for x in self.weights]
        logp, ref = self.logp(*leaves), self.logp(*self.reference)
        objective = (logp.exp() * (self.reward - beta * (logp - ref))).sum()
        grads = torch.autograd.grad(objective, leaves)
        self.first, self.second = (x + rate * g for x, g in zip(self.weights, grads, strict=True))

    def scale(self, s: float) -> None:
        self.first, self.second = (r + s * (x - r) for x, r in zip(self.weights, self.reference, strict=True))


def steps_of(policy: Enumerable, control: Control, rate: float) -> Iterator[tuple[Control, float]]:
    """The control and the true KL after each of forty steps."""
    for _ in range(40):
        control = control.before_update(float(policy.kl()), 1.0, 9)
        policy.update(control.beta, rate)
        control = control.after_update(lambda: float(policy.kl()), policy.scale)
        yield control, float(policy.kl())


@pytest.mark.parametrize("gauge", [None, Gauge()], ids=["exact", "gauge"])
@pytest.mark.parametrize("rate", [0.3, 3.0, 300.0])
def test_no_step_passes_the_clamp_at_any_rate(rate: float, gauge: Gauge | None) -> None:
    """Where the measurement is exact the bound is a promise.

    The gauge, made for measurements that are not, allows own tokens more than fresh ones by what it has learned, and
    nothing for a step that is larger than any it learned from: KL reached 2.8 limits here where it did.
    """
    worked = 0
    for seed in range(5):
        control = Control(klamp.Hold(0.1, per="sequence"), clamp=True, gauge=gauge).init(spread=1.0)
        for after, kl in steps_of(Enumerable(seed), control, rate):
            assert kl <= 0.11 * (1 + 1e-12)
            worked += after.clamped is not None and after.clamped.effort > 0
    assert worked, "the bound was never put to the test"


def test_without_a_clamp_the_same_steps_pass_it() -> None:
    policy, control = Enumerable(0), Control(klamp.Fixed(0.0)).init()
    for _ in range(5):
        control = control.before_update(float(policy.kl()))
        policy.update(control.beta, 3.0)
        control = control.after_update()
    assert float(policy.kl()) > 0.2
    assert control.clamped is None


def test_from_elsewhere_a_step_above_the_limit_comes_no_farther() -> None:
    """Backtracking to the weights before the step, which are over the limit themselves."""
    x = [1.0]

    def scale(s: float) -> None:
        x[0] *= s

    control = Control(klamp.Fixed(0.1), clamp=0.5, gauge=None).init().before_update(1.0)
    after = control.after_update(lambda: 1 + x[0], scale, origin_kl=1.0)
    assert x[0] == 0.0
    assert after.clamped is not None
    assert after.clamped.kl_after == 1.0
    assert after.clamped.effort == pytest.approx(math.log(2) / 2), "KL 2 came back to 1"


@pytest.mark.parametrize("undone", [0.0, 1e-9, 0.5])
def test_a_step_that_is_taken_back_leaves_the_price_calm(undone: float) -> None:
    """Backtracking scales a step, and Hold hears how much nearer the reference that brought the weights."""
    hold = klamp.Hold(0.05, "token")
    control = Control(hold, clamp=0.055, gauge=None).init(spread=1.0, length=20)
    began, plain = 0.0545, hold.init(spread=1.0, length=20)
    for _ in range(12):
        x = [1.0]  # the step; all but a share of it has to go

        def kl(x: list[float] = x) -> float:
            return began + 0.004 * (1.0 if x[0] > undone else 0.0)

        def scale(s: float, x: list[float] = x) -> None:
            x[0] *= s

        control = control.before_update(began, spread=1.0).after_update(kl, scale, origin_kl=began)
        plain = hold.update(plain, began, spread=1.0)
        assert control.clamped is not None
        assert 0 < control.clamped.effort < 0.04
    assert control.beta < 1.5 * plain.beta


# -- controllers of all kinds ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Narrow:
    """A stranger's controller, written for ``update(state, kl, n)`` alone."""

    def init(self) -> klamp.State:
        return klamp.State(beta=1.0)

    def update(self, state: klamp.State, kl: float, n: int = 1) -> klamp.State:
        return replace(state, beta=state.beta + kl * n)


@dataclass(frozen=True)
class Wide(Narrow):
    """One that takes everything."""

    def update(self, state: klamp.State, kl: float, n: int = 1, **known: float) -> klamp.State:  # type: ignore[override]
        told = 10 * known["spread"] + 100 * known["noise"] + 1000 * known["signal"]
        return replace(state, beta=known["effort"] + told)


def test_a_controller_gets_what_it_takes() -> None:
    read = Control(Narrow()).init(spread=1.0, length=3.0).before_update(0.5, 2.0, 4, noise=0.25)  # type: ignore[arg-type]
    assert read.after_update().beta == 3.0
    plant = Plant(2.0)
    wide = Control(Wide(), clamp=1.0, gauge=None).init().before_update(0.5, 2.0, 4, noise=0.25, signal=0.5)  # type: ignore[arg-type]
    after = wide.after_update(plant.measure, plant.scale)
    assert after.clamped is not None
    assert after.clamped.effort > 0.6
    assert after.beta == after.clamped.effort + 20 + 25 + 500


@pytest.mark.parametrize("controller", CONTROLLERS, ids=lambda c: type(c).__name__)
def test_every_controller_takes_a_whole_reading(controller: klamp.Controller) -> None:
    """The protocol: nobody has to look at a controller's kind to know what to tell it."""
    state = controller.init(spread=1.0, length=20.0)
    after = controller.update(state, 0.04, 8, effort=0.1, spread=0.9, noise=0.2, signal=0.5)
    plain = controller.update(controller.init(), 0.04, 8)
    if not isinstance(controller, klamp.Hold):
        assert after == plain


def test_a_step_that_measured_nothing_clamps_and_leaves_the_price() -> None:
    control = step(made(CONTROLLERS[0]).init(spread=1.0, length=20.0), 0.02, 0.03)
    plant = Plant(1.0)
    after = control.before_update(None, measured=0.03, fresh=False).after_update(plant.measure, plant.scale)
    assert after.state.price == control.state.price
    assert after.state.monitor == control.state.monitor
    assert plant.measure() < 0.06


def test_the_share_of_groups_with_a_signal_reaches_the_first_price_and_the_next() -> None:
    control = Control(klamp.Hold(0.05, per="token"))
    few = control.init(spread=0.3, length=20.0, signal=0.25)
    assert few.state.price == klamp.Hold(0.05, per="token").init(spread=0.3, length=20.0, signal=0.25)
    assert few.state.price.unit == pytest.approx(0.6)  # type: ignore[union-attr]
    after = few.before_update(0.01, 0.3, signal=0.25).after_update()
    assert after.state.price.unit == pytest.approx(0.6)  # type: ignore[union-attr]
    for spread in (0.0, 6e-4):  # no group shows any: nothing to divide, and what the advantages have is rounding
        silent = after.before_update(0.01, spread, signal=0.0).after_update()
        assert silent.state.price == after.before_update(0.01, 0.0).after_update().state.price
        assert silent.state.price.unit == pytest.approx(0.6)  # type: ignore[union-attr]


def test_a_floor_is_not_steered_by() -> None:
    control = Control(klamp.Doubling(0.05, per="token")).init(floor=0.04)
    assert control.before_update(0.04).after_update().beta == 0.5, "at the floor there is no KL"
    assert control.before_update(0.05).after_update().beta == 1.0, "at the target it is the target"


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Control(0.1), "Control.controller must have init"),
        (lambda: Control(klamp.Fixed(0.1), clamp=True), "no target"),
        (lambda: Control(klamp.Fixed(0.1), clamp=-1.0), "Control.clamp must be > 0"),
        (lambda: Control(klamp.Fixed(0.1)).beta, r"control.init\(\)"),
        (lambda: Control(klamp.Fixed(0.1)).init().after_update(), r"Call before_update\(kl\) first"),
        (lambda: Control(klamp.Fixed(0.1)).before_update(0.1).after_update(), r"Call init\(\)"),
        (lambda: Control(klamp.Fixed(0.1), clamp=1.0).init().before_update(0.1).after_update(), "measure and scale"),
        (lambda: Control(klamp.Fixed(0.1)).init().before_update(torch.ones(2)), "one number"),
        (lambda: Control(klamp.Fixed(0.1)).init().before_update(0.1, 1.0, signal=-0.1), "signal must be"),
    ],
)
def test_refusals_name_the_way_out(make: Any, says: str) -> None:
    with pytest.raises(klamp.ConfigError, match=says):
        make()


def test_public_names() -> None:
    assert klamp.Control is Control
    assert klamp.ControlState().to_dict()["controller"] is None


@pytest.mark.parametrize("clamp", [None, True])
def test_the_number_of_sequences_raises_the_first_price_only_without_a_clamp(clamp: bool | None) -> None:
    control = klamp.Control(klamp.Hold(target=0.05, per="token"), clamp=clamp)
    raised = control.init(spread=1.0, length=24, n=32).beta / control.init(spread=1.0, length=24).beta
    assert raised == pytest.approx(1.0 if clamp else 2**0.5, rel=1e-12)
