"""The sections of a page besides its charts, as plain values: the table, samples, alarms and settings."""

from __future__ import annotations

import math
import platform
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from klamp import __version__
from klamp.config_io import flat
from klamp.monitor import BAND
from klamp.report.charts import Arm, View
from klamp.results.promises import FRESH
from klamp.results.records import MOST_ALARMS, Record
from klamp.results.verdict import NOTHING, cells

HEAVY = 2.0
"""Nats at which a token has its darkest shade."""
MOST_STEPS, MOST_SAMPLES = 6, 6
"""Steps of a run whose completions are shown, and completions of each; more would bury the page."""
STRIP_HEIGHT, STRIP_SEEDS = 7, 8
"""Pixels to a seed in the strip beside a verdict, and seeds that have one."""


@dataclass(frozen=True)
class Head:
    """A column of the table."""

    key: str
    title: str
    tip: str
    text: str = ""


HEADS = (
    Head("arm", "Arm", "what steers beta"),
    Head("reward", "Reward", "second half of the run"),
    Head("KL", "KL", "nats, second half of the run"),
    Head("in band", "In band", "share of steps within 20 % of the target, second half of the run, all seeds"),
    Head("max KL", "Max KL", "highest reading, in targets"),
    Head("end KL", "End KL", f"on {FRESH} fresh samples after the last step, highest of the seeds, in targets"),
    Head("perplexity", "Perplexity", "on held-out text, second half of the run"),
    Head("on ref", "… on ref.", "perplexity on samples of the reference"),
    Head("entropy", "Entropy", "nats per token"),
    Head("beta", "Beta", "mean price, second half of the run"),
    Head("verdict", "Verdict", ""),
)


CAPTIONS = {
    "in band": "In band is the share of steps within 20 % of the target.",
    "max KL": "Max KL is the highest reading of the whole run, in targets.",
    "end KL": f"End KL is that of the last policy on {FRESH} fresh samples, in targets.",
    "on ref": "Perplexity is that on held-out text, and on samples of the reference.",
}
"""What a reader cannot guess from the name of a column."""


@dataclass(frozen=True)
class Row:
    """An arm in the table."""

    name: str
    summary: str
    cells: list[Head]
    verdict: str
    strip: list[dict[str, Any]]
    height: int


@dataclass(frozen=True)
class Table:
    """The table of arms; a column that is empty for all of them is left out."""

    heads: list[Head]
    rows: list[Row]
    several: bool
    caption: str


def table(view: View) -> Table:
    """The figures of every arm."""
    texts = [cells(a.figures, a.verdict) for a in view.arms]
    kept = [i for i in range(1, len(HEADS) - 1) if any(text[i] != NOTHING for text in texts)]
    rows = []
    for arm, text in zip(view.arms, texts, strict=True):
        own = [Head(HEADS[i].key, HEADS[i].title, HEADS[i].tip, text[i]) for i in kept]
        height = STRIP_HEIGHT * min(len(arm.runs), STRIP_SEEDS)
        rows.append(Row(arm.name, arm.summary, own, arm.verdict, _strip(arm, view.target), height))
    heads = [HEADS[0], *(HEADS[i] for i in kept), HEADS[-1]]
    explained = (CAPTIONS[head.key] for head in heads if head.key in CAPTIONS)
    caption = " ".join(["Means over the second half of the run.", *explained])
    return Table(heads, rows, any(a.figures.seeds > 1 for a in view.arms), caption)


def _strip(arm: Arm, target: float | None) -> list[dict[str, Any]]:
    """A bar a seed: below, in and above the band over the run, in a box 100 wide."""
    if not target or not arm.runs:
        return []
    last = max(r.last_step for r in arm.runs)
    return [
        {
            "kind": kind,
            "x": f"{100 * (start - 1) / last:.2f}",
            "width": f"{100 * (end - start + 1) / last:.2f}",
            "y": row * STRIP_HEIGHT,
            "height": STRIP_HEIGHT - 2,
        }
        for row, run in enumerate(arm.runs[:STRIP_SEEDS])
        for kind, start, end in _stretches(run, target)
    ]


def _stretches(run: Record, target: float) -> list[tuple[str, int, int]]:
    """Consecutive steps of one kind: (kind, first step, last step)."""
    found: list[tuple[str, int, int]] = []
    kl = run.get("kl/steered")
    before = 0
    for step, value, *_ in kl.stretches(kl.stride(400)):
        x = value / target - 1
        kind = "above" if x > BAND else "inside" if x >= -BAND else "below"
        if found and found[-1][0] == kind:
            found[-1] = (kind, found[-1][1], int(step))
        else:
            found.append((kind, before + 1, int(step)))
        before = int(step)
    return found


@dataclass(frozen=True)
class Token:
    """A token of a completion and how dark it is, from 0 to 1; no shade where it would not be seen."""

    text: str
    title: str
    shade: str


@dataclass(frozen=True)
class Card:
    """A completion. ``step`` is None for one that is shown at every step."""

    name: str
    note: str
    tokens: list[Token]
    arm: int | None = None
    step: int | None = None
    shown: bool = True


