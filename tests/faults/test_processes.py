"""Several processes: one that dies takes the others with it in good order, and two runs never share a folder."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from nursery import ENV, Child, Nursery

from klamp.references.spec import folder_of, saved_steps
from klamp.train.config import RewardConfig
from klamp.train.run_folder import RunFolder, damage, read_jsonl
from unbroken import assert_same, left_by, rows

pytestmark = pytest.mark.slow

STEPS = 48
"""So many that a run is still going when it is struck, however slow the machine."""
WITHIN = 20.0
"""Seconds in which the other process has ended: on a machine with nothing else to do it takes one or two."""


def pair(nursery: Nursery, file: Path, *more: object, cwd: Path | None = None) -> list[Child]:
    """Two ranks of one run, as a launcher that does not look after them would start them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": "2"}
    return [
        nursery.klamp("train", "--config", file, *more, cwd=cwd, env=common | {"RANK": str(n), "LOCAL_RANK": str(n)})
        for n in range(2)
    ]


def wait_for_step(run: Path, step: int, children: list[Child]) -> None:
    until = time.monotonic() + 120
    while len(list(read_jsonl(run / "metrics.jsonl"))) < step:
        assert all(child.poll() is None for child in children), [child.said for child in children]
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.fixture
def two(nursery: Nursery, write: Any, tmp_path: Path) -> dict[str, Any]:
    """What two processes leave that nothing happened to."""
    children = pair(nursery, write("straight", steps=STEPS))
    assert [child.wait() for child in children] == [0, 0], [child.said for child in children]
    return left_by(tmp_path / "straight", STEPS)


@pytest.mark.parametrize("dies", [0, 1])
def test_one_of_two_killed_the_other_ends_and_says_so(
    nursery: Nursery, write: Any, tmp_path: Path, two: dict[str, Any], dies: int
) -> None:
    """Whichever it is; started again, the two go on from the checkpoint to the same end."""
    file, run = write("killed", steps=STEPS), tmp_path / "killed"
    children = pair(nursery, file)
    wait_for_step(run, 3, children)
    children[dies].signal(signal.SIGKILL)
    other = children[1 - dies]
    assert other.wait(WITHIN) == 2, other.said
    last = other.said.strip().splitlines()[-1]
    assert last.startswith(f"klamp: process {1 - dies} of 2 lost another one"), other.said
    assert "--resume" in last
    assert "Traceback" not in other.said
    assert children[dies].wait() == -signal.SIGKILL
    assert saved_steps(run)
    assert all(damage(folder_of(run, step)) is None for step in saved_steps(run))
    again = pair(nursery, file, "--resume")
    assert [child.wait() for child in again] == [0, 0], [child.said for child in again]
    assert_same(left_by(run, STEPS), two)


def test_one_that_does_not_answer_is_given_up(nursery: Nursery, write: Any, tmp_path: Path) -> None:
    """Stopped, not dead: no connection breaks, and process_timeout is what ends the other."""
    children = pair(nursery, write("stopped", steps=5000, save_every=5000, process_timeout=10.0))
    wait_for_step(tmp_path / "stopped", 2, children)
    children[1].signal(signal.SIGSTOP)
    begun = time.monotonic()
    assert children[0].wait(10 + WITHIN) == 2, children[0].said
    assert time.monotonic() - begun > 5, "not before its time"
    assert "no answer within process_timeout=10 s" in children[0].said
    children[1].signal(signal.SIGKILL)
    children[1].wait()


def test_a_signal_after_they_agreed_counts_at_the_next_step(nursery: Nursery, write: Any, tmp_path: Path) -> None:
    """Heard by one between the exchange and the save: it must not save alone, nor leave the other waiting."""
    file = write("asked", reward=RewardConfig(functions=("phases:reward",)), save_every=STEPS)
    plan = {"at": "agreed", "call": 3, "signals": [int(signal.SIGTERM)], "rank": 0}
    (tmp_path / "phases.json").write_text(json.dumps(plan))
    children = pair(nursery, file, cwd=tmp_path)
    assert [child.wait(60) for child in children] == [143, 143], [child.said for child in children]
    assert [row["step"] for row in rows(tmp_path / "asked" / "metrics.jsonl")] == [1, 2, 3, 4]
    assert saved_steps(tmp_path / "asked") == [4]


# Under torchrun


