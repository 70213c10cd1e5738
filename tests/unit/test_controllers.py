"""Controllers: laws by hand, resume to the bit, bounds for any sequence, and the direction they push."""

from __future__ import annotations

import copy
import json
import math
import pickle
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

import klamp
from klamp import ConfigError, Doubling, Exponential, Fixed, Hold, Scheduled, State, Stateful, Ziegler

settings.register_profile("steady", deadline=None)  # a busy machine is no failure
settings.load_profile("steady")


def ramp(step: int) -> float:
    return 0.01 * step


BOUNDS = (0.01, 5.0)
CONTROLLERS: dict[str, Any] = {
    "fixed": Fixed(0.3),
    "scheduled": Scheduled(ramp),
    "ziegler": Ziegler(0.1, "token", horizon=500),
    "ziegler bounded": Ziegler(0.1, "token", horizon=500, bounds=BOUNDS),
    "exponential": Exponential(0.1, "token", gain=2.0, bounds=BOUNDS),
    "doubling": Doubling(0.1, "token", bounds=BOUNDS),
    "hold": Hold(0.1, "token", bounds=BOUNDS),
    "hold per sequence": Hold(6.0, "sequence"),
}
BOUNDED = {k: c for k, c in CONTROLLERS.items() if getattr(c, "bounds", None)}
STEERING = [c for c in CONTROLLERS.values() if hasattr(c, "target")]
ANY = st.one_of(
    st.floats(-2, 20), st.floats(), st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -0.0, 1e308, -1e308, 5e-324])
)


def run(controller: Any, kls: list[float], n: int = 8, state: State | None = None) -> State:
    state = controller.init() if state is None else state
    for kl in kls:
        state = controller.update(state, kl, n)
    return state


@pytest.mark.parametrize("name", CONTROLLERS)
@given(kls=st.lists(ANY, min_size=1, max_size=30), data=st.data())
def test_resume_is_invisible(name: str, kls: list[float], data: st.DataObject) -> None:
    controller = CONTROLLERS[name]
    straight = run(controller, kls)
    cut = data.draw(st.integers(0, len(kls)))
    saved = run(controller, kls[:cut]).to_json()
    json.loads(saved, parse_constant=lambda x: pytest.fail(f"{x} is not JSON"))
    again = run(controller, kls[cut:], state=State.from_json(saved))
    assert again == straight
    assert type(again) is type(straight)
    assert again.to_json() == straight.to_json()


@pytest.mark.parametrize("name", BOUNDED)
@given(kls=st.lists(ANY, max_size=60), n=st.integers(0, 100))
def test_bounded_controllers_stay_in_bounds_for_any_sequence(name: str, kls: list[float], n: int) -> None:
    controller = BOUNDED[name]
    low, high = controller.bounds
    state = controller.init()
    for kl in kls:
        state = controller.update(state, kl, n)
        assert low <= state.beta <= high


@pytest.mark.parametrize("name", CONTROLLERS)
@given(kls=st.lists(ANY, max_size=20), bad=st.sampled_from([math.nan, math.inf, -math.inf]))
def test_a_kl_that_is_no_number_is_counted_and_changes_nothing_else(name: str, kls: list[float], bad: float) -> None:
    controller = CONTROLLERS[name]
    before = run(controller, kls)
    after = controller.update(before, bad, 8)
    assert after.skipped == before.skipped + 1
    assert {**after.to_dict(), "skipped": 0} == {**before.to_dict(), "skipped": 0}
    assert before == run(controller, kls), "update must not change the state it was given"
    assert before.updates + before.skipped == len(kls)


@pytest.mark.parametrize("name", CONTROLLERS)
def test_prices_are_positive_finite_floats_after_long_extremes(name: str) -> None:
    controller = CONTROLLERS[name]
    for kl in (1e9, -1e9, 0.0):
        state = run(controller, [kl] * 3000)
        assert isinstance(state.beta, float)
        assert math.isfinite(state.beta)
        assert state.beta > 0
        back = run(controller, [-kl if kl else 1e9] * 3000, state=state)
        assert name in ("fixed", "scheduled") or back.beta != state.beta, "it must find its way back"


@pytest.mark.parametrize("controller", STEERING, ids=repr)
def test_tensors_of_one_are_numbers(controller: Any) -> None:
    a = run(controller, [0.3] * 5)
    b = run(controller, [torch.tensor(0.3, dtype=torch.float64)] * 5)  # type: ignore[list-item]
    assert a == b
    assert isinstance(b.beta, float)
    b.to_json()


