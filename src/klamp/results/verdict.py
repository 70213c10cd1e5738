"""What a comparison says: a verdict for each arm, the checks, and the finding with its numbers and intervals."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

from klamp.clamp import LIMIT
from klamp.monitor import BAND
from klamp.results.promises import FRESH, HELD, OVER, Check, checks, gain_of, share, steps
from klamp.results.statistics import ADAPTIVE, Comparison, Figures, Interval, paired, paired_ratio

DEGRADED = 1.25
"""Held-out perplexity, in the reference's, above which a policy's English has suffered."""
GONE = 10.0
"""And above which there is no English left."""


@dataclass(frozen=True)
class Verdict:
    """All that is said about a comparison."""

    figures: list[Figures]
    arms: dict[str, str]
    checks: list[Check]
    headline: str
    """The finding in at most fifteen words."""
    sentence: str
    oracle: str | None


def judge(comparison: Comparison) -> Verdict:
    """Figures, verdicts, checks and the sentence."""
    rows = comparison.figures()
    reference = float(comparison.reference["perplexity"]["heldout"])
    return Verdict(
        figures=rows,
        arms={f.arm: verdict(f, comparison.target, reference) for f in rows},
        checks=checks(comparison, {f.arm: f for f in rows}),
        headline=headline(comparison, {f.arm: f for f in rows}),
        sentence=sentence(comparison, {f.arm: f for f in rows}),
        oracle=comparison.oracle,
    )


def verdict(found: Figures, target: float, reference_perplexity: float) -> str:
    """A few words for one arm."""
    if found.entered == 0:
        where = "stays below the band" if found.kl < target else "shoots past the band"
    elif found.settled >= HELD and found.surely <= OVER * LIMIT:
        where = "holds the band"
    elif found.kl_end > 2 * target:
        where = f"drifts off: KL of the last tenth {found.kl_end / target:.2g} × target"
    elif found.settled >= 0.75:
        where = "mostly in band"
    else:
        where = "wanders" if found.entered == found.seeds else "enters with some seeds only"
    ratio = found.perplexity / reference_perplexity
    return f"{where}; English degraded ({ratio:.2g} × perplexity)" if ratio > DEGRADED else where


def headline(comparison: Comparison, rows: dict[str, Figures]) -> str:
    """The finding in at most fifteen words; :func:`sentence` has its numbers and intervals."""
    near = partial(_closeness, target=comparison.target)
    if not any(row.entered for row in rows.values()):
        return f"No run entered the band within {steps(comparison)}."
    gained = gain_of(comparison, "hold") if "hold" in rows else Interval(math.nan)
    if not math.isnan(gained.mean):
        return f"hold gained {share(gained.mean)} of the reward of constant prices at the same KL."
    adaptive = [rows[a] for a in ADAPTIVE if a in rows]
    if not adaptive or "static" not in rows:
        best = max(rows.values(), key=near)
        return f"Nearest to the target was {best.arm}: {_percent(best.settled)} of the second half in band."
    ours, static = max(adaptive, key=near), rows["static"]
    if near(ours) <= near(static):
        return "No adaptive arm kept KL closer to its target than static did."
    theirs = f"static {_percent(static.settled)}" if static.entered else "static never"
    return f"KL in band over the second half: {ours.arm} {_percent(ours.settled)}, {theirs}."


def sentence(comparison: Comparison, rows: dict[str, Figures]) -> str:
    """The finding: reward at equal KL where constants were run; then who kept nearest the target, beside static."""
    if not any(row.entered for row in rows.values()):
        return _nobody(comparison, max(rows.values(), key=partial(_closeness, target=comparison.target)))
    gained = gain_of(comparison, "hold") if "hold" in rows else Interval(math.nan)
    return f"{_gained(gained)} {_nearest(comparison, rows)}".strip()


def _gained(found: Interval) -> str:
    """What hold gained beside constants at the same KL; nothing where that is not known."""
    if math.isnan(found.mean):
        return ""
    known = not math.isnan(found.low)
    within = f"95 % interval {share(found.low)} to {share(found.high)}" if known else "one seed, no interval"
    return f"hold gained {share(found.mean)} of the reward that constant prices gain at the same KL ({within})."


def _nearest(comparison: Comparison, rows: dict[str, Figures]) -> str:
    """The adaptive arm nearest its target beside the static one."""
    near = partial(_closeness, target=comparison.target)
    adaptive = [rows[a] for a in ADAPTIVE if a in rows]
    if not adaptive or "static" not in rows:
        best = max(rows.values(), key=near)
        return f"Nearest to the target of {_target(comparison)} was {best.arm}: {_band(best)}."
    ours, static = max(adaptive, key=near), rows["static"]
    reward = paired(comparison.arms[ours.arm], comparison.arms["static"], "reward/mean")
    perplexity = paired_ratio(comparison.arms[ours.arm], comparison.arms["static"], "heldout/perplexity")
    closer = near(ours) > near(static)
    closest = f"its target of {_target(comparison)} than static did"
    opening = (
        f"{ours.arm} kept KL closer to {closest}"
        if closer
        else f"No adaptive arm kept KL closer to {closest}; {ours.arm} came nearest"
    )
    english = _compared(perplexity, percent=True)
    gone = 0.0 if perplexity.high < 0 else _gone(static, ours, comparison)
    if gone:  # seeds that collapse do so to perplexities many powers of ten apart, and no interval over them is narrow
        own = _english(ours, comparison)
        like = "like the reference's" if abs(own - 1) < 0.05 else f"{own:.2g} times the reference's"
        english = f"{like}, where static's was {gone:.2g} times it,"
    return (
        f"{opening} ({_band(ours)}, against {_band(static)} with beta {static.beta:g}); its held-out perplexity was "
        f"{english} and its reward {_compared(reward)}{_trade(reward, bool(gone) or perplexity.high < 0)}."
    )


def _nobody(comparison: Comparison, nearest: Figures) -> str:
    """That no run entered the band, and what to do: there is nothing yet to compare."""
    way_out = "Give more steps (--steps) or a higher learning rate (--lr)"
    if nearest.kl > comparison.target:
        way_out = "KL went past it at once: give a lower learning rate (--lr)"
    return (
        f"No run entered the band of {1 - BAND:g} to {1 + BAND:g} times {_target(comparison)} within "
        f"{steps(comparison)}, so there is no telling how well KL is held; {nearest.arm} came nearest, with KL "
        f"{nearest.kl:.3g}. {way_out}."
    )


def _trade(reward: Interval, better_english: bool) -> str:
    """What a lower reward bought; nothing where it is not certainly lower."""
    if not reward.high < 0:
        return ""
    if better_english:
        return ": what static gained in reward it paid for in English"
    return ": on this run adaptive steering did not win"


def _english(found: Figures, comparison: Comparison) -> float:
    """Held-out perplexity as a multiple of the reference's."""
    return found.perplexity / float(comparison.reference["perplexity"]["heldout"])


