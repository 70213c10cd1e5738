"""mkdocs hooks: roles of docstrings become code, and no built page may ask another host for anything."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

REQUEST = re.compile(r"<(?:script|link|img|iframe)\b[^>]*?\b(?:src|href)=[\"'](?:https?:)?//[^\"']+", re.I)

ROLE = re.compile(r":(?:func|class|meth|mod|attr):<code>~?([^<]*)</code>")


def on_page_content(html: str, **_: Any) -> str:
    """``:func:`name``` of a docstring as code."""
    return ROLE.sub(r"<code>\1</code>", html)


def on_post_build(config: Any, **_: Any) -> None:
    """Fail the build on the first request to another host, with the page and the tag."""
    from mkdocs.exceptions import PluginError

    for page in sorted(Path(config["site_dir"]).rglob("*.html")):
        found = REQUEST.search(page.read_text(encoding="utf-8"))
        if found:
            raise PluginError(f"{page.name} asks another host: {found.group(0)}")
