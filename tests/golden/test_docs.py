"""docs/coming-from.md says what the tests check: its code is the recipes, its snippets run, its names exist."""

from __future__ import annotations

import builtins
import inspect
import re
import sys
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace

import pytest
import recipes
import torch

import klamp
from klamp import compat

PAGE = (Path(__file__).parents[2] / "docs" / "coming-from.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
RECIPES = {k: f for k, f in vars(recipes).items() if isinstance(f, FunctionType) and f.__module__ == recipes.__name__}
SYSTEMS = ("ROLL", "trlx", "ART", "The PPO tutorial", "TRL", "verl", "OpenRLHF")


@pytest.mark.parametrize("name", RECIPES)
def test_the_page_shows_the_code_that_is_tested(name: str) -> None:
    assert inspect.getsource(RECIPES[name]).strip() in PAGE


def test_the_page_shows_no_recipe_that_is_not_tested() -> None:
    shown = PAGE[PAGE.index("## The compositions in full") :]
    assert set(re.findall(r"^def (\w+)\(", shown, re.MULTILINE)) == set(RECIPES)


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_system_has_settings_and_defects(system: str) -> None:
    section = PAGE.split(f"\n## {system}\n")[1].split("\n## ")[0]
    assert "| setting (default) | exactly, in klamp |" in section
    assert "| defect | klamp |" in section


def surroundings() -> dict[str, object]:
    """What a snippet finds around it: the objects of the framework that it is pasted into."""
    trainer = SimpleNamespace(beta=0.04, kl_ctl=compat.FixedKLController(0.1), reward_kl_controller=None)
    return {"trainer": trainer, "pipeline": SimpleNamespace(kl_ctrl=None), **vars(recipes)}


@pytest.fixture
def core_algos(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A stand-in for verl's module of that name, so that the snippet for it runs without verl."""
    modules = {name: ModuleType(name) for name in ("verl", "verl.trainer", "verl.trainer.ppo")}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    modules["verl.trainer.ppo"].core_algos = ModuleType("verl.trainer.ppo.core_algos")
    return modules["verl.trainer.ppo"].core_algos


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_every_snippet_runs(block: str, core_algos: ModuleType) -> None:
    names = surroundings()
    exec(compile(block, "coming-from.md", "exec"), names)
    for put in re.findall(r"^((?:trainer|pipeline)\.\w+) = ", block, re.MULTILINE):
        replaced(eval(put, names))
    if "core_algos.get_kl_controller = " in block:
        config = SimpleNamespace(type="hold", kl_coef=0.001, target_kl=0.1, horizon=10_000)
        replaced(core_algos.get_kl_controller(config))
    if "trainer.beta = " in block:
        for _ in range(20):
            names["on_step_end"]([1e3, 1e3])
        assert names["trainer"].beta == names["control"].value > 0.04


def replaced(controller: klamp.Stateful) -> None:
    """It serves every calling convention, and the price rises above the target."""
    start = controller.value
    for _ in range(20):
        controller.update(current=1e3, n_steps=8)
    assert controller.value > start


SPACES = (klamp, compat, recipes, klamp.Hold, torch.Tensor, builtins)
KNOWN = {name for space in SPACES for name in dir(space)}
THEIRS = {"compute_kl_penalty", "AdaptiveKLController", "compute_reward"}
SPANS = {
    span
    for table in re.findall(r"\| setting \(default\).*?\n\n", PAGE, re.DOTALL)
    for row in table.splitlines()
    for span in re.findall(r"`([^`]+)`", row.partition(" | ")[2])
}


@pytest.mark.parametrize("span", sorted(SPANS))
def test_every_function_in_a_table_exists(span: str) -> None:
    called = set(re.findall(r"(\w+)\(", span))
    assert called - THEIRS <= KNOWN, called - THEIRS - KNOWN