def torchrun(file: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *options]
    return subprocess.Popen(
        [*command, "-m", "klamp", "train", "--config", str(file), "--resume"],
        env=os.environ | ENV,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def ranks_of(launcher: int) -> list[int]:
    """The processes that torchrun started."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return [int(pid) for pid in children if b"klamp" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_torchrun_restarts_a_killed_process_from_the_checkpoint(
    write: Any, tmp_path: Path, two: dict[str, Any]
) -> None:
    run = tmp_path / "restarted"
    process = torchrun(write("restarted", steps=STEPS), "--max-restarts=1")
    until = time.monotonic() + 120
    while not saved_steps(run):
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.002)
    os.kill(ranks_of(process.pid)[-1], signal.SIGKILL)
    said, _ = process.communicate(timeout=180)
    assert process.returncode == 0, said[-4000:]
    assert re.search(r"resuming after step \d+", said)
    assert_same(left_by(run, STEPS), two)


def test_ctrl_c_under_torchrun_is_one_signal(write: Any, tmp_path: Path) -> None:
    """However it reaches the processes, through the terminal or through torchrun, it counts once: the step is saved."""
    run = tmp_path / "asked"
    process = torchrun(write("asked", steps=5000, save_every=5000))
    until = time.monotonic() + 120
    while not list(read_jsonl(run / "metrics.jsonl")):
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    said, _ = process.communicate(timeout=120)
    steps = [row["step"] for row in rows(run / "metrics.jsonl")]
    assert saved_steps(run) == [steps[-1]], said[-4000:]
    assert damage(folder_of(run, steps[-1])) is None


# One folder, one process


def test_a_second_process_on_a_run_is_refused_and_the_first_not_disturbed(
    nursery: Nursery, write: Any, tmp_path: Path, straight: Any
) -> None:
    file = write("shared", steps=STEPS)
    first = nursery.klamp("train", "--config", file)
    wait_for_step(tmp_path / "shared", 1, [first])
    first.signal(signal.SIGSTOP)  # so that it is there for as long as the second looks
    second = nursery.klamp("train", "--config", file, "--resume")
    assert second.wait() == 2, second.said
    assert second.said.startswith(f"klamp: run '{tmp_path / 'shared'}' is in use by another process.")
    first.signal(signal.SIGCONT)
    assert first.wait() == 0, first.said
    assert_same(left_by(tmp_path / "shared", STEPS), left_by(straight(steps=STEPS), STEPS))


def test_a_second_process_on_a_measurement_is_refused(
    nursery: Nursery, words_model: str, words_prompts: str, tmp_path: Path
) -> None:
    """It would cut off what the first is writing; a lock that a dead one left is no obstacle."""
    out = tmp_path / "out"
    out.mkdir()
    command = ["measure", "--policy", words_model, "--reference", words_model, "--prompts", words_prompts]
    command += ["--max-tokens", 4, "--device", "cpu", "--out", out]
    with (out / ".lock-0").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        second = nursery.klamp(*command)
        assert second.wait() == 2, second.said
        assert second.said.splitlines()[-1].startswith(f"klamp: measurement '{out}' is in use by another process.")
        assert [p.name for p in out.iterdir()] == [".lock-0"]
    again = nursery.klamp(*command)
    assert again.wait() == 0, again.said


def test_a_lock_left_by_a_dead_process_is_no_obstacle(
    nursery: Nursery, write: Any, tmp_path: Path, straight: Any
) -> None:
    """The lock is the kernel's and dies with its process; what the file says, a recycled pid even, means nothing."""
    file, run = write("dead", steps=STEPS), tmp_path / "dead"
    first = nursery.klamp("train", "--config", file)
    wait_for_step(run, 3, [first])
    first.signal(signal.SIGKILL)
    first.wait()
    assert (run / ".lock").is_file()
    (run / ".lock").write_text(f"{os.getpid()}\n")
    again = nursery.klamp("train", "--config", file, "--resume")
    assert again.wait() == 0, again.said
    assert_same(left_by(run, STEPS), left_by(straight(steps=STEPS), STEPS))


FORKS = """
import os, time
from pathlib import Path

def reward(prompts, completions):
    if not Path("child").is_file() and os.fork() == 0:
        Path("child").write_text(str(os.getpid()))
        time.sleep(600)
        os._exit(0)
    return [float(len(c)) for c in completions]
"""


def test_a_process_that_a_reward_left_behind_does_not_hold_the_run(
    nursery: Nursery, write: Any, tmp_path: Path
) -> None:
    """It was forked with every open file of its parent, the lock among them, and outlives it."""
    (tmp_path / "forking.py").write_text(FORKS)
    file, run = write("forked", reward=RewardConfig(functions=("forking:reward",))), tmp_path / "forked"
    first = nursery.klamp("train", "--config", file, cwd=tmp_path)
    wait_for_step(run, 2, [first])
    first.signal(signal.SIGKILL)
    first.wait()
    orphan = int((tmp_path / "child").read_text())
    try:
        again = nursery.klamp("train", "--config", file, "--resume", cwd=tmp_path)
        assert again.wait() == 0, again.said
    finally:
        os.kill(orphan, signal.SIGKILL)


def test_a_run_waits_for_the_process_that_is_leaving_it(write: Any, tmp_path: Path) -> None:
    """The run of an experiment whose parent was killed: its next process waits until the last one has saved."""
    folder = RunFolder(tmp_path / "leaving")
    folder.path.mkdir()
    command = ["flock", "-x", folder.path / ".lock", "sh", "-c", "echo held; exec sleep 3"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        folder.wait(60)
        assert holder.wait(1) == 0, "it did not wait"
