"""A disk that is full, read-only or damaged: one line that names it, what was whole stays whole, and the run goes on.

Full is real: a limit on the size of files (EFBIG) at every kind of write, and a small tmpfs (ENOSPC) where mounting is
permitted. Damage is a byte flipped or cut off in every file of a checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nursery import Child, Nursery

from klamp.references.spec import folder_of, saved_steps
from klamp.train.run_folder import damage, read_jsonl
from unbroken import assert_same, left_by

pytestmark = pytest.mark.slow

STEPS = 10


def ends_with_a_line(child: Child, code: int = 2) -> str:
    """It left with klamp's exit code and one last line of klamp's own, no traceback; returns the line."""
    assert child.wait() == code, child.said
    assert "Traceback" not in child.said
    last = child.said.strip().splitlines()[-1]
    assert last.startswith("klamp: "), child.said
    return last


def whole_steps(run: Path) -> list[int]:
    """Saved steps, each of which is whole."""
    steps = saved_steps(run)
    assert [damage(folder_of(run, s)) for s in steps] == [None] * len(steps)
    return steps


# Full


def writes_of(run: Path, every: bool) -> list[int]:
    """Limits that stop a run at different writes: at the first, within (every) file of a checkpoint, in the logs."""
    files = [p for p in folder_of(run, STEPS).iterdir() if every or p.name in ("trainer.json", "optimizer.safetensors")]
    sizes = {p.stat().st_size for p in (run / "config.yaml", *files)}
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    # In the middle of a line: the times in it are not as long in every run.
    logs = {sum(map(len, lines[: n - 1])) + len(lines[n - 1]) // 2 for n in ((1, 2, 5, 9) if every else (2,))}
    return sorted({0, *(size - 1 for size in sizes), *logs})


def test_full_at_any_write(nursery: Nursery, write: Any, tmp_path: Path, straight: Any, kills: int) -> None:
    """Stopped by the limit at each write in turn, in one folder: every attempt gets as far as its limit lets it."""
    file, run = write("full"), tmp_path / "full"
    stopped = set()
    for limit in writes_of(straight(), every=kills >= 50):
        before = whole_steps(run)
        child = nursery.klamp("train", "--config", file, "--resume", limit=limit)
        said = ends_with_a_line(child)
        assert "could not be written: File too large. Raise the limit on the size of a file" in said
        assert "--resume" in said
        assert set(before) <= set(whole_steps(run)), "what was saved stays saved"
        assert not list(run.glob("checkpoints/.*")), "the space of what could not be saved is given back"
        stopped.add(said.split("'")[1].removeprefix(str(run)))
    assert {"/config.yaml", "/metrics.jsonl", "/checkpoints/step-000002"} <= stopped, stopped
    child = nursery.klamp("train", "--config", file, "--resume")
    assert child.wait() == 0, child.said
    assert_same(left_by(run, STEPS), left_by(straight(), STEPS))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", place], capture_output=True).returncode:
        pytest.skip("mounting a tmpfs is not permitted here")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def fill(disk: Path, leave: int) -> Path:
    """Take all space but ``leave`` bytes."""
    ballast = disk / "ballast"
    with ballast.open("wb") as handle:
        os.posix_fallocate(handle.fileno(), 0, shutil.disk_usage(disk).free - leave)
    return ballast


@contextlib.contextmanager
def paused(child: Child) -> Iterator[None]:
    """The process stands still."""
    child.signal(signal.SIGSTOP)
    until = time.monotonic() + 60
    while Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] not in "TZ":
        assert time.monotonic() < until
        time.sleep(0.001)
    yield
    child.signal(signal.SIGCONT)


@pytest.mark.parametrize("leave", [0, 100 << 10])
def test_a_disk_that_fills_up_while_a_run_goes(
    nursery: Nursery, write: Any, small_disk: Path, straight: Any, leave: int
) -> None:
    run = small_disk / "run"
    file = write(run, steps=24)  # so many that it is still going when the disk is full
    child = nursery.klamp("train", "--config", file)
    while child.poll() is None and not saved_steps(run):
        time.sleep(0.001)
    with paused(child):  # what it took meanwhile would not be there for the ballast
        ballast = fill(small_disk, leave)
    said = ends_with_a_line(child)
    assert "could not be written: No space left on device. Free some space, then" in said
    assert str(run) in said
    assert whole_steps(run), "the checkpoint from before is there"
    before = [p.read_bytes() for p in sorted(folder_of(run, 2).iterdir())]
    ends_with_a_line(nursery.klamp("train", "--config", file, "--resume"))  # still full: refused, nothing lost
    assert [p.read_bytes() for p in sorted(folder_of(run, 2).iterdir())] == before
    ballast.unlink()
    child = nursery.klamp("train", "--config", file, "--resume")
    assert child.wait() == 0, child.said
    assert_same(left_by(run, 24), left_by(straight(steps=24), 24))


# Read-only


def test_a_read_only_folder(nursery: Nursery, write: Any, tmp_path: Path) -> None:
    """By its mount, which binds root as well: before the run, and in the middle of it."""
    place = tmp_path / "read-only"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", place], capture_output=True).returncode:
        pytest.skip("mounting a tmpfs is not permitted here")
    try:
        file, run = write(place / "run"), place / "run"
        child = nursery.klamp("train", "--config", file)
        assert child.wait() == 0, child.said
        before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
        subprocess.run(["mount", "-o", "remount,ro", place], check=True)
        for target in (file, write(place / "new")):
            said = ends_with_a_line(nursery.klamp("train", "--config", target, "--resume"))
            assert "could not be written: Read-only file system. Make it writable or choose another folder" in said
        assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def test_a_folder_that_permissions_close(nursery: Nursery, write: Any, tmp_path: Path) -> None:
    """They do not bind root, so the run gives up root's right to pass over them."""
    place = tmp_path / "closed"
    place.mkdir(mode=0o555)
    said = ends_with_a_line(nursery.klamp("train", "--config", write(place / "run"), bound=True))
    assert f"'{place / 'run'}' could not be written: Permission denied. Make it writable or choose another" in said
    assert not list(place.iterdir())


