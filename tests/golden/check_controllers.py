"""Coefficient sequences: ROLL, trlx, verl and OpenRLHF share a rule and are met to the last bit; the tutorial's too."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import recipes
import torch
from vectors import Case, checks

import klamp
from klamp.compat import AdaptiveKLController, ExponentialKLController, FixedKLController, get_kl_controller

# What klamp does where a defect is recorded: the reason it gives, or what it does better.
REFUSED_WHEN_MADE = {"hazard_init_zero": "init_beta", "hazard_zero_target": "target", "hazard_zero_horizon": "horizon"}
REFUSED_AT_THE_STEP = {"hazard_negative_coef"}
BETTER = {"hazard_nan_kl"}


def follow(controller: klamp.Stateful, kls: list[float], n_steps: list[int]) -> list[float]:
    """The coefficient after each update."""
    values = []
    for kl, n in zip(kls, n_steps, strict=True):
        controller.update(kl, n)
        values.append(controller.value)
    return values


@checks("roll_controller.json", "controller")
@checks("trlx_controller.json", "controller")
@checks("verl_controller.json", "controller")
@checks("openrlhf.json", "controller")
def adaptive(case: Case) -> None:
    if case.hazard:
        return hazard(case)
    given = case.inputs
    controller = AdaptiveKLController(given["init"], given["target"], given["horizon"])
    case.same("value", follow(controller, given["kl"], given["n_steps"]))
    return None


def hazard(case: Case) -> None:
    """Refused when the controller is made, refused at the step that would break it, or a NaN that leaves no trace."""
    given, name = case.inputs, case.raw["id"]
    settings = (given["init"], given["target"], given["horizon"])
    recorded = case.read("raises" if "raises" in case.unread else "value")
    if name in REFUSED_WHEN_MADE:
        with pytest.raises(klamp.ConfigError, match=REFUSED_WHEN_MADE[name]):
            AdaptiveKLController(*settings)
    elif name in REFUSED_AT_THE_STEP:
        controller = AdaptiveKLController(*settings)
        with pytest.raises(klamp.ConfigError, match="never negative"):
            follow(controller, given["kl"], given["n_steps"])
        assert controller.value == given["init"]
    else:
        assert name in BETTER
        steps_over_nan(AdaptiveKLController(*settings), given, recorded)


def steps_over_nan(controller: AdaptiveKLController, given: dict, recorded: list[float]) -> None:
    """To the last bit the record before the NaN; after it, the sequence without the NaN, not NaN for ever."""
    finite = [i for i, kl in enumerate(given["kl"]) if math.isfinite(kl)]
    first = next(i for i, kl in enumerate(given["kl"]) if not math.isfinite(kl))
    twin = AdaptiveKLController(given["init"], given["target"], given["horizon"])
    values = follow(controller, given["kl"], given["n_steps"])
    without = follow(twin, [given["kl"][i] for i in finite], [given["n_steps"][i] for i in finite])
    assert values[:first] == recorded[:first]
    assert [values[i] for i in finite] == without
    assert all(math.isnan(v) for v in recorded[first:])
    assert controller.state.skipped == len(values) - len(finite) > 0


@checks("roll_controller.json", "controller_factory")
def roll_factory(case: Case) -> None:
    given = case.inputs
    for made in (get_kl_controller, klamp.kl_controller):
        controller = made(given["init"], given["target"], given["horizon"])
        case.same("adaptive", isinstance(controller, AdaptiveKLController))
        assert isinstance(controller, AdaptiveKLController if given["target"] is not None else FixedKLController)
        case.same("value", follow(controller, given["kl"], given["n_steps"]))


@checks("verl_controller.json", "controller_factory")
def verl_factory(case: Case) -> None:
    given = case.inputs
    config = SimpleNamespace(
        type=given["type"], kl_coef=given["init"], target_kl=given["target"], horizon=given["horizon"]
    )
    case.same("value", follow(recipes.verl_get_kl_controller(config), given["kl"], given["n_steps"]))


@checks("verl_controller.json", "factory_raises")
def verl_factory_raises(case: Case) -> None:
    """Refused here as there, by a ConfigError that says how to go on."""
    assert case.read("raises") in ("AssertionError", "NotImplementedError")
    with pytest.raises(klamp.ConfigError, match=r"horizon|kl_ctrl\.type"):
        recipes.verl_get_kl_controller(SimpleNamespace(**case.inputs))


@checks("tutorial.json", "controller")
def tutorial(case: Case) -> None:
    given = case.inputs
    controller = ExponentialKLController(given["init"], given["target"])
    values = [controller.update(torch.tensor(kl, dtype=getattr(torch, case.dtype))) for kl in given["kl"]]
    case.close("value", torch.tensor(values, dtype=torch.float64))
    case.same("at_lower_clamp", sum(v == 1e-4 for v in values))
    case.same("at_upper_clamp", sum(v == 10.0 for v in values))


@checks("tutorial.json", "controller_raises")
def tutorial_python_float(case: Case) -> None:
    """Better: a Python float is taken like a tensor, and gives what the tensor gives."""
    case.same("raises", "TypeError")
    given = case.inputs
    by_float, by_tensor = (ExponentialKLController(given["init"], given["target"]) for _ in range(2))
    for kl in given["kl"]:
        expected = by_float.value * math.exp(0.1 * (kl - given["target"]))
        assert by_float.update(kl) == by_tensor.update(torch.tensor(kl, dtype=torch.float64))
        assert by_float.value == pytest.approx(expected, rel=1e-12)
