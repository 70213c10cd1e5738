"""How far an experiment is: a bar in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Any

EVERY = 10.0
"""Seconds between two lines: often enough to see that it lives, seldom enough for a log."""


class Lines:
    """``title: 120 of 900 steps, 3 min left`` on stderr: the first at once, others :data:`EVERY` few seconds."""

    def __init__(self, title: str, unit: str, already: int = 0) -> None:
        self.title, self.unit, self.already = title, unit, already
        self.begun = time.monotonic()
        self.last: float | None = None

    def update(self, done: int, total: int, text: str = "") -> None:
        """``done`` of ``total``; shown if a line is due, or if it was the last of them."""
        now = time.monotonic()
        if self.last is not None and now - self.last < EVERY and done < total:
            return
        self.last = now
        parts = [f"{self.title}: {done} of {total} {self.unit}"]
        if self.already < done < total and now - self.begun >= 1:
            parts.append(left((now - self.begun) / (done - self.already) * (total - done)))
        print(", ".join([*parts, *([text] if text else [])]), file=sys.stderr, flush=True)


def left(seconds: float) -> str:
    """``40 s left`` or ``3 min left``."""
    return f"{seconds:.0f} s left" if seconds < 120 else f"{seconds / 60:.0f} min left"


class Progress:
    """Counts steps over all runs while :meth:`live`."""

    def __init__(self) -> None:
        self.bar: Any = None
        self.total: Any = None
        self.lines: Lines | None = None
        self.steps = self.done_steps = 0
        self.now: dict[int, str] = {}
        self.seen: dict[str, int] = {}

    @contextlib.contextmanager
    def live(self, title: str, steps: int, already: int = 0) -> Iterator[None]:
        """Show how far it is while the block runs; ``already`` steps were done before."""
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        self.steps, self.done_steps = steps, already
        console = Console(stderr=True)
        if not console.is_terminal:
            self.lines = Lines(title, "steps", already)
            if steps > 1:
                self.lines.update(already, steps)
            yield
            self.lines = None
            return
        columns = (TextColumn(title), BarColumn(24), MofNCompleteColumn(), TextColumn("{task.description}"))
        with Bar(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True) as self.bar:
            self.total = self.bar.add_task("starting", total=steps, completed=already)
            yield
        self.bar = None

    def step(self, worker: int, label: str, step: int, text: str) -> None:
        """A worker finished a step."""
        self.now[worker] = f"{label} {text}"
        # A resumed run begins in the middle; its earlier steps were counted when the bar was made.
        advance = max(step - self.seen.get(label, step - 1), 0)
        self.seen[label] = step
        self.done_steps += advance
        if self.bar is not None:
            self.bar.update(self.total, advance=advance, description=" · ".join(self.now.values())[:60])
        elif self.lines is not None:
            self.lines.update(self.done_steps, self.steps, self.now[worker].strip())

    def done(self, worker: int, label: str) -> None:
        """A worker finished its run."""
        self.now.pop(worker, None)
