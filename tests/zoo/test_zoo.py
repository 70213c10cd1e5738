"""Families of models, small and random: right to 1e-5 against plain transformers, or refused in one line.

``results.json`` is what ``python tests/zoo/record.py`` found; the table of docs/models.md is written from it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers
from compare import Found, looked_at
from families import FAMILIES
from packaging.version import Version
from record import DOCS, kept, table

from klamp.sampling.families import FAST

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("one_thread")]
RECORDED = Version("5.22")
"""The transformers that the record is of; an older one may lack what a family needs, and is refused then."""
FEW = [("llama", False), ("mistral", True), ("gemma3_text", False), ("qwen3_5_text", False), ("bert", False)]
"""In every run of the tests, with whether all weights train; the others in ``make test-all``."""


def agrees(name: str, found: Found) -> None:
    assert not found.wrong(), f"{name}: {found.figures}"
    assert "\n" not in found.why
    if found.why and Version(transformers.__version__) < RECORDED:
        pytest.skip(f"this transformers cannot: {found.why}")
    recorded = kept()[name]
    assert found.way == recorded["way"], f"{name} {found.why}: record it anew with python tests/zoo/record.py"
    assert bool(found.why) == bool(recorded["why"])


@pytest.mark.parametrize(("name", "full"), FEW)
def test_some_families(name: str, full: bool, tmp_path: Path) -> None:
    agrees(name, looked_at(name, tmp_path, full=full))


@pytest.mark.slow
@pytest.mark.parametrize("full", [False, True], ids=["lora", "full"])
@pytest.mark.parametrize("name", list(FAMILIES))
def test_a_family_is_right_or_refused(name: str, full: bool, tmp_path: Path) -> None:
    agrees(name, looked_at(name, tmp_path, full=full))


def test_the_table_of_the_docs_is_the_record() -> None:
    assert set(kept()) == set(FAMILIES)
    assert table(kept()) in DOCS.read_text(encoding="utf-8"), "python tests/zoo/record.py --table"
    right = [name for name, found in kept().items() if found["way"] != "refused"]
    assert len(right) >= 30
    static = {FAMILIES[name].get("model_type", name) for name, found in kept().items() if found["way"] == "static"}
    assert static == FAST, "a family decodes by the static cache because it was looked at here"
