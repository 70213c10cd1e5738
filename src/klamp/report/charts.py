"""What a page shows: arms with their runs, colours and curves, whatever experiment they come from."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from klamp.monitor import BAND
from klamp.results.records import Record, Series, Stretch
from klamp.results.statistics import Figures, Interval, figures, interval, late_of

SMOOTH = 5
"""Steps over which rewards are averaged before they are drawn."""


FAR = 4.0
"""Targets above which KL goes onto a logarithmic axis: a linear one would flatten the band to a line."""


@dataclass(frozen=True)
class Look:
    """An arm's colour on light and on dark ground, and its dash: colour never stands alone."""

    light: str
    dark: str
    dash: str = "solid"


# Okabe and Ito's palette, told apart by colour-blind readers; darkened or lightened where the ground asks for it.
LOOKS = {
    "hold": Look("#0072B2", "#4DB2F0"),
    "hold-price": Look("#009E73", "#2CCB9D", "dash"),
    "static": Look("#D55E00", "#FF8A3D"),
    "ziegler": Look("#B8860B", "#E8B93C", "dashdot"),
    "exponential": Look("#B0498B", "#E58BC2", "dot"),
    "oracle": Look("#4A4A4A", "#C8C8C8", "longdash"),
}
SPARE = [Look("#0072B2", "#4DB2F0"), Look("#D55E00", "#FF8A3D"), Look("#009E73", "#2CCB9D"), Look("#B0498B", "#E58BC2")]
SPARE += [
    Look("#B8860B", "#E8B93C"),
    Look("#4A4A4A", "#C8C8C8"),
    Look("#0E9AA7", "#5BD1DB"),
    Look("#7A5195", "#B998D6"),
]
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")


@dataclass(frozen=True)
class Arm:
    """A line on every chart."""

    name: str
    runs: list[Record]
    look: Look
    figures: Figures
    verdict: str = ""
    summary: str = ""


@dataclass(frozen=True, kw_only=True)
class View:
    """Everything on the page."""

    kind: Literal["runs", "compare", "sweep"]
    title: str
    headline: str
    """The finding in at most fifteen words."""
    sentence: str
    """What else there is to say, below it."""
    arms: list[Arm]
    target: float | None
    per: str
    checks: list[tuple[str, str, bool | None]] = field(default_factory=list)
    reference: dict[str, Any] = field(default_factory=dict)
    constants: dict[str, list[Record]] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    notes: str = ""


class Panel(NamedTuple):
    """A chart's place on the page."""

    name: str
    title: str
    hint: str
    wide: bool = False


class Panels(NamedTuple):
    """The charts that have something to draw: at the top, further below, and folded away."""

    first: list[Panel]
    more: list[Panel]
    folded: list[Panel]


def look(name: str, index: int, total: int) -> Look:
    """An arm's own look, or the next spare one; many runs of a sweep go along one scale instead."""
    if name in LOOKS:
        return LOOKS[name]
    if total > len(SPARE):
        return _scale(index / max(total - 1, 1), DASHES[0])
    spare = SPARE[index % len(SPARE)]
    return Look(spare.light, spare.dark, DASHES[index % len(DASHES)])


