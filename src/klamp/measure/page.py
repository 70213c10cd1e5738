"""The page of a measurement: figures, KL by position, and completions with every token shaded by its KL.

One file without a network or a script: bars are SVG, alternatives are shown on hover or focus by CSS. Text that came
from a model is escaped, its control characters made visible.
"""

from __future__ import annotations

import html
import math
import unicodedata
from typing import Any

from klamp.measure.figures import Estimate
from klamp.measure.run import Measurement

STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --paper: #fbfaf7; --soft: #667; --line: #d9d6cd; --mark: 214, 94, 0; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e4dd; --paper: #15181d; --soft: #9aa; --line: #343a44; --mark: 255, 140, 40; }
}
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 62rem; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; } h2 { font-size: 1.1rem; margin: 2.2rem 0 .6rem; }
p.lead { font-size: 1.1rem; } .soft { color: var(--soft); }
table { border-collapse: collapse; width: 100%; } td, th { text-align: left; padding: .35rem .6rem .35rem 0;
  border-bottom: 1px solid var(--line); vertical-align: top; } td.n { text-align: right; white-space: nowrap;
  font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; } svg { width: 100%; height: 9rem; }
.text { border: 1px solid var(--line); border-radius: .5rem; padding: .8rem; margin: .6rem 0 1.2rem; line-height: 2.1;
  overflow-wrap: anywhere; unicode-bidi: isolate; }
.t { border-radius: .2rem; padding: .1rem 0; position: relative; white-space: pre-wrap; unicode-bidi: isolate; }
.t .why { display: none; position: absolute; z-index: 2; left: 0; top: 1.7rem; min-width: 13rem; padding: .5rem .7rem;
  background: var(--paper); border: 1px solid var(--line); border-radius: .4rem; font-size: .85rem; line-height: 1.4;
  white-space: pre-wrap; box-shadow: 0 .3rem 1rem rgba(0, 0, 0, .18); }
.t:hover .why, .t:focus .why { display: block; } .t:focus { outline: 2px solid rgb(var(--mark)); }
code { overflow-wrap: anywhere; }
@media (max-width: 40rem) {
  .figures tr { display: block; border-bottom: 1px solid var(--line); padding: .4rem 0; }
  .figures td { display: block; border: 0; padding: 0; text-align: left; white-space: normal; }
}
"""


def page(m: Measurement) -> str:
    """The whole page."""
    s = m.settings
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        # Markup that slipped through would still be dead: nothing is fetched and no script runs.
        "<meta http-equiv='Content-Security-Policy' content=\"default-src 'none'; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'\">",
        "<link rel='icon' href='data:,'>",
        f"<title>KL of {show(s.policy)} from {show(s.reference)}</title><style>{STYLE}</style></head><body>",
        f"<h1>{html.escape(headline(m))}</h1>",
        f"<p class='lead'>{html.escape(finding(m))}</p>",
        f"<p class='soft'>Policy: <code><bdi>{show(s.policy)}</bdi></code>. Reference: "
        f"<code><bdi>{show(s.reference)}</bdi></code>. {m.prompts} prompts, {m.sequences} completions, {m.tokens} "
        "tokens. Intervals are 95 %, over prompts.</p>",
        _figures(m),
        _positions(m.by_position),
        _maps(m.maps),
        _tokens(m.top_tokens),
        _prompts(m.top_prompts),
        "</body></html>",
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
        f"<tr><td>{html.escape(name)}</td><td class='n'>{html.escape(str(value))}</td>"
        f"<td class='soft'>{html.escape(what)}</td></tr>"
        for name, value, what in rows
        if value is not None
    )
    return f"<h2>Figures</h2><table class='figures'>{body}</table>"


def _positions(means: list[float]) -> str:
    if not means:
        return ""
    top = max(max(means), 1e-12)
    width = 100 / len(means)
    bars = "".join(
        f"<rect x='{i * width:.3f}' y='{100 - 100 * max(v, 0) / top:.2f}' width='{width * 0.85:.3f}' "
        f"height='{100 * max(v, 0) / top:.2f}' fill='rgb(var(--mark))'>"
        f"<title>token {i + 1}: {v:.4g} nats</title></rect>"
        for i, v in enumerate(means)
    )
    return (
        f"<h2>KL by position</h2><svg viewBox='0 0 100 100' preserveAspectRatio='none' role='img' "
        f"aria-label='mean KL of each position'>{bars}</svg>"
        f"<p class='soft'>Tokens 1 to {len(means)} of a completion; the highest bar is {top:.3g} nats.</p>"
    )


def _maps(maps: list[dict[str, Any]]) -> str:
    if not maps:
        return ""
    blocks = "".join(
        f"<p class='soft'><bdi>{show(m['prompt'])}</bdi> &middot; {m['kl']:.3g} nats per token</p>"
        f"<div class='text'>{''.join(_token(t) for t in m['tokens'])}</div>"
        for m in maps
    )
    return (
        "<h2>Where it drifted</h2><p class='soft'>The prompts that drifted most; the darker a token, the larger its "
        f"KL. Hover or tap for what each model would have said.</p>{blocks}"
    )


def _token(t: dict[str, Any]) -> str:
    shade = 1 - math.exp(-2.0 * max(t["kl"], 0.0))

    def told(who: str) -> str:
        return ", ".join(f"<bdi>{show(repr(token))}</bdi> {p:.0%}" for token, p in t[who])

    why = f"{t['kl']:.3g} nats\npolicy: {told('policy')}\nreference: {told('reference')}"
    return (
        f"<span class='t' tabindex='0' style='background: rgba(var(--mark), {0.85 * shade:.3f})'>{show(t['token'])}"
        f"<span class='why'>{why}</span></span>"
    )


def _tokens(tokens: list[dict[str, Any]]) -> str:
    rows = "".join(
        f"<tr><td class='n'>{t['kl']:.3g}</td>"
        f"<td><bdi>{show(t['before'])}</bdi> <b><bdi>{show(t['token'])}</bdi></b></td>"
        f"<td class='n soft'>prompt {t['prompt'] + 1}</td></tr>"
        for t in tokens
    )
    return f"<h2>Tokens that drifted most</h2><div class='scroll'><table>{rows}</table></div>" if rows else ""


def _prompts(prompts: list[dict[str, Any]]) -> str:
    rows = "".join(
        f"<tr><td class='n'>{p['kl']:.3g}</td><td><bdi>{show(p['text'])}</bdi></td>"
        f"<td class='n soft'>prompt {p['prompt'] + 1}</td></tr>"
        for p in prompts
    )
    return f"<h2>Prompts that drifted most</h2><div class='scroll'><table>{rows}</table></div>" if rows else ""
