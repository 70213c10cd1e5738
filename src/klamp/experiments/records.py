"""What a run left on disk, read with suspicion: numbers by step, alarms, completions at the fixed prompts.

A line that is not what klamp writes is named by file and number; a torn last line is passed over. Numbers are kept as
packed doubles, 160 bytes a step, and go to a page as the means of at most ``POINTS`` stretches.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from klamp.errors import ConfigError

KEYS = (
    "reward/mean",
    "kl/steered",
    "kl/ref/exact",
    "kl/beta",
    "kl/target",
    "kl/clamp/effort",
    "policy/entropy",
    "length/mean",
    "heldout/perplexity",
    "heldout/perplexity_reference",
)
POINTS = 2_000
LONGEST = 10_000_000
"""Bytes of a line; more is refused rather than read into memory."""


@dataclass
class Series:
    """One metric over a run: the steps at which it was written and its values."""

    steps: array[float] = field(default_factory=lambda: array("d"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def add(self, step: float, value: float) -> None:
        """Append a point."""
        self.steps.append(step)
        self.values.append(value)

    def thinned(self, most: int = POINTS) -> Series:
        """Means over stretches of equal length, at most ``most`` of them."""
        stride = -(-len(self.steps) // most)
        if stride <= 1:
            return self
        thin = Series()
        for i in range(0, len(self.steps), stride):
            part = [v for v in self.values[i : i + stride] if math.isfinite(v)]
            thin.add(self.steps[min(i + stride, len(self.steps)) - 1], sum(part) / len(part) if part else math.nan)
        return thin

    def from_step(self, first: float) -> list[float]:
        """Finite values at ``first`` and later."""
        return [v for s, v in zip(self.steps, self.values, strict=True) if s >= first and math.isfinite(v)]

    def __len__(self) -> int:
        return len(self.steps)


@dataclass
class Record:
    """One run."""

    path: Path
    config: dict[str, Any] = field(default_factory=dict)
    series: dict[str, Series] = field(default_factory=dict)
    alarms: list[dict[str, Any]] = field(default_factory=list)
    probes: list[dict[str, Any]] = field(default_factory=list)

    def get(self, key: str) -> Series:
        """A metric's series; empty where it was never written."""
        return self.series.get(key, Series())

    @property
    def seed(self) -> int:
        """The run's seed."""
        seed = self.config.get("seed", 0)
        return seed if isinstance(seed, int) else 0

    @property
    def target(self) -> float | None:
        """The target its KL was measured against, by its metrics."""
        values = self.get("kl/target").values
        return float(values[-1]) if len(values) and values[-1] > 0 else None

    @property
    def last_step(self) -> int:
        """The last step written."""
        steps = self.get("kl/steered").steps
        return int(steps[-1]) if len(steps) else 0


def read(path: Path) -> Record:
    """The run in ``path``."""
    if not (path / "metrics.jsonl").is_file():
        raise ConfigError(f"{str(path)!r} holds no metrics.jsonl. Give the folder of a run, a compare or a sweep.")
    record = Record(path, config=_config(path / "config.yaml"))
    for number, row in rows(path / "metrics.jsonl"):
        step = _number(path / "metrics.jsonl", number, "step", row.get("step"))
        for key in KEYS:
            if key in row:
                value = _number(path / "metrics.jsonl", number, key, row[key])
                record.series.setdefault(key, Series()).add(step, value)
    record.alarms = [row for _, row in rows(path / "alarms.jsonl")]
    record.probes = _latest(row for _, row in rows(path / "probes.jsonl"))
    return record


def rows(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Numbered objects of a JSONL file; :class:`ConfigError` with the line number for anything else."""
    if not file.is_file():
        return
    with file.open("rb") as handle:
        number = 0
        while raw := handle.readline(LONGEST + 1):
            number += 1
            where = f"{str(file)!r}, line {number}"
            if len(raw) > LONGEST:
                raise ConfigError(f"{where}: longer than {LONGEST} bytes. It is no line of klamp's; remove it.")
            if not raw.endswith(b"\n"):
                return  # torn: its process was killed while writing
            try:
                text = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                row = json.loads(text) if text else None
            except UnicodeDecodeError as error:
                raise ConfigError(f"{where}: not UTF-8 at byte {error.start}.") from None
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{where}: not JSON ({error}).") from None
            if row is None and not text:
                continue
            if not isinstance(row, dict):
                raise ConfigError(f"{where}: must be an object, got {type(row).__name__}.")
            yield number, row


def finished(path: Path, steps: int) -> bool:
    """True when the run's last step is written and its checkpoint is there."""
    if not (path / "checkpoints" / f"step-{steps:06d}").is_dir():
        return False
    return last_step(path) >= steps


def last_step(path: Path) -> int:
    """The last whole step in metrics.jsonl, read from the file's end; 0 where there is none."""
    file = path / "metrics.jsonl"
    if not file.is_file():
        return 0
    with file.open("rb") as handle:
        handle.seek(max(0, file.stat().st_size - (1 << 16)))
        for raw in reversed(handle.read().split(b"\n")[:-1]):
            try:
                return int(json.loads(raw)["step"])
            except (ValueError, KeyError, TypeError):
                continue
    return 0


def _number(file: Path, line: int, key: str, value: Any) -> float:
    """A number; text such as "nan", which klamp writes for what JSON cannot say, counts as one."""
    if isinstance(value, str) and value in ("nan", "inf", "-inf"):
        return float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{str(file)!r}, line {line}: {key} must be a number, got {value!r:.80}.")
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _latest(found: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    """Probes by step and prompt; of one written twice, before and after a resumption, the later."""
    kept: dict[tuple[Any, Any], dict[str, Any]] = {}
    for row in found:
        tokens, kl = row.get("tokens"), row.get("kl")
        good = isinstance(tokens, list) and isinstance(kl, list) and len(tokens) == len(kl)
        if good and isinstance(row.get("step"), int) and isinstance(row.get("prompt"), str):
            kept[row["step"], row["prompt"]] = row
    return list(kept.values())


def _config(file: Path) -> dict[str, Any]:
    """The run's configuration as plain values; a file that is not YAML is an error that names it."""
    if not file.is_file():
        return {}
    import yaml

    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{str(file)!r} is not YAML: {getattr(error, 'problem', error)}.") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{str(file)!r} must hold a mapping of fields.")
    return found