def _scale(x: float, dash: str) -> Look:
    """Viridis without its palest end: a sequence that colour-blind readers see in order."""
    stops = [(68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (200, 210, 40)]
    i = min(int(x * 4), 3)
    mixed = [round(a + (b - a) * (4 * x - i)) for a, b in zip(stops[i], stops[i + 1], strict=True)]
    light = [round(c * 0.88) for c in mixed]
    dark = [round(c + (255 - c) * 0.3) for c in mixed]
    on_light, on_dark = ("#" + "".join(f"{c:02X}" for c in side) for side in (light, dark))
    return Look(on_light, on_dark, dash)


def make_arm(name: str, runs: list[Record], index: int, total: int, target: float | None, **more: str) -> Arm:
    """An arm with its look and figures."""
    return Arm(name, runs, look(name, index, total), figures(name, runs, target), **more)


def chart_data(view: View) -> dict[str, Any]:
    """The numbers that the page's charts draw; no NaN in it."""
    start = view.reference.get("perplexity", {})
    return {
        "target": view.target,
        "per": view.per,
        "far": FAR,
        "band": BAND,
        "arms": [_arm_data(arm, start) for arm in view.arms],
        "constants": [_point(name, runs) for name, runs in view.constants.items()],
        "frontier": frontier(view),
        "reference": {k: _clean(v) for k, v in start.items()},
        "events": _events(view),
        "targets": _targets(view),
    }


def _events(view: View) -> list[dict[str, Any]]:
    """What was changed on the way through a single run: after which step, and from what to what."""
    if len(view.arms) != 1 or len(view.arms[0].runs) != 1:
        return []
    found = []
    for event in view.arms[0].runs[0].events:
        changes = event.get("changes")
        pairs = {k: v for k, v in changes.items() if isinstance(v, list)} if isinstance(changes, dict) else {}
        told = ", ".join(f"{k} {' → '.join(map(str, values))}" for k, values in pairs.items())
        found.append({"step": event["step"], "text": ": ".join(filter(None, (str(event.get("event", "")), told)))})
    return found


def _targets(view: View) -> list[dict[str, float]]:
    """The targets of a single run by the steps they held at; empty where there was one throughout."""
    if len(view.arms) != 1 or len(view.arms[0].runs) != 1:
        return []
    found: list[dict[str, float]] = []
    series = view.arms[0].runs[0].get("kl/target")
    for step, target in zip(series.steps, series.values, strict=True):
        if found and found[-1]["target"] == target:
            found[-1]["last"] = step
        elif target > 0:
            found.append({"first": step, "last": step, "target": target})
    return found if len(found) > 1 else []


def panels(view: View, data: dict[str, Any]) -> Panels:
    """The panels that have data: a run's reward and KL stand above its samples, an experiment's curves together."""
    unit = view.per.replace("_", " ")
    several = len(view.arms) > 1 or bool(view.constants)
    band = f"; shaded: target {view.target:g} ± {100 * BAND:.0f} %" if view.target else ""
    path = "path of each arm; marker: second half of the run, with its 95 % interval; dashed: the frontier"
    all_of = {
        "reward": Panel("reward", "Reward", f"mean of a step's completions, averaged over {SMOOTH} steps"),
        "kl": Panel("kl", "KL from the reference", f"nats per {unit}{band}"),
        "beta": Panel("beta", "Beta", "the price of a nat"),
        "perplexity": Panel("perplexity", "Held-out perplexity", "what became of its English; lower is better"),
        "entropy": Panel("entropy", "Entropy", "nats per token"),
        "on_reference": Panel("on_reference", "Perplexity on the reference's samples", "lower is better"),
        "frontier": Panel("frontier", "Reward for distance", path if several else "path of the run", wide=True),
    }
    there = {name: panel for name, panel in all_of.items() if _drawn(name, data, several)}
    main, others = ("reward", "kl"), ("beta", "perplexity", "frontier")
    rest = ("entropy", "on_reference")
    order: list[tuple[str, ...]] = [(*main, *others), (), rest]
    if view.kind == "runs":
        order = [main, ("beta", "perplexity", *rest, "frontier"), ()]
    return Panels(*([there[name] for name in names if name in there] for names in order))


def _drawn(name: str, data: dict[str, Any], several: bool) -> bool:
    """Whether a chart has anything on it; a run's way from reward to reward needs two points."""
    if name == "frontier":
        ends = any(a["end"]["x"] is not None and a["end"]["y"] is not None for a in data["arms"])
        return ends and (several or any(len(a["path"]["x"]) > 1 for a in data["arms"]))
    return any(y is not None for a in data["arms"] for y in a[name]["y"])


def _arm_data(arm: Arm, start: dict[str, float]) -> dict[str, Any]:
    runs = arm.runs
    return {
        "name": arm.name,
        "light": arm.look.light,
        "dark": arm.look.dark,
        "dash": arm.look.dash,
        "seeds": len(runs),
        "reward": curve([smooth(r.get("reward/mean")) for r in runs]),
        "kl": curve([r.get("kl/steered") for r in runs], by_ratio=True),
        "beta": curve([r.get("kl/beta") for r in runs], by_ratio=True),
        "entropy": curve([r.get("policy/entropy") for r in runs]),
        "perplexity": curve([_from(start.get("heldout"), r.get("heldout/perplexity")) for r in runs], by_ratio=True),
        "on_reference": curve(
            [_from(start.get("reference"), r.get("heldout/perplexity_reference")) for r in runs], by_ratio=True
        ),
        "path": _path(runs),
        "end": _point(arm.name, runs),
    }


def curve(runs: Sequence[Series], *, by_ratio: bool = False) -> dict[str, Any]:
    """Mean over seeds with its 95 % interval at every step that any run has; values as they stand in the files.

    ``by_ratio`` takes the interval of the logarithms, as befits what is drawn on a logarithmic axis.

    Runs too long to draw are drawn in stretches, the band then from the least to the greatest value of any seed: what
    lasts a single step stays to be seen.
    """
    stride = max((s.stride() for s in runs), default=1)
    at: dict[float, list[Stretch]] = {}
    for series in runs:
        for stretch in series.stretches(stride):
            at.setdefault(stretch.step, []).append(stretch)
    points = [at[step] for step in sorted(at)]
    bands = [(_ratio_interval if by_ratio else interval)([s.mean for s in found]) for found in points]
    if stride > 1:
        bands = [
            Interval(b.mean, min(s.low for s in found), max(s.high for s in found))
            for b, found in zip(bands, points, strict=True)
        ]
    several = stride > 1 or max(map(len, points), default=0) > 1
    return {
        "x": sorted(at),
        "y": [_clean(b.mean) for b in bands],
        "low": [_clean(b.low) for b in bands] if several else [],
        "high": [_clean(b.high) for b in bands] if several else [],
        "stride": stride,
    }


def _ratio_interval(values: Sequence[float]) -> Interval:
    """The mean, and the interval of the geometric one where there is one; the wider of the two ends around the mean."""
    plain = interval(values)
    if not all(v > 0 for v in values if math.isfinite(v)) or math.isnan(plain.low):
        return plain
    logs = interval([math.log(v) for v in values if math.isfinite(v)])
    return Interval(plain.mean, min(math.exp(logs.low), plain.mean), max(math.exp(min(logs.high, 700.0)), plain.mean))


def thinned(view: View) -> int:
    """Steps to a point on the page's curves; 1 where every step is drawn."""
    return max((r.get("kl/steered").stride() for a in view.arms for r in a.runs), default=1)


def smooth(series: Series, width: int = SMOOTH) -> Series:
    """Means over the last ``width`` steps; a series that is drawn in stretches is smooth enough by that."""
    if series.stride() > 1:
        return series
    made = Series()
    for i, step in enumerate(series.steps):
        recent = [v for v in series.values[max(0, i + 1 - width) : i + 1] if math.isfinite(v)]
        made.add(step, sum(recent) / len(recent) if recent else math.nan)
    return made


def frontier(view: View) -> dict[str, list[float]]:
    """Best late reward at or below each late √KL, over all arms and constants."""
    points = [_point(a.name, a.runs) for a in view.arms] + [_point(n, r) for n, r in view.constants.items()]
    kept: list[tuple[float, float]] = []
    for point in sorted((p for p in points if p["x"] is not None and p["y"] is not None), key=lambda p: p["x"]):
        if not kept or point["y"] > kept[-1][1]:
            kept.append((point["x"], point["y"]))
    return {"x": [x for x, _ in kept], "y": [y for _, y in kept]}


def _point(name: str, runs: Sequence[Record]) -> dict[str, Any]:
    """Where runs have settled: late √KL and reward with its interval."""
    kl = [late_of(r, "kl/steered") for r in runs]
    clean = [k for k in kl if math.isfinite(k) and k >= 0]
    reward = interval([late_of(r, "reward/mean") for r in runs])
    x = math.sqrt(sum(clean) / len(clean)) if clean else None
    half = reward.high - reward.mean if math.isfinite(reward.high) else None
    return {"name": name, "x": x, "y": _clean(reward.mean), "half": half}


def _path(runs: Sequence[Record]) -> dict[str, list[float | None]]:
    """The way through the plane of √KL and reward, both averaged over seeds and a few steps."""
    kl = curve([smooth(r.get("kl/steered"), 2 * SMOOTH) for r in runs])
    reward = curve([smooth(r.get("reward/mean"), 2 * SMOOTH) for r in runs])
    rewards = dict(zip(reward["x"], reward["y"], strict=True))
    both = [(k, rewards.get(x)) for x, k in zip(kl["x"], kl["y"], strict=True) if k is not None and k >= 0]
    return {"x": [math.sqrt(k) for k, _ in both], "y": [r for _, r in both]}


def _from(start: float | None, series: Series) -> Series:
    """``series`` with the reference's own value in front, at step 0."""
    if start is None or not len(series):
        return series
    return Series(array("d", [0.0]) + series.steps, array("d", [float(start)]) + series.values)


def _clean(x: float) -> float | None:
    return x if math.isfinite(x) else None
