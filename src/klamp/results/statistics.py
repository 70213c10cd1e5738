"""Figures of an arm over its seeds: time in the band, reward and perplexity where it has settled, intervals.

Intervals are Student's over seeds, paired by seed where two arms are compared: prompts and random numbers are shared,
and steps of one run are no independent draws.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from klamp.monitor import BAND
from klamp.results.records import Record

T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""Student's t at 97.5 % for 1, 2, ... degrees of freedom."""


ADAPTIVE = ("ziegler", "exponential", "hold-price", "hold")
"""The arms of a comparison that steer beta."""
ORACLE = "oracle"
"""The name under which the best constant in hindsight appears in tables and figures."""


@dataclass(frozen=True)
class Interval:
    """A mean with its 95 % interval; no interval (NaN ends) from a single seed."""

    mean: float
    low: float = math.nan
    high: float = math.nan

    def __str__(self) -> str:
        if math.isnan(self.low):
            return f"{self.mean:+.3g}"
        return f"{self.mean:+.3g} [{self.low:+.3g}, {self.high:+.3g}]"


@dataclass(frozen=True)
class Figures:
    """An arm in numbers. ``late`` figures are means over the second half of the run."""

    arm: str
    seeds: int
    entered: int
    """Seeds that entered the band."""
    entry: float
    """Mean step of first entry; NaN where none entered."""
    in_band: float
    """Share of steps in band from first entry on, pooled over seeds; NaN where none entered."""
    settled: float
    """Share of the second half's steps in band, pooled over the seeds that entered it; NaN where none did."""
    held_steps: int
    """Steps that share is taken over."""
    highest: float
    """Highest reading, in targets."""
    surely: float
    """Highest KL of the whole run that a reading shows beyond its own noise (:func:`beyond_noise`), in targets."""
    fresh: float
    """KL on fresh samples at the end of the run, the highest of the seeds, in targets; NaN where not measured."""
    kl: float
    kl_end: float
    reward: float
    perplexity: float
    perplexity_reference: float
    entropy: float
    beta: float
    effort: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values; NaN as None."""
        return {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in asdict(self).items()}


@dataclass(frozen=True)
class Comparison:
    """What came of a comparison: every arm's runs, the constants the oracle was chosen from, the oracle's name."""

    folder: Path
    target: float
    per: str
    arms: dict[str, list[Record]]
    constants: dict[str, list[Record]]
    oracle: str | None
    reference: dict[str, Any]

    def figures(self) -> list[Figures]:
        """A row for each arm, the oracle last."""
        shown = dict(self.arms)
        if self.oracle is not None:
            shown[ORACLE] = self.constants[self.oracle]
        return [figures(name, runs, self.target) for name, runs in shown.items()]


def student(degrees: int) -> float:
    """The 97.5 % point of Student's t: a table up to 15 degrees, beyond it the Cornish-Fisher expansion (to 1e-5)."""
    if degrees <= len(T95):
        return T95[degrees - 1]
    z, v = 1.959964, float(degrees)
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / v + second / v**2 + third / v**3


def interval(values: Sequence[float]) -> Interval:
    """``mean ± t · s / sqrt(n)``."""
    clean = [v for v in values if math.isfinite(v)]
    if not clean:
        return Interval(math.nan)
    if len(clean) == 1:
        return Interval(clean[0])
    half = student(len(clean) - 1) * stdev(clean) / math.sqrt(len(clean))
    return Interval(fmean(clean), fmean(clean) - half, fmean(clean) + half)


def figures(arm: str, records: Sequence[Record], target: float | None) -> Figures:
    """The figures of one arm."""
    entries = [first_entry(r, target) for r in records]
    held = [_held(r, e) for r, e in zip(records, entries, strict=True) if e is not None]
    pooled = [v for values in held for v in values]
    everything = [v for r in records for v in r.get("kl/steered").from_step(0) if math.isfinite(v)]
    inside = [abs(v / target - 1) <= BAND for v in pooled] if target else []
    return Figures(
        arm=arm,
        seeds=len(records),
        entered=len(held),
        entry=_mean([e for e in entries if e is not None]),
        in_band=_mean(inside),
        settled=_mean([abs(v / target - 1) <= BAND for v in _settled(records, entries)]) if target else math.nan,
        held_steps=len(pooled),
        highest=max(everything, default=math.nan) / target if target else math.nan,
        surely=max((v for r in records for v in beyond_noise(r)), default=math.nan) / target if target else math.nan,
        fresh=max((kl for r in records for kl, _ in fresh(r)), default=math.nan) / target if target else math.nan,
        kl=late(records, "kl/steered"),
        kl_end=_mean([v for r in records for v in r.get("kl/steered").from_step(0.9 * r.last_step)]),
        reward=late(records, "reward/mean"),
        perplexity=late(records, "heldout/perplexity"),
        perplexity_reference=late(records, "heldout/perplexity_reference"),
        entropy=late(records, "policy/entropy"),
        beta=late(records, "kl/beta"),
        effort=late(records, "kl/clamp/effort"),
    )


def first_entry(record: Record, target: float | None) -> float | None:
    """The first step whose KL is within the band; None where there is none."""
    kl = record.get("kl/steered")
    if not target:
        return None
    return next((s for s, v in zip(kl.steps, kl.values, strict=True) if abs(v / target - 1) <= BAND), None)


