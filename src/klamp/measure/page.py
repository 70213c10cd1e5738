"""The page of a measurement: figures, KL by position, and completions with every token shaded by its KL.

One file without a network or a script: bars are SVG, alternatives are shown on hover or focus by CSS. Text that came
from a model is escaped, its control characters made visible.
"""

from __future__ import annotations

import html
import math
import unicodedata
from typing import Any

from klamp.measure.run import Measurement
from klamp.measure.summary import Estimate

HEAVY = 2.0
"""Nats at which a token has its darkest shade, as on the page of a run."""

STYLE = """
td,th{text-align:left}td.n{text-align:right}td{white-space:normal;overflow-wrap:anywhere}td.n{white-space:nowrap}
.soft{color:var(--soft)}.worst td:first-child,.worst td:last-child{width:90px}
.bars{display:block;width:100%;height:150px;margin:8px 0}.bars rect{fill:var(--heat)}
.cards.broad{grid-template-columns:repeat(auto-fill,minmax(min(100%,340px),1fr))}
.cards.broad article{overflow:visible}
.t{background:color-mix(in srgb,var(--heat) calc(var(--k,0)*62%),transparent);border-radius:3px;padding:1px 0;
position:relative;unicode-bidi:isolate}
.t .why{display:none;position:absolute;z-index:2;left:0;top:1.6em;min-width:200px;padding:8px 11px;line-height:1.4;
background:var(--panel);border:1px solid var(--line);border-radius:8px;font-size:13px;white-space:pre-wrap;
box-shadow:0 4px 16px rgba(0,0,0,.18)}
.t .why bdi{background:none}
.t:hover .why,.t:focus .why{display:block}.t:focus{outline:2px solid var(--heat)}
"""
"""What this page has beside the style of klamp's other pages."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
"""Markup that slipped through would still be dead: nothing is fetched and no script runs."""


def page(m: Measurement) -> str:
    """The whole page, in the style of the report's."""
    from klamp.report.html import asset

    s = m.settings
    title = f"KL of {show(s.policy)} from {show(s.reference)}"
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"><link rel="icon" href="data:,">',
        f"<title>{title}</title><style>{asset('style.css')}{STYLE}</style></head><body>",
        '<header class="top"><div class="bar"><span class="brand">klamp</span>',
        f'<span class="what"><bdi>{title}</bdi></span></div><h1>{html.escape(headline(m))}</h1>',
        f'<p class="lead">{html.escape(finding(m))}</p>',
        f'<p class="hint">Policy: <bdi>{show(s.policy)}</bdi>. Reference: <bdi>{show(s.reference)}</bdi>. {m.prompts} '
        f"prompts, {m.sequences} completions, {m.tokens} tokens. Intervals are 95 %, over prompts.</p></header><main>",
        _maps(m.maps),
        _figures(m),
        _positions(m.by_position),
        _tokens(m.top_tokens),
        _prompts(m.top_prompts),
        "</main></body></html>",
    ]
    return "\n".join(parts)


def headline(m: Measurement) -> str:
    """The finding in at most fifteen words."""
    if m.below_floor:
        return "No drift that can be told from rounding."
    return f"The policy is {m.kl.mean:.3g} nats per token from its reference."


def finding(m: Measurement) -> str:
    """The measurement in a sentence."""
    if m.below_floor:
        return (
            f"No drift that can be told from rounding: KL {m.kl.mean:.3g} nats per token, and the policy against "
            f"itself reads {m.noise_floor.mean:.3g}."
        )
    return f"KL {m.kl} nats per token, {m.kl_per_sequence} per sequence; rounding alone reads {m.noise_floor.mean:.2g}."


def show(text: object) -> str:
    """Text from a model or a user, inert: escaped, with control and formatting characters made visible."""
    visible = "".join(_visible(c) for c in str(text))
    return html.escape(visible, quote=True)


def _visible(c: str) -> str:
    if c in "\n\t":
        return c
    hidden = unicodedata.category(c) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
    if hidden and c != "\u200d":  # emoji are joined by U+200D
        return f"\u27e8U+{ord(c):04X}\u27e9"
    return c


