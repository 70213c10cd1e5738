"""The main figure as PNG and PDF: reward, KL with its band, held-out perplexity, and beta or a sweep's frontier."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from klamp.monitor import BAND
from klamp.report.charts import FAR, Arm, View, chart_data
from klamp.report.html import visible

DASHES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-.", "longdash": (0, (8, 3))}
PANELS = (("reward", "reward"), ("kl", "KL"), ("beta", "beta"), ("perplexity", "held-out perplexity"))
SPARE = ("entropy", "entropy, nats per token")
"""Takes the place of a panel that would be empty."""


def save(view: View, folder: Path) -> list[Path]:
    """Write figure.png and figure.pdf into ``folder``."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    data = chart_data(view)
    drawn = [p for p in (*PANELS, SPARE) if any(y is not None for a in data["arms"] for y in a[p[0]]["y"])][:4]
    rows = max(1, -(-len(drawn) // 2))
    figure = Figure(figsize=(9.6, 3.2 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    places = list(figure.subplots(rows, 2).flat)
    for axes in places[len(drawn) :]:
        axes.remove()
    for axes, (key, title) in zip(places, drawn, strict=False):
        if view.kind == "sweep" and key == "beta":
            _frontier(axes, view, data)
        else:
            _panel(axes, key, title, view, data)
    handles, labels = figure.axes[0].get_legend_handles_labels() if figure.axes else ([], [])
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 6), frameon=False, fontsize=9)
    made = []
    # No dates inside: the same runs give the same files.
    for name, extra in (("figure.png", {"dpi": 160}), ("figure.pdf", {"metadata": {"CreationDate": None}})):
        aside = folder / f".{name}"
        figure.savefig(aside, format=name[-3:], **extra)
        made.append(aside.replace(folder / name))
    return made


def _panel(axes: Any, key: str, title: str, view: View, data: dict[str, Any]) -> None:
    highest = 0.0
    for arm, numbers in zip(view.arms, data["arms"], strict=True):
        highest = max(highest, _line(axes, arm, numbers[key], len(view.arms)))
    lowest = min((y for n in data["arms"] for y in n[key]["y"] if y), default=1.0, key=abs)
    if key == "kl":
        means = [y for n in data["arms"] for y in n[key]["y"] if y is not None]
        _band(axes, view.target, highest, min(means, default=0.0))
        title = f"KL, nats per {view.per.replace('_', ' ')}"
    elif key in ("beta", "perplexity") and 0 < 2.5 * lowest < highest:
        axes.set_yscale("log")
        axes.set_ylim(lowest / 1.5, highest * 1.5)  # by the means: the interval of a few seeds may span everything
    else:
        means = [y for n in data["arms"] for y in n[key]["y"] if y is not None]
        margin = 0.25 * (max(means, default=1.0) - min(means, default=0.0)) or 0.1
        axes.set_ylim(min(means, default=0.0) - margin, max(means, default=1.0) + margin)
    _dress(axes, title, "step")


def _frontier(axes: Any, view: View, data: dict[str, Any]) -> None:
    """Where every run of a sweep has settled, and the best reward at each distance."""
    front = data["frontier"]
    axes.plot(front["x"], front["y"], color="#5a6675", linewidth=1, linestyle="--")
    for arm, numbers in zip(view.arms, data["arms"], strict=True):
        end = numbers["end"]
        if end["x"] is not None and end["y"] is not None:
            axes.errorbar(end["x"], end["y"], yerr=end["half"], color=arm.look.light, marker="o", capsize=3)
    _dress(axes, "reward for distance; dashed: the frontier", "√KL")


def _dress(axes: Any, title: str, below: str) -> None:
    axes.set_title(title, fontsize=11, loc="left")
    axes.set_xlabel(below, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _line(axes: Any, arm: Arm, curve: dict[str, Any], arms: int) -> float:
    x = [v for v in curve["x"] if v is not None]
    y = [math.nan if v is None else v for v in curve["y"]]
    if not x:
        return 0.0
    style = {"color": arm.look.light, "linestyle": DASHES[arm.look.dash], "linewidth": 1.8}
    axes.plot(x, y, label=visible(arm.name).replace("$", r"\$") if arms <= 12 else None, **style)
    if curve["low"]:
        low, high = ([math.nan if v is None else v for v in curve[side]] for side in ("low", "high"))
        axes.fill_between(x, low, high, color=arm.look.light, alpha=0.13, linewidth=0)
    shown = [*y, *(v for v in curve["high"] if v is not None)] if curve["stride"] > 1 else y
    return max((v for v in shown if math.isfinite(v)), default=0.0)


def _band(axes: Any, target: float | None, highest: float, lowest: float) -> None:
    """KL from zero with its target; where it goes far beyond the band, linear up to there and logarithmic above."""
    axes.set_ylim(min(0.0, 1.05 * lowest), 1.05 * max(highest, 1.3 * (target or 0.0)) or 1.0)
    if target:
        axes.axhspan((1 - BAND) * target, (1 + BAND) * target, color="#5a6675", alpha=0.18, linewidth=0)
        axes.axhline(target, color="#5a6675", linewidth=0.9, linestyle=":")
        if highest > FAR * target:
            axes.set_yscale("symlog", linthresh=(1 + BAND) * target)
