"""A reward for the runs under test, and a process that signals itself at an exact point of a step.

Imported by ``klamp train`` as ``phases:reward``. ``phases.json`` in the folder it runs in says what to do:
``{"at": "sampling", "call": 40, "signals": [2, 15], "sleep": 0, "rank": 0}``. Without it nothing happens.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FILE = Path("phases.json")
PLAN: dict[str, Any] = json.loads(FILE.read_text()) if FILE.is_file() else {}
if "rank" in PLAN and str(PLAN["rank"]) != os.environ.get("RANK", "0"):
    PLAN = {}
CALLS = 0


def reward(prompts: list[str], completions: list[str]) -> list[float]:
    """The number of words of each completion."""
    reach("reward")
    return [float(len(text.split())) for text in completions]


def reach(place: str) -> None:
    """Send this process its signals at the chosen call of the chosen place."""
    global CALLS
    if PLAN.get("at") != place:
        return
    CALLS += 1
    if PLAN["call"] == CALLS:
        Path("reached").touch()
        for number in PLAN["signals"]:
            os.kill(os.getpid(), number)
        time.sleep(PLAN.get("sleep", 0))


def through(place: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, with the signals in its middle: after it began, before what it returns is used."""

    def reached(*args: Any, **kwargs: Any) -> Any:
        found = function(*args, **kwargs)
        reach(place)
        return found

    return reached


def watch() -> None:
    """Put :func:`reach` into sampling (at each token), training (at each loss), saving (at each file) and between."""
    from klamp.sampling.sampler import Decoder
    from klamp.train import checkpoint, update
    from klamp.train.loop import Stop

    Decoder.draw = through("sampling", Decoder.draw)  # type: ignore[method-assign]
    update._loss = through("training", update._loss)
    checkpoint.save_file = through("saving", checkpoint.save_file)  # type: ignore[attr-defined]
    checkpoint.seal = through("sealed", checkpoint.seal)
    Stop.agree = through("agreed", Stop.agree)  # type: ignore[method-assign]


if PLAN:
    watch()
    reach("starting")
