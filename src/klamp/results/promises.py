"""What klamp promises of a comparison, each promise with what it came to.

Reward at equal KL comes first: a user has a KL budget, and wants its worth. Then the clamp's limit, and last how near
the target KL stays.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

from klamp.clamp import LIMIT
from klamp.monitor import BAND
from klamp.results.records import Record
from klamp.results.statistics import (
    ORACLE,
    Comparison,
    Figures,
    Interval,
    at_equal_kl,
    difference,
    fresh,
    gain,
    perhaps_in_band,
)

FRESH = 256
"""Samples of the last policy that its KL is read on."""
GAINS = {"hold": 0.97, "hold-price": 0.95}
"""Reward gained, as a share of what constants gain at the same KL."""
GAIN_MARGIN, ENGLISH_MARGIN = 0.05, 0.05
"""How far an interval may reach to the wrong side and still show a promise kept: as a share of the constants' gain, and
of the reference's held-out perplexity."""
OVER = 1.1
"""KL in limits up to which the limit counts as kept."""
EFFORT = 0.03
"""Share of the displacement that the clamp undoes in a step, on average: the price carries the load."""
DENSE, SPARSE = 1.5, 2.0
"""Highest reading without the clamp, in targets: with a dense reward, and with one that most groups show nothing of."""
HELD, POINTS = 0.95, 0.05
"""Share of the second half in band, and how far below the oracle's share it may be without the clamp."""


@dataclass(frozen=True)
class Check:
    """A figure that was promised, what it is, and whether it holds; None where it cannot be told."""

    what: str
    found: str
    holds: bool | None


def checks(comparison: Comparison, rows: dict[str, Figures]) -> list[Check]:
    """The figures klamp promises, as they came out, in the order of their weight."""
    hold, price, oracle = rows.get("hold"), rows.get("hold-price"), rows.get(ORACLE)
    found = [_gained(comparison, arm) for arm in GAINS if arm in rows]
    if hold is not None:
        if comparison.constants:
            found.append(_english(comparison))
        found += [_limit_at_the_end(comparison, hold), _limit_on_the_way(comparison, hold), _effort(comparison, hold)]
        found.append(_in_band(comparison, hold))
    if price is not None:
        found += _price_alone(comparison, price)
    if price is not None and oracle is not None:
        gap = price.settled - oracle.settled if price.entered and oracle.entered else math.nan
        shown = never(comparison) if math.isnan(gap) else f"{100 * gap:+.1f} points"
        what = f"hold-price in band at most {100 * POINTS:g} points less than the oracle"
        found.append(Check(what, shown, None if math.isnan(gap) else gap >= -POINTS))
    return found


def share(x: float) -> str:
    """``97 %``."""
    return f"{100 * x:.0f} %"


def start(comparison: Comparison) -> float:
    """Mean reward of the first step, which every arm takes with the reference's weights."""
    firsts = [run.get("reward/mean").values[:1] for runs in comparison.arms.values() for run in runs]
    return fmean([value for first in firsts for value in first] or [math.nan])


def gain_of(comparison: Comparison, arm: str) -> Interval:
    """Reward that an arm gained, as a share of what constants gain at the same KL; NaN where that is not known."""
    pairs = at_equal_kl(comparison.arms[arm], list(comparison.constants.values()), "reward/mean")
    return gain(pairs, start(comparison)) if pairs else Interval(math.nan)


def never(comparison: Comparison) -> str:
    """``never in band within 60 steps``."""
    return f"never in band within {steps(comparison)}"


def steps(comparison: Comparison) -> str:
    """``60 steps``: of the longest run."""
    most = max((run.last_step for runs in comparison.arms.values() for run in runs), default=0)
    return f"{most} {'step' if most == 1 else 'steps'}"


def _gained(comparison: Comparison, arm: str) -> Check:
    promise = GAINS[arm]
    what = f"{arm} gains {share(promise)} of the reward that constants gain at the same KL, or more"
    if not comparison.constants:
        return Check(what, "not measured: add --oracle", None)
    found = gain_of(comparison, arm)
    if math.isnan(found.mean):
        return Check(what, f"not known: no constants enclose the KL of {arm}, or none gains there", None)
    if without := _not_enclosed(comparison, arm):
        return Check(what, f"{share(found.mean)}, but {without}", None)
    if math.isnan(found.low):
        return Check(what, f"{share(found.mean)} (one seed, no interval)", None)
    shown = f"{share(found.mean)} (95 % interval {share(found.low)} to {share(found.high)})"
    if found.high < promise:
        return Check(what, shown, False)
    if found.mean >= promise and found.low >= promise - GAIN_MARGIN:
        return Check(what, shown, True)
    return Check(what, f"{shown}, too wide to tell: more --seeds", None)


def _not_enclosed(comparison: Comparison, arm: str) -> str:
    """``no constants enclose the KL of 1 of 3 seeds``, whose worth is not known then; empty where they enclose all."""
    runs = comparison.arms[arm]
    known = len(at_equal_kl(runs, list(comparison.constants.values()), "reward/mean"))
    return f"no constants enclose the KL of {len(runs) - known} of {len(runs)} seeds" if known < len(runs) else ""