def beyond_noise(record: Record) -> list[float]:
    """``KL / (1 + 1.96 noise)`` of every step: the least KL that could have given this reading, 19 times of 20."""
    return [kl / (1 + 1.96 * noise) for _, kl, noise in _readings(record)]


def perhaps_in_band(records: Sequence[Record], target: float) -> float:
    """Share of the second half's steps whose reading is in band, or out of it by no more than its own noise."""
    low, high = (1 - BAND) * target, (1 + BAND) * target
    entered = [r for r in records if first_entry(r, target) is not None]
    late = [(kl, noise) for r in entered for step, kl, noise in _readings(r) if step >= r.last_step / 2]
    return _mean([kl / (1 + 1.96 * noise) <= high and kl >= low * (1 - 1.96 * noise) for kl, noise in late])


def _readings(record: Record) -> list[tuple[float, float, float]]:
    """Step, KL and its relative standard error, 0 where that is not known, of every step with a finite KL."""
    kl, noise = record.get("kl/steered"), record.get("kl/noise").values
    known = (n if 0 < n < math.inf else 0.0 for n in noise) if len(noise) else itertools.repeat(0.0)
    return [(s, v, n) for s, v, n in zip(kl.steps, kl.values, known, strict=False) if math.isfinite(v)]


def fresh(record: Record) -> list[tuple[float, float]]:
    """KL on fresh samples of the last policy, with its relative standard error; nothing where it was not measured."""
    return list(zip(record.get("kl/fresh").from_step(0), record.get("kl/fresh_noise").from_step(0), strict=True))


def _settled(records: Sequence[Record], entries: Sequence[float | None]) -> list[float]:
    """KL over the second half of the runs that entered the band at all."""
    entered = [r for r, e in zip(records, entries, strict=True) if e is not None]
    return [v for r in entered for v in r.get("kl/steered").from_step(r.last_step / 2)]


def late_of(record: Record, key: str) -> float:
    """A run's mean over its second half."""
    return _mean(record.get(key).from_step(record.last_step / 2))


def late(records: Sequence[Record], key: str) -> float:
    """The mean of :func:`late_of` over runs."""
    return _mean([x for x in (late_of(r, key) for r in records) if math.isfinite(x)])


def paired(ours: Sequence[Record], theirs: Sequence[Record], key: str) -> Interval:
    """Mean difference of a figure, ours minus theirs, over the seeds that both have."""
    other = {r.seed: late_of(r, key) for r in theirs}
    return interval([late_of(r, key) - other[r.seed] for r in ours if r.seed in other])


def paired_ratio(ours: Sequence[Record], theirs: Sequence[Record], key: str) -> Interval:
    """Mean ratio less 1 of a figure, ours over theirs, through its logarithm: what perplexities are compared by."""
    other = {r.seed: late_of(r, key) for r in theirs}
    pairs = [(late_of(r, key), other[r.seed]) for r in ours if r.seed in other]
    logs = interval([math.log(a / b) for a, b in pairs if a > 0 and b > 0 and math.isfinite(a) and math.isfinite(b)])
    return Interval(math.expm1(logs.mean), math.expm1(logs.low), math.expm1(logs.high))


class AtEqualKL(NamedTuple):
    """A figure of one seed, and what constant prices have at the KL that it was had at."""

    ours: float
    theirs: float


def at_equal_kl(ours: Sequence[Record], constants: Sequence[Sequence[Record]], key: str) -> list[AtEqualKL]:
    """Ours beside what constant prices get at the KL we hold, seed by seed; none for a KL that no constants enclose.

    For each seed a parabola in sqrt(KL) is fitted through the constants' points and read off at our own sqrt(KL).
    """
    found = []
    for record in ours:
        points = [
            (math.sqrt(max(late_of(r, "kl/steered"), 0.0)), late_of(r, key))
            for group in constants
            for r in group
            if r.seed == record.seed
        ]
        points = [p for p in points if all(map(math.isfinite, p))]
        x = math.sqrt(max(late_of(record, "kl/steered"), 0.0))
        if len(points) >= 3 and min(p[0] for p in points) <= x <= max(p[0] for p in points):
            found.append(AtEqualKL(late_of(record, key), _parabola(points, x)))
    return found


def difference(pairs: Sequence[AtEqualKL]) -> Interval:
    """``ours - theirs``."""
    return interval([p.ours - p.theirs for p in pairs])


def gain(pairs: Sequence[AtEqualKL], start: float) -> Interval:
    """``(ours - start) / (theirs - start)``: what was gained as a share of what constants gain at the same KL.

    The interval is that of the difference, over the constants' mean gain; NaN where they gain nothing.
    """
    scale = _mean([p.theirs for p in pairs]) - start
    if not scale > 0:
        return Interval(math.nan)
    found = difference(pairs)
    return Interval(1 + found.mean / scale, 1 + found.low / scale, 1 + found.high / scale)


def _parabola(points: list[tuple[float, float]], x: float) -> float:
    """The least-squares parabola through ``points`` (a line through fewer than five) at ``x``."""
    import torch

    powers = 3 if len(points) >= 5 else 2
    at = torch.tensor([[(p[0] - x) ** k for k in range(powers)] for p in points], dtype=torch.float64)
    values = torch.tensor([[p[1]] for p in points], dtype=torch.float64)
    return float(torch.linalg.lstsq(at, values, driver="gelsd").solution[0])


def _held(record: Record, entry: float) -> Sequence[float]:
    return record.get("kl/steered").from_step(entry)


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else math.nan
