"""The page as HTML: templates filled by jinja2, one for each part, so that a live page can renew them one by one.

All text from models, files and flags is escaped by jinja2, after its control and direction characters have been made
visible.
"""

from __future__ import annotations

import base64
import functools
import gzip
import hashlib
import html
import json
import unicodedata
from pathlib import Path
from typing import Any

from klamp.report import sections
from klamp.report.charts import View, chart_data, panels, thinned

NAMED = {"\n": "⏎", "\t": "⇥", "\r": "␍"}
HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
"""Unicode categories that steer a terminal or a browser, or show as nothing."""
JOINERS = {"\u200d", "\ufe0f"}
"""What holds emoji together."""


def visible(text: str) -> str:
    """``text`` with every character that would act rather than show replaced by a sign for it."""
    return "".join(_sign(c) for c in text)


def _sign(c: str) -> str:
    if c in NAMED:
        return NAMED[c]
    if c in JOINERS or unicodedata.category(c) not in HIDDEN:
        return c
    code = ord(c)
    return chr(0x2400 + code) if code < 0x20 else f"⟨U+{code:04X}⟩"


def escape(text: object) -> str:
    """For HTML, between tags and inside quoted attributes."""
    return html.escape(visible(str(text)), quote=True)


def embed(data: Any) -> str:
    """JSON for a script element: no sequence in it can end the element or begin a comment."""
    plain = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return plain.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


HERE = Path(__file__).parent
DASHES = {"solid": "none", "dash": "7 3", "dot": "2 3", "dashdot": "7 3 2 3", "longdash": "11 4"}
MARKS = {True: ("yes", "✓"), False: ("no", "✗"), None: ("unknown", "?")}
PARTS = ("lead", "legend", "curves", "samples", "more", "verdicts", "alarms", "settings")
LATE_SAMPLES = ("curves", "more", "verdicts", "samples", "alarms", "settings")
EARLY_SAMPLES = ("curves", "samples", "more", "verdicts", "alarms", "settings")
"""The order of the parts below the legend: on the page of runs, what the policy writes stands near the top."""
POLICY = (
    "default-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; script-src 'nonce-{}'; base-uri 'none'; "
    "form-action 'none'"
)


def render(view: View, data: dict[str, Any] | None = None, *, live: float = 0.0, nonce: str = "") -> str:
    """The whole page as HTML; ``live`` is the number of seconds between the looks of a page that a server keeps."""
    from markupsafe import Markup

    data = chart_data(view) if data is None else data
    made, inside = parts(view, data), embed(data)
    # A script runs only with this page's own nonce, so markup that slipped through would still be dead.
    nonce = nonce or hashlib.sha256("".join([inside, *made.values()]).encode("utf-8", "replace")).hexdigest()[:32]
    page = _templates().get_template("page.html")
    return str(
        page.render(
            view=view,
            live=live,
            parts={name: Markup(text) for name, text in made.items()},
            order=EARLY_SAMPLES if view.kind == "runs" else LATE_SAMPLES,
            style=Markup(asset("style.css") + _arm_colours(view)),
            data=Markup(inside),
            plotly=Markup(zipped_plotly()),
            script=Markup(asset("charts.js")),
            nonce=nonce,
            policy=policy(nonce, live=bool(live)),
        )
    )


def policy(nonce: str, *, live: bool = False) -> str:
    """The content security policy: nothing is fetched, but for a live page's own numbers."""
    return POLICY.format(nonce) + ("; connect-src 'self'" if live else "")


def parts(view: View, data: dict[str, Any]) -> dict[str, str]:
    """Every part of the page by its name, as HTML; an empty text for one that has nothing to show."""
    values = {
        "view": view,
        "notes": " ".join(filter(None, (view.notes, _thinning(view)))),
        "dashes": DASHES,
        "marks": MARKS,
        "panels": panels(view, data),
        "table": sections.table(view),
        "samples": sections.samples(view),
        "heavy": f"{sections.HEAVY:g}",
        "events": data["events"],
        "alarms": sections.alarms(view),
        "settings": sections.settings(view),
    }
    found = _templates()
    return {name: str(found.get_template(f"{name}.html").render(values)).strip() for name in PARTS}


@functools.cache
def _templates() -> Any:
    """jinja2's environment: every text is made visible, then escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    return Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=True,
        finalize=lambda x: visible(x) if isinstance(x, str) and not isinstance(x, Markup) else x,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


@functools.cache
def zipped_plotly() -> str:
    """plotly.js, gzipped, as base64: a third of its size, unpacked by the browser."""
    from plotly.offline import get_plotlyjs

    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), 9, mtime=0)).decode()


@functools.cache
def asset(name: str) -> str:
    """A file of the package that goes into pages."""
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
