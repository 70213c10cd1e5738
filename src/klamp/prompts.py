"""Prompts, from a file or a built-in model's own.

Which prompts a step takes follows from seed and step alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from klamp import strict_json
from klamp.chat import Prompt, as_text, keys, problem
from klamp.errors import ConfigError
from klamp.seeds import mix


@dataclass(frozen=True)
class Prompts:
    """Prompts with the dataset's other columns."""

    given: list[Prompt]
    """As they stand in the file: text, or a list of messages."""
    columns: dict[str, list[Any]] = field(default_factory=dict)

    @property
    def texts(self) -> list[str]:
        """For people to read."""
        return [as_text(prompt) for prompt in self.given]

    def __len__(self) -> int:
        return len(self.given)

    def of_step(self, step: int, count: int, seed: int) -> list[int]:
        """Indices of the ``count`` prompts of ``step``: every prompt once an epoch, in an order the seed decides."""
        start = step * count
        orders = {e: self._order(seed, e) for e in {i // len(self) for i in range(start, start + count)}}
        return [orders[i // len(self)][i % len(self)] for i in range(start, start + count)]

    def _order(self, seed: int, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed(mix(seed, epoch))
        return list(torch.randperm(len(self.given), generator=generator).tolist())


def load_prompts(path: str | None, model: str) -> Prompts:
    """The prompts of a file, or those of the built-in ``model`` when there is none."""
    if path is None:
        from klamp import models

        if model not in models.BUILTIN:
            raise ConfigError(f"prompts is missing: model {model!r} brings none of its own. Give a JSONL or text file.")
        return Prompts(list(models.prompts(model)))
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
    found = []
    for number, line, _ in strict_json.lines(file):
        if "\0" in line:
            raise ConfigError(f"{str(file)!r}, line {number}: holds a NUL byte. Save the file as UTF-8 text.")
        if line.strip():
            found.append({"prompt": line})
    return found


def read_jsonl(file: Path, field: str = "prompt") -> list[dict[str, Any]]:
    """One JSON object a line, each with a ``field`` of text (a prompt: or messages); errors name the line."""
    found = []
    for number, row in strict_json.rows(file, strict=True):
        where = f"{field}s {str(file)!r}, line {number}"
        if field not in row:
            raise ConfigError(f'{where}: there is no "{field}". The keys are {keys(row)}; rename the one you mean.')
        wrong = problem(row[field])
        if wrong is None and field != "prompt" and not isinstance(row[field], str):
            wrong = "got a list"
        if wrong is not None:
            form = "text, or a list of messages" if field == "prompt" else "a non-empty string"
            raise ConfigError(f'{where}: "{field}" must be {form}: {wrong}.')
        found.append(row)
    return found
