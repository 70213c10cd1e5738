"""SIGKILL anywhere: the run goes on from its newest whole checkpoint and ends as one that was not killed, to the bit.

Float32 on a CPU with one thread. Ten kills or so by default, spread over the four kinds of training and the middle of a
checkpoint; ``--kills 50`` (``make faults``) for the long form, which kills comparisons and sweeps more often too.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from nursery import Child, Nursery, count

from klamp.experiments.folder import Folder
from klamp.references.spec import folder_of, saved_steps
from klamp.train.run_folder import RunFolder, damage, read_jsonl
from unbroken import assert_same, left_by, rows, timeless

pytestmark = pytest.mark.slow

STEPS = 10
KINDS = [("grpo", False), ("grpo", True), ("ppo", False), ("ppo", True)]


def kind(name: str, full: bool, **other: Any) -> dict[str, Any]:
    several = {"epochs": 2, "minibatches": 2} if name == "ppo" else {}
    return {"keep": 2, "full": full, "algorithm": {"name": name, **several}, **other}


def newest_whole(run: Path) -> int:
    """The step that a resumption has to start after: what stands under a checkpoint's name is whole."""
    steps = saved_steps(run)
    assert [damage(folder_of(run, step)) for step in steps] == [None] * len(steps)
    return max(steps, default=0)


def check_left(run: Path, straight: list[dict[str, Any]]) -> None:
    """After a kill: the whole lines are the unbroken run's, none missing, none twice, at least to the checkpoint."""
    lines = [timeless(row) for row in read_jsonl(run / "metrics.jsonl")]
    assert lines == straight[: len(lines)]
    assert len(lines) >= newest_whole(run)


class Assault:
    """One run, killed and resumed until enough kills have hit it; then to its end."""

    def __init__(self, nursery: Nursery, file: Path, run: Path, straight: Path) -> None:
        self.nursery, self.file, self.run = nursery, file, run
        self.lines = rows(straight / "metrics.jsonl")
        self.hits = 0
        self.torn = 0

    def strike(self, wait: Callable[[Child], None]) -> bool:
        """Start or resume the run, ``wait``, kill. False when the run was done before."""
        resume = newest_whole(self.run)
        child = self.nursery.klamp("train", "--config", self.file, "--resume")
        wait(child)
        child.signal(signal.SIGKILL)
        code = child.wait()
        assert code in (-signal.SIGKILL, 0), child.said
        check_left(self.run, self.lines)
        began = re.search(r"resuming after step (\d+)", child.said)
        if began is not None:
            assert int(began[1]) == resume, "not from the newest whole checkpoint"
        self.hits += code != 0
        self.torn += any(self.run.glob("checkpoints/.step-*"))
        return code != 0

    def finish(self, steps: int = STEPS) -> dict[str, Any]:
        child = self.nursery.klamp("train", "--config", self.file, "--resume")
        assert child.wait() == 0, child.said
        assert not list(self.run.glob("checkpoints/.*")), "nothing half written is left"
        return left_by(self.run, steps)


def at_a_step(run: Path, step: int, later: float) -> Callable[[Child], None]:
    """Wait until ``step`` is written and ``later`` seconds have gone by."""

    def wait(child: Child) -> None:
        metrics = run / "metrics.jsonl"
        while child.poll() is None and (not metrics.is_file() or metrics.read_bytes().count(b"\n") < step):
            time.sleep(0.002)
        time.sleep(later)

    return wait


def after(seconds: float) -> Callable[[Child], None]:
    """Wait for a moment, as a rule before the first step."""
    return lambda child: time.sleep(seconds)


def in_a_save(run: Path, later: float) -> Callable[[Child], None]:
    """Wait until a checkpoint is being written, or an old one deleted, and ``later`` seconds have gone by."""

    def wait(child: Child) -> None:
        before = {p.name for p in run.glob("checkpoints/.step-*")}
        asked = time.monotonic()
        while not {p.name for p in run.glob("checkpoints/.step-*")} - before:
            if time.monotonic() - asked > 0.2:
                asked = time.monotonic()
                if child.poll() is not None:
                    return
        time.sleep(later)

    return wait


def one_moment(run: Path, moments: random.Random) -> Callable[[Child], None]:
    """Any moment: while it starts, in or after a step, in a save."""
    where = moments.random()
    if where < 0.25:
        return after(moments.uniform(0, 1.0))
    if where < 0.5:
        return in_a_save(run, moments.uniform(0, 0.03))
    steps = saved_steps(run)
    return at_a_step(run, moments.randrange(max(steps, default=0) + 1, STEPS + 1), moments.uniform(0, 0.05))


