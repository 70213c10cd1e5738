"""Tables of ``any_reward.py``: a line for each model, learning rate, reward and arm."""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
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
            square += (max(SMOOTHING * share, 1 / n) if square else 1.0) * (value * value / share - square)
        found.append(math.sqrt(square) or 1.0)
    return found


def prices(row: Row, price: float) -> tuple[float, float]:
    """Lowest and highest price over the computed one; a price is made of the spreads before its step."""
    spreads = usual_spread(row["spread"], row.get("signal", [1.0] * len(row["spread"])))
    ratios = [beta / (price * s) for beta, s in zip(row["beta"][1:], spreads[:-1], strict=True)]
    return min(ratios), max(ratios)


def compared(rows: Sequence[Row], constants: Sequence[Row], reference: float) -> str:
    """The gain in per cent with its 95 % interval, from the jackknife over seeds.

    Runs of one seed share their prompts and their first completions, so a seed is left out of both at once: what it
    does to both cancels. Constants of other seeds count only where those of the arm's do not lie on both sides. The
    degrees of freedom are those of the arm, or of the constant near it, with fewest seeds.
    """
    constants, x = paired(rows, constants), fmean(point(row)[0] for row in rows)
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


def paired(rows: Sequence[Row], constants: Sequence[Row]) -> Sequence[Row]:
    """The constants of the seeds of ``rows`` where these lie on both sides of them, otherwise all."""
    seeds, x = {r["seed"] for r in rows}, fmean(point(row)[0] for row in rows)
    same = [c for c in constants if c["seed"] in seeds]
    between = around(x, same)
    return same if len(between) == 2 and between[0][1] <= x else constants


def target(row: Row) -> float:
    """The target of a run: the usual one unless its settings have another."""
    given = dict(pair.split("=", 1) for pair in row.get("settings", "").split())
    return float(given.get("kl.target", TARGET))


def freed(row: Row) -> list[float]:
    """Readings over the limit, each freed of twice its own noise."""
    noisy = zip(row["kl"], row.get("noise", [0.0] * len(row["kl"])), strict=True)
    return [kl / (1 + 1.96 * noise) / (LIMIT * target(row)) for kl, noise in noisy]


def over(row: Row) -> float:
    """The highest of them."""
    return max(freed(row))


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
    "hold-price": ("reward", "seeds", "highest", "beyond noise", "mean highest", "constant's", "late KL", "gain %"),
}
WIDEST = 50.0
"""A gain of several runs whose interval is wider, in per cent to a side, or unknown, is not shown."""
LEAST_KL = 0.5
"""Neither is that of one run which comes no nearer to its target: what it gains is of the size of its error."""


