"""The first screen of a report: ``python tests/browser/picture.py runs/compare/report.html docs/images/report.png``."""

from __future__ import annotations

import sys
from pathlib import Path

import chrome


def main() -> int:
    """Write the picture; needs chromium, and Pillow to make it small."""
    page, out = Path(sys.argv[1]), Path(sys.argv[2])
    out.parent.mkdir(parents=True, exist_ok=True)
    with chrome.browser() as browser:
        browser.open(page, width=1400, height=1560)
        browser.screenshot(out, whole=False)
    try:
        from PIL import Image
    except ModuleNotFoundError:
        return 0
    with Image.open(out) as image:
        image.convert("RGB").quantize(256).save(out, optimize=True)
    print(f"{out}: {out.stat().st_size >> 10} KB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
