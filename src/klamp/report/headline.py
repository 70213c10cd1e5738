"""What the runs of a page came to, in words: a headline of at most fifteen, and the sentences below it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any

from klamp.monitor import BAND
from klamp.report.charts import SMOOTH, Arm
from klamp.results.records import Record
from klamp.results.statistics import Figures
from klamp.results.verdict import percent

FEW = 4
"""Steps below which there is no telling where KL goes."""


def state(arm: Arm, target: float | None) -> str:
    """Where KL is at the end of the runs: in band, approaching, below, above, unsteered or not finite."""
    kl = arm.figures.kl_end
    if math.isnan(kl):
        return "not finite"
    if not target:
        return "unsteered"
    if abs(kl / target - 1) <= BAND:
        return "in band"
    if kl > target:
        return "above"
    return "approaching" if any(_approaches(r, (1 - BAND) * target) for r in arm.runs) else "below"


def _approaches(run: Record, goal: float) -> bool:
    """Whether KL rises while the run goes on; of one that has ended, whether as many steps again would be enough.

    Judged by √KL, which grows evenly while the weights move evenly: KL is quadratic in their displacement.
    """
    roots = [math.sqrt(max(kl, 0.0)) for kl in run.get("kl/steered").from_step(0)]
    if len(roots) < FEW:
        return True
    quarter = len(roots) // 4
    pace = (fmean(roots[-quarter:]) - fmean(roots[-2 * quarter : -quarter])) / quarter
    if run.last_step < run.config.get("steps", 0):
        return pace > 0
    return roots[-1] + pace * len(roots) >= math.sqrt(goal)


def verdict(arm: Arm, target: float | None) -> str:
    """A run in a few words, for the table."""
    found, now = arm.figures, state(arm, target)
    if now == "in band" and found.in_band >= 0.95:
        return "holds the band"
    said = {
        "in band": f"in band at the end, {percent(found.in_band)} of the steps since it entered",
        "approaching": "approaching the band",
        "below": "stays below the band",
        "above": "ends above the band",
        "unsteered": "no target",
        "not finite": "KL is not finite",
    }
    return said[now]


def headline(arms: Sequence[Arm], target: float | None, per: str) -> str:
    """The finding of a page of runs in at most fifteen words."""
    if len(arms) > 1:
        if not target:
            return f"{len(arms)} runs, {max(r.last_step for a in arms for r in a.runs)} steps."
        inside = sum(state(a, target) == "in band" for a in arms)
        return f"{inside} of {len(arms)} runs end with KL in the band around {target:g}."
    arm, unit = arms[0], per.replace("_", " ")
    now, kl = state(arm, target), arm.figures.kl_end
    size = f"{kl:.3g} of {target:g} nats per {unit}" if target else f"{kl:.3g} nats per {unit}"
    held = arm.figures.in_band >= 0.95
    if now == "approaching" and max(r.last_step for r in arm.runs) < FEW:
        return f"KL has only begun to move: {size}."
    said = {
        "in band": f"KL holds its target: {size}." if held else f"KL is in its band: {size}.",
        "approaching": f"KL is approaching its target: {size}.",
        "below": f"KL stays below its target: {size}.",
        "above": f"KL is above its target: {size}.",
        "unsteered": f"KL has reached {size}; nothing steers it.",
        "not finite": "KL is not a finite number.",
    }
    return said[now]


def sentence(arms: Sequence[Arm], target: float | None) -> str:
    """What else a page of runs says: reward, time in the band, alarms, and the way out where KL is off its target."""
    if len(arms) > 1:
        return ""
    arm = arms[0]
    parts = [_reward(arm), _band(arm.figures), _way_out(arm, target), _alarms(arm), _not_finite(arm)]
    return " ".join(filter(None, parts))


def _reward(arm: Arm) -> str:
    """Reward at the beginning and at the end, each the mean of a few steps."""
    steps = max(r.last_step for r in arm.runs)
    taken = f"in {steps} steps" if steps != 1 else "in one step"
    pairs = [(v[:SMOOTH], v[-SMOOTH:]) for r in arm.runs if len(v := r.get("reward/mean").from_step(0))]
    if not pairs:
        return ""
    first, last = (fmean(fmean(values) for values in side) for side in zip(*pairs, strict=True))
    if steps < 2 * SMOOTH:
        return f"Mean reward {last:.3g} {taken}."
    noise = math.hypot(*(stdev(values) / math.sqrt(SMOOTH) for pair in pairs for values in pair)) / len(pairs)
    if abs(last - first) < 2 * noise:
        return f"Reward has not clearly changed {taken}: {first:.3g} at first, {last:.3g} now."
    return f"Reward {'rose' if last > first else 'fell'} from {first:.3g} to {last:.3g} {taken}."


def _band(found: Figures) -> str:
    if not found.entered:
        return ""
    highest = f"highest reading {found.highest:.2f} × target"
    return (
        f"KL entered its band at step {found.entry:.0f} and was in it for {percent(found.in_band)} of the steps since, "
        f"{highest}."
    )


def _way_out(arm: Arm, target: float | None) -> str:
    """What brings KL to its target."""
    now = state(arm, target)
    if now in ("approaching", "below"):
        how = "more steps" if now == "approaching" else "a higher learning rate (optim.lr)"
        return f"The band begins at {(1 - BAND) * (target or 0.0):.3g}; {how} would bring KL there."
    if now == "above":
        clamped = _section(arm.runs[0].config, "kl").get("clamp", True)
        return f"A lower learning rate (optim.lr){'' if clamped else ' or the clamp (kl.clamp)'} would bring it down."
    return ""


def _alarms(arm: Arm) -> str:
    count = sum(max(r.alarms_in_all, len(r.alarms)) for r in arm.runs)
    return "" if not count else "One alarm was raised." if count == 1 else f"{count} alarms were raised."


def _not_finite(arm: Arm) -> str:
    """Values that no chart can draw."""
    names = {"reward/mean": "reward", "kl/steered": "KL", "kl/beta": "beta"}
    found = {
        name: sum(not math.isfinite(v) for r in arm.runs for v in r.get(key).values) for key, name in names.items()
    }
    told = ", ".join(f"{name} at {count} {'step' if count == 1 else 'steps'}" for name, count in found.items() if count)
    return f"Not finite, and not drawn: {told}." if told else ""


def notes(config: dict[str, Any]) -> str:
    """What a run was, by its configuration; nothing where it is not known."""
    reward, rollout, algorithm = (_section(config, name) for name in ("reward", "rollout", "algorithm"))
    if not config.get("model"):
        return ""
    functions = reward.get("functions")
    rewards = " + ".join(map(str, functions)) if isinstance(functions, list) else ""
    parts = [
        str(config["model"]),
        str(algorithm.get("name", "")).upper(),
        f"reward {rewards}" if rewards else "",
        f"{rollout.get('prompts')} prompts of {rollout.get('group_size')} completions a step" if rollout else "",
        f"seed {config.get('seed', 0)}",
    ]
    return f"{', '.join(filter(None, parts))}."


def _section(config: dict[str, Any], name: str) -> dict[str, Any]:
    found = config.get(name)
    return found if isinstance(found, dict) else {}
