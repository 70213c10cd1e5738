"""Every refusal is a ConfigError that names the field, the value it was given and the way out."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

import klamp
from klamp import ConfigError, KlampError
from klamp.compat import AdaptiveKLController, FixedKLController, get_kl_controller
from klamp.errors import require_number, unknown

Z = torch.zeros(2, 3)
NAN = float("nan")
STEERING = [klamp.Hold, klamp.Ziegler, klamp.Exponential, klamp.Doubling]

ESTIMATORS = [
    (lambda: klamp.estimator("k33"), ("estimator", "'k33'", "Did you mean 'k3'")),
    (lambda: klamp.estimator("exact+"), ("exact+", "'exact'", "k3")),
    (lambda: klamp.weighted("exact", Z, Z, Z), ("weighted", "'exact'", "k3")),
    (lambda: klamp.weighted("k1", Z, Z, Z, tail=5.0), ("tail", "'k1'", "Leave tail out")),
    (lambda: klamp.weighted("k2", Z, Z, torch.zeros(3)), ("(2, 3)", "(3,)", "broadcast")),
    (lambda: klamp.weighted("k2", Z, Z.double(), Z), ("old_logp", "float64", "same dtype")),
    (lambda: klamp.k1(Z, torch.zeros(2, 4)), ("logp (2, 3)", "ref_logp (2, 4)", "broadcast")),
    (lambda: klamp.k1(Z, torch.zeros(1, 3)), ("logp (2, 3)", "ref_logp (1, 3)", "broadcast")),
    (lambda: klamp.k3(Z, Z.bfloat16()), ("float32", "bfloat16", "same dtype")),
    (lambda: klamp.exact(Z, Z.double()), ("logits", "float64", "same dtype")),
    (lambda: klamp.k3(Z.long(), Z.long()), ("logp", "int64", "log-probabilities")),
    (lambda: klamp.k3([0.1], torch.zeros(1)), ("logp", "list", "as_tensor")),
    (lambda: klamp.k3(Z, Z, tail=-1), ("tail", "-1", "5.0")),
    (lambda: klamp.k2(Z, Z, tail=NAN), ("tail", "nan", "5.0")),
    (lambda: klamp.k3_clamped(Z, Z, limit=0), ("limit", "0", "10")),
    (lambda: klamp.top_k_exact(Z, Z, torch.zeros(2)), ("tokens", "float32", "integer")),
    (lambda: klamp.top_k_exact(Z, Z, torch.zeros(2).long(), k=0), ("k", "0", "k1")),
    (lambda: klamp.straight_through(Z, klamp.k1), ("straight_through", "one of each", "Call")),
    (lambda: klamp.straight_through(Z, torch.zeros(3)), ("value (2, 3)", "gradient (3,)", "broadcast")),
]
MEANS = [
    (lambda: klamp.mean(Z, per="tokens"), ("per", "'tokens'", "Did you mean 'token'")),
    (lambda: klamp.mean(Z, per=None), ("per", "missing", "per='sequence'")),
    (lambda: klamp.mean(Z, torch.ones(3)), ("mask (3,)", "(2, 3)", "broadcast")),
    (lambda: klamp.mean(Z, [True]), ("mask", "list", "as_tensor")),
    (lambda: klamp.mean(Z[0], per="sequence"), ("'sequence'", "(3,)", "batch dimension")),
    (lambda: klamp.mean(Z.long()), ("x", "int64", "floating-point")),
]
PLACEMENTS = [
    (lambda: klamp.in_loss(Z, -0.1), ("beta", "-0.1", "never negative")),
    (lambda: klamp.in_loss(Z, NAN), ("beta", "nan", "0 only measures")),
    (lambda: klamp.in_loss(Z, torch.ones(2)), ("beta", "(2,)", "Weigh kl")),
    (lambda: klamp.in_loss(Z, 0.1, count=-1), ("count", "-1", "number of counted tokens")),
    (lambda: klamp.in_reward(torch.zeros(2), Z, 0.1), ("rewards (2,)", "kl (2, 3)", "broadcast")),
    (lambda: klamp.in_reward(Z, Z.long(), 0.1), ("kl", "int64", "floating-point")),
    (lambda: klamp.in_advantage(Z, Z, 0.1, centre="bach"), ("centre", "'bach'", "Did you mean 'batch'")),
    (lambda: klamp.in_advantage(Z, Z, 0.1, centre="none", mean=0.1), ("mean=0.1", "centre='none'", "one of them")),
    (lambda: klamp.in_advantage(Z, Z, 0.1, mean=torch.zeros(2, 1)), ("mean", "(2, 1)", "broadcast")),
    (lambda: klamp.sequence_exact(Z[0], 0.1), ("sequence_exact", "(3,)", "batch dimension")),
    (lambda: klamp.sequence_exact(Z, 0.1, old_logp=Z), ("old_logp", "without logp", "Pass both")),
    (lambda: klamp.sequence_exact(Z, 0.1, logp=Z, old_logp=Z.double()), ("old_logp", "float64", "same dtype")),
    (lambda: klamp.sequence_exact(Z, 0.1, logp=Z[:1], old_logp=Z[:1]), ("kl (2, 3)", "logp (1, 3)", "broadcast")),
    (lambda: klamp.sequence_exact(Z, 0.1, logp=Z, old_logp=Z, max_weight=0), ("max_weight", "0", "None")),
    (lambda: klamp.sequence_exact(Z, 0.1, objective="ratios"), ("objective", "'ratios'", "'ratio'")),
    (lambda: klamp.sequence_exact(Z, 0.1, baseline="positon"), ("baseline", "'positon'", "'position'")),
    (lambda: klamp.sequence_exact(Z, 0.1, baseline=Z[:1]), ("kl (2, 3)", "baseline (1, 3)", "broadcast")),
    (lambda: klamp.check("k4", "in_loss"), ("estimator", "'k4'", "Did you mean 'k")),
    (lambda: klamp.check("k1", "in_los"), ("placement", "'in_los'", "Did you mean 'in_loss'")),
    (lambda: klamp.check("k1", "in_loss"), ("'k1'", "'in_loss'", "Use exact, k2")),
]
CONTROLLERS = [
    (lambda: klamp.Fixed(-1.0), ("Fixed.beta", "-1.0", "never negative")),
    (lambda: klamp.Fixed(NAN), ("Fixed.beta", "nan", "0 only measures")),
    (lambda: klamp.Fixed("x"), ("Fixed.beta", "'x'", "number")),
    (lambda: klamp.Fixed(True), ("Fixed.beta", "True", "number")),
    (lambda: klamp.Scheduled(0.1), ("Scheduled.schedule", "0.1", "Fixed(beta=")),
    (lambda: klamp.Scheduled(lambda t: -1.0).init(), ("Scheduled.schedule(0)", "-1.0", "never negative")),
    (lambda: klamp.Ziegler(1.0, "token", horizon=0), ("Ziegler.horizon", "0", "10000")),
    (lambda: klamp.Ziegler(1.0, "token", horizon=-5), ("Ziegler.horizon", "-5", "sequences")),
    (lambda: klamp.Ziegler(1.0, "token", max_error=0), ("Ziegler.max_error", "0", "0.2")),
    (lambda: klamp.Exponential(1.0, "token", gain=0), ("Exponential.gain", "0", "0.1")),
    (lambda: klamp.Doubling(1.0, "token", factor=1.0), ("Doubling.factor", "1.0", "PPO uses 2")),
    (lambda: klamp.Doubling(1.0, "token", tolerance=0.5), ("Doubling.tolerance", "0.5", "1.5")),
    (lambda: klamp.Hold.preset("moderat"), ("Hold.preset", "'moderat'", "Did you mean 'moderate'")),
    (lambda: klamp.Hold(0.1, "token").init(spread=1.0), ("length", "missing", "length=...")),
    (lambda: klamp.Hold(0.1, "token").init(spread=-1.0, length=9), ("spread", "-1.0", "spread")),
    (lambda: klamp.Hold(0.1, "token").update(klamp.State(0.1), 0.1), ("HoldState", "State(beta=0.1", "init()")),
    (lambda: klamp.Hold(0.1, "token").update(klamp.State(0.1), NAN), ("HoldState", "State(beta=0.1", "init()")),
    (lambda: klamp.Stateful(klamp.Hold(0.1, "token"), klamp.State(0.1)), ("HoldState", "State(beta=0.1", "init()")),
    (lambda: klamp.Fixed(0.1).update(klamp.Hold(0.1, "token").init(), 0.1), ("be a State", "HoldState(", "init()")),
    (lambda: klamp.Stateful(klamp.Fixed(0.1)).update(), ("current=None", "current_kl=None", "Pass either")),
    (lambda: klamp.Stateful(klamp.Fixed(0.1)).update("x"), ("kl", "'x'", "klamp.mean")),
    (lambda: klamp.State.from_dict({"kind": "Nope", "beta": 1.0}), ("kind", "'Nope'", "init()")),
    (lambda: klamp.State.from_dict({"kind": "State", "beta": 1.0}), ("fields", "['beta']", "init()")),
    (lambda: klamp.State.from_dict({**klamp.State(1.0).to_dict(), "beta": NAN}), ("State.beta", "nan", "init()")),
    (lambda: klamp.State.from_dict({**klamp.State(1.0).to_dict(), "beta": None}), ("State.beta", "None", "init()")),
    (lambda: klamp.Ziegler(1.0, "token").update(klamp.State(0.1), 1.0, n=-3), ("n", "-3", "number of sequences")),
    (lambda: AdaptiveKLController(0.1, 0.0, 100), ("target", "0.0", "Fixed")),
    (lambda: AdaptiveKLController(0.1, 6.0, 0), ("horizon", "0", "10000")),
    (lambda: FixedKLController(-0.1), ("beta", "-0.1", "never negative")),
    (lambda: get_kl_controller(-0.1, 6.0), ("init_beta", "-0.1", "Fixed")),
    (lambda: klamp.Monitor(target=0.1), ("Monitor.per", "missing", "per='token'")),
    (lambda: klamp.Monitor(target=-1, per="token"), ("Monitor.target", "-1", "Leave it out")),
    (lambda: klamp.Monitor(window=0), ("Monitor.window", "0", "100")),
    (lambda: klamp.Monitor(bounds=(2.0, 1.0)), ("Monitor.bounds", "(2.0, 1.0)", "Swap")),
]
for _kind in STEERING:
    _name = _kind.__name__
    CONTROLLERS += [
        (lambda k=_kind: k(0.1), (f"{_name}.per", "missing", "per='token'")),
        (lambda k=_kind: k(0.1, "tokn"), (f"{_name}.per", "'tokn'", "Did you mean 'token'")),
        (lambda k=_kind: k(0.0, "token"), (f"{_name}.target", "0.0", "Fixed(beta=...)")),
        (lambda k=_kind: k(-2.0, "sequence"), (f"{_name}.target", "-2.0", "per sequence")),
        (lambda k=_kind: k(NAN, "token"), (f"{_name}.target", "nan", "Fixed(beta=...)")),
        (lambda k=_kind: k(math.inf, "token"), (f"{_name}.target", "inf", "Fixed(beta=...)")),
        (lambda k=_kind: k("0.05", "token"), (f"{_name}.target", "'0.05'", "must be a number")),
        (lambda k=_kind: k(0.1, "token").update(None, 0.1), ("state", "None", "init()")),
        (lambda k=_kind: k(0.1, "token").update({"beta": 0.1}, 0.1), ("state", "{'beta': 0.1}", "init()")),
        (lambda k=_kind: k(0.1, "token", init_beta=-0.1), (f"{_name}.init_beta", "-0.1", ".")),
        (lambda k=_kind: k(0.1, "token", init_beta=0.0), (f"{_name}.init_beta", "0.0", ".")),
        (lambda k=_kind: k(0.1, "token", bounds=(10.0, 1e-4)), (f"{_name}.bounds", "(10.0, 0.0001)", "Swap")),
        (lambda k=_kind: k(0.1, "token", bounds=(-1.0, 5.0)), (f"{_name}.bounds[0]", "-1.0", "never negative")),
        (lambda k=_kind: k(0.1, "token", bounds=(0.1, NAN)), (f"{_name}.bounds[1]", "nan", "highest price")),
        (lambda k=_kind: k(0.1, "token", bounds=(0.1, "b")), (f"{_name}.bounds[1]", "'b'", "highest price")),
        (lambda k=_kind: k(0.1, "token", bounds=5.0), (f"{_name}.bounds", "5.0", "(low, high)")),
        (lambda k=_kind: k(0.1, "token", init_beta=3.0, bounds=(0.1, 2.0)), (f"{_name}.init_beta", "3.0", "Widen")),
        (lambda k=_kind: (c := k(0.1, "token")).update(c.init(), None), ("kl", "None", "klamp.mean")),
        (lambda k=_kind: (c := k(0.1, "token")).update(c.init(), Z), ("kl", "tensor", "klamp.mean")),
    ]


@pytest.mark.parametrize(("call", "says"), [*ESTIMATORS, *MEANS, *PLACEMENTS, *CONTROLLERS])
def test_the_message_names_field_value_and_way_out(call: Callable[[], object], says: tuple[str, str, str]) -> None:
    with pytest.raises(ConfigError) as error:
        call()
    message = str(error.value)
    assert [part for part in says if part not in message] == [], message
    assert "\n" not in message


def test_a_config_error_is_a_value_error_and_klamps_own() -> None:
    assert issubclass(ConfigError, ValueError)
    assert issubclass(ConfigError, KlampError)


def test_unknown_names_no_neighbour_when_there_is_none() -> None:
    message = str(unknown("shape", "zzzzzz", ["square", "circle"]))
    assert "Did you mean" not in message
    assert "circle, square" in message


@pytest.mark.parametrize("value", [1, 1.5, "2.5", torch.tensor(3.0)])
def test_require_number_takes_what_is_a_number(value: object) -> None:
    assert require_number("x", value, above=0, way_out="") == float(value)  # type: ignore[arg-type]


def test_require_number_holds_both_kinds_of_limit() -> None:
    assert require_number("x", 0, at_least=0, way_out="") == 0
    with pytest.raises(ConfigError, match="> 0"):
        require_number("x", 0, above=0, way_out="")
    with pytest.raises(ConfigError, match=">= 0"):
        require_number("x", -1e-300, at_least=0, way_out="")
