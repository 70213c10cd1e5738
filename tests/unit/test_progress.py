"""Where there is no terminal an experiment prints a line now and then."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from klamp import progress
from klamp.cli import main
from klamp.cli.experiments import refuse_fields
from klamp.experiments import sweep
from klamp.progress import Lines, Progress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which the test moves."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_an_experiment_in_a_pipe_prints_a_line_now_and_then(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    shown = Progress()
    with shown.live("compare", 100, already=20):
        for step in range(1, 41):
            clock[0] += 1.0
            shown.step(step % 2, f"hold seed {step % 2}", (step + 1) // 2, "KL 0.050")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "compare: 20 of 100 steps"
    assert lines[1] == "compare: 30 of 100 steps, 70 s left, hold seed 0 KL 0.050"
    assert len(lines) == 1 + 4, "one for each ten seconds"


def test_a_measurement_ends_with_all_of_it(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    lines = Lines("measure", "prompts")
    for done in (32, 64, 96):
        lines.update(done, 96)
    assert capsys.readouterr().err.splitlines() == ["measure: 32 of 96 prompts", "measure: 96 of 96 prompts"]


def test_a_bare_sweep_varies_the_price(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Seen(Exception):
        pass

    def run(config: sweep.SweepConfig, out: str, **_: object) -> None:
        raise Seen(config.over)

    monkeypatch.setattr(sweep, "run", run)
    with pytest.raises(Seen, match=r"kl\.beta=0\.01:1:5:log"):
        main(["sweep"])
    with pytest.raises(Seen, match=r"^\('seed=1,2',\)$"):
        main(["sweep", "--over", "seed=1,2"])
    refuse_fields([])


def last_line(said: str, count: str) -> str:
    """The last state of a bar that stands at ``count``, without colours."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said)
    return [line for line in re.split(r"[\r\n]+", plain) if count in line][-1].rstrip()


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_the_line_of_a_run_keeps_its_count_and_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: int
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: True)
    shown = progress.Display(60)
    with shown.live(0):
        figures = {"kl/steered": 0.0467, "kl/beta": 0.722, "reward/mean": 0.351, "time/tokens_per_second": 2174.0}
        shown.step(40, {**figures, "kl/target": 0.05}, [])
        shown.progress.refresh()
    last = last_line(capsys.readouterr().err, "40/60")
    assert len(last) <= columns
    assert re.search(r"40/60 .*reward 0\.351  KL 0\.0467 of 0\.05 .* (\d|-):(\d\d|--):(\d\d|--)$", last), last


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_the_bar_of_a_narrow_terminal_keeps_its_count_and_times(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: int
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = Progress()
    with shown.live("compare", 900):
        for step in range(1, 21):
            shown.step(step % 2, f"exponential seed {step % 2}", (step + 1) // 2, "KL 0.050")
        shown.bar.refresh()
    last = last_line(capsys.readouterr().err, "20/900")
    assert len(last) <= columns
    assert re.search(r"20/900 .*exponential.* \d:\d\d:\d\d (\d|-):(\d\d|--):(\d\d|--)$", last), last


def test_a_run_shows_its_alarms_itself_and_leaves_other_warnings_to_logging() -> None:
    """As at a command line, where nobody has set up logging: a warning goes to stderr, an alarm's copy does not."""
    code = """
import logging
from klamp.progress import Display
from klamp.rounding_floor import warn_near_floor
Display(5)
logging.getLogger("klamp.monitor").warning("an alarm")
warn_near_floor(0.001, "token", 0.002)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "klamp: the target 0.001 is less than 5 times the floor" in done.stderr
    assert "an alarm" not in done.stderr
    env = {**os.environ, "RANK": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert "floor" not in done.stderr, "the first process says it"
