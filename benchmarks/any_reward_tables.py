"""Tables of ``any_reward.py``: a line for each model, learning rate, reward and arm."""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, stdev
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

import many_rewards
from klamp.results.statistics import student

TARGET, LIMIT, UNIT = 0.05, 1.1, 0.65
"""UNIT: the share of Hold's first price that constants are multiples of."""
Row = dict[str, Any]


class Gain(NamedTuple):
    """Reward gained over the reference, and what constants gain at the same KL."""

    ours: float
    theirs: float


def late(values: Sequence[float]) -> float:
    """The mean of the last third."""
    return fmean(values[2 * len(values) // 3 :])


def first(rows: Sequence[Row]) -> float:
    """Reward of the reference: the first step of every run is its, and runs of one seed share it."""
    return fmean(row["reward"][0] for row in rows)


def gain(row: Row, constants: Sequence[Row], reference: float) -> Gain | None:
    """At the KL of the last third, between the constants of the same seed; None outside of them."""
    points = sorted((math.sqrt(max(late(c["kl"]), 0.0)), late(c["reward"])) for c in constants)
    points = [(0.0, reference), *points]
    x = math.sqrt(max(late(row["kl"]), 0.0))
    for (a, ra), (b, rb) in pairwise(points):
        if a <= x <= b:
            share = (x - a) / (b - a) if b > a else 0.0
            return Gain(late(row["reward"]) - reference, ra + share * (rb - ra) - reference)
    return None


def usual_spread(spread: Sequence[float]) -> list[float]:
    """Root of the mean square over a few steps, as Hold averages it; 1 before the first signal."""
    square, found = 0.0, []
    for n, value in enumerate(spread, 1):
        square += max(0.28, 1 / n) * (value * value - square)
        found.append(math.sqrt(square) or 1.0)
    return found


def prices(row: Row, price: float) -> tuple[float, float]:
    """Lowest and highest ``beta / (rho0 spread)``; a price is made of the spreads before its step."""
    spreads = usual_spread(row["spread"])
    ratios = [beta / (price * s) for beta, s in zip(row["beta"][1:], spreads[:-1], strict=True)]
    return min(ratios), max(ratios)


def compared(gains: Sequence[Gain]) -> str:
    """``gained / theirs`` with its interval over seeds."""
    if not gains or abs(fmean(g.theirs for g in gains)) < 1e-12:
        return ""
    scale = fmean(g.theirs for g in gains)
    ratio = fmean(g.ours for g in gains) / scale
    if len(gains) < 2:
        return f"{100 * ratio:.0f}"
    spread = stdev((g.ours - g.theirs) / scale for g in gains)
    half = student(len(gains) - 1) * spread / math.sqrt(len(gains))
    return f"{100 * ratio:.0f} ± {100 * half:.0f}"


def over(row: Row) -> float:
    """The highest reading over the limit, freed of twice its own noise."""
    noisy = zip(row["kl"], row.get("noise", [0.0] * len(row["kl"])), strict=True)
    return max(kl / (1 + 1.96 * noise) for kl, noise in noisy) / (LIMIT * TARGET)


def cells(rows: Sequence[Row], constants: Sequence[Row], price: float, reference: float) -> list[str]:
    """One arm on one reward."""
    by_seed = defaultdict(list)
    for c in constants:
        by_seed[c["seed"]].append(c)
    same = {r["seed"]: by_seed[r["seed"]] if len(by_seed[r["seed"]]) > 1 else constants for r in rows}
    gains = [g for r in rows if constants and (g := gain(r, same[r["seed"]], reference))]
    low, high = zip(*(prices(r, price) for r in rows), strict=True)
    learned = rows[0]["reward"] and rows[0]["reward_name"] not in many_rewards.NOTHING
    return [
        str(len(rows)),
        f"{max(max(r['kl']) for r in rows) / TARGET:.2f}",
        f"{max(over(r) for r in rows):.2f}",
        f"{max(r['fresh'][0] for r in rows) / (LIMIT * TARGET):.2f}",
        f"{fmean(late(r['kl']) for r in rows) / TARGET:.2f}",
        f"{fmean(late(r['reward']) for r in rows):.3g}",
        compared(gains) if learned else "",
        f"{100 * fmean(fmean(r['effort']) for r in rows):.1f}",
        f"{min(low):.2f}-{max(high):.2f}",
        f"{fmean(r['spread'][0] for r in rows):.2f}→{fmean(late(r['spread']) for r in rows):.2f}",
    ]


HEADINGS = (
    *("reward", "arm", "runs", "highest KL / target", "less 2 sd, / limit", "fresh KL / limit", "late KL / target"),
    *("late reward", "gain, % of constant's", "effort %", "beta / (rho0 spread)", "spread"),
)


def show(rows: Sequence[Row]) -> None:
    """Print a table for each model and learning rate, the two halves of the rewards apart."""
    console = Console(width=None if sys.stdout.isatty() else 200)
    known = {row["model"]: row for row in rows if "price" in row}
    for model, made in known.items():
        words = {name: (made["words"][name], round(made["shares"][name], 4)) for name in made["words"]}
        console.print(f"{model}: {made['length']:.1f} tokens, rho0 {made['price'] / UNIT:.3f}, sparse words {words}")
    runs = [row for row in rows if "arm" in row]
    for half, names in many_rewards.HALVES.items():
        for model in known:
            for rate in (0, 1):
                here = [r for r in runs if (r["model"], r["rate"]) == (model, rate) and r["reward_name"] in names]
                if here:
                    console.print(table(f"{model}, {half}, {('usual', 'low')[rate]} learning rate", here, known[model]))


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
        for arm in [a for a in order if any(r["arm"] == a for r in here)]:
            own = [r for r in here if r["arm"] == arm]
            shown = name if arm == "hold" else ""
            drawn.add_row(shown, arm, *cells(own, constants, made["price"] / UNIT, first(here)))
    return drawn
