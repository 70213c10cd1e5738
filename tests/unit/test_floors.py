"""The versions that pyproject.toml promises are those that ``make test-lowest`` installs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def floors() -> dict[str, str]:
    """name -> lowest version, of klamp's dependencies and the extras that the tests of `make test-lowest` have."""
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *extras["train"], *extras["report"]]
    found = dict(re.match(r"([\w.-]+)>=([\d.]+)", line).groups() for line in lines if not line.startswith("klamp["))  # type: ignore[union-attr]
    return {name.lower(): version for name, version in found.items()}


def pinned() -> dict[str, str]:
    lines = (ROOT / "constraints-lowest.txt").read_text(encoding="utf-8").splitlines()
    return {name.lower(): version for name, _, version in (line.partition("==") for line in lines if "==" in line)}


def test_every_floor_is_the_version_that_is_tested() -> None:
    tested = pinned()
    for name, version in floors().items():
        assert name in tested, f"constraints-lowest.txt lacks {name}=={version}"
        assert (tested[name] + ".").startswith(version + "."), f"{name}: {version} promised, {tested[name]} tested"
