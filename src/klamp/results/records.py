"""What a run left on disk, read with suspicion: numbers by step, alarms, completions at the fixed prompts.

A line that is not what klamp writes is named by file and number; a torn last line is passed over. Numbers are kept as
packed doubles, at most 120 bytes a step, so every figure is taken over every step; curves go to a page as the means,
least and greatest values of at most ``POINTS`` stretches.
"""

from __future__ import annotations

import bisect
import itertools
import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from klamp import strict_json
from klamp.config_io import load_yaml
from klamp.errors import ConfigError
from klamp.train.run_folder import RunFolder

KEYS = (
    "reward/mean",
    "reward/no_signal",
    "kl/steered",
    "kl/noise",
    "kl/fresh",
    "kl/fresh_noise",
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
MOST_ALARMS = 200
"""Alarms kept of a run; the others are counted."""
SAMPLES_READ = 1 << 23
"""Bytes of samples.jsonl up to which all of it is read; of a larger one the first step and the last."""
NAN = array("d", [math.nan])


class Stretch(NamedTuple):
    """Consecutive steps as one point: the last of them, and mean, least and greatest of the finite values."""

    step: float
    mean: float
    low: float
    high: float


@dataclass
class Series:
    """One metric over a run: the steps at which it was written and its values."""

    steps: array[float] = field(default_factory=lambda: array("d"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def add(self, step: float, value: float) -> None:
        """Append a point."""
        self.steps.append(step)
        self.values.append(value)

    def stride(self, most: int = POINTS) -> int:
        """Points to a stretch, so that there are at most ``most``; 1 where nothing has to be left out."""
        return max(1, -(-len(self.steps) // most))

    def stretches(self, stride: int) -> Iterator[Stretch]:
        """The series in stretches of ``stride`` points; those without a finite value are left out."""
        for i in range(0, len(self.steps), stride):
            part = self.values[i : i + stride]
            if not math.isfinite(sum(part)):
                part = array("d", filter(math.isfinite, part))
            if part:
                step = self.steps[min(i + stride, len(self.steps)) - 1]
                yield Stretch(step, sum(part) / len(part), min(part), max(part))

    def from_step(self, first: float) -> array[float]:
        """Finite values at ``first`` and later; steps only grow."""
        return array("d", filter(math.isfinite, self.values[bisect.bisect_left(self.steps, first) :]))

    def __len__(self) -> int:
        return len(self.steps)


@dataclass
class Record:
    """One run."""

    path: Path
    config: dict[str, Any] = field(default_factory=dict)
    series: dict[str, Series] = field(default_factory=dict)
    alarms: list[dict[str, Any]] = field(default_factory=list)
    """The first of them."""
    alarms_in_all: int = 0
    probes: list[dict[str, Any]] = field(default_factory=list)
    """Completions at the fixed prompts of an experiment."""
    samples: list[dict[str, Any]] = field(default_factory=list)
    """Completions from training, where there are no probes."""
    events: list[dict[str, Any]] = field(default_factory=list)
    """What was changed on the way: the settings of a resumption."""

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
    file = path / "metrics.jsonl"
    if not file.is_file():
        raise ConfigError(f"{str(path)!r} holds no metrics.jsonl. Give the folder of a run, a compare or a sweep.")
    record = Record(path, config=_config(path / "config.yaml"), series=_series(file))
    for n, (_, row) in enumerate(strict_json.whole(path / "alarms.jsonl")):
        record.alarms_in_all = n + 1
        if n < MOST_ALARMS:
            record.alarms.append(row)
    record.probes = _latest(row for _, row in strict_json.whole(path / "probes.jsonl"))
    if not record.probes:
        record.samples = _samples(path / "samples.jsonl")
    record.events = [row for _, row in strict_json.whole(path / "events.jsonl") if isinstance(row.get("step"), int)]
    return record


def _series(file: Path) -> dict[str, Series]:
    """Every metric of ``KEYS`` that was ever written, all on one array of steps: NaN where a step has none."""
    steps: array[float] = array("d")
    found: dict[str, array[float]] = {}
    for number, row in strict_json.whole(file):
        step = _number(file, number, "step", row.get("step"))
        if not math.isfinite(step) or (steps and step < steps[-1]):
            raise ConfigError(f"{str(file)!r}, line {number}: step {row.get('step')!r:.40} comes after a larger one.")
        for key in KEYS:
            value = row.get(key)
            if value is None and key not in row:
                value = math.nan
            elif type(value) is not float:
                value = _number(file, number, key, value)
            if key in found:
                found[key].append(value)
            elif key in row:
                found[key] = NAN * len(steps) + array("d", [value])
        steps.append(step)
    return {key: Series(steps, values) for key, values in found.items()}


def finished(path: Path, steps: int) -> bool:
    """True when the run's last step is written and its checkpoint is there."""
    if not (path / "checkpoints" / f"step-{steps:06d}").is_dir():
        return False
    return last_step(path) >= steps


def last_step(path: Path) -> int:
    """The last whole step in metrics.jsonl, read from the file's end; 0 where there is none."""
    return RunFolder(path).last_step()


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


def _samples(file: Path) -> list[dict[str, Any]]:
    """Completions from training, by step and prompt; of a file too large to read, those of its first and last step."""
    rows = (row for _, row in strict_json.whole(file))
    if not file.is_file() or file.stat().st_size <= SAMPLES_READ:
        return _latest(rows)
    from_the_end = (
        strict_json.parse(line.decode("utf-8", "replace"), repr(str(file))) for _, line in strict_json.backwards(file)
    )
    return _latest(iter([*_of_one_step(rows), *reversed(_of_one_step(from_the_end))]))


def _of_one_step(rows: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of the first step met."""
    return next((list(found) for _, found in itertools.groupby(rows, lambda row: row.get("step"))), [])


def _config(file: Path) -> dict[str, Any]:
    """The run's configuration as plain values; a file that is not YAML is an error that names it."""
    if not file.is_file():
        return {}
    found = load_yaml(file)
    if not isinstance(found, dict):
        raise ConfigError(f"{str(file)!r} must hold a mapping of fields.")
    return found
