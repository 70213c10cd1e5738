"""A run is a folder: config.yaml, metrics.jsonl, events.jsonl, checkpoints/. This file owns all but the last.

Every write that matters is atomic (write aside, fsync, rename) or a whole line with its newline. One process writes at
a time: a lock that dies with its process.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from klamp import strict_json
from klamp.config_io import from_yaml, to_yaml
from klamp.errors import ConfigError, writing
from klamp.train.config import ResolvedConfig, TrainConfig
from klamp.train.resume import Changes, changes

GO_ON = "run the same command again (klamp train: with --resume) to go on from the last checkpoint"


class RunFolder:
    """The files of a run."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.metrics, self.samples = self.path / "metrics.jsonl", self.path / "samples.jsonl"
        self.alarms, self.probes = self.path / "alarms.jsonl", self.path / "probes.jsonl"
        self.events = self.path / "events.jsonl"

    def claim(self, config: TrainConfig) -> tuple[ResolvedConfig, Changes]:
        """``config`` with what it left out written down, and what it changes in the run it resumes.

        Refuses a folder that is not klamp's or in use, one that holds a run which is not being resumed, and a change
        that a run cannot take. A folder without a finished step may be taken with any configuration.
        """
        no_links_out(self.path)
        self._not_in_use()
        if not self.begun():
            saved = self.path / "config.yaml"
            if not saved.is_file() and self.path.is_dir() and not all(_half_begun(p) for p in self.path.iterdir()):
                raise ConfigError(f"run {str(self.path)!r} is not empty and is no run of klamp. Choose another --run.")
            return config.resolved(), {}
        if not config.resume:
            last = self.last_step()
            raise ConfigError(
                f"run {str(self.path)!r} exists and has {last} steps. Add --resume to go on with it, or choose another "
                "--run."
            )
        own = self.own_config()
        settled = config.resolved(own)
        return settled, changes(self.path, own, settled)

    def begun(self) -> bool:
        """Whether a step of this run is finished: in its metrics, or in a checkpoint."""
        there = (self.path / "config.yaml").is_file()
        return there and (self.last_step() > 0 or any((self.path / "checkpoints").glob("step-*")))

    def own_config(self) -> ResolvedConfig:
        """The configuration the run was made with, its changes since included."""
        return from_yaml(TrainConfig, self.path / "config.yaml").resolved()

    def _not_in_use(self) -> None:
        """Refuse a folder whose lock another process holds; the processes of one launch may all look at once."""
        file = self.path / ".lock"
        if file.is_file():
            with writing(file, GO_ON), file.open("a+") as handle:
                _flock(handle, fcntl.LOCK_SH, self.path)

    def wait(self, seconds: float) -> None:
        """Wait until the folder is free, at most ``seconds``: for a process that was asked to stop and is saving."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            try:
                return self._not_in_use()
            except ConfigError:
                time.sleep(0.1)
        return None

    def write_config(self, config: ResolvedConfig) -> None:
        """The resolved configuration."""
        atomic_text(self.path / "config.yaml", to_yaml(config))

    def note_resumed(self, step: int, changes: Changes) -> None:
        """Write down that the run goes on after ``step``, and what is different from here on."""
        if self.events.is_file():
            with writing(self.events, GO_ON):
                _keep_until(self.events, sys.maxsize)  # a torn last line
        event = {"step": step, "event": "resumed", "changes": {k: list(v) for k, v in changes.items()}}
        self.append(self.events, event)

    def changes_since(self, step: int, last: Changes) -> Changes:
        """What was changed since ``step`` was saved, ``last`` included: killed before it saved again, a run has noted
        changes that its newest checkpoint does not know."""
        rows = [row for _, row in strict_json.whole(self.events) if isinstance(row.get("changes"), dict)]
        noted = [row["changes"] for row in rows if isinstance(row.get("step"), int) and row["step"] >= step]
        found: Changes = {}
        for once in (*noted, last):
            for field, pair in once.items():
                if isinstance(pair, list | tuple) and len(pair) == 2:
                    found[field] = (found.get(field, pair)[0], pair[1])
        return {field: (was, now) for field, (was, now) in found.items() if was != now}

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Refuse a second process on this folder. The lock is the kernel's: it goes when its process does."""
        with writing(self.path, GO_ON):
            self.path.mkdir(parents=True, exist_ok=True)
            handle = (self.path / ".lock").open("a+")
        with handle:
            _flock(handle, fcntl.LOCK_EX, self.path)
            # A process that a reward forks would hold the lock beyond this one's death.
            os.register_at_fork(after_in_child=handle.close)
            yield

    def append(self, file: Path, row: dict[str, Any]) -> None:
        """One line, whole and on disk before this returns."""
        line = json.dumps({k: _plain(v) for k, v in row.items()}, ensure_ascii=False) + "\n"
        with writing(file, GO_ON), file.open("ab") as handle:
            handle.write(line.encode())
            handle.flush()
            os.fsync(handle.fileno())

    def last(self) -> dict[str, Any]:
        """The metrics of the last step written; empty before the first."""
        row = next(_from_the_end(self.metrics), (0, {}))[1]
        return {k: v for k, v in row.items() if k != "step"}

    def last_step(self) -> int:
        """The last step written; 0 before the first."""
        return next((_step(self.metrics, row) for _, row in _from_the_end(self.metrics)), 0)

    def rewind(self, step: int) -> None:
        """Drop lines after ``step`` and a torn last one: they will be written again."""
        for file in (self.metrics, self.samples, self.alarms, self.probes):
            if file.is_file():
                with writing(file, GO_ON):
                    _keep_until(file, step)