def _gone(static: Figures, ours: Figures, comparison: Comparison) -> float:
    """The static arm's perplexity as a multiple of the reference's, if it alone is beyond GONE; else 0."""
    ratio = _english(static, comparison)
    return ratio if ratio > GONE and _english(ours, comparison) <= DEGRADED else 0.0


def _compared(found: Interval, *, percent: bool = False) -> str:
    """``0.41 lower (95 % interval -0.45 to -0.37)``, or that there is no telling."""

    def show(x: float, sign: str = "+") -> str:
        return f"{100 * x:{sign}.0f} %" if percent else f"{x:{sign}.3g}"

    if math.isnan(found.mean):
        return "not measured"
    size = f"{show(abs(found.mean), '')} {'lower' if found.mean < 0 else 'higher'}"
    if math.isnan(found.low):
        return f"{size} (one seed, no interval)"
    ends = f"95 % interval {show(found.low)} to {show(found.high)}"
    return f"not clearly different ({ends})" if found.low <= 0 <= found.high else f"{size} ({ends})"


def _band(found: Figures) -> str:
    if found.entered == 0:
        return f"never in band, KL {found.kl:.3g}"
    return f"{_percent(found.settled)} of the second half in band, highest reading {found.highest:.2f} × target"


def _closeness(found: Figures, target: float) -> tuple[float, float]:
    """Share in band, weighed by the seeds that entered; then how near the late KL is, as a ratio."""
    share = 0.0 if math.isnan(found.settled) else found.settled * found.entered / found.seeds
    return share, -abs(math.log(found.kl / target)) if found.kl > 0 else -math.inf


