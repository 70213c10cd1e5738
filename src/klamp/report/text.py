"""Text from models and files, made inert: escaped for HTML and JSON, control and direction characters made visible."""

from __future__ import annotations

import html
import json
import unicodedata
from typing import Any

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