def _english(comparison: Comparison) -> Check:
    what = "held-out perplexity of hold no higher than a constant's at the same KL"
    constants = list(comparison.constants.values())
    found = difference(at_equal_kl(comparison.arms["hold"], constants, "heldout/perplexity"))
    if not math.isnan(found.mean) and (without := _not_enclosed(comparison, "hold")):
        return Check(what, f"{found.mean:+.2g}, but {without}", None)
    return _no_higher(what, found, ENGLISH_MARGIN * float(comparison.reference["perplexity"]["heldout"]))


def _no_higher(what: str, found: Interval, margin: float) -> Check:
    """Broken where the interval lies wholly above 0; not shown where it reaches there by over ``margin``."""
    if math.isnan(found.mean):
        return Check(what, "not known: no constants enclose the KL of hold", None)
    if math.isnan(found.high):
        return Check(what, f"{found} (one seed, no interval)", None)
    if found.low > 0 or found.high <= margin:
        return Check(what, str(found), found.low <= 0)
    return Check(what, f"{found}, too wide to show it: the margin is {margin:+.2g}", None)


def _limit_at_the_end(comparison: Comparison, hold: Figures) -> Check:
    """A fresh reading has noise of its own: a limit that is passed by less is neither kept nor broken."""
    what = f"KL of hold at the end at most {OVER} × its limit, on {FRESH} fresh samples"
    runs = comparison.arms["hold"]
    found = [(kl / (LIMIT * comparison.target), noise) for run in runs for kl, noise in fresh(run)]
    if len(found) < len(runs):
        return Check(what, "not measured in every run: they are of an earlier klamp, or not finished", None)
    highest, noise = max(found)
    shown = f"{highest:.2f} × its limit (± {196 * noise:.0f} %)"
    if highest <= OVER:
        return _held(what, shown, hold, holds=True)
    broken = any(kl / (1 + 1.96 * noise) > OVER for kl, noise in found)
    return Check(what, shown if broken else f"{shown}, within its noise", False if broken else None)


def _limit_on_the_way(comparison: Comparison, hold: Figures) -> Check:
    what = f"KL of hold in every step at most {OVER} × its limit, beyond the noise of its reading"
    surely = hold.surely / LIMIT
    shown = _shown(comparison, hold, lambda: f"{surely:.2f} × its limit (highest reading {hold.highest:.2f} × target)")
    return _held(what, shown, hold, holds=surely <= OVER)


def _effort(comparison: Comparison, hold: Figures) -> Check:
    what = f"the clamp of hold undoes at most {share(EFFORT)} of the displacement in a step"
    if math.isnan(hold.effort):
        return Check(what, "not measured", None)
    shown = _shown(comparison, hold, lambda: f"{100 * hold.effort:.1f} %")
    return _held(what, shown, hold, holds=hold.effort <= EFFORT)


def _in_band(comparison: Comparison, hold: Figures) -> Check:
    """Readings that only their noise may have put out of the band decide nothing."""
    what = f"hold in band in at least {share(HELD)} of the steps of the second half"
    shown = _shown(comparison, hold, lambda: f"{100 * hold.settled:.1f} %")
    perhaps = perhaps_in_band(comparison.arms["hold"], comparison.target)
    if hold.settled < HELD <= perhaps:
        return Check(what, f"{shown}; {100 * perhaps:.1f} % within the noise of the readings", None)
    return _held(what, shown, hold, holds=hold.settled >= HELD)


def _price_alone(comparison: Comparison, price: Figures) -> list[Check]:
    sparse = _no_signal(comparison.arms["hold-price"]) > 0.5
    most, kind = (SPARSE, " (sparse reward)") if sparse else (DENSE, "")
    highest = _shown(comparison, price, lambda: f"{price.highest:.2f} × target")
    level = price.kl / comparison.target
    near = _shown(comparison, price, lambda: f"{level:.2f} × target")
    within = f"hold-price within {share(BAND)} of the target in the mean of the second half"
    return [
        _held(f"highest KL of hold-price at most {most:g} × target{kind}", highest, price, holds=price.highest <= most),
        _held(within, near, price, holds=abs(level - 1) <= BAND),
    ]


def _no_signal(runs: list[Record]) -> float:
    """Share of the first batches' groups in which every completion has the same reward; 0 where it is not known."""
    firsts = [value for run in runs for value in run.get("reward/no_signal").values[:1] if math.isfinite(value)]
    return fmean(firsts or [0.0])


def _shown(comparison: Comparison, arm: Figures, found: Callable[[], str]) -> str:
    return never(comparison) if not arm.entered and not arm.highest > 1 else found()


def _held(what: str, found: str, arm: Figures, *, holds: bool) -> Check:
    """A promise that begins with the band: kept only if every seed entered it, and broken by a KL far above it."""
    if arm.entered == arm.seeds or ((arm.entered or arm.highest > 1) and not holds):
        return Check(what, found, holds)
    entered = f", but {arm.entered} of {arm.seeds} seeds entered the band" if arm.entered else ""
    return Check(what, found + entered, None)
