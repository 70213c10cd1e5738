"""The page of a measurement in a real browser: hostile prompts and tokens are shown, and do nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chrome
import fabricated
import pytest
from test_report_browser import IN_ORDER

from klamp.measure import Estimate, Measurement
from klamp.measure.run import Settings

pytestmark = pytest.mark.skipif(chrome.found() is None, reason="no chromium here: apt-get install chromium")


def _measurement() -> Measurement:
    some = Estimate(0.1, 0.05, 0.15)
    told = [[text, 0.5] for text in fabricated.HOSTILE[:3]]
    tokens: list[dict[str, Any]] = [
        {"token": text, "kl": 0.1 * n, "policy": told, "reference": told}
        for n, text in enumerate([" a", *fabricated.HOSTILE, " z"])
    ]
    worst = [{"token": t, "before": t, "kl": 1.0, "prompt": n} for n, t in enumerate(fabricated.HOSTILE)]
    asked = [{"prompt": n, "kl": 0.5, "text": text} for n, text in enumerate(fabricated.HOSTILE)]
    return Measurement(
        kl=some,
        forward_kl=some,
        kl_per_sequence=some,
        k1=some,
        k1_per_sequence=some,
        k3=some,
        entropy=some,
        reference_entropy=some,
        sampler_gap=None,
        noise_floor=Estimate(1e-9, 0.0, 1e-8),
        by_position=[0.1, 0.2],
        top_tokens=worst,
        top_prompts=asked,
        tokens=10,
        sequences=2,
        prompts=2,
        settings=Settings(fabricated.HOSTILE[2], fabricated.HOSTILE[4], 2, 8, 1, 1.0, 8, 0, None, False),
        maps=[{"prompt": text, "kl": 0.5, "tokens": tokens} for text in fabricated.HOSTILE],
    )


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("measure") / "measure.html"
    _measurement().to_html(file)
    return file


@pytest.fixture(scope="module")
def browser() -> Iterator[chrome.Browser]:
    with chrome.browser() as opened:
        yield opened


def test_it_loads_without_a_complaint_or_a_request(browser: chrome.Browser, page: Path) -> None:
    for width in (1400, 390):
        browser.open(page, width=width, charts=False)
        assert browser.problems() == []
        assert browser.evaluate("document.querySelectorAll('script, img, iframe, object').length") == 0
        assert browser.evaluate("document.querySelectorAll('style').length") == 1
        assert browser.evaluate("[...document.querySelectorAll('*')].some(e => e.onmouseover || e.onerror)") is False


def test_markup_and_control_characters_are_shown_and_inert(browser: chrome.Browser, page: Path) -> None:
    browser.open(page, charts=False)
    text = browser.evaluate("document.body.textContent")
    for shown in (*fabricated.HOSTILE[:4], "⟨U+202E⟩gnirts desrever⟨U+202C⟩", "⟨U+0000⟩⟨U+0007⟩⟨U+001B⟩[31m"):
        assert shown in text
    for shown in ("⟨U+2028⟩⟨U+2029⟩⟨U+D800⟩", "👩‍👩‍👧 🎉", "{{data}} ${1}", "⟨U+2067⟩⟨U+2066⟩⟨U+061C⟩⟨U+FEFF⟩⟨U+009B⟩"):
        assert shown in text
    assert not set(text) & set("\u202e\u202c\x00\x07\x1b\u2028\u2029\u2066\u2067\u061c\ufeff\x9b")
    title = browser.evaluate("document.title")
    assert title.startswith("KL of </script><script>document.title='owned'</script> from ⟨U+202E⟩")
    # Even markup that got in would be dead.
    browser.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=data:, onerror=\"document.title=1\">')")
    browser.evaluate("new Promise(r => setTimeout(r, 200))")
    assert browser.evaluate("document.title") == title


def test_direction_does_not_leak_out_of_a_token_or_a_prompt(browser: chrome.Browser, page: Path) -> None:
    browser.open(page, charts=False)
    assert browser.evaluate(IN_ORDER.replace("PLACE", ".text")) > 20
    # what stands after a prompt stays to its right, or on a line below
    after = "(h => { const [b, t] = [...h.children].map(e => e.getBoundingClientRect()); "
    after += "return t.left >= b.right - 1 || t.top > b.top })"
    prompts = "[...document.querySelectorAll('article header')]"
    assert browser.evaluate(f"{prompts}.length") == len(fabricated.HOSTILE)
    assert browser.evaluate(f"{prompts}.every({after})")