def _figures(m: Measurement) -> str:
    rows: list[tuple[str, Estimate | None, str]] = [
        ("KL(policy‖reference)", m.kl, "nats per token, exact"),
        ("KL(policy‖reference)", m.kl_per_sequence, "nats per sequence, exact"),
        ("KL(reference‖policy)", m.forward_kl, "nats per token, exact, on the policy's prefixes"),
        ("k1", m.k1, "nats per token, the sampled estimate"),
        ("k3", m.k3, "nats per token, the sampled estimate"),
        ("entropy of the policy", m.entropy, "nats per token"),
        ("entropy of the reference", m.reference_entropy, "nats per token, at the same prefixes"),
        ("sampler gap", m.sampler_gap, "log-prob when sampled minus when scored"),
        ("noise floor", m.noise_floor, "the policy against itself, in other batches"),
    ]
    body = "".join(
        f'<tr><th scope="row">{html.escape(name)}</th><td class="n">{html.escape(str(value))}</td>'
        f'<td class="soft">{html.escape(what)}</td></tr>'
        for name, value, what in rows
        if value is not None
    )
    return f'<section id="figures"><h2>Figures</h2><table class="plain"><tbody>{body}</tbody></table></section>'


def _positions(means: list[float]) -> str:
    if not means:
        return ""
    top = max(max(means), 1e-12)
    width = 100 / len(means)
    bars = "".join(
        f'<rect x="{i * width:.3f}" y="{100 - 100 * max(v, 0) / top:.2f}" width="{width * 0.85:.3f}" '
        f'height="{100 * max(v, 0) / top:.2f}"><title>token {i + 1}: {v:.4g} nats</title></rect>'
        for i, v in enumerate(means)
    )
    return (
        '<section id="positions"><figure><figcaption><h2>KL by position</h2><span>'
        f"tokens 1 to {len(means)} of a completion; the highest bar is {top:.3g} nats</span></figcaption>"
        '<svg class="bars" viewBox="0 0 100 100" preserveAspectRatio="none" role="img" '
        f'aria-label="mean KL of each position">{bars}</svg></figure></section>'
    )


def _maps(maps: list[dict[str, Any]]) -> str:
    if not maps:
        return ""
    cards = "".join(
        f"<article><header><bdi>{show(m['prompt'])}</bdi><small>{m['kl']:.3g} nats per token</small></header>"
        f'<p class="text" dir="ltr">{"".join(_token(t) for t in m["tokens"])}</p></article>'
        for m in maps
    )
    scale = "".join(f'<i style="--k:{k / 4:.2f}"></i>' for k in range(5))
    return (
        '<section id="samples"><h2>Where it drifted</h2><p class="hint">The prompts that drifted most. A token\'s '
        f'shade is its exact KL from the reference: 0 <span class="scale">{scale}</span> {HEAVY:g} nats and more. '
        f'Hover or tap for what each model would have said.</p><div class="cards broad">{cards}</div></section>'
    )


def _token(t: dict[str, Any]) -> str:
    shade = min(1.0, math.sqrt(max(t["kl"], 0.0) / HEAVY))

    def told(who: str) -> str:
        return ", ".join(f"<bdi>{show(repr(token))}</bdi> {p:.0%}" for token, p in t[who])

    why = f"{t['kl']:.3g} nats\npolicy: {told('policy')}\nreference: {told('reference')}"
    return (
        f'<span class="t" tabindex="0" style="--k:{shade:.2f}">{show(t["token"])}<span class="why">{why}</span></span>'
    )


def _tokens(tokens: list[dict[str, Any]]) -> str:
    rows = "".join(
        f'<tr><td class="n">{t["kl"]:.3g}</td>'
        f"<td><bdi>{show(t['before'])}</bdi> <b><bdi>{show(t['token'])}</bdi></b></td>"
        f'<td class="n soft">prompt {t["prompt"] + 1}</td></tr>'
        for t in tokens
    )
    return _table("Tokens that drifted most", "KL of the token in nats, after the text before it.", rows)


def _prompts(prompts: list[dict[str, Any]]) -> str:
    rows = "".join(
        f'<tr><td class="n">{p["kl"]:.3g}</td><td><bdi>{show(p["text"])}</bdi></td>'
        f'<td class="n soft">prompt {p["prompt"] + 1}</td></tr>'
        for p in prompts
    )
    return _table("Prompts that drifted most", "KL in nats per token of the completions.", rows)


def _table(title: str, hint: str, rows: str) -> str:
    if not rows:
        return ""
    table = f'<table class="plain worst"><tbody>{rows}</tbody></table>'
    return f'<section><h2>{title}</h2><p class="hint">{hint}</p>{table}</section>'
