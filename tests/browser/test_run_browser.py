"""The page of a run in a real browser: every value inside its chart, no chart empty, straight lines."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import chrome
import fabricated
import pytest

from klamp.experiments import records
from klamp.report.page import render
from klamp.report.write import runs_view

pytestmark = pytest.mark.skipif(chrome.found() is None, reason="no chromium here: apt-get install chromium")
SIZES = {
    "as usual": [0.0, *(0.05 * (1 - math.exp(-n / 8)) for n in range(1, 40))],
    "far below": [0.0, *(1e-7 * n**2 for n in range(1, 40))],
    "far above": [0.0, 1e-9, *(0.02 * n**2 for n in range(1, 30)), 1e6],
    "negative too": [0.01 * (-1) ** n for n in range(12)],
    "one step": [0.0],
}
INSIDE = """(() => {
  const place = document.getElementById('chart-NAME'), axis = place._fullLayout.yaxis, log = axis.type === 'log';
  const out = (v) => (log && v <= 0) || (log ? Math.log10(v) : v) < axis.range[0] || (log ? Math.log10(v) : v) > axis.range[1];
  const marked = place.data.filter((t) => t.meta === 'below').flatMap((t) => t.customdata);
  const drawn = place.data.filter((t) => t.meta === 'arm').flatMap((t) => t.y);
  return {drawn, lost: drawn.filter((v) => v !== null && out(v) && !marked.includes(v)), target: out(0.05)};
})()"""  # noqa: E501
"""A chart's values, those outside its axis that are not marked at its foot either, and whether the target is out."""


def page(folder: Path, kls: list[float]) -> Path:
    run = records.read(fabricated.run(folder / "run", kls))
    file = folder / "report.html"
    file.write_text(render(runs_view([run])), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def browser() -> Iterator[chrome.Browser]:
    with chrome.browser() as opened:
        yield opened


@pytest.mark.parametrize("name", SIZES)
def test_every_value_is_drawn_whatever_its_size(browser: chrome.Browser, tmp_path: Path, name: str) -> None:
    kls = SIZES[name]
    browser.open(page(tmp_path, kls))
    assert browser.problems() == []
    found = browser.evaluate(INSIDE.replace("NAME", "kl"))
    assert found["drawn"] == pytest.approx(kls)
    assert found["lost"] == []
    assert found["target"] is False, "the target is on the chart"
    empty = (
        "[...document.querySelectorAll('.chart')].filter(c => !c.querySelectorAll('.scatterlayer path, .scatterlayer "
        ".point').length).map(c => c.id)"
    )
    assert browser.evaluate(empty) == []
    for chart in ("reward", "beta", "entropy"):
        assert browser.evaluate(INSIDE.replace("NAME", chart))["lost"] == []
    shapes = "[...document.querySelectorAll('.chart')].flatMap(c => c.data).map(t => t.line?.shape).filter(Boolean)"
    assert browser.evaluate(shapes) == [], "no splines: a curve between the values is not the values"


@pytest.mark.parametrize("width", [1280, 390])
def test_the_first_screens_say_what_came_of_it(browser: chrome.Browser, tmp_path: Path, width: int) -> None:
    browser.open(page(tmp_path, SIZES["as usual"]), width=width, height=900)
    assert browser.evaluate("document.querySelector('h1').textContent").startswith("KL holds its target: 0.0")
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
    top = browser.evaluate("document.querySelector('#samples').getBoundingClientRect().top")
    assert top < (900 if width > 720 else 1.5 * 900), "what the policy writes is near the top"
    shades = browser.evaluate(
        "[...document.querySelectorAll('#samples article:not([hidden]) p bdi')].map(b => [b.title, "
        "getComputedStyle(b).backgroundColor])"
    )
    assert {title for title, _ in shades} == {"0 nats", "0.5 nats", "2 nats"}
    assert len({colour for _, colour in shades}) == 3, "the more KL, the darker"