def test_an_experiment_on_a_full_disk(nursery: Nursery, tmp_path: Path) -> None:
    said = ends_with_a_line(nursery.klamp("compare", "--steps", 1, "--out", tmp_path / "out", limit=0))
    assert "File too large" in said
    assert "run the same command again" in said


def test_a_measurement_on_a_full_disk(
    nursery: Nursery, words_model: str, words_prompts: str, straight: Any, tmp_path: Path
) -> None:
    """Within the line of a block: with room again the same command finds what it would have found."""
    command = ["measure", "--policy", folder_of(straight(), STEPS), "--reference", words_model, "--batch", 1]
    command += ["--prompts", words_prompts, "--max-tokens", 6, "--device", "cpu", "--out"]
    whole = nursery.klamp(*command, tmp_path / "straight")
    assert whole.wait() == 0, whole.said
    parts = (tmp_path / "straight" / "parts-0.jsonl").read_bytes()
    out, full = tmp_path / "out", parts.find(b"\n") + (len(parts) - parts.find(b"\n")) // 2
    said = ends_with_a_line(nursery.klamp(*command, out, limit=full))
    assert f"'{out / 'parts-0.jsonl'}' could not be written: File too large." in said
    assert "run the same command again" in said
    again = nursery.klamp(*command, out)
    assert again.wait() == 0, again.said
    for name in ("measure.json", "parts-0.jsonl"):
        assert (out / name).read_bytes() == (tmp_path / "straight" / name).read_bytes(), f"{name} differs"


# Damaged


def flipped(raw: bytes) -> bytes:
    middle = len(raw) // 2
    return raw[:middle] + bytes([raw[middle] ^ 1]) + raw[middle + 1 :]


def test_a_byte_in_any_file_of_a_checkpoint(nursery: Nursery, write: Any, tmp_path: Path) -> None:
    """Flipped, cut off or gone: found before anything is loaded or written, named, and nothing is touched."""
    file = write("damaged", steps=4, algorithm={"name": "ppo"}, kl={"reference": "ema:0.9"})
    run = tmp_path / "damaged"
    assert nursery.klamp("train", "--config", file).wait() == 0
    folder = folder_of(run, 4)
    names = {p.name for p in folder.iterdir()}
    assert {"optimizer.safetensors", "reference.safetensors", "value_head.safetensors", "manifest.json"} <= names
    for name in sorted(names):
        whole = (folder / name).read_bytes()
        for broken in (flipped(whole), whole[:-1], whole[: len(whole) // 2], b""):
            (folder / name).write_bytes(broken)
            problem = damage(folder)
            assert problem is not None, f"{name} damaged and not found"
            assert name in problem or name == "manifest.json"
        (folder / name).unlink()
        assert damage(folder) == f"{name} is missing"
        (folder / name).write_bytes(whole)
    assert damage(folder) is None
    (folder / "optimizer.safetensors").write_bytes(flipped((folder / "optimizer.safetensors").read_bytes()))
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    said = ends_with_a_line(nursery.klamp("train", "--config", file, "--resume", "--steps", 5))
    assert f"checkpoint '{folder}' is damaged: optimizer.safetensors does not match its hash" in said
    assert "--skip-damaged" in said
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before


def test_on_request_the_checkpoint_before_is_used_and_the_damaged_one_kept(
    nursery: Nursery, write: Any, tmp_path: Path, straight: Any
) -> None:
    run = shutil.copytree(straight(), tmp_path / "copy")
    file = write("copy")
    broken = folder_of(run, STEPS) / "adapter_model.safetensors"
    broken.write_bytes(flipped(broken.read_bytes()))
    bytes_then = broken.read_bytes()
    child = nursery.klamp("train", "--config", file, "--resume", "--skip-damaged")
    assert child.wait() == 0, child.said
    assert f"resuming after step {STEPS - 2} from" in child.said
    assert_same(left_by(run, STEPS), left_by(straight(), STEPS))
    kept = run / "checkpoints" / f"damaged-step-{STEPS:06d}" / "adapter_model.safetensors"
    assert kept.read_bytes() == bytes_then, "the damaged one is kept for whoever wants to look at it"


def test_with_no_whole_checkpoint_left_nothing_is_begun_anew(
    nursery: Nursery, write: Any, tmp_path: Path, straight: Any
) -> None:
    run, file = shutil.copytree(straight(), tmp_path / "copy"), write("copy")
    for step in saved_steps(run):
        (folder_of(run, step) / "trainer.json").write_bytes(b"")
    lines = list(read_jsonl(run / "metrics.jsonl"))
    said = ends_with_a_line(nursery.klamp("train", "--config", file, "--resume", "--skip-damaged"))
    assert "is whole" in said
    assert "begin again at step 1" in said
    assert list(read_jsonl(run / "metrics.jsonl")) == lines
