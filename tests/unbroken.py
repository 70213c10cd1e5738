"""What a run leaves behind, to compare a broken one with one that was not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from klamp.train.config import TrainConfig
from klamp.train.run_folder import read_jsonl

LOGS = ("metrics", "samples", "alarms", "probes")


def left_by(run: str | Path, steps: int) -> dict[str, Any]:
    """Every line of its logs but their times, and every byte of its last checkpoint."""
    folder = Path(run)
    last = folder / "checkpoints" / f"step-{steps:06d}"
    kept = {p.name: p.read_bytes() for p in sorted(last.iterdir()) if p.name not in ("README.md", "manifest.json")}
    return {**{name: rows(folder / f"{name}.jsonl") for name in LOGS}, **kept}


def rows(file: Path) -> list[dict[str, Any]]:
    """The lines of a log without their times; a torn last one fails."""
    raw = file.read_bytes() if file.is_file() else b""
    assert not raw or raw.endswith(b"\n"), f"{file.name} ends in a torn line"
    return [timeless(row) for row in read_jsonl(file)]


def timeless(row: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in row.items() if not k.startswith("time/")}


def assert_same(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a.keys() == b.keys(), f"in one alone: {sorted(a.keys() ^ b.keys())}"
    for name in a:
        assert a[name] == b[name], f"{name} differs"


def resumed(config: TrainConfig) -> TrainConfig:
    return replace(config, resume=True)
