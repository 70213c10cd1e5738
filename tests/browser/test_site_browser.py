"""The built documentation in a real browser: every page fits a phone, shows its images and asks no other host."""

from __future__ import annotations

import functools
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import chrome
import pytest

SITE = Path(__file__).parents[2] / "build" / "site"
PAGES = sorted(p.relative_to(SITE).as_posix() for p in SITE.rglob("*.html") if p.name != "404.html")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(chrome.found() is None, reason="no chromium here: apt-get install chromium"),
    pytest.mark.skipif(not PAGES, reason="there is no site: make docs"),
]


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The site over HTTP: from a file a browser loads no search."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(SITE))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator[chrome.Browser]:
    with chrome.browser() as opened:
        yield opened


@pytest.mark.parametrize("width", [1400, 390])
def test_every_page_fits_and_is_whole(browser: chrome.Browser, address: str, width: int) -> None:
    wrong = {}
    for page in PAGES:
        browser.open(address + page, width=width, height=900, charts=False)
        beyond = browser.evaluate("document.documentElement.scrollWidth - window.innerWidth")
        images = browser.evaluate("[...document.images].filter(i => !i.naturalWidth).map(i => i.src)")
        said = browser.problems(address)
        if beyond > 1 or images or said:
            wrong[page] = (beyond, images, said)
    assert wrong == {}
