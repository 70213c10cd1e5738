"""Rollouts taken step by step, the next one drawn while this one trains where that is asked for."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet

from klamp.sampling.batch import Rollout

LOOK = 0.2
"""Seconds between two looks at whether the run was asked to stop while it waits for a server."""


class Ahead:
    """``take(step)`` waits for the step's rollout; with ``ahead`` the next one is asked for at once.

    It is drawn from the weights before this step's update, so it is one update old when its turn comes.
    """

    def __init__(self, draw: Callable[[int], Rollout], *, last: int, ahead: bool, stopped: Callable[[], bool]) -> None:
        """``last`` is the run's last step; ``stopped`` says that nobody waits any more."""
        self.draw, self.last, self.ahead, self.stopped = draw, last, ahead, stopped
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="klamp-ahead")
        self.pending: dict[int, Future[Rollout]] = {}

    def take(self, step: int) -> Rollout | None:
        """The rollout of ``step``; None where the run was stopped before it came."""
        future = self.pending.pop(step, None) or self.pool.submit(self.draw, step)
        while not future.done():
            try:
                future.result(timeout=LOOK)
            except NotYet:
                if self.stopped():
                    self.pool.shutdown(wait=False, cancel_futures=True)
                    return None
        found = future.result()
        if self.ahead and step < self.last:
            self.pending[step + 1] = self.pool.submit(self.draw, step + 1)
        return found
