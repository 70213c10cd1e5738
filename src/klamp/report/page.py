"""The page: sections as HTML, filled into the template. All text from models, files and flags goes through `escape`."""

from __future__ import annotations

import base64
import functools
import gzip
import hashlib
import math
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from klamp import __version__
from klamp.experiments.figures import BAND
from klamp.experiments.records import MOST_ALARMS, Record
from klamp.experiments.tables import cells
from klamp.report.text import embed, escape
from klamp.report.view import Arm, View, chart_data, thinned

HERE = Path(__file__).parent
HEADS = {
    "arm": ("Arm", "what steers beta"),
    "in band": ("In band", "share of steps within 20 % of the target, from first entry on, pooled over seeds"),
    "max KL": ("Max KL", "highest KL from first entry on, in targets"),
    "KL": ("KL", "nats, second half of the run"),
    "reward": ("Reward", "second half of the run"),
    "perplexity": ("Perplexity", "on held-out text, second half of the run"),
    "on ref": ("… on ref.", "perplexity on samples of the reference"),
    "entropy": ("Entropy", "nats per token"),
    "beta": ("Beta", "mean price, second half of the run"),
    "verdict": ("Verdict", ""),
}
HEAVY = 2.0
"""Nats at which a token has its darkest shade."""


def render(view: View) -> str:
    """The whole page as HTML."""
    data = embed(chart_data(view))
    parts = {
        "title": escape(view.title),
        "sentence": escape(view.sentence),
        "notes": escape(" ".join(filter(None, (view.notes, _thinning(view))))),
        "legend": _legend(view),
        "table": _table(view),
        "checks": _checks(view),
        "samples": _samples(view),
        "alarms": _alarms(view),
        "settings": _settings(view),
        "style": _asset("style.css") + _arm_colours(view),
        "data": data,
        "charts": _asset("charts.js"),
        "plotly": packed_plotly(),
    }
    # A script runs only with this page's own nonce, so markup that slipped through would still be dead.
    parts["nonce"] = hashlib.sha256("".join(parts.values()).encode("utf-8", "replace")).hexdigest()[:32]
    page = _asset("template.html")
    pieces = page.split("{{")
    filled = [pieces[0]]
    for piece in pieces[1:]:
        name, _, rest = piece.partition("}}")
        filled += [parts[name.strip()], rest]
    return "".join(filled)


@functools.cache
def packed_plotly() -> str:
    """plotly.js, gzipped, as base64: a third of its size, unpacked by the browser."""
    from plotly.offline import get_plotlyjs

    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), 9, mtime=0)).decode()


