"""What was said and what it was worth: choices, trajectories and groups of them, with ART's attribute names.

Anything with these attributes is accepted in their place: an OpenAI choice, an ``art.Trajectory``, a message as a
dictionary. Rollouts of a group, and many groups, run at the same time, with some failures allowed, as in ART.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from klamp.chat import as_message
from klamp.errors import require_number


@dataclass(frozen=True)
class Message:
    """One message of a chat."""

    role: str
    content: str | None


@dataclass(frozen=True)
class Choice:
    """What the model said in one turn, with the tokens it said it in. Those are trained on, never the text."""

    message: Message
    finish_reason: Literal["stop", "length"]
    """stop: it ended by itself. length: it was cut off."""
    token_ids: tuple[int, ...]
    """As sampled; the end token is among them when the model said it."""
    logp: tuple[float, ...]
    """Log-prob of each token under the distribution it was drawn from."""
    prompt_token_ids: tuple[int, ...]
    """What the model had before it."""
    temperature: float = 1.0
    step: int | None = None
    """The step whose weights said it."""
    index: int = 0


@dataclass
class Trajectory:
    """Messages and choices in the order they came, and the reward of the whole. Only choices are trained on."""

    messages_and_choices: list[Any]
    """Dictionaries with role and content, and choices. Without a single choice, the assistant's messages count, and
    are tokenised once."""
    reward: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    """Averaged over the step and returned as ``trajectory/NAME``."""
    metadata: dict[str, Any] = field(default_factory=dict)
    logs: list[str] = field(default_factory=list)
    tools: list[Any] | None = None
    """Passed to the chat template."""
    additional_histories: list[Any] = field(default_factory=list)
    """Side conversations with ``messages_and_choices`` and ``tools`` of their own, trained on with the same reward."""
    start_time: float = field(default_factory=time.monotonic, repr=False, compare=False)

    def log(self, message: str) -> None:
        """Keep a line with the trajectory.

        Args:
            message: the line.
        """
        self.logs.append(message)

    def finish(self) -> Trajectory:
        """Note the seconds since the trajectory was made as the metric ``duration``.

        Returns:
            The trajectory itself.
        """
        self.metrics["duration"] = time.monotonic() - self.start_time
        return self

    @contextlib.asynccontextmanager
    async def track_duration(self, name: str) -> AsyncIterator[None]:
        """Add the seconds that the block takes to the metric ``NAME_duration``.

        Args:
            name: the first part of the metric.

        Returns:
            A block for ``async with``.
        """
        began = time.monotonic()
        try:
            yield
        finally:
            key = f"{name}_duration"
            self.metrics[key] = self.metrics.get(key, 0.0) + time.monotonic() - began

    def messages(self) -> list[dict[str, Any]]:
        """All of it as plain messages.

        Returns:
            Dictionaries with role and content.
        """
        return [as_message(item) for item in self.messages_and_choices]


class TrajectoryGroup:
    """Trajectories that are compared with one another: attempts at the same task. Failed ones may be among them.

    ``await TrajectoryGroup(coroutines)`` runs them at the same time and raises what one of them raises, unless
    ``gather_trajectory_groups`` allows some to fail. ``TrajectoryGroup.gather`` keeps whatever fails.

    Args:
        trajectories: trajectories, exceptions in place of those that failed, or coroutines that make them.
        metadata: kept with the group.
        exceptions: further rollouts that failed.
    """

    def __init__(
        self,
        trajectories: Iterable[Any],
        *,
        metadata: Mapping[str, Any] | None = None,
        exceptions: Iterable[BaseException] = (),
    ) -> None:
        given = list(trajectories)
        self.pending = given if any(isinstance(t, Awaitable) for t in given) else []
        """Coroutines among the rest, until the group is awaited."""
        if self.pending:
            given = []
        self.trajectories = [t for t in given if not isinstance(t, BaseException)]
        self.exceptions = [*(t for t in given if isinstance(t, BaseException)), *exceptions]
        self.metadata = dict(metadata or {})

    @classmethod
    async def gather(
        cls, rollouts: Iterable[Awaitable[Any]], *, metadata: Mapping[str, Any] | None = None
    ) -> TrajectoryGroup:
        """Run the rollouts at the same time; one that raises an Exception is kept as such and not trained on.

        Args:
            rollouts: coroutines, each of which returns a trajectory.
            metadata: kept with the group.

        Returns:
            The group, with what failed as ``exceptions``.
        """
        with allowing(math.inf):
            return await cls(rollouts, metadata=metadata)

    def __await__(self) -> Generator[Any, None, TrajectoryGroup]:
        return rolled_out(self).__await__()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.trajectories)

    def __len__(self) -> int:
        return len(self.trajectories)


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
    """Await all groups at the same time.

    A group of several coroutines keeps its failed ones as ``exceptions``; a group that fails as a whole is left out.

    Args:
        groups: groups of coroutines, or coroutines that return a group.
        pbar_desc: the name of the progress bar on a terminal. None: no bar.
        max_exceptions: how many rollouts may fail, or which share of them where it is below 1.
        after_each: awaited with every group as it is done; returns the group, several, or None to leave it out.

    Returns:
        The groups, in the order in which they were given.
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