@given(kl=st.floats(0, 1e6), beta=st.floats(0.011, 4.9), n=st.integers(1, 400))
def test_ziegler_and_exponential_rise_above_the_target_and_fall_below_it(kl: float, beta: float, n: int) -> None:
    for controller in (CONTROLLERS["ziegler bounded"], CONTROLLERS["exponential"], CONTROLLERS["ziegler"]):
        after = controller.update(State(beta), kl, n).beta
        if abs(kl / controller.target - 1) < 1e-9:  # nearer than that the change rounds to nothing
            assert after == pytest.approx(beta)
        else:
            assert (after > beta) == (kl > controller.target)
            assert (after < beta) == (kl < controller.target)


@pytest.mark.parametrize("hold", [Hold(0.1, "token"), Hold(6.0, "sequence"), Hold(0.004, "sequence_mean")], ids=repr)
@pytest.mark.parametrize("init_beta", [0.01, 0.1, 3.0])
def test_hold_ends_higher_at_twice_the_target_and_lower_at_half(hold: Hold, init_beta: float) -> None:
    hold = Hold(hold.target, hold.per, init_beta=init_beta)
    assert run(hold, [2 * hold.target] * 200).beta > 1.05 * init_beta
    assert run(hold, [0.5 * hold.target] * 200).beta < init_beta / 1.05


def test_hold_is_scale_free() -> None:
    kls = [0.02, 0.05, 0.2, 0.4, 0.3, 0.15, 0.1, 0.09, 0.11] * 5
    one = run(Hold(0.1, "token"), kls)
    other = run(Hold(6.0, "sequence"), [60 * kl for kl in kls])
    assert one.beta == pytest.approx(other.beta, rel=1e-9)


@pytest.mark.parametrize("controller", STEERING, ids=repr)
def test_negative_kl_of_a_noisy_estimator_counts_as_low(controller: Any) -> None:
    state = run(controller, [-0.05 * controller.target] * 50)
    assert state.beta <= controller.init().beta
    assert state.updates == 50


def test_ziegler_by_hand() -> None:
    z = Ziegler(6.0, "sequence", init_beta=0.2, horizon=10_000)
    assert z.update(State(0.2), 6.6, 256).beta == pytest.approx(0.2 * (1 + 0.1 * 256 / 10_000), rel=1e-12)
    assert z.update(State(0.2), 600.0, 256).beta == pytest.approx(0.2 * (1 + 0.2 * 256 / 10_000), rel=1e-12)
    assert z.update(State(0.2), 0.0, 256).beta == pytest.approx(0.2 * (1 - 0.2 * 256 / 10_000), rel=1e-12)
    assert z.update(State(0.2), 6.0, 256).beta == 0.2
    assert Ziegler(6.0, "sequence", max_error=0.5).update(State(0.2), 12.0, 100).beta == pytest.approx(0.2 * 1.005)


def test_ziegler_refuses_a_step_that_would_turn_the_price_over_and_nothing_smaller() -> None:
    z = Ziegler(6.0, "sequence", horizon=100)
    with pytest.raises(ConfigError, match="below horizon / max_error = 500"):
        z.update(z.init(), 0.0, n=500)
    assert 0 < z.update(z.init(), 0.0, n=499).beta < 0.01
    assert z.update(z.init(), 60.0, n=10**9).beta > 1  # upwards any n will do


def test_exponential_by_hand() -> None:
    e = Exponential(0.1, "token")
    assert e.update(State(0.1), 0.6).beta == pytest.approx(0.1 * math.exp(0.05), rel=1e-12)
    assert e.update(State(0.1), 0.0).beta == pytest.approx(0.1 * math.exp(-0.01), rel=1e-12)
    assert e.update(State(0.1), 1e300).beta == 10.0
    assert e.update(State(0.1), -1e300).beta == 1e-4


def test_doubling_by_hand() -> None:
    d = Doubling(0.1, "token", init_beta=1.0)
    betas = [d.update(State(1.0), kl).beta for kl in (0.151, 0.15, 0.1, 0.067, 0.066)]
    assert betas == [2.0, 1.0, 1.0, 1.0, 0.5]


