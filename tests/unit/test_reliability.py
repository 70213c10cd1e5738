"""docs/reliability.md: every promise names its test, every test it names exists, and none of faults goes unnamed."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
NAMED = set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE))


def held_in(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_every_test_it_names_exists() -> None:
    assert NAMED
    missing = [f"{file}::{name}" for file, name in sorted(NAMED) if name not in held_in(file)]
    assert not missing


def test_every_promise_names_a_test() -> None:
    tables = re.findall(r"^\| what .*\| tested by \|\n\| --- .*\n((?:\| .*\n)+)", PAGE, re.MULTILINE)
    promises = [line for table in tables for line in table.splitlines()]
    assert len(promises) > 60
    assert not [line for line in promises if not re.search(r"`tests/[\w/]+\.py::\w+`", line)]


def test_every_test_of_faults_and_of_hostile_input_is_named() -> None:
    files = [f"tests/{k}/{f.name}" for k in ("faults", "hostile") for f in (ROOT / "tests" / k).glob("test_*.py")]
    held = {(file, name) for file in files for name in held_in(file)}
    assert held <= NAMED, sorted(held - NAMED)