@dataclass(frozen=True)
class Block:
    """Completions of one prompt, or, without a prompt, of several."""

    prompt: str | None
    cards: list[Card]


@dataclass(frozen=True)
class Samples:
    """The completions on a page."""

    title: str
    hint: str
    steps: list[int]
    blocks: list[Block] = field(default_factory=list)


def samples(view: View) -> Samples | None:
    """Completions at the fixed prompts where there are any, else what the runs wrote while they trained."""
    return _probes(view) or _written(view)


def _probes(view: View) -> Samples | None:
    """Completions at the fixed prompts of every arm's first seed, beside the reference's."""
    asked = {p["prompt"]: p for p in view.reference.get("probes", []) if isinstance(p.get("prompt"), str)}
    said = {(i, p["step"], p["prompt"]): p for i, a in enumerate(view.arms) for r in a.runs[:1] for p in r.probes}
    steps = sorted({step for _, step, _ in said})
    if not steps:
        return None
    blocks = []
    for prompt in dict.fromkeys([*asked, *(prompt for _, _, prompt in said)]):
        cards = [Card("reference", "before training", _tokens(asked[prompt]))] if prompt in asked else []
        for step in steps:
            for i, arm in enumerate(view.arms):
                found = said.get((i, step, prompt))
                note, tokens = (_mean_kl(found), _tokens(found)) if found else ("", [])
                cards.append(Card(arm.name, note, tokens, i, step, step == steps[-1]))
        blocks.append(Block(prompt, cards))
    hint = "The same prompts and random numbers for every arm, first seed."
    return Samples("What the policies write", hint, steps, blocks)


def _written(view: View) -> Samples | None:
    """Completions from the runs' own steps, first seed of every arm: the first, the last and some between."""
    rows = [(i, s) for i, a in enumerate(view.arms) for r in a.runs[:1] for s in r.samples]
    steps, several = _spread(sorted({s["step"] for _, s in rows})), len(view.arms) > 1
    cards = []
    for step in steps:
        for i, arm in enumerate(view.arms):
            of_step = [s for j, s in rows if j == i and s["step"] == step][:MOST_SAMPLES]
            for s in of_step:
                note = " · ".join(filter(None, (arm.name if several else "", _reward(s), _mean_kl(s))))
                cards.append(Card(s["prompt"], note, _tokens(s), i if several else None, step, step == steps[-1]))
    if not cards:
        return None
    who = "the policies write" if several else "the policy writes"
    return Samples(f"What {who}", "Completions from training.", steps, [Block(None, cards)])


def _spread(steps: list[int]) -> list[int]:
    """At most ``MOST_STEPS`` of the steps, evenly, the first and the last among them."""
    if len(steps) <= MOST_STEPS:
        return steps
    return [steps[round(i * (len(steps) - 1) / (MOST_STEPS - 1))] for i in range(MOST_STEPS)]


def _finite(value: object) -> float | None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if good else None  # type: ignore[arg-type]


def _reward(said: dict[str, Any]) -> str:
    value = _finite(said.get("reward"))
    return "" if value is None else f"reward {value:.2f}"


def _mean_kl(said: dict[str, Any]) -> str:
    """The mean KL of the tokens of a completion."""
    values = [v for v in map(_finite, said["kl"]) if v is not None]
    return f"KL {sum(values) / len(values):.2g}" if values else ""


def _tokens(said: dict[str, Any]) -> list[Token]:
    found = []
    for text, kl in zip(said["tokens"], said["kl"], strict=True):
        value = _finite(kl)
        shade = math.sqrt(min(max(value or 0.0, 0.0) / HEAVY, 1.0))
        title = "KL not finite" if value is None else f"{value:.3g} nats"
        found.append(Token(str(text), title, f"{shade:.2f}" if shade >= 0.05 else ""))
    return found


@dataclass(frozen=True)
class Alarms:
    """Alarms as they were raised, at most ``MOST_ALARMS``."""

    rows: list[dict[str, Any]]
    count: int
    left_out: int


def alarms(view: View) -> Alarms:
    """The alarms of every run."""
    rows = [
        {"arm": i, "name": a.name, "seed": r.seed, **{k: alarm.get(k, "") for k in ("step", "kind", "message")}}
        for i, a in enumerate(view.arms)
        for r in a.runs
        for alarm in r.alarms
    ]
    count = sum(max(r.alarms_in_all, len(r.alarms)) for a in view.arms for r in a.runs)
    return Alarms(rows[:MOST_ALARMS], count, max(0, count - MOST_ALARMS))


def settings(view: View) -> dict[str, Any]:
    """The configuration in rows, and the versions of what the figures depend on."""
    if not view.settings:
        return {}
    given = {name: _listed(value) for name, value in flat(view.settings).items()}
    return {**given, **{f"version of {k}": v for k, v in versions().items()}}


def versions() -> dict[str, str]:
    """Versions of what the figures depend on."""
    found = {"klamp": __version__, "python": platform.python_version()}
    for name in ("torch", "transformers", "peft", "accelerate", "vaderSentiment", "plotly"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _listed(value: Any) -> Any:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else value