def test_fixed_and_scheduled() -> None:
    assert run(Fixed(0.0), [0.1, 9.0]).beta == 0.0
    assert run(Scheduled(ramp), [0.1] * 7) == State(0.07, updates=7)
    assert run(Scheduled(ramp), [0.1, math.nan, 0.1]) == State(0.02, updates=2, skipped=1)


@pytest.mark.parametrize(("name", "target"), [("conservative", 0.02), ("moderate", 0.08), ("aggressive", 0.15)])
def test_presets(name: str, target: float) -> None:
    preset = Hold.preset(name)
    assert (preset.target, preset.per) == (target, "token")


def test_hold_starts_on_the_safe_side_of_the_small_tilt_price() -> None:
    assert Hold(6.0, "sequence").init(spread=2.0).beta == pytest.approx(2 / math.sqrt(12), rel=1e-9)
    told = Hold(0.05, "token").init(spread=1.0, length=100)
    assert told.beta == pytest.approx(1 / math.sqrt(2 * 5.0), rel=1e-9)
    assert Hold(0.05, "token", init_beta=0.3).init().beta == 0.3


@pytest.mark.parametrize("name", CONTROLLERS)
def test_settings_and_states_are_frozen_values(name: str) -> None:
    controller = CONTROLLERS[name]
    state = run(controller, [0.2, 0.3])
    assert copy.deepcopy(state) == state == pickle.loads(pickle.dumps(state))
    assert pickle.loads(pickle.dumps(controller)) == controller
    with pytest.raises(AttributeError):
        state.beta = 1.0  # type: ignore[misc]
    with pytest.raises(AttributeError):
        controller.target = 1.0


@pytest.mark.parametrize("name", CONTROLLERS)
def test_stateful_is_the_pure_controller_with_its_state(name: str) -> None:
    controller = CONTROLLERS[name]
    kls = [0.05, 0.4, math.nan, 0.2]
    one = Stateful(controller)
    for kl in kls:
        one.update(torch.tensor(kl, dtype=torch.float64), n_steps=8)
    assert one.state == run(controller, kls)
    assert one.value == one.state.beta
    other = Stateful(controller)
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    one.update(0.3, 8)
    other.update(current_kl=0.3, n_steps=8)
    assert other.state == one.state
    assert copy.deepcopy(one).state == one.state


def test_stateful_refuses_a_state_of_another_kind() -> None:
    with pytest.raises(ConfigError, match="HoldState"):
        Stateful(Hold(0.1, "token")).load_state_dict(Stateful(Fixed(0.1)).state_dict())
    with pytest.raises(ConfigError, match="HoldState"):
        Stateful(Fixed(0.1)).load_state_dict(Stateful(Hold(0.1, "token")).state_dict())


def test_every_controller_keeps_the_protocol() -> None:
    kinds = {type(c) for c in CONTROLLERS.values()}
    others = {klamp.Controller, State, klamp.HoldState, klamp.Target, Stateful}
    assert kinds == {getattr(klamp, name) for name in klamp.controllers.__all__} - others


# A target is one value


@pytest.mark.parametrize("kind", [Hold, Ziegler, Exponential, Doubling])
def test_a_target_with_its_unit_is_the_two_arguments(kind: Any) -> None:
    whole, apart = kind(klamp.Target(0.05, per="token")), kind(0.05, per="token")
    assert whole == apart
    assert (whole.target, whole.per) == (0.05, "token")
    assert whole.update(whole.init(), 0.2, 8) == apart.update(apart.init(), 0.2, 8)
    assert kind(klamp.Target(0.05, per="token"), per="token") == apart
    with pytest.raises(ConfigError, match=f"{kind.__name__}.per is 'sequence', and the target is 0.05 nats per token"):
        kind(klamp.Target(0.05, per="token"), per="sequence")


def test_a_target_goes_to_the_monitor_too_and_is_checked_when_it_is_made() -> None:
    monitor = klamp.Monitor(klamp.Target(0.05, per="token"))
    assert (monitor.target, monitor.per) == (0.05, "token")
    assert str(klamp.Target(6, per="sequence")) == "6 nats per sequence"
    for bad in ({"kl": 0.0, "per": "token"}, {"kl": "0.05", "per": "token"}, {"kl": 0.05, "per": "word"}):
        with pytest.raises(ConfigError, match="Target"):
            klamp.Target(**bad)
    with pytest.raises(TypeError):
        klamp.Target(0.05)  # type: ignore[call-arg]
