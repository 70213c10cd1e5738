"""How far a run or an experiment is: a live line or a bar in a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from klamp.monitor import BAND, Alarm

if TYPE_CHECKING:
    from klamp.train.config import ResolvedConfig

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


def fitted(text: str, room: int) -> str:
    """As much of ``text`` as fits."""
    return text if len(text) <= room else text[: max(room - 1, 0)] + "…"


def left(seconds: float) -> str:
    """``40 s left`` or ``3 min left``."""
    return f"{seconds:.0f} s left" if seconds < 120 else f"{seconds / 60:.0f} min left"


class Progress:
    """Counts steps over all runs while :meth:`live`."""

    def __init__(self) -> None:
        self.bar: Any = None
        self.total: Any = None
        self.lines: Lines | None = None
        self.steps = self.done_steps = self.room = 0
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
        # What the runs do gives way to the count and the times: each 7 wide, with 5 spaces between the columns.
        bar = 24 if console.width >= 100 else 10
        self.room = max(console.width - len(title) - bar - len(f"{steps}/{steps}") - 2 * 7 - 5, 0)
        columns = (TextColumn(title), BarColumn(bar), MofNCompleteColumn(), TextColumn("{task.description}"))
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
            self.bar.update(self.total, advance=advance, description=self._doing())
        elif self.lines is not None:
            self.lines.update(self.done_steps, self.steps, self.now[worker].strip())

    def _doing(self) -> str:
        """What the runs under way do, as far as the line has room for it."""
        return fitted(" · ".join(self.now.values()), self.room)

    def done(self, worker: int, label: str) -> None:
        """A worker finished its run."""
        self.now.pop(worker, None)


RECENT = 5
"""Steps whose mean a KL below its band must exceed to be on its way there: one step alone is noise."""


class Display:
    """Progress of a run. ``quiet`` shows nothing: for ranks other than the first, and for callers of the library."""

    def __init__(self, steps: int, *, quiet: bool = False) -> None:
        self.steps, self.quiet = steps, quiet
        self.terminal = sys.stderr.isatty() and not quiet
        self.progress: Any = None
        self.task: Any = None
        self.room = 0
        self.begun = time.monotonic()
        self.first: int | None = None
        self.recent: deque[float] = deque(maxlen=RECENT)
        self.alarms: Counter[str] = Counter()
        if not quiet:  # alarms are shown here; without a handler of its own logging would show them once more
            logging.getLogger("klamp.monitor").addHandler(logging.NullHandler())

    @contextlib.contextmanager
    def live(self, done: int) -> Iterator[None]:
        """Show progress until the block ends; ``done`` steps were done before."""
        self.first = done
        if not self.terminal:
            yield
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        bar = [BarColumn(20)] if console.width >= 110 else []
        self.room = console.width - 21 * len(bar) - len(f"{self.steps}/{self.steps}") - 7 - 2
        columns = (MofNCompleteColumn(), *bar, TextColumn("{task.description}"), TimeRemainingColumn())
        with Progress(*columns, console=console) as self.progress:
            self.task = self.progress.add_task("starting", total=self.steps, completed=done)
            yield

    def say(self, text: str) -> None:
        """One line about the run itself."""
        if self.progress is not None:
            self.progress.console.print(text)
        elif not self.quiet:
            print(text, file=sys.stderr, flush=True)

    def step(self, step: int, metrics: dict[str, float], alarms: list[Alarm]) -> None:
        """A finished step."""
        if self.quiet:
            return
        text = summary(metrics, self.recent)
        self.recent.append(metrics["kl/steered"])
        if self.progress is not None:
            self.progress.update(self.task, completed=step, description=fitted(text, self.room))
        else:
            remaining = self._left(step)
            print(f"step {step}/{self.steps}  {text}  {remaining}", file=sys.stderr, flush=True)
        for alarm in alarms:
            self.alarms[alarm.kind] += 1
            if self.alarms[alarm.kind] == 1:
                self.say(f"alarm {alarm.kind} at step {alarm.step}: {alarm.message}")

    def repeated(self, file: object) -> None:
        """Say at the end which alarms came more than once, and where all of them are."""
        often = [f"{kind} {count} times" for kind, count in self.alarms.items() if count > 1]
        if often:
            self.say(f"alarms that came again: {', '.join(often)}. All are in {file}")

    def _left(self, step: int) -> str:
        done = step - (self.first or 0)
        seconds = (time.monotonic() - self.begun) / max(done, 1) * (self.steps - step)
        return left(seconds)


def opening(config: ResolvedConfig) -> str:
    """What a run is about to do, its usual values written out."""
    rollout, kl = config.rollout, config.kl
    batch = f"{rollout.prompts} × {rollout.group_size} completions of up to {rollout.max_tokens} tokens"
    aim = f"KL to {kl.goal:g} nats per {kl.unit}" if kl.controller != "fixed" else f"beta {kl.beta:g}"
    rewards = " + ".join(config.reward.functions)
    what = f"{config.model}, {config.algorithm.name}, {rewards}"
    return f"{what}: {config.steps} steps of {batch}, learning rate {config.optim.lr:g}, {aim}. Run: {config.run}"


def summary(metrics: dict[str, float], recent: Sequence[float] = ()) -> str:
    """Reward, KL against its target, beta and speed in one line; ``recent`` are the KLs of the steps before."""
    kl, beta, target = metrics["kl/steered"], metrics["kl/beta"], metrics.get("kl/target")
    band = "" if target is None else f" of {target:g} {place(kl, target, recent)}"
    rate = f"  {metrics['time/tokens_per_second']:.0f} tok/s" if "time/tokens_per_second" in metrics else ""
    return f"reward {metrics['reward/mean']:.3f}  KL {kl:.4f}{band}  beta {beta:.3g}{rate}"


def place(kl: float, target: float, recent: Sequence[float]) -> str:
    """Where KL is: in band (within a fifth of the target), above it, approaching it from below, or just below."""
    if not math.isfinite(kl):
        return "not measured"
    if abs(kl / target - 1) <= BAND:
        return "in band"
    if kl > target:
        return "above"
    known = [k for k in recent if math.isfinite(k)]
    return "approaching" if known and kl > sum(known) / len(known) else "below"