@pytest.mark.parametrize(("name", "full"), KINDS)
def test_training_killed_at_random_moments(
    nursery: Nursery,
    write: Any,
    straight: Any,
    tmp_path: Path,
    moments: random.Random,
    kills: int,
    name: str,
    full: bool,
) -> None:
    whole = left_by(straight(**kind(name, full)), STEPS)
    hits, wanted, n = 0, max(1, kills // 5), 0
    while hits < wanted:
        assert n < 10 * wanted, f"{hits} kills in {n} runs: they end before they are struck"
        run, n = tmp_path / f"killed-{n}", n + 1
        assault = Assault(nursery, write(run.name, **kind(name, full)), run, straight(**kind(name, full)))
        while hits < wanted and assault.strike(one_moment(run, moments)):
            hits += 1
        assert_same(assault.finish(), whole)
    count(f"training ({name}, {'full' if full else 'LoRA'})", hits)


def test_killed_in_the_middle_of_a_checkpoint(
    nursery: Nursery, write: Any, straight: Any, tmp_path: Path, moments: random.Random, kills: int
) -> None:
    """Every step saves and deletes here; enough kills for some to leave a folder half written, half deleted or both."""
    settings = {"save_every": 1, "keep": 1, "steps": 16}
    hits, torn, wanted, n = 0, 0, max(2, kills // 5), 0
    while hits < wanted or not torn:
        run, n = tmp_path / f"killed-{n}", n + 1
        assault = Assault(nursery, write(run.name, **settings), run, straight(**settings))
        while (hits + assault.hits < wanted or not assault.torn) and n < 20:
            if not assault.strike(in_a_save(run, moments.uniform(0, 0.01))):
                break
        hits, torn = hits + assault.hits, torn + assault.torn
        assert_same(assault.finish(16), left_by(straight(**settings), 16))
        assert saved_steps(run) in ([16], [15, 16]), "killed after its last save, it may have had no time to delete"
        assert n < 20, f"{hits} kills and {torn} torn folders in {n} runs"
    count("in a save", hits)


def test_what_a_kill_before_the_first_line_leaves_is_no_obstacle(nursery: Nursery, write: Any, tmp_path: Path) -> None:
    """Killed between the bytes of config.yaml and its name: the folder holds a lock and a file aside."""
    file = write("begun", steps=1)
    run = tmp_path / "begun"
    run.mkdir()
    (run / ".lock").touch()
    (run / ".config.yaml.12345").write_text("model: ti")
    child = nursery.klamp("train", "--config", file, "--resume")
    assert child.wait() == 0, child.said
    (run / "config.yaml").unlink()
    assert nursery.klamp("train", "--config", file, "--resume").wait() == 2, "but a folder with other files is"
    out = tmp_path / "experiment"
    out.mkdir()
    (out / ".experiment.json.12345").write_text("{")
    with Folder(out).claimed("compare", {"steps": 1}):
        assert (out / "experiment.json").is_file()


def test_a_line_torn_by_a_kill_is_written_anew(nursery: Nursery, write: Any, tmp_path: Path) -> None:
    """In each log, the probes of an experiment's run among them: what is appended never meets half a line.

    And a checkpoint half deleted goes, though the run has none left to save.
    """
    file = write("torn", steps=4)
    assert nursery.klamp("train", "--config", file).wait() == 0
    run = tmp_path / "torn"
    whole = left_by(run, 4)
    folder = RunFolder(run)
    for log in (folder.metrics, folder.samples, folder.alarms, folder.probes):
        with log.open("ab") as handle:
            handle.write(b'{"step": 5, "kl/ste')
    half = run / "checkpoints" / ".step-000002.12345"
    half.mkdir()
    (half / "trainer.json").write_text("{")
    assert nursery.klamp("train", "--config", file, "--resume").wait() == 0
    assert_same(left_by(run, 4), whole)
    assert not half.exists()


# Comparisons and sweeps: processes with processes of their own

COMPARE = ("--steps", 8, "--seeds", 1, "--prompts-per-step", 2, "--group-size", 2, "--max-tokens", 6, "--lr", 3e-3)


def workers(parent: int) -> list[int]:
    """The children of a process."""
    tasks = Path(f"/proc/{parent}/task/{parent}/children")
    return [int(pid) for pid in tasks.read_text().split()] if tasks.is_file() else []


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def finished(out: Path) -> dict[str, Any]:
    """What came of an experiment; times, places and the events that tell of the interruptions aside."""
    logs = [log for log in sorted(out.glob("runs/**/*.jsonl")) if log.name != "events.jsonl"]
    found = {str(log.relative_to(out)): rows(log) for log in logs}
    for file in sorted(out.glob("runs/**/checkpoints/*/*.safetensors")):
        found[str(file.relative_to(out))] = file.read_bytes()
    results = json.loads((out / "results.json").read_text())
    return found | {"results": {k: v for k, v in results.items() if k not in ("folder", "report", "path")}}


def lines(out: Path) -> int:
    """Steps written so far, over all runs."""
    return sum(f.read_bytes().count(b"\n") for f in out.glob("runs/**/metrics.jsonl"))


def experiment(nursery: Nursery, moments: random.Random, command: list[object], tmp_path: Path, wanted: int) -> None:
    """``command`` unbroken, and killed ``wanted`` times: its own process alone, or its workers with it."""
    whole = nursery.klamp(*command, "--out", tmp_path / "straight")
    assert whole.wait(300) == 0, whole.said
    out, hits = tmp_path / "killed", 0
    for n in range(wanted):
        target = lines(out) + moments.randrange(0, 3)
        child = nursery.klamp(*command, "--out", out)
        while child.poll() is None and lines(out) < target:
            time.sleep(0.01)
        time.sleep(moments.uniform(0, 0.5))
        orphans = workers(child.pid)
        child.signal(signal.SIGKILL)
        assert child.wait() in (-signal.SIGKILL, 0), child.said
        if child.code == 0:
            break
        hits += 1
        if n % 2:  # otherwise they hear that they are alone, save, and leave
            for pid in orphans:
                if alive(pid):
                    os.kill(pid, signal.SIGKILL)
    again = nursery.klamp(*command, "--out", out)
    assert again.wait(300) == 0, again.said
    assert_same(finished(out), finished(tmp_path / "straight"))
    assert hits, "it ended before it was struck"
    count(str(command[0]), hits)


def test_a_comparison_killed(nursery: Nursery, moments: random.Random, tmp_path: Path, kills: int) -> None:
    command = ["compare", "--arms", "static", "hold", *COMPARE]
    experiment(nursery, moments, command, tmp_path, max(2, kills // 10))


def test_a_sweep_killed(nursery: Nursery, moments: random.Random, tmp_path: Path, kills: int) -> None:
    command = ["sweep", "--over", "kl.beta=0.01,1", "--steps", 8]
    for setting in ("rollout.prompts=2", "rollout.group_size=2", "rollout.max_tokens=6"):
        command += ["--set", setting]
    experiment(nursery, moments, command, tmp_path, max(2, kills // 10))


def test_a_measurement_killed(
    nursery: Nursery, words_model: str, straight: Any, tmp_path: Path, moments: random.Random
) -> None:
    """Killed between and within its blocks of prompts: the same command goes on to the same figures."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"w{n % 29} w{n // 29}\n" for n in range(120)))
    policy = folder_of(straight(), STEPS)
    command = ["measure", "--policy", policy, "--reference", words_model, "--prompts", prompts, "--batch", 1]
    command += ["--max-tokens", 6, "--device", "cpu", "--out"]
    whole = nursery.klamp(*command, tmp_path / "straight")
    assert whole.wait() == 0, whole.said
    out, hits = tmp_path / "killed", 0
    blocks = out / "parts-0.jsonl"
    for _ in range(3):
        target = (blocks.read_bytes().count(b"\n") if blocks.is_file() else 0) + moments.randrange(1, 10)
        child = nursery.klamp(*command, out)
        while child.poll() is None and (not blocks.is_file() or blocks.read_bytes().count(b"\n") < target):
            time.sleep(0.001)
        child.signal(signal.SIGKILL)
        assert child.wait() in (-signal.SIGKILL, 0), child.said
        if child.code == 0:
            break
        hits += 1
    assert hits, "it ended before it was struck"
    again = nursery.klamp(*command, out)
    assert again.wait() == 0, again.said
    for name in ("measure.json", "parts-0.jsonl"):
        assert (out / name).read_bytes() == (tmp_path / "straight" / name).read_bytes(), f"{name} differs"
    count("measure", hits)


def test_a_worker_whose_parent_is_killed_saves_its_step_and_leaves(nursery: Nursery, tmp_path: Path) -> None:
    out = tmp_path / "out"
    child = nursery.klamp("compare", "--arms", "static", *COMPARE, "--steps", 2000, "--out", out)
    run = out / "runs" / "static" / "seed-0"
    while child.poll() is None and not (run / "metrics.jsonl").is_file():
        time.sleep(0.05)
    (worker,) = workers(child.pid)
    child.signal(signal.SIGKILL)
    child.wait()
    until = time.monotonic() + 60
    while alive(worker):
        assert time.monotonic() < until, "it outlives its parent"
        time.sleep(0.05)
    last = [row["step"] for row in read_jsonl(run / "metrics.jsonl")][-1]
    assert newest_whole(run) == last
