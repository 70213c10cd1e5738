"""Which settings may change when a run is resumed, and what a change is refused with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from klamp.config_io import flat, to_dict
from klamp.errors import ConfigError, shown
from klamp.references import CheckpointStep, parse
from klamp.train.config import ResolvedConfig

HOW = ("run", "resume", "skip_damaged")
"""Fields that say how a command goes about a run and nothing about the run itself."""
MAY_CHANGE = (
    "steps",
    "kl.beta",
    "kl.target",
    "kl.limit",
    "optim.lr",
    "optim.value_lr",
    "save_every",
    "keep",
    "sample_every",
    "track",
    "preflight",
    "device",
    "process_timeout",
)
"""Fields that may differ between a run and its resumption. Each change is an event of the run. From another ``kl.beta``
the controller starts anew."""
Changes = dict[str, tuple[Any, Any]]
"""By field: what it was and what it is now."""


def changes(run: Path, old: ResolvedConfig, new: ResolvedConfig) -> Changes:
    """What differs between a run and its resumption, by field; refused where a run cannot take it."""
    before, after = flat(to_dict(old)), flat(to_dict(new))
    found = {k: (before.get(k), after.get(k)) for k in after if before.get(k) != after.get(k) and k not in HOW}
    # Going on from a saved step with that step as the new anchor is said in so many words, and is this run.
    anchored = isinstance(parse(new.kl.reference), CheckpointStep)
    for field in sorted(found, key=lambda name: name != "kl.controller"):  # which target and unit go with
        was, now = found[field]
        may_change = field in MAY_CHANGE and not (field == "kl.beta" and now is None)
        if not may_change and not (anchored and field == "kl.reference"):
            raise ConfigError(
                f"‹{field}› is {shown(was)} in run {str(run)!r} and cannot become {shown(now)} when it is resumed. "
                f"Keep it at {shown(was)}, or choose another --run. Steps, ‹kl.beta›, ‹kl.target›, ‹kl.limit›, "
                "‹optim.lr› and the settings of saving and logging may change."
            )
    return found
