"""The monitor: each alarm when it should, once, again only after it was clear; and never a crash on a bad figure."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from klamp import Alarm, ConfigError, Limits, Monitor

settings.register_profile("steady", deadline=None)  # a busy machine is no failure
settings.load_profile("steady")

NAN = float("nan")


def feed(monitor: Monitor, kls: list[float], start: int = 0, **more: float) -> list[Alarm]:
    return [alarm for i, kl in enumerate(kls, start) for alarm in monitor.record(i, kl=kl, **more)]  # type: ignore[arg-type]


def kinds(alarms: list[Alarm]) -> list[str]:
    return [alarm.kind for alarm in alarms]


def test_a_run_on_target_is_silent() -> None:
    monitor = Monitor(0.1, "token", bounds=(1e-4, 10.0))
    ramp = [0.1 * min(1.0, (i / 40) ** 2) for i in range(300)]
    quiet = [a for i, kl in enumerate(ramp) for a in monitor.record(i, kl=kl, beta=0.1, estimates={"k3": 1.1 * kl})]
    assert quiet == []
    assert monitor.in_band == 1.0


def test_drifting_is_raised_once_and_again_only_after_it_was_well_below() -> None:
    monitor = Monitor(0.1, "token", window=10)
    alarms = feed(monitor, [0.1] * 10 + [0.25] * 30)
    assert kinds(alarms) == ["drifting"]
    assert alarms[0].figures == {"kl": pytest.approx((3 * 0.1 + 7 * 0.25) / 10), "target": 0.1}, "over 0.2 with seven"
    assert feed(monitor, [0.19] * 30) == [], "0.19 is under the line but not well under it"
    assert feed(monitor, [0.25] * 30) == []
    assert feed(monitor, [0.1] * 30) == []
    assert kinds(feed(monitor, [0.25] * 30)) == ["drifting"]


def test_drifting_names_the_figures_and_what_to_do() -> None:
    (alarm,) = feed(Monitor(0.1, "token", window=10), [0.3] * 10)
    assert alarm.kind == "drifting"
    assert alarm.step == 4, "five steps are enough to believe a mean"
    assert alarm.figures == {"kl": pytest.approx(0.3), "target": 0.1}
    for part in ("0.3", "per token", "last 5 steps", "3.0 times", "0.1", "Lower the learning rate or clamp"):
        assert part in alarm.message


def test_not_learning_waits_for_the_warm_up() -> None:
    limits = Limits(warmup=30)
    alarms = feed(Monitor(0.1, "token", limits=limits), [0.01] * 60)
    assert kinds(alarms) == ["not_learning"]
    assert alarms[0].step == 30
    assert feed(Monitor(0.1, "token", limits=limits), [0.01] * 30) == []
    assert feed(Monitor(0.1, "token", limits=limits), [0.06] * 60) == []


def test_spike() -> None:
    monitor = Monitor(0.1, "token")
    assert feed(monitor, [0.1] * 20) == []
    (alarm,) = feed(monitor, [0.51])
    assert (alarm.kind, alarm.figures) == ("spike", {"kl": 0.51, "median": 0.1})
    assert feed(monitor, [0.1] * 5) == []
    assert feed(Monitor(0.1, "token"), [0.001] * 20 + [0.11]) == [], "a climb to the target is no spike"
    assert kinds(feed(Monitor(0.1, "token"), [0.001] * 20 + [0.13])) == ["spike"]
    assert kinds(feed(Monitor(), [0.001] * 20 + [0.02])) == ["spike"], "without a target there is no other scale"
    assert feed(Monitor(), [0.0] * 20 + [0.02]) == []


def test_non_finite_steps_stay_out_of_the_window_however_many_there_are() -> None:
    monitor = Monitor(0.1, "token")
    feed(monitor, [0.1] * 10)
    alarms = feed(monitor, [NAN, math.inf, NAN, -math.inf])
    assert kinds(alarms) == ["non_finite"]
    assert "kl is nan" in alarms[0].message
    assert monitor.mean() == pytest.approx(0.1)
    assert monitor.steps == 14
    assert feed(monitor, [0.1]) == []
    assert kinds(monitor.record(99, kl=0.1, beta=NAN)) == ["non_finite"]
    json.dumps(alarms[0].to_dict(), allow_nan=False)


def test_beta_at_its_bound_does_not_flap() -> None:
    monitor = Monitor(bounds=(0.01, 1.0))
    assert monitor.record(0, kl=0.1, beta=0.5) == []
    assert kinds(monitor.record(1, kl=0.1, beta=1.0)) == ["beta_at_bound"]
    for beta in (0.99, 1.0, 0.98, 1.0):
        assert monitor.record(2, kl=0.1, beta=beta) == []
    assert monitor.record(3, kl=0.1, beta=0.5) == []
    assert kinds(monitor.record(4, kl=0.1, beta=0.01)) == ["beta_at_bound"]
    assert Monitor().record(0, kl=0.1, beta=0.0) == []


def test_estimators_disagreeing_are_compared_on_the_same_steps() -> None:
    def run(other: float, target: float | None = None, kl: float = 0.1) -> list[str]:
        monitor = Monitor(target, "token")
        return kinds([a for i in range(20) for a in monitor.record(i, kl=kl, estimates={"k3": other})])

    assert run(0.16) == []
    assert run(0.3) == ["estimators_disagree:k3"]
    assert run(0.04) == ["estimators_disagree:k3"]
    assert run(-1e-6, target=0.1, kl=1e-9) == [], "at the reference both are noise"
    sparse = Monitor()
    for i in range(20):
        has = {"k3": 0.9} if i >= 15 else None
        assert sparse.record(i, kl=0.9 if i >= 15 else 0.3, estimates=has) == []


def test_sampler_gap_and_the_clamps_effort() -> None:
    assert kinds(feed(Monitor(), [0.1] * 10, sampler_kl=-0.02)) == ["sampler_gap"]
    assert feed(Monitor(), [0.1] * 10, sampler_kl=0.005) == []
    noisy = Monitor()
    assert [a for i in range(60) for a in noisy.record(i, kl=0.1, sampler_kl=0.03 * (-1) ** i)] == []
    assert kinds(feed(Monitor(), [0.1] * 10, effort=0.2)) == ["clamp_works_hard"]
    assert feed(Monitor(), [0.1] * 10, effort=0.0) == []


def test_no_target_and_beta_zero_still_measure() -> None:
    monitor = Monitor()
    assert feed(monitor, [0.1] * 200 + [0.3] * 200, beta=0.0) == []
    assert monitor.in_band is None
    assert monitor.mean("beta") == 0.0
    assert monitor.mean("nothing") is None
    assert len(monitor.window) == 100


@pytest.mark.parametrize("window", [1, 2, 3])
def test_a_short_window_is_a_short_window(window: int) -> None:
    monitor = Monitor(0.1, "token", window=window, limits=Limits(spike=100.0))
    assert kinds(feed(monitor, [0.1] * 5 + [0.5] * window)) == ["drifting"]
    assert len(monitor.window) == window


def test_in_band_is_the_share_within_a_fifth_of_the_target() -> None:
    monitor = Monitor(0.1, "token")
    feed(monitor, [0.081, 0.119, 0.121, 0.079])
    assert monitor.in_band == 0.5


def test_alarms_reach_the_callback_and_the_log_once(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[Alarm] = []
    with caplog.at_level(logging.WARNING, logger="klamp.monitor"):
        raised = feed(Monitor(0.1, "token", callback=heard.append), [0.3] * 50)
    assert heard == raised
    assert len(caplog.records) == len(raised) == 1
    assert heard[0].message in caplog.text


def test_jsonl_is_strict_json_with_the_alarms_beside_their_step(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "run.jsonl"
    monitor = Monitor(0.1, "token", path=path)
    monitor.record(0, kl=torch.tensor(0.125), beta=0.2, estimates={"k3": 0.11}, reward=1.5)  # type: ignore[arg-type]
    monitor.record(1, kl=NAN, beta=0.2)

    def refuse(text: str) -> float:
        raise AssertionError(f"{text} is not JSON")

    lines = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    assert lines[0] == {"step": 0, "kl": 0.125, "beta": 0.2, "kl/k3": 0.11, "reward": 1.5}
    assert lines[1]["kl"] == "nan"
    assert [a["kind"] for a in lines[1]["alarms"]] == ["non_finite"]
    with pytest.raises(ConfigError, match="cannot be written"):
        Monitor(path=path / "x.jsonl").record(0, kl=0.1)


@given(
    kls=st.lists(st.one_of(st.floats(0, 1), st.sampled_from([NAN, math.inf, -0.1, 30.0])), min_size=1, max_size=60),
    data=st.data(),
)
def test_resume_is_invisible(kls: list[float], data: st.DataObject) -> None:
    def fresh() -> Monitor:
        return Monitor(0.1, "token", window=7, limits=Limits(warmup=10))

    straight, first, second = fresh(), fresh(), fresh()
    cut = data.draw(st.integers(0, len(kls)))
    logging.getLogger("klamp.monitor").setLevel(logging.ERROR)
    want = feed(straight, kls)
    got = feed(first, kls[:cut])
    second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    got += feed(second, kls[cut:], start=cut)
    logging.getLogger("klamp.monitor").setLevel(logging.NOTSET)
    assert [a.to_dict() for a in got] == [a.to_dict() for a in want]
    assert second.state_dict() == straight.state_dict()
