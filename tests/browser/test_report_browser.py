"""The report in a real browser: no error, no request, plots drawn, the numbers of the files, markup not run."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import chrome
import fabricated
import pytest

from klamp.report import write_runs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(chrome.found() is None, reason="no chromium here: apt-get install chromium"),
]
IN_ORDER = """[...document.querySelectorAll('PLACE')].reduce((n, p) => {
  const spans = [...p.children].map((s) => s.getClientRects()).filter((r) => r.length === 1).map((r) => r[0]);
  for (let i = 1; i < spans.length; i++) {
    if (Math.abs(spans[i].top - spans[i - 1].top) > 1) continue; // another line
    if (spans[i].left < spans[i - 1].right - 1) return -1e9;
    n += 1;
  }
  return n;
}, 0)"""
"""How many neighbours on one line stand in the order they were said; hugely negative where any do not."""
SIZES = {"desktop": (1400, 900), "phone": (390, 844)}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("report") / "compare"
    fabricated.comparison(root, hostile=True)
    return write_runs([root])


@pytest.fixture(scope="module")
def browser() -> Iterator[chrome.Browser]:
    with chrome.browser() as opened:
        yield opened


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_it_loads_without_a_complaint_and_draws(browser: chrome.Browser, page: Path, size: str, dark: bool) -> None:
    width, height = SIZES[size]
    browser.open(page, width=width, height=height, dark=dark)
    assert browser.problems() == []
    drawn = browser.evaluate(
        "[...document.querySelectorAll('#curves .chart')].map(c => c.querySelectorAll('.scatterlayer .trace').length)"
    )
    assert len(drawn) == 5
    assert all(n >= 5 for n in drawn), drawn  # at least a trace an arm
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the page is wider than the screen"


def test_light_and_dark_differ_and_each_can_be_read(browser: chrome.Browser, page: Path) -> None:
    contrasts = {}
    for dark in (False, True):
        browser.open(page, dark=dark)
        style = "getComputedStyle(document.body)"
        colours = browser.evaluate(f"[{style}.color, {style}.backgroundColor]")
        contrasts[colours[1]] = _contrast(*colours)
    assert len(contrasts) == 2
    assert min(contrasts.values()) > 7  # WCAG AAA for text


def test_the_arms_keep_their_colours_throughout(browser: chrome.Browser, page: Path) -> None:
    browser.open(page)
    data = browser.evaluate("JSON.parse(document.getElementById('data').textContent).arms.map(a => [a.name, a.light])")
    chips = browser.evaluate("[...document.querySelectorAll('.chip svg')].map(c => getComputedStyle(c).color)")
    dots = browser.evaluate(
        "[...document.querySelectorAll('#verdicts th i')].map(c => getComputedStyle(c).backgroundColor)"
    )
    wanted = [_rgb(colour) for _, colour in data]
    assert [name for name, _ in data] == ["static", "ziegler", "exponential", "hold-price", "hold"]
    assert chips == wanted
    assert dots == wanted
    for chart in ("reward", "kl", "beta", "perplexity"):
        lines = browser.evaluate(
            f"document.getElementById('chart-{chart}').data.filter(t => t.meta).map(t => t.line.color)"
        )
        assert lines == [colour for _, colour in data]


def test_the_tables_numbers_are_those_of_metrics_jsonl(browser: chrome.Browser, page: Path) -> None:
    browser.open(page)
    script = (
        "[...document.querySelectorAll('#verdicts tbody tr')].map(r => [r.dataset.arm, "
        "Object.fromEntries([...r.querySelectorAll('td[data-key]')].map(c => [c.dataset.key, c.textContent]))])"
    )
    table: dict[str, dict[str, str]] = dict(browser.evaluate(script))
    assert set(table) == {"static", "ziegler", "exponential", "hold-price", "hold"}
    for arm, shown in table.items():
        expected = _figures(page.parent / "runs" / arm)
        assert shown["in band"] == f"{100 * expected['in_band']:.1f} %"
        assert shown["max KL"] == f"{expected['highest']:.2f} ×"
        assert shown["KL"] == f"{expected['kl/steered']:.4f}"
        assert shown["reward"] == f"{expected['reward/mean']:.3f}"
        assert shown["perplexity"] == f"{expected['heldout/perplexity']:.2f}"
        assert shown["on ref"] == f"{expected['heldout/perplexity_reference']:.2f}"
        assert shown["entropy"] == f"{expected['policy/entropy']:.2f}"
        assert shown["beta"] == f"{expected['kl/beta']:.3g}"
        assert len(shown) == 8


def test_the_charts_draw_the_means_over_seeds(browser: chrome.Browser, page: Path) -> None:
    browser.open(page)
    drawn = browser.evaluate("document.getElementById('chart-kl').data.filter(t => t.name === 'hold')[0].y")
    runs = [_rows(p) for p in sorted((page.parent / "runs" / "hold").iterdir())]
    assert drawn == pytest.approx([fmean(r[i]["kl/steered"] for r in runs) for i in range(60)], rel=1e-12)


def test_markup_in_completions_is_shown_and_never_run(browser: chrome.Browser, page: Path) -> None:
    browser.open(page)
    assert browser.evaluate("document.title") == "compare"
    assert browser.evaluate("document.querySelectorAll('#samples script, #samples img, #alarms script').length") == 0
    text = browser.evaluate("document.querySelector('#samples').textContent")
    assert "<script>document.title='owned'</script>" in text
    assert "<img src=x onerror=\"document.title='owned'\">" in text
    assert "⟨U+202E⟩gnirts desrever⟨U+202C⟩" in text
    assert "␀␇␛[31m" in text
    assert "👩‍👩‍👧 🎉" in text
    assert not set(text) & set("\u202e\u202c\x00\x07\x1b\u2028\u2029")
    # Even markup that got in would be dead: only scripts with the page's own nonce run.
    browser.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=data:, onerror=\"document.title=1\">')")
    browser.evaluate("new Promise(r => setTimeout(r, 200))")
    assert browser.evaluate("document.title") == "compare"


def test_the_order_of_tokens_is_kept_whatever_their_direction(browser: chrome.Browser, page: Path) -> None:
    browser.open(page)
    assert browser.evaluate(IN_ORDER.replace("PLACE", "#samples article:not([hidden]) p")) > 50
    lead = browser.evaluate("getComputedStyle(document.querySelector('#samples h3 bdi')).unicodeBidi")
    assert lead == "isolate"
    # the dots after a prompt stay to its right
    after = (
        "(h => { const r = document.createRange(); r.selectNode(h.lastChild); return r.getBoundingClientRect().left "
    )
    after += ">= h.querySelector('bdi').getBoundingClientRect().right - 1 })"
    assert browser.evaluate(f"[...document.querySelectorAll('#samples h3')].every({after})")


def test_chips_hide_an_arm_and_tabs_change_the_step(browser: chrome.Browser, page: Path) -> None:
    browser.open(page)
    count = "document.getElementById('chart-kl').data.filter(t => t.meta).length"
    assert browser.evaluate(count) == 5
    browser.evaluate("document.querySelector('.chip').click()")
    assert browser.evaluate(count) == 4
    shown = "[...new Set([...document.querySelectorAll('article[data-step]:not([hidden])')].map(a => a.dataset.step))]"
    assert browser.evaluate(shown) == ["60"]
    browser.evaluate("document.querySelector('.tabs button').click()")
    assert browser.evaluate(shown) == ["20"]
    browser.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    deadline = time.monotonic() + chrome.PATIENCE
    while browser.evaluate("document.querySelectorAll('#chart-entropy .trace').length") < 4:
        assert time.monotonic() < deadline, "what was folded away is not drawn"
        time.sleep(0.1)
    assert browser.problems() == []


def _rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def _figures(arm: Path) -> dict[str, float]:
    """The table's figures, computed again from the files alone."""
    runs = [_rows(p) for p in sorted(arm.iterdir())]
    held, judged = [], []
    for rows in runs:
        inside = [abs(r["kl/steered"] / 0.05 - 1) <= 0.2 for r in rows]
        if any(inside):
            held += [r["kl/steered"] / 0.05 for r in rows[inside.index(True) :]]
            judged += [within for r, within in zip(rows, inside, strict=True) if r["step"] >= 30]
    late = [[r for r in rows if r["step"] >= 30] for rows in runs]
    keys = ("kl/steered", "kl/beta", "reward/mean", "policy/entropy", "heldout/perplexity")
    return {
        "in_band": fmean(judged),
        "highest": max(held),
        **{k: fmean(fmean(r[k] for r in rows if k in r) for rows in late) for k in (*keys, f"{keys[-1]}_reference")},
    }


def _rgb(colour: str) -> str:
    n = int(colour[1:], 16)
    return f"rgb({n >> 16}, {(n >> 8) & 255}, {n & 255})"


def _contrast(front: str, back: str) -> float:
    """WCAG's contrast ratio of two ``rgb(...)`` colours."""

    def luminance(colour: str) -> float:
        parts = [int(c) / 255 for c in colour[4:-1].split(",")]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(front), luminance(back)), reverse=True)
    return (light + 0.05) / (dark + 0.05)
