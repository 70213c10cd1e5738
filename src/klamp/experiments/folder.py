"""The folder of an experiment: its settings, a lock, one folder a run, and what came of it."""

from __future__ import annotations

import contextlib
import fcntl
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from klamp.errors import ConfigError
from klamp.train.run_folder import atomic_text, no_links_out

SETTINGS = "experiment.json"
FORMAT = "klamp-experiment/1"
NOTHING: Mapping[str, Any] = MappingProxyType({})


class Folder:
    """``experiment.json``, ``reference.json``, ``runs/ARM/seed-N/``, ``results.json``, ``report.html``."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.settings = self.path / SETTINGS
        self.reference = self.path / "reference.json"
        self.runs = self.path / "runs"
        self.logs = self.path / "logs"
        self.results = self.path / "results.json"

    @contextlib.contextmanager
    def claimed(
        self,
        kind: str,
        settings: Mapping[str, Any],
        *,
        may_grow: tuple[str, ...] = (),
        usual: Mapping[str, Any] = NOTHING,
    ) -> Iterator[None]:
        """Hold the folder for this process; refuse one in use, of another configuration, or not klamp's.

        Fields of ``may_grow`` may differ from last time: more arms or seeds are more runs, not other ones. ``usual`` is
        what a field meant that was left out then.
        """
        self.check(kind, settings, may_grow=may_grow, usual=usual)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            handle = (self.path / ".lock").open("a+")
        except OSError as error:
            raise ConfigError(f"--out {str(self.path)!r} cannot be written: {error}. Choose another --out.") from None
        with handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ConfigError(f"--out {str(self.path)!r} is in use by another process.") from None
            self.check(kind, settings, may_grow=may_grow, usual=usual)
            atomic_text(self.settings, json.dumps({"format": FORMAT, "kind": kind, **settings}, indent=1) + "\n")
            yield

    def check(
        self,
        kind: str,
        settings: Mapping[str, Any],
        *,
        may_grow: tuple[str, ...] = (),
        usual: Mapping[str, Any] = NOTHING,
    ) -> None:
        """Refuse a folder of another configuration, or one that is not klamp's; nothing is written."""
        if not self.path.exists():
            return
        if not self.path.is_dir():
            raise ConfigError(f"--out {str(self.path)!r} is a file. Choose another --out.")
        no_links_out(self.path)
        if not self.settings.is_file():
            begun = (".lock", f".{SETTINGS}.")  # all that a process killed before it had written SETTINGS can have left
            if not all(p.name.startswith(begun) for p in self.path.iterdir()):
                raise ConfigError(
                    f"--out {str(self.path)!r} is not empty and is no experiment of klamp's. Choose another --out."
                )
            return
        old = {k: usual.get(k) if v is None else v for k, v in read_settings(self.path).items()}
        now = json.loads(json.dumps(dict(settings)))
        different = [k for k in now if k not in may_grow and old.get(k) != now[k]]
        if old.get("kind") != kind or different:
            told = [f"{k} is {json.dumps(old.get(k))} there and {json.dumps(now[k])} here" for k in different[:3]]
            what = f"it is a {old.get('kind')}" if old.get("kind") != kind else ", ".join(told)
            raise ConfigError(
                f"--out {str(self.path)!r} belongs to another configuration: {what}. Choose another --out, or the "
                "settings it was made with."
            )


def read_settings(path: Path) -> dict[str, Any]:
    """The settings of the experiment in ``path``."""
    file = path / SETTINGS
    try:
        found = json.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{str(file)!r} cannot be read: {error}.") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ConfigError(f"{str(file)!r} is not klamp's, or of another version ({FORMAT} is read here).")
    return found
