"""How far an experiment is: a bar in a terminal, nothing in a pipe."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


class Progress:
    """Counts steps over all runs. Silent unless :meth:`live` found a terminal on stderr."""

    def __init__(self) -> None:
        self.bar: Any = None
        self.total: Any = None
        self.now: dict[int, str] = {}
        self.seen: dict[str, int] = {}

    @contextlib.contextmanager
    def live(self, title: str, steps: int, already: int = 0) -> Iterator[None]:
        """Show the bar while the block runs; ``already`` steps were done before."""
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        console = Console(stderr=True)
        if not console.is_terminal:
            yield
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
        advance = step - self.seen.get(label, step - 1)
        self.seen[label] = step
        if self.bar is not None:
            self.bar.update(self.total, advance=max(advance, 0), description=" · ".join(self.now.values())[:60])

    def done(self, worker: int, label: str) -> None:
        """A worker finished its run."""
        self.now.pop(worker, None)
