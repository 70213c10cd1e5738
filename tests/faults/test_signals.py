"""SIGTERM and Ctrl-C at exact points: the step is finished, saved and left with the usual code; twice, left at once.

The process under test signals itself in the middle of sampling, training or saving (``phases.py``), so where a signal
arrives is no matter of luck.
"""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from nursery import Child, Nursery

from klamp.references.spec import folder_of, saved_steps
from klamp.train.config import RewardConfig
from klamp.train.run_folder import damage, read_jsonl
from unbroken import assert_same, left_by

pytestmark = pytest.mark.slow

STEPS = 10
OURS = {"reward": RewardConfig(functions=("phases:reward",)), "save_every": 4}
TERM, INT = int(signal.SIGTERM), int(signal.SIGINT)


def run(nursery: Nursery, file: Path, place: Path, plan: dict[str, Any] | None = None) -> Child:
    (place / "phases.json").unlink(missing_ok=True)
    if plan is not None:
        (place / "phases.json").write_text(json.dumps(plan))
    return nursery.klamp("train", "--config", file, "--resume", cwd=place)


def written(folder: Path) -> list[int]:
    return [row["step"] for row in read_jsonl(folder / "metrics.jsonl")]


def ends_as(nursery: Nursery, file: Path, place: Path, whole: Path) -> None:
    """Resumed, it is the run that was never signalled."""
    child = run(nursery, file, place)
    assert child.wait() == 0, child.said
    assert_same(left_by(place / "asked", STEPS), left_by(whole, STEPS))


# Every step draws 6 tokens at most, makes one update, and every fourth saves.
PLACES = {"sampling": 14, "training": 3, "reward": 3, "saving": 1}


@pytest.mark.parametrize(("at", "number"), [*((at, TERM) for at in PLACES), ("sampling", INT)])
def test_a_signal_finishes_the_step_saves_it_and_leaves(
    nursery: Nursery, write: Any, straight: Any, tmp_path: Path, at: str, number: int
) -> None:
    file, place = write("asked", **OURS), tmp_path
    child = run(nursery, file, place, {"at": at, "call": PLACES[at], "signals": [number]})
    assert child.wait() == 128 + number, child.said
    assert "Traceback" not in child.said
    steps = written(place / "asked")
    assert steps == list(range(1, len(steps) + 1))
    assert 1 <= len(steps) < STEPS
    newest = max(saved_steps(place / "asked"))
    assert newest == steps[-1], "the step at hand is saved, whatever save_every says"
    assert damage(folder_of(place / "asked", newest)) is None
    ends_as(nursery, file, place, straight(**OURS))


@pytest.mark.parametrize("at", ["sampling", "training", "saving", "sealed"])
def test_twice_leaves_at_once_and_harms_no_checkpoint(
    nursery: Nursery, write: Any, straight: Any, tmp_path: Path, at: str
) -> None:
    """In the second save, or the step before it: what the first one saved is whole and nothing else has its name."""
    file, place = write("asked", **OURS), tmp_path
    calls = {"sampling": 40, "training": 7, "saving": 2, "sealed": 2}
    child = run(nursery, file, place, {"at": at, "call": calls[at], "signals": [INT, INT]})
    assert child.wait() == 130, child.said
    assert "Traceback" not in child.said
    assert saved_steps(place / "asked") == [4]
    assert damage(folder_of(place / "asked", 4)) is None
    assert written(place / "asked")[-1] >= 4
    ends_as(nursery, file, place, straight(**OURS))


def test_the_second_one_does_not_wait_for_a_reward_that_hangs(nursery: Nursery, write: Any, tmp_path: Path) -> None:
    place = tmp_path
    child = run(nursery, write("asked", **OURS), place, {"at": "reward", "call": 2, "signals": [INT], "sleep": 600})
    until = time.monotonic() + 60
    while not (place / "reached").is_file():
        assert time.monotonic() < until
        time.sleep(0.01)
    time.sleep(0.3)
    assert child.poll() is None, "the first one lets the step finish"
    child.signal(signal.SIGINT)
    assert child.wait(60) == 130, child.said
    assert written(place / "asked") == [1]


def test_before_the_first_step_there_is_nothing_to_save(nursery: Nursery, write: Any, tmp_path: Path) -> None:
    """While the run is being made: a line and the usual code, no traceback, and the folder is not taken."""
    file, place = write("asked", **OURS), tmp_path
    child = run(nursery, file, place, {"at": "starting", "call": 1, "signals": [INT]})
    assert child.wait() == 130, child.said
    assert "Nothing was saved yet: the same command begins again." in child.said
    assert len(child.said.splitlines()) == 1
    child = run(nursery, file, place, {"at": "starting", "call": 1, "signals": [TERM]})
    assert child.wait() == -signal.SIGTERM, child.said
    assert not (place / "asked").exists()
