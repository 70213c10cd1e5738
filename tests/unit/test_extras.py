"""``pip install klamp`` alone: whatever needs an extra names it in one line, and every import has its extra."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import klamp
from klamp.errors import EXTRAS, MissingExtra, needing

SOURCE = Path(klamp.__file__).parent
WITH_TORCH = {"torch", "tyro", "rich", "filelock"}
"""Packages of a bare install: klamp's own dependencies, and what torch brings."""
OPTIONAL = {"triton", "deepspeed", "verl", "art", "openai"}
"""Used where they are found, or the host or client of whoever calls klamp; never asked for."""
DISTRIBUTION = {"yaml": "pyyaml"}
BROUGHT = {"huggingface_hub": "transformers", "datasets": "trl", "markupsafe": "jinja2", "starlette": "fastapi"}
"""Packages that come with one that the extra names."""

BARE = """
import contextlib, io, sys
sys.modules.update(dict.fromkeys({hidden!r}))  # None there: an import of it fails as if it were not installed
from klamp.cli import main

for command in {commands!r}:
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        code = main(command.split())
    print(command.split()[0], code, said.getvalue().strip(), sep="|")
for statement in {imports!r}:
    try:
        exec(statement)
    except ImportError as error:
        print(statement, type(error).__name__, error, sep="|")
"""

COMMANDS = [
    "train --steps 1",
    "compare",
    "sweep --over optim.lr=1e-4,1e-3",
    "report x",
    "measure --policy tiny --reference tiny",
]
IMPORTS = [
    "import klamp.local_backend",
    "import klamp.integrations.trl",
    "from klamp import LocalBackend",
    "from klamp import measure_kl, train_policy",
]


def test_without_extras_every_command_and_import_names_the_one_it_needs() -> None:
    script = BARE.format(hidden=set(EXTRAS), commands=COMMANDS, imports=IMPORTS)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = [line.split("|") for line in done.stdout.splitlines()]
    assert [words[0] for words in said] == [command.split()[0] for command in COMMANDS] + IMPORTS
    for what, code, message in said[: len(COMMANDS)]:
        assert code == "2"
        assert message.startswith(f"klamp: {what} needs ")
        extras = "[train]" if what in ("train", "measure") else "[train,report]"
        assert message.endswith(f"which is not installed. pip install 'klamp{extras}'.")
    for what, kind, message in said[len(COMMANDS) :]:
        assert kind == "MissingExtra"
        assert "pip install 'klamp[train,trl]'" in message if "trl" in what else "pip install 'klamp[train]'" in message
    assert "NumPy" not in done.stderr


def test_a_package_that_is_no_extras_stays_a_bare_error() -> None:
    with pytest.raises(ModuleNotFoundError) as raised, needing("this"):
        import a_package_of_nobody  # type: ignore[import-not-found]  # noqa: F401
    assert not isinstance(raised.value, MissingExtra)


def imported(tree: ast.AST) -> set[str]:
    """The packages that a file imports at run time, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(str(node.module).partition(".")[0])
    return found


def test_every_import_of_klamp_is_a_dependency_or_has_an_extra() -> None:
    found: set[str] = set()
    for file in SOURCE.rglob("*.py"):
        found |= imported(ast.parse(file.read_text(encoding="utf-8")))
    strangers = found - set(sys.stdlib_module_names) - {"klamp"}
    assert strangers - WITH_TORCH - OPTIONAL <= set(EXTRAS), "add it to klamp.errors.EXTRAS and to pyproject.toml"


def test_every_extra_brings_its_packages() -> None:
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for package, extra in EXTRAS.items():
        named = [line.lower() for line in project["optional-dependencies"][extra]]
        name = BROUGHT.get(package, DISTRIBUTION.get(package, package)).lower()
        assert any(line.startswith((f"{name}>", f"{name}=", f"{name}<")) for line in named), f"{extra} lacks {name}"
