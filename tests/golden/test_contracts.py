"""The contract of every controller class that klamp replaces: how it is made, what is read, how it is called, when."""

from __future__ import annotations

import copy
import inspect
import json
import pickle
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import recipes
import torch

import klamp
from klamp.compat import AdaptiveKLController, ExponentialKLController, FixedKLController, get_kl_controller

KLS = [0.02, 0.3, 0.11, 0.04, 2.0, -0.01]
VERL = SimpleNamespace(type="adaptive", kl_coef=0.2, target_kl=0.1, horizon=1_000)

Made = Callable[[], klamp.Stateful]
Called = Callable[[klamp.Stateful, float, int], object]
# How each system makes its controller, and how its loop calls it.
CONTRACTS: dict[str, tuple[Made, Called]] = {
    "ROLL": (
        lambda: get_kl_controller(init_kl_coef=0.2, target_kl=0.1, kl_horizon=1_000),
        lambda c, kl, n: c.update(current=kl, n_steps=n),
    ),
    "trlx": (lambda: AdaptiveKLController(0.2, 0.1, 1_000), lambda c, kl, n: c.update(kl, n_steps=n)),
    "verl": (lambda: recipes.verl_get_kl_controller(VERL), lambda c, kl, n: c.update(current_kl=kl, n_steps=n)),
    "OpenRLHF": (lambda: AdaptiveKLController(0.2, 0.1, 1_000), lambda c, kl, n: c.update(kl, n)),
    "SkyRL": (
        lambda: AdaptiveKLController(init_kl_coef=0.2, target=0.1, horizon=1_000),
        lambda c, kl, n: c.update(current=kl, n_steps=n),
    ),
}
ANY: dict[str, Made] = {
    "Fixed": lambda: klamp.Stateful(klamp.Fixed(0.2)),
    "Ziegler": lambda: klamp.Stateful(klamp.Ziegler(0.1, per="sequence_mean")),
    "Exponential": lambda: klamp.Stateful(klamp.Exponential(0.1, per="token")),
    "Doubling": lambda: klamp.Stateful(klamp.Doubling(0.1, per="sequence")),
    "Hold": lambda: klamp.Stateful(klamp.Hold(0.1, per="sequence_mean")),
    "kl_controller": lambda: klamp.kl_controller(0.2, 0.1),
}


def parameters(f: Callable) -> list[str]:
    return list(inspect.signature(f).parameters)


def ziegler(values: list[float], n: int) -> list[float]:
    """The rule as all five systems have it."""
    beta, betas = 0.2, []
    for kl in values:
        beta *= 1 + min(max(kl / 0.1 - 1, -0.2), 0.2) * n / 1_000
        betas.append(beta)
    return betas


def test_the_parameters_have_the_names_that_callers_use() -> None:
    assert parameters(FixedKLController) == ["kl_coef"]
    assert parameters(get_kl_controller) == ["init_kl_coef", "target_kl", "kl_horizon"]
    assert parameters(klamp.kl_controller) == ["init_kl_coef", "target", "horizon"]
    assert parameters(ExponentialKLController) == ["init_kl_coef", "target_kl", "horizon"]
    assert parameters(AdaptiveKLController)[:3] == ["init_kl_coef", "target", "horizon"]
    assert parameters(klamp.Stateful.update)[1:] == ["current", "n_steps", "current_kl"]


@pytest.mark.parametrize("system", CONTRACTS)
def test_it_is_read_first_and_updated_afterwards(system: str) -> None:
    made, call = CONTRACTS[system]
    controller, applied, after = made(), [], []
    for kl in KLS:
        applied.append(controller.value)
        assert call(controller, kl, 64) is None
        after.append(controller.value)
    assert applied == [0.2, *after[:-1]]
    assert after == ziegler(KLS, 64)


@pytest.mark.parametrize("system", CONTRACTS)
def test_its_settings_can_be_read(system: str) -> None:
    settings = CONTRACTS[system][0]().controller
    assert (settings.init_beta, settings.target, settings.horizon, settings.max_error) == (0.2, 0.1, 1_000, 0.2)


@pytest.mark.parametrize("system", CONTRACTS)
@pytest.mark.parametrize("name", ANY)
def test_any_controller_answers_to_every_call(name: str, system: str) -> None:
    _, call = CONTRACTS[system]
    controller, plain = ANY[name](), ANY[name]()
    for kl in KLS:
        call(controller, kl, 8)
        plain.update(kl, 8)
        assert controller.value == plain.value
        assert type(controller.value) is float


@pytest.mark.parametrize("name", ANY)
@pytest.mark.parametrize("kind", [np.float32, np.float64, torch.tensor, lambda x: torch.tensor([x])])
def test_a_kl_is_a_number_of_any_kind(name: str, kind: Callable[[float], object]) -> None:
    controller, plain = ANY[name](), ANY[name]()
    controller.update(kind(0.25), np.int64(8))
    plain.update(0.25, 8)
    assert controller.value == plain.value


@pytest.mark.parametrize("name", ANY)
def test_no_kl_or_two_of_them_are_refused(name: str) -> None:
    controller = ANY[name]()
    with pytest.raises(klamp.ConfigError, match="one KL"):
        controller.update(n_steps=8)
    with pytest.raises(klamp.ConfigError, match="one KL"):
        controller.update(0.1, 8, current_kl=0.1)
    with pytest.raises(klamp.ConfigError, match="one number"):
        controller.update(torch.zeros(2), 8)


@pytest.mark.parametrize("name", ANY)
@pytest.mark.parametrize("through", [copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))])
def test_it_travels_between_processes(name: str, through: Callable[[klamp.Stateful], klamp.Stateful]) -> None:
    here = ANY[name]()
    here.update(0.3, 8)
    there = through(here)
    for controller in (here, there):
        controller.update(0.05, 8)
    assert there.value == here.value


@pytest.mark.parametrize("name", ANY)
def test_it_is_saved_as_json_and_resumes_to_the_bit(name: str) -> None:
    straight, first, second = (ANY[name]() for _ in range(3))
    for i, kl in enumerate(KLS * 3):
        straight.update(kl, 8)
        (first if i < 7 else second).update(kl, 8)
        if i == 6:
            second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.value == straight.value
    assert second.state == straight.state


def test_fixed_is_fixed_and_measures() -> None:
    controller = FixedKLController(kl_coef=0.05)
    for kl in KLS:
        controller.update(current=kl, n_steps=1_000_000)
    assert controller.value == 0.05
    assert controller.state.updates == len(KLS)
    assert get_kl_controller(0.0).value == 0.0


def test_the_tutorials_update_returns_the_coefficient() -> None:
    controller = ExponentialKLController()
    assert (controller.value, controller.kl_coef, controller.horizon) == (0.1, 0.1, 100)
    for kl in (0.3, torch.tensor(0.3)):
        assert controller.update(kl) == controller.value == controller.kl_coef
    assert controller.update(current_kl=0.3) > 0.1


@pytest.mark.parametrize("change", [{"type": "pid"}, {"horizon": 0}, {"target_kl": 0.0}, {"kl_coef": -0.1}])
def test_what_verl_should_refuse_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(klamp.ConfigError):
        recipes.verl_get_kl_controller(SimpleNamespace(**vars(VERL) | change))