@functools.cache
def _asset(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def _arm_colours(view: View) -> str:
    light = "".join(f"--arm-{i}:{a.look.light};" for i, a in enumerate(view.arms))
    dark = "".join(f"--arm-{i}:{a.look.dark};" for i, a in enumerate(view.arms))
    return (
        f":root{{{light}}}@media(prefers-color-scheme:dark){{:root:not([data-theme=light]){{{dark}}}}}"
        f":root[data-theme=dark]{{{dark}}}"
    )


def _thinning(view: View) -> str:
    """What the reader is not shown, where the runs are longer than a chart can draw."""
    stride = thinned(view)
    if stride == 1:
        return ""
    return (
        f"Curves are drawn as means of {stride} steps; shaded: from the least to the greatest value of each. "
        "The table's figures are taken over every step."
    )


def _legend(view: View) -> str:
    chips = [
        f'<button type="button" class="chip" data-arm="{i}" aria-pressed="true" style="--c:var(--arm-{i})" '
        f'title="{escape(a.summary)}"><svg width="26" height="8" aria-hidden="true"><line x1="0" x2="26" y1="4" y2="4" '
        f'stroke="currentColor" stroke-width="3" stroke-dasharray="{_dash(a)}"/></svg>{escape(a.name)}</button>'
        for i, a in enumerate(view.arms)
    ]
    return "".join(chips)


def _dash(arm: Arm) -> str:
    dashes = {"dash": "7 3", "dot": "2 3", "dashdot": "7 3 2 3", "longdash": "11 4"}
    return dashes.get(arm.look.dash, "none")


def _table(view: View) -> str:
    several = any(a.figures.seeds > 1 for a in view.arms)
    head = "".join(f'<th scope="col" title="{escape(tip)}">{escape(name)}</th>' for name, tip in HEADS.values())
    body = []
    for i, arm in enumerate(view.arms):
        row = cells(arm.figures, arm.verdict)
        name = f'<th scope="row">{_dot(i)}{escape(row[0])}<small>{escape(arm.summary)}</small></th>'
        middle = "".join(
            f'<td data-label="{escape(label[0])}" data-key="{escape(key)}">{escape(text)}</td>'
            for (key, label), text in zip(list(HEADS.items())[1:-1], row[1:-1], strict=True)
        )
        strip = _strip(arm, view.target)
        body.append(
            f'<tr data-arm="{escape(arm.name)}">{name}{middle}<td class="verdict">{strip}{escape(row[-1])}</td></tr>'
        )
    key = (
        '<p class="key"><i class="below"></i>below <i class="inside"></i>in band <i class="above"></i>above the band'
        f"{', one line a seed' if several else ''}</p>"
        if view.target
        else ""
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>{key}"


def _strip(arm: Arm, target: float | None) -> str:
    """A bar a seed: below, in and above the band over the run."""
    if not target or not arm.runs:
        return ""
    last = max(r.last_step for r in arm.runs)
    height = 7
    rects = []
    for row, run in enumerate(arm.runs[:8]):
        for kind, start, end in _stretches(run, target):
            x, width = 100 * (start - 1) / last, 100 * (end - start + 1) / last
            place = f'x="{x:.2f}" y="{row * height}" width="{width:.2f}" height="{height - 2}"'
            rects.append(f'<rect class="{kind}" {place}/>')
    size = f'viewBox="0 0 100 {height * min(len(arm.runs), 8)}" preserveAspectRatio="none"'
    rows = min(len(arm.runs), 8)
    return (
        f'<svg class="strip" style="height:{rows * height}px" {size} role="img" '
        f'aria-label="KL below, in and above the band over the run">{"".join(rects)}</svg>'
    )


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


def _checks(view: View) -> str:
    if not view.checks:
        return ""
    marks = {True: ("yes", "✓"), False: ("no", "✗"), None: ("unknown", "?")}
    items = [
        f'<li class="{marks[holds][0]}"><b aria-label="{marks[holds][0]}">{marks[holds][1]}</b>'
        f"<span>{escape(what)}</span><em>{escape(found)}</em></li>"
        for what, found, holds in view.checks
    ]
    return f'<section id="checks"><h2>Promised and found</h2><ul class="checks">{"".join(items)}</ul></section>'


def _samples(view: View) -> str:
    """Completions at the fixed prompts of every arm's first seed, beside the reference's."""
    asked = {p["prompt"]: p for p in view.reference.get("probes", []) if isinstance(p.get("prompt"), str)}
    steps = sorted({p["step"] for a in view.arms for r in a.runs[:1] for p in r.probes})
    prompts = list(dict.fromkeys([*asked, *(p["prompt"] for a in view.arms for r in a.runs[:1] for p in r.probes)]))
    if not prompts or not steps:
        return ""
    tabs = "".join(
        f'<button type="button" data-step="{s}" aria-pressed="{str(s == steps[-1]).lower()}">step {s}</button>'
        for s in steps
    )
    blocks = []
    for prompt in prompts:
        cards = [_card("reference", "before training", asked.get(prompt), None, None)] if prompt in asked else []
        for step in steps:
            for i, arm in enumerate(view.arms):
                said = next((p for p in arm.runs[0].probes if p["step"] == step and p["prompt"] == prompt), None)
                cards.append(_card(arm.name, "", said, i, (step, step == steps[-1])))
        blocks.append(
            f'<div class="prompt"><h3><bdi>{escape(prompt)}</bdi> …</h3><div class="cards">{"".join(cards)}</div></div>'
        )
    scale = "".join(f'<i style="--k:{k / 4:.2f}"></i>' for k in range(5))
    return (
        '<section id="samples"><h2>What the policies write</h2><p class="hint">The same prompts and random numbers for '
        "every arm, first seed. A token's shade is its exact KL from the reference: 0 "
        f'<span class="scale">{scale}</span> {HEAVY:g} nats and more.</p><div class="tabs">{tabs}</div>'
        f"{''.join(blocks)}</section>"
    )


def _card(name: str, note: str, said: dict[str, Any] | None, index: int | None, at: tuple[int, bool] | None) -> str:
    colour = "" if index is None else f' style="--c:var(--arm-{index})"'
    place = "" if at is None else f' data-step="{at[0]}"{"" if at[1] else " hidden"}'
    body = _tokens(said) if said is not None else "<em>nothing recorded</em>"
    mean = ""
    if said is not None and index is not None and said["kl"]:
        values = [v for v in said["kl"] if isinstance(v, int | float) and math.isfinite(v)]
        mean = f'<small title="mean KL of its tokens, nats">{sum(values) / max(len(values), 1):.3f}</small>'
    label = f"<header>{escape(name)}{f'<small>{escape(note)}</small>' if note else mean}</header>"
    return f'<article{place}{colour}>{label}<p dir="ltr">{body}</p></article>'


def _tokens(said: dict[str, Any]) -> str:
    spans = []
    for token, kl in zip(said["tokens"], said["kl"], strict=True):
        value = float(kl) if isinstance(kl, int | float) and math.isfinite(kl) else 0.0
        shade = min(1.0, math.sqrt(max(value, 0.0) / HEAVY))
        style = f' style="--k:{shade:.2f}"' if shade >= 0.05 else ""
        spans.append(f'<bdi title="{value:.3f} nats"{style}>{escape(token)}</bdi>')
    return "".join(spans)


def _alarms(view: View) -> str:
    rows = [(i, r, {**alarm, "arm": a.name}) for i, a in enumerate(view.arms) for r in a.runs for alarm in r.alarms]
    if not rows:
        return '<section id="alarms"><h2>Alarms</h2><p class="hint">None were raised.</p></section>'
    items = "".join(_alarm(i, r, alarm) for i, r, alarm in rows[:MOST_ALARMS])
    count = sum(r.alarms_in_all for a in view.arms for r in a.runs)
    more = f'<p class="hint">and {count - MOST_ALARMS} more.</p>' if count > MOST_ALARMS else ""
    return (
        f'<section id="alarms"><details><summary><h2>Alarms raised</h2><span>{count}</span></summary>'
        '<table class="alarms"><thead><tr><th>Arm</th><th>Seed</th><th>Step</th><th>Alarm</th><th>Message</th></tr>'
        f"</thead><tbody>{items}</tbody></table>{more}</details></section>"
    )


def _alarm(index: int, run: Record, alarm: dict[str, Any]) -> str:
    arm = alarm["arm"]
    return (
        f'<tr><th scope="row">{_dot(index)}{escape(arm)}</th><td data-label="Seed">{run.seed}</td>'
        f'<td data-label="Step">{escape(alarm.get("step", ""))}</td>'
        f'<td data-label="Alarm">{escape(alarm.get("kind", ""))}</td>'
        f'<td class="verdict">{escape(alarm.get("message", ""))}</td></tr>'
    )


def _dot(index: int) -> str:
    return f'<i style="--c:var(--arm-{index})"></i>'


def _settings(view: View) -> str:
    rows = {**_flat(view.settings), **{f"version of {k}": v for k, v in versions().items()}}
    items = "".join(f'<tr><th scope="row">{escape(k)}</th><td>{escape(v)}</td></tr>' for k, v in rows.items())
    return (
        '<section id="settings"><details><summary><h2>Configuration and versions</h2></summary>'
        f'<table class="plain"><tbody>{items}</tbody></table></details></section>'
    )


def versions() -> dict[str, str]:
    """Versions of what the figures depend on."""
    found = {"klamp": __version__, "python": platform.python_version()}
    for name in ("torch", "transformers", "peft", "accelerate", "vaderSentiment", "plotly"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = ", ".join(map(str, value)) if isinstance(value, list | tuple) else value
    return flat
