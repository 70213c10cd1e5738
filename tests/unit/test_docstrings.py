"""Public functions say what they take and return: the API reference is made of these docstrings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import klamp
from klamp import kernels, local_backend, objectives, trust


def functions() -> dict[str, Callable[..., Any]]:
    """Every public function of the library floor, by its full name."""
    found = {f"klamp.{name}": getattr(klamp, name) for name in klamp.__all__}
    for module in (objectives, trust, kernels):
        names = getattr(module, "__all__", [n for n in vars(module) if not n.startswith("_")])
        found |= {f"{module.__name__}.{n}": getattr(module, n) for n in names}
    return {n: f for n, f in found.items() if inspect.isfunction(f) and f.__module__.startswith("klamp")}


FUNCTIONS = functions()
BESIDE = {"matches", "same_shape", "wide", "as_mask", "select", "require_number", "unknown"}
"""Helpers that these modules import."""


@pytest.mark.parametrize("name", [n for n in FUNCTIONS if n.rpartition(".")[2] not in BESIDE])
def test_every_argument_and_the_result_are_described(name: str) -> None:
    text = inspect.getdoc(FUNCTIONS[name]) or ""
    described = re.search(r"^Args:\n((?:    .*\n|\n)+)", text + "\n", re.M)
    assert described is not None, "no Args"
    groups = re.findall(r"^    ([a-z_0-9]+(?:, [a-z_0-9]+)*):", described.group(1), re.M)
    names = {n for group in groups for n in group.split(", ")}
    assert names == set(inspect.signature(FUNCTIONS[name]).parameters)
    assert "\nReturns:\n" in text or "-> None" in str(inspect.signature(FUNCTIONS[name]))


def methods() -> dict[str, Callable[..., Any]]:
    """Every public method with arguments of the public classes, by its full name."""
    classes = {n: getattr(klamp, n) for n in klamp.__all__} | {
        n: getattr(local_backend, n) for n in local_backend.__all__
    }
    found = {}
    for name, cls in classes.items():
        for method, value in vars(cls).items() if inspect.isclass(cls) else ():
            function = getattr(value, "__func__", value)
            if inspect.isfunction(function) and not method.startswith("_") and method not in PROMISED.get(cls, ()):
                found[f"{name}.{method}"] = function
    return {n: f for n, f in found.items() if set(inspect.signature(f).parameters) - {"self", "cls"}}


RULES = (klamp.Fixed, klamp.Scheduled, klamp.Ziegler, klamp.Exponential, klamp.Doubling, klamp.Hold)
PROMISED = dict.fromkeys(RULES, ("init", "update", "preset")) | {klamp.HoldState: ("retargeted",)}
"""Methods whose arguments are described once, by :class:`klamp.Controller` and :class:`klamp.State`, or in one line."""
METHODS = methods()


@pytest.mark.parametrize("name", METHODS)
def test_every_argument_of_a_method_is_described(name: str) -> None:
    text = inspect.getdoc(METHODS[name]) or ""
    described = text.partition("Args:\n")[2].partition("\nReturns:")[0]
    groups = re.findall(r"^    (\**[a-z_0-9]+(?:, [a-z_0-9]+)*):", described, re.M)
    names = {n.lstrip("*") for group in groups for n in group.split(", ")}
    assert names == set(inspect.signature(METHODS[name]).parameters) - {"self", "cls"}
    assert "Returns:\n" in text or inspect.signature(METHODS[name]).return_annotation in (None, "None")


@pytest.mark.parametrize("name", ["k1", "k2", "k3", "exact", "in_reward", "in_advantage", "in_loss", "sequence_exact"])
def test_the_formula_is_on_line_one(name: str) -> None:
    assert inspect.getdoc(getattr(klamp, name)).startswith("``")


def test_every_public_name_is_in_the_api_reference() -> None:
    pages = "".join(p.read_text(encoding="utf-8") for p in (Path(__file__).parents[2] / "docs" / "api").glob("*.md"))
    shown = set(re.findall(r"^::: klamp\.(\w+)$", pages, re.M))
    assert set(klamp.__all__) - shown == set()
