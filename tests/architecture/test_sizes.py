"""A file is at most 400 lines long, a function at most 60; train/ has at most 15 modules; no two have one name."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import klamp

ROOT = Path(klamp.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
FILE, FUNCTION, ROOM = 400, 60, 15


def longer(path: Path, root: Path = ROOT) -> set[str]:
    """The file, if it is too long, and its functions that are, by name."""
    text, name = path.read_text(encoding="utf-8"), path.relative_to(root).as_posix()
    found = {name} if len(text.splitlines()) > FILE else set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            found |= {f"{name}:{node.name}"} if node.end_lineno - node.lineno >= FUNCTION else set()
    return found


def test_files_and_functions_are_short() -> None:
    assert not {name for path in FILES for name in longer(path)}


@pytest.mark.parametrize(("lines", "too_long"), [(60, False), (61, True)])
def test_a_function_is_measured_from_its_def_to_its_last_line(lines: int, too_long: bool, tmp_path: Path) -> None:
    (tmp_path / "some.py").write_text("def f():\n" + "    pass\n" * (lines - 1), encoding="utf-8")
    assert longer(tmp_path / "some.py", tmp_path) == ({"some.py:f"} if too_long else set())


def test_the_room_of_training_is_not_crowded() -> None:
    assert len([p for p in FILES if p.parent.name == "train" and p.name != "__init__.py"]) <= ROOM


def test_a_name_stands_for_one_module() -> None:
    """``batch.py`` in three folders says in none of them what it holds."""
    names = [path.stem for path in FILES if not path.stem.startswith("__")]
    assert sorted({name for name in names if names.count(name) > 1}) == []
