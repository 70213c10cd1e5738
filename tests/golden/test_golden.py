"""Every recorded case of every system, and that none of them, and no field of them, is passed over."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from fnmatch import fnmatch
from typing import Any

import check_controllers
import check_groups
import check_placements
import check_tokens
import pytest
from vectors import CHECKS, Case, cases, files, load

CHECKED_BY = (check_controllers, check_groups, check_placements, check_tokens)  # importing them fills CHECKS
ALL = list(cases())
EXEMPT = {"grad_full": "with respect to a whole vocabulary", "ends": "trlx's bookkeeping"}

# What klamp does where a defect of the original is recorded.
HAZARDS = {
    "*/hazard_init_zero": "refused when made: a product never leaves 0",
    "*/hazard_zero_target": "refused when made",
    "*/hazard_zero_horizon": "refused when made",
    "*/hazard_negative_coef": "refused at the step, and the coefficient stays",
    "*/hazard_nan_kl": "better: the NaN is counted and stepped over",
    "roll_kl/full_2d_*": "refused: the shapes of KL and mask differ",
    "art/ignored_nan_*_pr562": "better: the counted tokens alone decide",
    "art/ignored_nan_*_kl_penalty_source": "better: the counted tokens alone decide",
    "tutorial/controller_python_float": "better: a float is as good as a tensor",
}


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.id)
def test_recorded_case(case: Case) -> None:
    CHECKS[case.file, case.kind](case)
    assert not case.unread, f"{case.id}: recorded and not compared: {sorted(case.unread)}"


@pytest.mark.parametrize("file", files())
def test_every_case_of_the_file_is_checked(file: str) -> None:
    vectors = load(file)
    mine = [case for case in ALL if case.file == file]
    assert vectors["format"] == "kl-golden/1"
    assert len(mine) == len({case.id for case in mine}) == vectors["n_cases"] > 0
    assert {(file, case.kind) for case in mine} <= set(CHECKS)


def test_klamps_answer_to_every_hazard_is_stated() -> None:
    for case in ALL:
        answers = [text for pattern, text in HAZARDS.items() if fnmatch(case.id, pattern)]
        assert len(answers) == (1 if case.hazard else 0), case.id


def numbers_in(outputs: Any, path: tuple = ()) -> Iterator[tuple]:
    """The paths to the recorded numbers, one for each named field: its largest."""
    named = outputs.items() if isinstance(outputs, dict) else enumerate(outputs)
    for key, value in named:
        if key in EXEMPT:
            continue
        if isinstance(value, dict) or (isinstance(value, list) and value and isinstance(value[0], dict)):
            yield from numbers_in(value, (*path, key))
        elif where := largest(value):
            yield (*path, key, *where[1])


def largest(value: Any) -> tuple[float, tuple] | None:
    """The largest number at any depth of nested lists, with its place."""
    if isinstance(value, list):
        found = [(inner[0], (i, *inner[1])) for i, v in enumerate(value) if (inner := largest(v))]
        return max(found, default=None)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return (abs(value), ()) if is_number else None


def recorded_in(raw: dict[str, Any]) -> Iterator[tuple]:
    """The paths to recorded numbers of a case, its steps and its chunks."""
    if "outputs" in raw:
        yield from numbers_in(raw["outputs"], ("outputs",))
    for part in ("steps", "chunks"):
        for i, step in enumerate(raw.get(part, ())):
            yield from numbers_in(step["outputs"], (part, i, "outputs"))


def changed(raw: dict[str, Any], path: tuple) -> dict[str, Any]:
    """The case with one recorded number off by 1 %, or 1 instead of 0."""
    raw = copy.deepcopy(raw)
    place: Any = raw
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = place[path[-1]] * 1.01 or 1.0
    return raw


FIRST = list({(case.file, case.kind): case for case in reversed(ALL) if not case.hazard}.values())
NUMBERS = [(case, path) for case in FIRST for path in recorded_in(case.raw)]


@pytest.mark.parametrize(("case", "path"), NUMBERS, ids=[f"{c.id}:{'.'.join(map(str, p))}" for c, p in NUMBERS])
def test_a_changed_record_is_noticed(case: Case, path: tuple) -> None:
    with pytest.raises(AssertionError):
        CHECKS[case.file, case.kind](Case(case.file, changed(case.raw, path)))
