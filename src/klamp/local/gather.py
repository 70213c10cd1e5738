"""Rollouts run at the same time: groups to be awaited, and many of them with some failures allowed, as in ART."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from klamp.errors import require_number
from klamp.local.trajectories import TrajectoryGroup

AfterEach = Callable[[TrajectoryGroup], Awaitable["TrajectoryGroup | list[TrajectoryGroup] | None"]]


@dataclass
class Tolerance:
    """How many rollouts may fail before one of their errors is raised."""

    most: float
    """A count, or a share of ``total`` where it is below 1."""
    total: int = 0
    failed: int = 0
    progress: Callable[[], None] = lambda: None

    def fail(self) -> bool:
        """Count a failure; whether that is one too many."""
        self.failed += 1
        share = 0 < self.most < 1 and self.failed <= self.most * self.total
        return not share and self.failed > self.most


_tolerance: contextvars.ContextVar[Tolerance | None] = contextvars.ContextVar("tolerance", default=None)


@contextlib.contextmanager
def allowing(most: float, total: int = 0, progress: Callable[[], None] = lambda: None) -> Iterator[Tolerance]:
    """Groups that are awaited in this context keep up to ``most`` failed rollouts together."""
    tolerance = Tolerance(most, total, progress=progress)
    token = _tolerance.set(tolerance)
    try:
        yield tolerance
    finally:
        _tolerance.reset(token)


async def rolled_out(group: TrajectoryGroup) -> TrajectoryGroup:
    """``group`` with the trajectories that its coroutines give, in their order."""
    tolerance = _tolerance.get() or Tolerance(0)

    async def one(rollout: Any) -> Any:
        if not isinstance(rollout, Awaitable):
            return rollout
        try:
            return await rollout
        except Exception as error:
            if tolerance.fail():
                raise
            return error
        finally:
            tolerance.progress()

    rollouts, group.pending = group.pending, []
    try:
        done = await together(one(r) for r in rollouts)
    finally:
        _close(rollouts)
    group.trajectories += [t for t in done if not isinstance(t, BaseException)]
    group.exceptions += [t for t in done if isinstance(t, BaseException)]
    return group


async def together(jobs: Iterable[Awaitable[Any]]) -> list[Any]:
    """The results in order; the first error cancels what is still running, waits for it, and is raised."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def gather_trajectory_groups(
    groups: Iterable[Awaitable[TrajectoryGroup]],
    *,
    pbar_desc: str | None = "gather",
    max_exceptions: float = 0,
    after_each: AfterEach | None = None,
) -> list[TrajectoryGroup]:
    """Await all groups at the same time; up to ``max_exceptions`` rollouts may fail, or that share where it is below 1.

    A group of several coroutines keeps its failed ones as ``exceptions``; a group that fails as a whole is left out.
    ``after_each`` is awaited with every group as it is done and gives the group, several, or None to leave it out.
    ``pbar_desc`` names the progress bar on a terminal; None shows none.
    """
    require_number("max_exceptions", 0 if max_exceptions == float("inf") else max_exceptions, at_least=0, way_out=WAYS)
    waiting = list(groups)
    total = sum(len(g.pending) if isinstance(g, TrajectoryGroup) else 1 for g in waiting)

    async def one(group: Awaitable[TrajectoryGroup], tolerance: Tolerance) -> list[TrajectoryGroup]:
        try:
            made = await group
        except Exception:
            # What a group of coroutines lets through was counted there.
            if isinstance(group, TrajectoryGroup) or tolerance.fail():
                raise
            return []
        finally:
            if not isinstance(group, TrajectoryGroup):
                tolerance.progress()
        found: Any = made if after_each is None else await after_each(made)
        return found if isinstance(found, list) else [] if found is None else [found]

    with _bar(pbar_desc, total) as progress, allowing(max_exceptions, total, progress) as tolerance:
        try:
            return [g for found in await together(one(g, tolerance) for g in waiting) for g in found]
        finally:
            _close(waiting)


def _close(rollouts: Iterable[Any]) -> None:
    """Close what was never begun because something else failed before it; nothing happens to the rest."""
    for rollout in rollouts:
        if isinstance(rollout, TrajectoryGroup):
            _close(rollout.pending)
        elif asyncio.iscoroutine(rollout):
            rollout.close()


WAYS = "It counts rollouts; below 1 it is their share."


@contextlib.contextmanager
def _bar(description: str | None, total: int) -> Iterator[Callable[[], None]]:
    """A call that moves a progress bar on by one; on a terminal only."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if description is None or not console.is_terminal:
        yield lambda: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(description, total=total)
        yield lambda: bar.advance(task)
