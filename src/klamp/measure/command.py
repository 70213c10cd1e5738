"""``klamp measure`` as a command: files in, a summary, measure.json and measure.html out."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from klamp.errors import ConfigError
from klamp.measure.page import finding
from klamp.measure.run import Measurement, measure_kl
from klamp.train import data


def run(
    policy: str, reference: str, prompts: str | None, completions: str | None, out: Path, **settings: Any
) -> Measurement:
    """Measure, write the files and print the summary; processes other than the first only help."""
    asked = data.load(prompts, policy).texts
    given = None if completions is None else _completions(completions)
    with _progress() as progress:
        result = measure_kl(policy, reference, asked, completions=given, out=out, progress=progress, **settings)
    if int(os.environ.get("RANK", "0")) == 0:
        result.to_json(out / "measure.json")
        result.to_html(out / "measure.html")
        print(summary(result))
        print(f"{out / 'measure.html'}")
    return result


def summary(m: Measurement) -> str:
    """The figures in a few lines."""
    rows = [
        ("KL(policy‖reference) per token", m.kl),
        ("KL(policy‖reference) per sequence", m.kl_per_sequence),
        ("KL(reference‖policy) per token", m.forward_kl),
        ("k1 per token", m.k1),
        ("k3 per token", m.k3),
        ("entropy, policy", m.entropy),
        ("entropy, reference", m.reference_entropy),
        ("sampler gap", m.sampler_gap),
        ("noise floor", m.noise_floor),
    ]
    lines = [finding(m), ""]
    lines += [f"  {name:<36}{value}" for name, value in rows if value is not None]
    worst = ", ".join(f"{t['token'].strip()!r} {t['kl']:.2g}" for t in m.top_tokens[:5])
    lines += [f"  {'drifted most':<36}{worst}", f"  {m.prompts} prompts, {m.sequences} completions, {m.tokens} tokens"]
    return "\n".join(lines)


def _completions(path: str) -> list[str]:
    rows = data.read_jsonl(Path(path), field="completion") if Path(path).is_file() else None
    if rows is None:
        raise ConfigError(f'completions {path!r} is not a file. Give JSONL with a "completion" on each line.')
    return [row["completion"] for row in rows]


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int, int], None] | None]:
    """A progress bar in a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("measuring", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
