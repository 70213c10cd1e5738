"""A process that runs jobs: one JSON object a line on stdin, events back on stdout; ``python -m`` this module.

It outlives no parent: when stdin ends it asks its own run to stop, which saves a checkpoint after the step at hand.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import sys
import threading
import traceback
from typing import Any, TextIO

from klamp.errors import KlampError


def main() -> int:
    """Serve jobs until stdin ends."""
    events = _take_stdout()
    orders: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    busy = threading.Event()
    threading.Thread(target=_listen, args=(orders, busy), daemon=True).start()
    while (order := orders.get()) is not None:
        busy.set()
        _serve(order, events)
        busy.clear()
    return 0


def _serve(order: dict[str, Any], events: TextIO) -> None:
    def tell(event: str, **more: Any) -> None:
        # With the parent gone nobody listens; the run goes on to its checkpoint all the same.
        with contextlib.suppress(BrokenPipeError):
            events.write(json.dumps({"event": event, **more}) + "\n")
            events.flush()

    try:
        import torch

        from klamp.experiments import jobs

        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        work = jobs.Job(**order["job"])
        if order["kind"] == "reference":
            jobs.make_reference(work)
        else:
            jobs.run(work, lambda step, text: tell("step", step=step, text=text))
    except KlampError as error:
        tell("failed", error=str(error))
    except Exception as error:
        traceback.print_exc()
        tell("failed", error=f"{type(error).__name__}: {error}")
    else:
        tell("done")


def _listen(orders: queue.SimpleQueue[dict[str, Any] | None], busy: threading.Event) -> None:
    for line in sys.stdin:
        orders.put(json.loads(line))
    orders.put(None)
    if busy.is_set():
        os.kill(os.getpid(), signal.SIGTERM)


def _take_stdout() -> TextIO:
    """The real stdout for events; whatever else prints goes to stderr, which is the log."""
    events = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return events


if __name__ == "__main__":
    raise SystemExit(main())
