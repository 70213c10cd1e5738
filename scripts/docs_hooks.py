"""mkdocs hooks: a built page must not ask another host for a script, a style sheet, a font or an image."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

REQUEST = re.compile(r"<(?:script|link|img|iframe)\b[^>]*?\b(?:src|href)=[\"'](?:https?:)?//[^\"']+", re.I)


def on_post_build(config: Any, **_: Any) -> None:
    """Fail the build on the first request to another host, with the page and the tag."""
    from mkdocs.exceptions import PluginError

    for page in sorted(Path(config["site_dir"]).rglob("*.html")):
        found = REQUEST.search(page.read_text(encoding="utf-8"))
        if found:
            raise PluginError(f"{page.name} asks another host: {found.group(0)}")
