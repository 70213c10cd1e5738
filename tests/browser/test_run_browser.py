"""The page of a run in a real browser: every value inside its chart, no chart empty, straight lines."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import chrome
import fabricated
import pytest

from klamp.report.html import render
from klamp.report.write import runs_view
from klamp.results import records

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(chrome.found() is None, reason="no chromium here: apt-get install chromium"),
]
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


def test_changes_made_on_the_way_are_marked_where_they_were_made(browser: chrome.Browser, tmp_path: Path) -> None:
    run = fabricated.run(tmp_path / "run", [0.05] * 10 + [0.08] * 10)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [{**row, "kl/target": 0.05 if row["step"] <= 10 else 0.08} for row in rows]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    event = {"step": 10, "event": "resumed", "changes": {"kl.target": [0.05, 0.08], "run": ["<b>a</b>", "b"]}}
    (run / "events.jsonl").write_text(json.dumps(event) + "\n")
    file = tmp_path / "report.html"
    file.write_text(render(runs_view([records.read(run)])), encoding="utf-8")
    browser.open(file)
    assert browser.problems() == []
    shapes = browser.evaluate("document.getElementById('chart-kl').layout.shapes")
    assert [s["x0"] for s in shapes if s.get("name") == "event"] == [10]
    bands = [(s["x0"], s["x1"], round(s["y0"], 6)) for s in shapes if s.get("name") == "band"]
    assert bands == [(0.5, 10.5, 0.04), (10.5, 20.5, 0.064)], "each target has its own band"
    text = browser.evaluate("document.getElementById('events').textContent")
    assert "after step 10" in text
    assert "resumed: kl.target 0.05 → 0.08, run <b>a</b> → b" in text
    assert browser.evaluate("document.querySelectorAll('#events b').length") == 0
