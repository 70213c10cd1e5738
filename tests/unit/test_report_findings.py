"""The page of runs in words: headlines of at most fifteen, panels only where there is data, samples near the top."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from klamp.report import html as page_module
from klamp.report.charts import chart_data, panels
from klamp.report.html import PARTS, parts, render
from klamp.report.write import runs_view
from klamp.results import records


@pytest.fixture(autouse=True)
def without_plotly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two megabytes that no test here looks at."""
    monkeypatch.setattr(page_module, "zipped_plotly", lambda: "")


def write(
    folder: Path, kls: Sequence[float], *, target: float | None = 0.05, steps: int = 0, per: str = "token"
) -> Path:
    """A run of ``klamp train`` whose KL is given."""
    folder.mkdir(parents=True)
    settings = f"model: tiny\nseed: 0\nsteps: {steps or len(kls)}\nrollout: {{prompts: 4, group_size: 8}}\n"
    (folder / "config.yaml").write_text(settings + f"reward: {{functions: [vader]}}\nkl: {{per: {per}, clamp: true}}\n")
    rows = []
    for n, kl in enumerate(kls):
        row = {"step": n + 1, "kl/steered": kl if math.isfinite(kl) else str(kl), "kl/beta": 0.1}
        rows.append({**row, "reward/mean": 0.2 + 0.01 * n, **({"kl/target": target} if target else {})})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    samples = [
        {"step": step, "prompt": f"ask {k}", "reward": 0.5, "tokens": [" yes", f" {step}"], "kl": [0.0, 1.5]}
        for step in range(1, len(kls) + 1)
        if step in (1, len(kls)) or step % 10 == 0
        for k in range(4)
    ]
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in samples))
    return folder


RISING = [0.05 * (n / 40) ** 2 for n in range(20)]
STATES = {
    "held": ([0.02, 0.041] + [0.05] * 30, "KL holds its target: 0.05 of 0.05 nats per token."),
    "left and back": ([0.05] * 5 + [0.09] * 10 + [0.05] * 5, "KL is in its band: 0.05 of 0.05 nats per token."),
    "approaching": (RISING, "KL is approaching its target: 0.0101 of 0.05 nats per token."),
    "below": ([0.0045] * 30, "KL stays below its target: 0.0045 of 0.05 nats per token."),
    "hardly moving": ([1e-5 * n for n in range(30)], "KL stays below its target: 0.000275 of 0.05 nats per token."),
    "above": ([0.05 * n for n in range(20)], "KL is above its target: 0.9 of 0.05 nats per token."),
    "one step": ([0.0], "KL has only begun to move: 0 of 0.05 nats per token."),
    "not a number": ([math.nan, math.inf], "KL is not a finite number."),
}


@pytest.mark.parametrize("name", STATES)
def test_a_run_is_judged_in_a_headline_of_at_most_fifteen_words(tmp_path: Path, name: str) -> None:
    kls, expected = STATES[name]
    view = runs_view([records.read(write(tmp_path / "run", kls))])
    assert view.headline == expected
    assert len(view.headline.split()) <= 15
    assert view.arms[0].verdict
    assert re.search(r"reward", view.sentence, re.I)
    assert "tiny" in view.notes
    assert "vader" in view.notes


def test_a_run_without_a_target_and_several_runs_have_headlines_too(tmp_path: Path) -> None:
    free = records.read(write(tmp_path / "free", [0.1, 0.3], target=None, per="sequence_mean"))
    assert runs_view([free]).headline == "KL has reached 0.3 nats per sequence mean; nothing steers it."
    held, low = (records.read(write(tmp_path / n, kl)) for n, kl in (("held", [0.05] * 9), ("low", [0.001] * 8)))
    both = runs_view([held, low])
    assert both.headline == "1 of 2 runs end with KL in the band around 0.05."
    assert [a.verdict for a in both.arms] == ["holds the band", "stays below the band"]


def test_a_run_that_still_rises_is_approaching_until_its_last_step(tmp_path: Path) -> None:
    slow = [1e-4 * n for n in range(1, 13)]
    going, over = (records.read(write(tmp_path / n, slow, steps=s)) for n, s in (("going", 100), ("over", 12)))
    assert runs_view([going]).headline.startswith("KL is approaching its target")
    assert runs_view([over]).headline.startswith("KL stays below its target")


def test_what_cannot_be_drawn_is_said(tmp_path: Path) -> None:
    view = runs_view([records.read(write(tmp_path / "run", [0.01, math.nan, 0.03, math.inf, 0.05]))])
    assert "Not finite, and not drawn: KL at 2 steps." in view.sentence


def test_a_panel_without_data_is_left_out(tmp_path: Path) -> None:
    view = runs_view([records.read(write(tmp_path / "run", [0.01] * 12))])
    found = panels(view, chart_data(view))
    assert [p.name for p in found.first] == ["reward", "kl"]
    assert [p.name for p in found.more] == ["beta", "frontier"]
    assert found.folded == []
    page = render(view)
    assert re.findall(r'id="chart-(\w+)"', page) == ["reward", "kl", "beta", "frontier"]
    once = runs_view([records.read(write(tmp_path / "once", [0.0]))])
    assert [p.name for p in panels(once, chart_data(once)).more] == ["beta"], "one point is no path"
    heads = re.findall(r'<th scope="col"[^>]*>([^<]*)', page)
    assert "Perplexity" not in heads, "nor is a column of dashes shown"
    assert "Reward" in heads


def test_what_the_policy_writes_stands_near_the_top_with_its_tokens_shaded(tmp_path: Path) -> None:
    page = render(runs_view([records.read(write(tmp_path / "run", [0.01] * 95))]))
    assert page.index('id="curves"') < page.index('id="samples"') < page.index('id="more-curves"')
    section = page[page.index('id="samples"') : page.index('id="more-curves"')]
    steps = re.findall(r'<button type="button" data-step="(\d+)"', section)
    assert steps == ["1", "20", "40", "60", "80", "95"], "the first, the last and some between"
    assert section.count('<article data-step="95">') == 4
    assert section.count('<article data-step="20" hidden>') == 4
    assert '<bdi title="1.5 nats" style="--k:0.87"> 95</bdi>' in section
    assert "reward 0.50 · KL 0.75" in section


def test_of_samples_too_many_to_read_the_first_and_the_last_step_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write(tmp_path / "run", [0.01] * 95)
    everything = records.read(run).samples
    assert {s["step"] for s in everything} == {1, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95}
    monkeypatch.setattr(records, "SAMPLES_READ", 1000)
    ends = records.read(run).samples
    assert ends == [s for s in everything if s["step"] in (1, 95)]


def test_every_part_of_a_page_is_rendered_and_none_of_a_compare_is_missing(tmp_path: Path) -> None:
    view = runs_view([records.read(write(tmp_path / "run", [0.01] * 3))])
    made = parts(view, chart_data(view))
    assert tuple(made) == PARTS
    assert [name for name, text in made.items() if not text] == ["legend"], "one arm needs no legend"