def page(rows: Sequence[Row], model: str, arm: str) -> list[str]:
    """What docs/results.md says of one arm at the usual setting, in Markdown: a list that sums it up, and its table.

    Bold is outside the aims; something of the law was chosen on the rewards in italics.
    """
    made = next(r for r in rows if r["model"] == model and "price" in r)
    runs = [r for r in rows if "arm" in r and _group(r) == (model, 0, "")]
    judged = []
    for name in (name for half in many_rewards.HALVES.values() for name in half):
        own = [r for r in runs if (r["reward_name"], r["arm"]) == (name, arm)]
        if own:
            constants = [r for r in runs if r["reward_name"] == name and r["arm"].startswith("x ")]
            judged.append(Judged(name, own, cells(own, constants, made), made, constants))
    return [*summary(judged), "", *markdown(COLUMNS[arm], [j.row() for j in judged if j.name != "never"])]


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table, line by line."""
    return ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads), *("| " + " | ".join(r) + " |" for r in rows)]


@dataclass(frozen=True)
class Judged:
    """The runs of one arm on one reward, beside the aims."""

    name: str
    runs: Sequence[Row]
    figures: Sequence[str]
    """As :func:`cells` has them."""
    made: Row
    constants: Sequence[Row]

    @property
    def decided(self) -> bool:
        """Whether something of the law was chosen on these runs."""
        return self.name in many_rewards.DECIDED[self.made["model"]]

    @property
    def clamped(self) -> bool:
        return self.runs[0]["arm"] == "hold"

    @property
    def settled(self) -> float:
        """KL of the last third over the target."""
        return float(self.figures[4])

    @property
    def gain(self) -> str:
        """In per cent, with its interval; empty where it says nothing."""
        shown = self.figures[6]
        width = shown.partition(" ± ")[2]
        silent = float(width) > WIDEST if width else len(self.runs) > 1 or self.settled < LEAST_KL
        return "" if shown and silent else shown

    @property
    def least(self) -> int:
        """The least gain that is within the aims."""
        return 97 if self.clamped else 95

    @property
    def most(self) -> float:
        """The highest reading within the aims without a clamp: more where most groups show no signal at first."""
        return 2 if _mostly_silent(self.made, self.name) else 1.5

    @property
    def short(self) -> bool:
        return bool(self.gain) and gained(self.gain) < self.least

    def row(self) -> list[str]:
        seeds, highest, over_limit, ended, settled, _, _, effort, _, _ = self.figures

        def bold(text: str, holds: bool) -> str:
            return text if holds else f"**{text}**"

        name, gain = f"*{self.name}*" if self.decided else self.name, bold(self.gain, not self.short)
        if self.clamped:
            within = [bold(over_limit, float(over_limit) <= 1.1), bold(ended, float(ended) <= 1.1)]
            return [name, seeds, highest, *within, settled, gain, bold(effort, float(effort) <= 3)]
        beyond = f"{LIMIT * max(map(over, self.runs)):.2f}"
        mean, theirs = fmean(map(highest_reading, self.runs)), constants_highest(self.runs, self.constants)
        peaks = [f"{mean:.2f}", "" if theirs is None else f"{theirs:.2f}"]
        near = bold(settled, 0.8 <= self.settled <= 1.2)
        return [name, seeds, bold(highest, float(highest) <= self.most), beyond, *peaks, near, gain]


def highest_reading(row: Row) -> float:
    """Over the target."""
    return max(row["kl"]) / target(row)


def constants_highest(rows: Sequence[Row], constants: Sequence[Row]) -> float | None:
    """The mean highest reading of runs at constant prices with the KL of ``rows`` in the last third, read off the line
    through the two constants around it; None where it does not lie between two."""
    by_price = defaultdict(list)
    for c in constants:
        by_price[c["arm"]].append(c)
    points = [(fmean(late(r["kl"]) for r in runs), fmean(map(highest_reading, runs))) for runs in by_price.values()]
    at = fmean(late(r["kl"]) for r in rows)
    for (low, a), (high, b) in pairwise(sorted(points)):
        if low <= at <= high:
            return a + (b - a) * (at - low) / (high - low)
    return None


def gained(shown: str) -> float:
    """The gain without its interval."""
    return float(shown.partition(" ± ")[0])


def summary(judged: Sequence[Judged]) -> list[str]:
    """What the runs of one arm come to, as a Markdown list."""
    runs = [row for j in judged for row in j.runs]
    readings = sum(len(row["kl"]) for row in runs)
    lines = [f"{len(runs)} runs on {len(judged)} rewards, {readings:,} readings of KL."]
    if judged[0].clamped:
        fresh = max(row["fresh"][0] / target(row) for row in runs) / LIMIT
        above = sum(reading > 1.1 for row in runs for reading in freed(row))
        effort = 100 * max(fmean(row["effort"]) for row in runs)
        lines += [
            f"KL of fresh samples ends at {fresh:.2f} of its limit or below.",
            f"{above} readings are above 1.1 of the limit by more than twice their standard error.",
            f"The clamp undoes {effort:.1f} % of the displacement a step at most.",
        ]
    else:
        pulls = [j for j in judged if j.name not in many_rewards.NOTHING]
        away = [f"{j.name} ({j.settled:.2f})" for j in pulls if not 0.8 <= j.settled <= 1.2]
        peaks = [[highest_reading(row) > j.most for row in j.runs] for j in judged]
        beyond = [j.name for j in judged if LIMIT * max(map(over, j.runs)) > j.most]
        lines += [
            f"KL of the last third is within 20 % of the target on {len(pulls) - len(away)} of {len(pulls)} rewards; "
            f"not on {', '.join(away)}.",
            f"{sum(map(sum, peaks))} runs have a reading above its aim, 1.5 or 2 times the target, on "
            f"{sum(map(any, peaks))} rewards; beyond its noise on {', '.join(beyond) or 'none'}.",
        ]
    known = [j for j in judged if j.gain]
    gains = [gained(j.gain) for j in known]
    short = ", ".join(f"{j.name} ({j.gain})" for j in known if j.short) or "none"
    lines.append(
        f"The gain is {min(gains):.0f} to {max(gains):.0f} % on {len(known)} rewards, {fmean(gains):.0f} % in the "
        f"mean; below {judged[0].least} % on {short}."
    )
    once = [gained(j.gain) for j in known if not j.decided]
    lines.append(f"On the {len(once)} of them that nothing was chosen on it is {fmean(once):.0f} % in the mean.")
    idle = [f"{j.figures[8].replace('-', ' to ')} with *{j.name}*" for j in judged if j.name in many_rewards.NOTHING]
    lines.append(f"The price is {', '.join(idle)}, over the computed one.")
    return [f"- {line}" for line in lines]


RULES = {
    "hold": "`Hold` and the clamp",
    "hold-price": "`Hold`, no clamp",
    "ff-clamp": "computed price, constant, and the clamp",
    "ff": "computed price, constant, no clamp",
    "ziegler-ff": "Ziegler's rule from the computed price, no clamp",
    "ziegler": "Ziegler's rule, usual settings, no clamp",
    "static": "constant price of 0.04, no clamp",
}


def beside(rows: Sequence[Row], model: str) -> list[str]:
    """``Hold`` beside other rules as a Markdown table, on the rewards and seeds that all of them were run with."""
    made = next(r for r in rows if r["model"] == model and "price" in r)
    runs = [r for r in rows if "arm" in r and _group(r) == (model, 0, "")]
    own = {arm: [r for r in runs if r["arm"] == arm] for arm in RULES}
    own = {arm: found for arm, found in own.items() if found}
    shared = set.intersection(*({(r["reward_name"], r["seed"]) for r in found} for found in own.values()))
    names = sorted({name for name, _ in shared} - set(many_rewards.NOTHING))
    sets = {
        arm: {n: [r for r in found if r["reward_name"] == n and (n, r["seed"]) in shared] for n in names}
        for arm, found in own.items()
    }

    def gain_of(arm: str, name: str) -> float | None:
        constants = [r for r in runs if r["reward_name"] == name and r["arm"].startswith("x ")]
        found, far = sets[arm][name], fmean(late(r["kl"]) for r in sets[arm][name]) < LEAST_KL * TARGET
        return None if far or not constants else gain(found, paired(found, constants), made["means"][name])

    gains = {arm: {name: gain_of(arm, name) for name in names} for arm in sets}
    common = [n for n in names if None not in (gains[arm][n] for arm in ("hold", "hold-price", "ff-clamp"))]
    dense, sparse = ([n for n in common if (_mostly_silent(made, n)) == silent] for silent in (False, True))
    heads = ("rule", "runs", "highest", "fresh", "late KL", "within 20 %", "effort %")
    heads += (f"gain %, {len(dense)} dense rewards", f"gain %, {len(sparse)} sparse ones")
    lines = []
    for arm, by_name in sets.items():
        each = [r for found in by_name.values() for r in found]
        settled = [round(fmean(late(r["kl"]) for r in found) / TARGET, 2) for found in by_name.values()]
        shown = (
            RULES[arm],
            str(len(each)),
            f"{fmean(map(highest_reading, each)):.2f}, {max(map(highest_reading, each)):.2f}",
            f"{max(r['fresh'][0] for r in each) / TARGET:.2f}",
            f"{min(settled):.2f} to {max(settled):.2f}",
            f"{sum(0.8 <= x <= 1.2 for x in settled)} of {len(names)}",
            f"{100 * max(fmean(r['effort']) for r in each):.1f}" if arm in ("hold", "ff-clamp") else "",
            *(_mean_gain([gains[arm][n] for n in part]) for part in (dense, sparse)),
        )
        lines.append(shown)
    return markdown(heads, lines)


def _mostly_silent(made: Row, name: str) -> bool:
    """Whether most groups of a reward show no signal at first."""
    return bool(made["spreads"][name] ** 2 < 0.5)


def _mean_gain(gains: Sequence[float | None]) -> str:
    """The mean over rewards and its 95 % interval; empty where a gain is not known."""
    known = [100 * g for g in gains if g is not None]
    if len(known) < len(gains) or len(known) < 2:
        return ""
    return f"{fmean(known):.0f} ± {student(len(known) - 1) * math.sqrt(variance(known) / len(known)):.0f}"


def slow(rows: Sequence[Row]) -> list[str]:
    """``Hold`` at a tenth of the usual learning rate, as a Markdown table: a line for each model and arm."""
    heads = ("model", "arm", "rewards", "runs", "highest KL", "late KL", "price over the computed one")
    lines = []
    for model in ("tiny", "smollm2"):
        made = next(r for r in rows if r["model"] == model and "price" in r)
        for arm in ("hold", "hold-price"):
            runs = [r for r in rows if "arm" in r and _group(r) == (model, 1, "") and r["arm"] == arm]
            own = [r for r in runs if r["reward_name"] not in many_rewards.NOTHING]
            low, high = zip(*(prices(r, made["price"] / UNIT) for r in own), strict=True)
            settled = [late(r["kl"]) / TARGET for r in own]
            shown = (
                model,
                f"`{arm}`",
                str(len({r["reward_name"] for r in own})),
                str(len(own)),
                f"{max(map(highest_reading, own)):.2f}",
                f"{min(settled):.2f} to {max(settled):.2f}",
                f"{min(low):.2f} to {max(high):.2f}",
            )
            lines.append(shown)
    return markdown(heads, lines)


def rewards() -> list[str]:
    """What each reward is, as a Markdown table."""
    return markdown(("reward", "what it is"), sorted(many_rewards.WHAT.items()))


HEADINGS = (
    *("reward", "arm", "runs", "highest KL / target", "less 2 sd, / limit", "fresh KL / limit", "late KL / target"),
    *("late reward", "gain, % of constant's", "effort %", "beta / computed", "spread"),
)


def show(rows: Sequence[Row]) -> None:
    """Print a table for each model and learning rate, the two halves of the rewards apart."""
    console = Console(width=None if sys.stdout.isatty() else 200)
    for name in dict.fromkeys(row["reward_name"] for row in rows if "arm" in row):
        console.print(f"{name}: {many_rewards.WHAT[name]}")
    known = {row["model"]: row for row in rows if "price" in row}
    for model, made in known.items():
        words = {name: (made["words"][name], round(made["shares"][name], 4)) for name in made["words"]}
        computed = f"computed price {made['price'] / UNIT:.3f} per spread"
        console.print(f"{model}: {made['length']:.1f} tokens, {computed}, sparse words {words}")
    runs = [row for row in rows if "arm" in row]
    for half, names in many_rewards.HALVES.items():
        of_half = [r for r in runs if r["reward_name"] in names]
        for model, rate, settings in sorted({_group(r) for r in of_half}):
            here = with_constants([r for r in of_half if _group(r) == (model, rate, settings)], of_half)
            title = f"{model}, {half}, {('usual', 'low')[rate]} learning rate"
            console.print(table(", ".join(filter(None, (title, settings))), here, known[model]))


def _group(row: Row) -> tuple[str, int, str]:
    """Runs that share a table: constants are those of the same setting."""
    return row["model"], row["rate"], row.get("settings", "")


def with_constants(rows: Sequence[Row], runs: Sequence[Row]) -> list[Row]:
    """The runs of a table, and among ``runs`` the constants of their rewards: no first price is anything to them."""
    model, rate, settings = _group(rows[0])
    names = {row["reward_name"] for row in rows}
    others = " ".join(part for part in settings.split() if not part.startswith("kl.beta="))
    theirs = [r for r in runs if _group(r) == (model, rate, others) and r["reward_name"] in names]
    return [*rows, *(r for r in theirs if settings != others and r["arm"].startswith("x "))]


def table(title: str, rows: Sequence[Row], made: Row) -> Table:
    """All rewards and arms of one model and learning rate."""
    drawn = Table(title=title, title_justify="left")
    for heading in HEADINGS:
        drawn.add_column(heading, justify="left" if heading in ("reward", "arm") else "right")
    for name in dict.fromkeys(r["reward_name"] for r in rows):
        here = [r for r in rows if r["reward_name"] == name]
        constants = [r for r in here if r["arm"].startswith("x ")]
        held = sorted({r["arm"] for r in here if "@" in r["arm"]})
        order = ["hold", "hold-price", *held, *list(RULES)[2:], *sorted({c["arm"] for c in constants})]
        arms = [a for a in order if any(r["arm"] == a for r in here)]
        for arm in arms:
            own = [r for r in here if r["arm"] == arm]
            drawn.add_row(name if arm == arms[0] else "", arm, *cells(own, constants, made))
    return drawn
