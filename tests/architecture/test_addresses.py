"""Addresses in the project exist: one of klamp's own is named once there is one, not before."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SKIPPED = {".git", "runs", "build", "dist", "node_modules", "__pycache__"}
TEXT = {".py", ".md", ".toml", ".txt", ".yaml", ".yml", ".html", ".js", ".css", ".json", ""}
ADDRESS = re.compile(r"https?://([\w.-]+)(?::\d+)?(/[\w./~-]*)?")


def addresses() -> list[tuple[str, str, str]]:
    """(file, host, path) of every address in the project's text."""
    found = []
    for file in ROOT.rglob("*"):
        parts = file.relative_to(ROOT).parts
        if (
            not file.is_file()
            or file.suffix not in TEXT
            or any(p in SKIPPED or p.startswith(".venv") or p.endswith("_cache") for p in parts)
        ):
            continue
        text = file.read_text(encoding="utf-8", errors="ignore")
        found += [(str(file.relative_to(ROOT)), host, path or "") for host, path in ADDRESS.findall(text)]
    return found


def test_no_address_claims_to_be_klamps() -> None:
    """Nothing is published yet: a repository, a site or a registry page of klamp's would be an invention."""
    ours = [(file, host + path) for file, host, path in addresses() if "klamp" in (host + path).lower()]
    assert ours == []


def test_addresses_are_found() -> None:
    assert ("LICENSE", "www.apache.org", "/licenses/") in addresses()