def no_links_out(folder: Path) -> None:
    """Refuse a folder in which a link leads out: klamp would write there. The folder itself may be a link."""
    if not folder.is_dir():
        return
    home = folder.resolve()
    for place in (*folder.iterdir(), *folder.glob("checkpoints/*")):
        if place.is_symlink() and not place.resolve().is_relative_to(home):
            raise ConfigError(
                f"{str(place)!r} is a link that leads out of {str(folder)!r}, to {str(place.resolve())!r}. Remove it; "
                "to keep a run elsewhere, link the whole folder."
            )


def _flock(handle: IO[str], kind: int, run: Path) -> None:
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except OSError:
        raise ConfigError(f"run {str(run)!r} is in use by another process. Choose another --run.") from None


def _half_begun(path: Path) -> bool:
    """Whether this is all that a process killed before it had written config.yaml can have left."""
    return path.name == ".lock" or path.name.startswith(".config.yaml.")


def read_jsonl(file: Path) -> Iterator[dict[str, Any]]:
    """Whole lines of a JSONL file; a torn last one is passed over."""
    return (row for _, row in strict_json.whole(file))


def _from_the_end(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(where its line ends, row) from the last whole line on: a million steps are not read to find the last few."""
    if not file.is_file():
        return
    for end, raw in strict_json.backwards(file):
        try:
            text = raw.decode("utf-8-sig").strip()
        except UnicodeDecodeError as error:
            raise ConfigError(f"{str(file)!r}, line {_number(file, end)}: not UTF-8 ({error.reason}).") from None
        if text:
            try:
                yield end, strict_json.parse(text, "")
            except ConfigError as error:
                raise ConfigError(f"{str(file)!r}, line {_number(file, end)}{error}") from None


def _number(file: Path, end: int) -> int:
    """The number of the line that ends at byte ``end``."""
    with file.open("rb") as handle:
        blocks = iter(lambda: handle.read(min(1 << 20, end - handle.tell())), b"")
        return sum(block.count(b"\n") for block in blocks)


def _step(file: Path, row: dict[str, Any]) -> int:
    step = row.get("step")
    if isinstance(step, bool) or not isinstance(step, int):
        raise ConfigError(f"{str(file)!r}: step must be a whole number, got {step!r:.80}. It is no file of klamp's.")
    return step


def _keep_until(file: Path, step: int) -> None:
    """Cut the file behind the last line whose step is at most ``step``; steps only grow."""
    found = _from_the_end(file) if step > 0 else iter(())
    keep = next((end for end, row in found if _step(file, row) <= step), 0)
    if keep < file.stat().st_size:
        with file.open("rb+") as handle:
            handle.truncate(keep)
            os.fsync(handle.fileno())


def atomic_text(path: Path, text: str) -> None:
    """Write aside, fsync, rename."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with writing(path, GO_ON):
        try:
            with aside.open("w", encoding="utf-8") as handle:
                handle.write(text)
                handle.flush()
                os.fsync(handle.fileno())
            os.replace(aside, path)
        except OSError:
            with contextlib.suppress(OSError):
                aside.unlink()
            raise
        sync_folder(path.parent)


def damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint, by its manifest; None when it is whole."""
    manifest = folder / "manifest.json"
    if not manifest.is_file():
        return "manifest.json is missing"
    try:
        hashes: dict[str, str] = dict(json.loads(manifest.read_text(encoding="utf-8"))["sha256"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return "manifest.json cannot be read"
    if "trainer.json" not in hashes:
        return "manifest.json does not name trainer.json"
    for name, expected in hashes.items():
        file = folder / name
        if not file.resolve().is_relative_to(folder.resolve()):
            return f"{name} leads out of it"
        if not file.is_file():
            return f"{name} is missing"
        if _hash(file) != expected:
            return f"{name} does not match its hash"
    return None


def seal(folder: Path) -> None:
    """Hash every file into the manifest and sync all of them."""
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    hashes = {str(p.relative_to(folder)): _hash(p) for p in files}
    (folder / "manifest.json").write_text(json.dumps({"sha256": hashes}, indent=1), encoding="utf-8")
    for file in [*files, folder / "manifest.json"]:
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
    sync_folder(folder)


def _hash(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as handle:
        while block := handle.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def sync_folder(folder: Path) -> None:
    """Make a rename in ``folder`` last."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _plain(x: Any) -> Any:
    return str(x) if isinstance(x, float) and not math.isfinite(x) else x
