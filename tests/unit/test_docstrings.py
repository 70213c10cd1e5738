"""Public functions say what they take and return: the API reference is made of these docstrings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import klamp
from klamp import kernels, objectives, trust


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


@pytest.mark.parametrize("name", ["k1", "k2", "k3", "exact", "in_reward", "in_advantage", "in_loss", "sequence_exact"])
def test_the_formula_is_on_line_one(name: str) -> None:
    assert inspect.getdoc(getattr(klamp, name)).startswith("``")


def test_every_public_name_is_in_the_api_reference() -> None:
    pages = "".join(p.read_text(encoding="utf-8") for p in (Path(__file__).parents[2] / "docs" / "api").glob("*.md"))
    shown = set(re.findall(r"^::: klamp\.(\w+)$", pages, re.M))
    assert set(klamp.__all__) - shown == set()
