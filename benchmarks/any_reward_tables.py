"""Tables of ``any_reward.py``: a line for each model, learning rate, reward and arm."""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean, variance
from typing import Any

from rich.console import Console
from rich.table import Table

import many_rewards
from klamp.controllers.hold import SMOOTHING
from klamp.results.statistics import student

TARGET, LIMIT, UNIT = 0.05, 1.1, 0.65
"""UNIT: the share of Hold's computed price that constants are multiples of."""
Row = dict[str, Any]


def late(values: Sequence[float]) -> float:
    """The mean of the last third."""
    return fmean(values[2 * len(values) // 3 :])


def point(row: Row) -> tuple[float, float]:
    """``sqrt(KL)`` and reward of the last third."""
    return math.sqrt(max(late(row["kl"]), 0.0)), row["late_reward"]


def around(x: float, constants: Sequence[Row]) -> list[tuple[str, float, float]]:
    """Price, sqrt(KL) and reward of the two constants whose KL lies around ``x``, or nearest above it; none beyond."""
    by_price = defaultdict(list)
    for c in constants:
        by_price[c["arm"]].append(point(c))
    means = [(fmean(x for x, _ in runs), fmean(r for _, r in runs), arm) for arm, runs in by_price.items()]
    means.sort()
    above = next((i for i, (at, _, _) in enumerate(means) if at >= x), None)
    return [] if above is None else [(arm, at, r) for at, r, arm in means[max(above - 1, 0) :][:2]]


def gain(rows: Sequence[Row], constants: Sequence[Row], reference: float) -> float | None:
    """Reward gained over the reference as a share of what constants gain at the same KL; None beyond their KL.

    What they gain is read off a parabola in sqrt(KL) through the reference and the two constants whose KL lies around
    ours, or nearest above it: a line would lie below a curve that flattens.
    """
    ours = [point(row) for row in rows]
    x, r = fmean(x for x, _ in ours), fmean(r for _, r in ours) - reference
    near = around(x, constants)
    theirs = through_origin([(at, earned - reference) for _, at, earned in near], x) if near else 0.0
    return r / theirs if abs(theirs) > 1e-12 else None


def through_origin(points: Sequence[tuple[float, float]], x: float) -> float:
    """The parabola through the origin and two ``points`` at ``x``; the line through one."""
    (a, at_a), (b, at_b) = points[0], points[-1]
    if b - a < 1e-6:
        return at_a / a * x
    slope = (at_b / b - at_a / a) / (b - a)  # of y / x, which is linear on a parabola through the origin
    return x * (at_a / a + slope * (x - a))


def usual_spread(spread: Sequence[float], signal: Sequence[float]) -> list[float]:
    """Root of the mean square in groups with signal over a few steps, as Hold averages it; 1 before the first."""
    square, found = 0.0, []
    for n, (value, share) in enumerate(zip(spread, signal, strict=True), 1):
        if value:
            square += (max(SMOOTHING, 1 / n) if square else 1.0) * (value * value / share - square)
        found.append(math.sqrt(square) or 1.0)
    return found


def prices(row: Row, price: float) -> tuple[float, float]:
    """Lowest and highest ``beta / (rho0 spread)``; a price is made of the spreads before its step."""
    spreads = usual_spread(row["spread"], row.get("signal", [1.0] * len(row["spread"])))
    ratios = [beta / (price * s) for beta, s in zip(row["beta"][1:], spreads[:-1], strict=True)]
    return min(ratios), max(ratios)


def compared(rows: Sequence[Row], constants: Sequence[Row], reference: float) -> str:
    """The gain in per cent with its 95 % interval, from the jackknife over seeds.

    Runs of one seed share their prompts and their first completions, so a seed is left out of both at once: what it
    does to both cancels. Constants of other seeds count only where those of the arm's do not lie on both sides. The
    degrees of freedom are those of the arm, or of the constant near it, with fewest seeds.
    """
    seeds, x = {r["seed"] for r in rows}, fmean(point(row)[0] for row in rows)
    paired = [c for c in constants if c["seed"] in seeds]
    between = around(x, paired)
    if len(between) == 2 and between[0][1] <= x:
        constants = paired
    ratio = gain(rows, constants, reference)
    if ratio is None:
        return ""
    own, theirs = ({r["seed"] for r in part} for part in (rows, constants))
    near = [arm for arm, _, _ in around(x, constants)]
    fewest = min(len(own), *(sum(c["arm"] == arm for c in constants) for arm in near))
    if fewest < 2:
        return f"{100 * ratio:.0f}"

    def without(seed: int) -> float | None:
        kept, others = ([r for r in part if r["seed"] != seed] for part in (rows, constants))
        return gain(kept, others, reference)

    found = [without(seed) for seed in own | theirs]
    known = [g for g in found if g is not None]
    if len(known) < len(found):
        return f"{100 * ratio:.0f}"
    error = math.sqrt((len(known) - 1) ** 2 / len(known) * variance(known))
    return f"{100 * ratio:.0f} ± {100 * student(fewest - 1) * error:.0f}"


def target(row: Row) -> float:
    """The target of a run: the usual one unless its settings have another."""
    given = dict(pair.split("=", 1) for pair in row.get("settings", "").split())
    return float(given.get("kl.target", TARGET))


def over(row: Row) -> float:
    """The highest reading over the limit, freed of twice its own noise."""
    noisy = zip(row["kl"], row.get("noise", [0.0] * len(row["kl"])), strict=True)
    return max(kl / (1 + 1.96 * noise) for kl, noise in noisy) / (LIMIT * target(row))


def cells(rows: Sequence[Row], constants: Sequence[Row], made: Row) -> list[str]:
    """One arm on one reward, with the calibration of its model."""
    aim, name = target(rows[0]), rows[0]["reward_name"]
    computed = made["price"] / UNIT * math.sqrt(TARGET / aim)
    low, high = zip(*(prices(r, computed) for r in rows), strict=True)
    learned = constants and name not in many_rewards.NOTHING
    return [
        str(len(rows)),
        f"{max(max(r['kl']) for r in rows) / aim:.2f}",
        f"{max(over(r) for r in rows):.2f}",
        f"{max(r['fresh'][0] for r in rows) / (LIMIT * aim):.2f}",
        f"{fmean(late(r['kl']) for r in rows) / aim:.2f}",
        f"{fmean(r['late_reward'] for r in rows):.3g}",
        compared(rows, constants, made["means"][name]) if learned else "",
        f"{100 * max(fmean(r['effort']) for r in rows):.1f}",
        f"{min(low):.2f}-{max(high):.2f}",
        f"{fmean(r['spread'][0] for r in rows):.2f}→{fmean(late(r['spread']) for r in rows):.2f}",
    ]


COLUMNS = {
    "hold": ("reward", "seeds", "highest", "beyond noise / limit", "fresh / limit", "late KL", "gain %", "effort %"),
    "hold-price": ("reward", "seeds", "highest", "beyond noise", "late KL", "gain %"),
}
WIDEST = 50.0
"""A gain of several runs whose interval is wider, in per cent to a side, or unknown, is not shown."""


def page(rows: Sequence[Row], model: str, arm: str) -> list[str]:
    """The table of docs/results.md for one arm at the usual setting, in Markdown.

    Bold is outside the aims; a dagger marks runs that were made with a law before the last one of ``rows``.
    """
    newest = max(r["law"] for r in rows if "law" in r)
    made = next(r for r in rows if r["model"] == model and "price" in r)
    runs = [r for r in rows if "arm" in r and _group(r) == (model, 0, "")]
    lines = ["| " + " | ".join(COLUMNS[arm]) + " |", "|" + " --- |" * len(COLUMNS[arm])]
    for name in (name for half in many_rewards.HALVES.values() for name in half if name != "never"):
        own = [r for r in runs if (r["reward_name"], r["arm"]) == (name, arm)]
        constants = [r for r in runs if r["reward_name"] == name and r["arm"].startswith("x ")]
        if own:
            mark = " †" if any(r["law"] < newest for r in own) else ""
            lines.append("| " + " | ".join([name + mark, *_judged(own, constants, made, arm)]) + " |")
    return lines


def _judged(own: Sequence[Row], constants: Sequence[Row], made: Row, arm: str) -> list[str]:
    """The cells of one reward in :func:`page`."""
    seeds, highest, over_limit, ended, settled, _, shown, effort, _, _ = cells(own, constants, made)
    name, clamped = own[0]["reward_name"], arm == "hold"
    gained, _, width = shown.partition(" ± ")
    if shown and (float(width) > WIDEST if width else len(own) > 1):
        gained = shown = ""

    def bold(text: str, holds: bool) -> str:
        return text if holds else f"**{text}**"

    short = shown and float(gained) < (97 if clamped else 95)
    if clamped:
        within = [bold(over_limit, float(over_limit) <= 1.1), bold(ended, float(ended) <= 1.1)]
        return [seeds, highest, *within, settled, bold(shown, not short), bold(effort, float(effort) <= 3)]
    at_most = 2 if name in many_rewards.SPARSE else 1.5
    beyond = f"{LIMIT * max(map(over, own)):.2f}"
    near = bold(settled, 0.8 <= float(settled) <= 1.2)
    return [seeds, bold(highest, float(highest) <= at_most), beyond, near, bold(shown, not short)]


HEADINGS = (
    *("reward", "arm", "runs", "highest KL / target", "less 2 sd, / limit", "fresh KL / limit", "late KL / target"),
    *("late reward", "gain, % of constant's", "effort %", "beta / (rho0 spread)", "spread"),
)


def show(rows: Sequence[Row]) -> None:
    """Print a table for each model and learning rate, the two halves of the rewards apart."""
    console = Console(width=None if sys.stdout.isatty() else 200)
    for name in dict.fromkeys(row["reward_name"] for row in rows if "arm" in row):
        console.print(f"{name}: {many_rewards.WHAT[name]}")
    known = {row["model"]: row for row in rows if "price" in row}
    for model, made in known.items():
        words = {name: (made["words"][name], round(made["shares"][name], 4)) for name in made["words"]}
        console.print(f"{model}: {made['length']:.1f} tokens, rho0 {made['price'] / UNIT:.3f}, sparse words {words}")
    runs = [row for row in rows if "arm" in row]
    for half, names in many_rewards.HALVES.items():
        of_half = [r for r in runs if r["reward_name"] in names]
        for model, rate, settings in sorted({_group(r) for r in of_half}):
            here = [r for r in of_half if _group(r) == (model, rate, settings)]
            title = f"{model}, {half}, {('usual', 'low')[rate]} learning rate"
            console.print(table(", ".join(filter(None, (title, settings))), here, known[model]))


def _group(row: Row) -> tuple[str, int, str]:
    """Runs that share a table: constants are those of the same setting."""
    return row["model"], row["rate"], row.get("settings", "")


def table(title: str, rows: Sequence[Row], made: Row) -> Table:
    """All rewards and arms of one model and learning rate."""
    drawn = Table(title=title, title_justify="left")
    for heading in HEADINGS:
        drawn.add_column(heading, justify="left" if heading in ("reward", "arm") else "right")
    for name in dict.fromkeys(r["reward_name"] for r in rows):
        here = [r for r in rows if r["reward_name"] == name]
        constants = [r for r in here if r["arm"].startswith("x ")]
        held = sorted({r["arm"] for r in here if "@" in r["arm"]})
        order = ["hold", "hold-price", *held, "ff-clamp", "static", "ziegler", *sorted({c["arm"] for c in constants})]
        arms = [a for a in order if any(r["arm"] == a for r in here)]
        for arm in arms:
            own = [r for r in here if r["arm"] == arm]
            drawn.add_row(name if arm == arms[0] else "", arm, *cells(own, constants, made))
    return drawn