def _target(comparison: Comparison) -> str:
    return f"{comparison.target:g} nats per {comparison.per}"


def _percent(x: float) -> str:
    return "–" if math.isnan(x) else f"{100 * x:.1f} %"


def console() -> Any:
    """Wide when piped, so that no row wraps."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 160, soft_wrap=not sys.stdout.isatty())


NOTHING = "–"
"""What stands in a cell without a figure."""


def number(x: float, digits: int = 3) -> str:
    """``x`` in a cell; a dash where there is none."""
    if math.isnan(x):
        return NOTHING
    rounds_away = 0 < abs(x) < 10.0 ** (1 - digits)
    return f"{x:.2g}" if rounds_away else f"{x:.{digits}f}" if abs(x) < 1000 else f"{x:.3g}"


def percent(x: float) -> str:
    """A share in a cell."""
    return NOTHING if math.isnan(x) else f"{100 * x:.1f} %"


def times(x: float) -> str:
    """A multiple of the target in a cell."""
    return NOTHING if math.isnan(x) else f"{x:.2f} ×"


COLUMNS = ("arm", "reward", "KL", "in band", "max KL", "end KL", "perplexity", "on ref", "entropy", "beta", "verdict")


def cells(row: Figures, verdict: str) -> tuple[str, ...]:
    """A row as text; the report shows the same."""
    return (
        row.arm,
        number(row.reward),
        number(row.kl, 4),
        percent(row.settled),
        times(row.highest),
        times(row.fresh),
        number(row.perplexity, 2),
        number(row.perplexity_reference, 2),
        number(row.entropy, 2),
        NOTHING if math.isnan(row.beta) else f"{row.beta:.3g}",
        verdict,
    )


OPTIONAL = ("entropy", "on ref", "perplexity", "max KL")
"""Columns that a terminal without room for all of them does without, the first of them first."""


def arms_table(found: Verdict, width: int = 160) -> Any:
    """The figures of each arm for a terminal of that ``width``, and the verdicts below them."""
    from rich.console import Group
    from rich.table import Table

    rows = [cells(row, "")[:-1] for row in found.figures]
    needs = [max(map(len, column)) + 3 for column in zip(COLUMNS[:-1], *rows, strict=True)]
    shown = list(range(len(needs)))
    for name in OPTIONAL:
        if 1 + sum(needs[i] for i in shown) > width:
            shown.remove(COLUMNS.index(name))
    table = Table(
        title="second half of the run, in band pooled over seeds; max KL: highest reading; "
        f"end KL: on {FRESH} fresh samples after the last step, highest seed"
    )
    for i in shown:
        table.add_column(COLUMNS[i], justify="right" if i else "left", overflow="fold")
    below = Table(show_header=False, box=None)
    for row, figures in zip(found.figures, rows, strict=True):
        table.add_row(*(figures[i] for i in shown))
        known = f" ({found.oracle})" if row.arm == "oracle" else ""
        below.add_row(row.arm, found.arms[row.arm] + known)
    return Group(table, below)


def checks_table(found: Verdict) -> Any:
    """The promised figures, each with what it came to."""
    from rich.table import Table

    table = Table(show_header=False, box=None)
    for check in found.checks:
        mark = "?" if check.holds is None else "✓" if check.holds else "✗"
        table.add_row(mark, check.what, check.found)
    return table


def markdown(found: Verdict) -> str:
    """Table, checks and sentence for a README or an issue."""
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{' --- |' * len(COLUMNS)}"]
    for row in found.figures:
        label = f"{row.arm} ({found.oracle})" if row.arm == "oracle" else row.arm
        lines.append(f"| {' | '.join((label, *cells(row, found.arms[row.arm])[1:]))} |")
    marks = {True: "✓", False: "✗", None: "?"}
    lines += ["", *(f"- {marks[c.holds]} {c.what}: {c.found}" for c in found.checks), "", found.sentence, ""]
    return "\n".join(lines)
