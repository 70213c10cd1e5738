"""CONTRIBUTING.md says where to change what: each file that it names exists, each folder of the source is on it."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`((?:src|tests|docs|examples)/[\w./-]*)`", TEXT)))


def test_every_path_that_the_map_names_exists() -> None:
    missing = [path for path in NAMED if not (ROOT / path).exists()]
    assert missing == [], "moved? change CONTRIBUTING.md too"


def test_the_map_has_rows_with_a_place_and_a_test() -> None:
    rows = re.findall(r"^\| (.+) \| (`src/.+) \| (`tests/.+`) \|$", TEXT, re.M)
    assert len(rows) >= 15


def test_every_folder_of_the_source_is_on_the_map() -> None:
    folders = {p.name for p in (ROOT / "src" / "klamp").iterdir() if (p / "__init__.py").is_file()}
    assert {name for name in folders if f"src/klamp/{name}/" not in TEXT} == set()


def test_one_batch_is_followed_through_the_files() -> None:
    steps = re.findall(r"^\d+\. (?:.*\n(?:   .*\n)*)", TEXT[TEXT.index("## One batch") :], re.M)
    assert len(steps) >= 8
    assert all("`src/klamp/" in step for step in steps)
