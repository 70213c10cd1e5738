"""Prompts: a file, or a built-in model's own. Which ones a step takes follows from seed and step alone."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from klamp.errors import ConfigError

LONGEST_LINE = 10_000_000
"""Characters of one JSONL line; more is refused rather than read into memory."""


@dataclass(frozen=True)
class Prompts:
    """Prompts with the dataset's other columns."""

    texts: list[str]
    columns: dict[str, list[Any]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.texts)

    def of_step(self, step: int, count: int, seed: int) -> list[int]:
        """Indices of the ``count`` prompts of ``step``: every prompt once an epoch, in an order the seed decides."""
        start = step * count
        orders = {e: self._order(seed, e) for e in {i // len(self) for i in range(start, start + count)}}
        return [orders[i // len(self)][i % len(self)] for i in range(start, start + count)]

    def _order(self, seed: int, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed(mix(seed, epoch))
        return list(torch.randperm(len(self.texts), generator=generator).tolist())


def mix(*numbers: int) -> int:
    """One seed of several numbers (FNV-1a over their bytes): the same everywhere, different for each tuple."""
    value = 0xCBF29CE484222325
    for number in numbers:
        for byte in int(number).to_bytes(8, "little", signed=True):
            value = ((value ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return value >> 1


def load(path: str | None, model: str) -> Prompts:
    """The prompts of a file, or those of the built-in ``model`` when there is none."""
    if path is None:
        from klamp import models

        if model not in models.BUILTIN:
            raise ConfigError(f"prompts is missing: model {model!r} brings none of its own. Give a JSONL or text file.")
        return Prompts(models.prompts(model))
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f'prompts {path!r} is not a file. Give JSONL with a "prompt" on each line, or plain text.')
    rows = read_jsonl(file) if file.suffix in (".jsonl", ".json") else read_lines(file)
    if not rows:
        raise ConfigError(f"prompts {path!r} has no prompt in it.")
    names = sorted({k for row in rows for k in row} - {"prompt"})
    return Prompts([row["prompt"] for row in rows], {n: [row.get(n) for row in rows] for n in names})


def read_lines(file: Path) -> list[dict[str, Any]]:
    """One prompt a line; empty lines are passed over."""
    return [{"prompt": line} for _, line in _lines(file) if line.strip()]


def read_jsonl(file: Path, field: str = "prompt") -> list[dict[str, Any]]:
    """One JSON object a line, each with a non-empty string ``field``; errors name the line."""
    rows = []
    for number, line in _lines(file):
        if not line.strip():
            continue
        where = f"{field}s {str(file)!r}, line {number}"
        try:
            row = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ConfigError(f"{where}: not JSON ({error}).") from None
        if not isinstance(row, dict):
            raise ConfigError(f'{where}: must be an object with a "{field}", got {type(row).__name__}.')
        if not isinstance(row.get(field), str) or not row[field]:
            raise ConfigError(f'{where}: "{field}" must be a non-empty string, got {row.get(field)!r}.')
        rows.append(row)
    return rows


def _lines(file: Path) -> list[tuple[int, str]]:
    """Numbered lines without their ends; a byte-order mark is dropped, other than UTF-8 is refused by line."""
    lines = []
    try:
        with file.open("rb") as handle:
            for number, raw in enumerate(iter(lambda: handle.readline(LONGEST_LINE + 1), b""), 1):
                if len(raw) > LONGEST_LINE:
                    raise ConfigError(
                        f"{str(file)!r}, line {number}: longer than {LONGEST_LINE} bytes. Split the file."
                    )
                try:
                    text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    raise ConfigError(f"{str(file)!r}, line {number}: not UTF-8 at byte {error.start}.") from None
                lines.append((number, text.rstrip("\r\n")))
    except OSError as error:
        raise ConfigError(f"{str(file)!r} cannot be read: {error}.") from None
    return lines
