"""The page as text: inert whatever models say, whole without a network, the same again from the same runs."""

from __future__ import annotations

import html.parser
import json
import math
import re
import unicodedata
from pathlib import Path
from statistics import fmean, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from klamp.errors import ConfigError
from klamp.report import html as page_module
from klamp.report import write_runs
from klamp.report.charts import LOOKS, View, curve, make_arm
from klamp.report.html import embed, escape, render, visible
from klamp.results.records import Record, Series
from klamp.results.statistics import figures

real_plotly = page_module.zipped_plotly


@pytest.fixture(autouse=True)
def without_plotly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two megabytes that no test but one looks at."""
    monkeypatch.setattr(page_module, "zipped_plotly", lambda: "")


TEXT = st.text(st.characters(), max_size=60)  # surrogates and controls included


@given(TEXT)
def test_nothing_that_acts_is_left_in_a_text(text: str) -> None:
    shown = visible(text)
    kept = {"\u200d", "\ufe0f"}
    assert all(c in kept or unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Zl", "Zp") for c in shown)
    shown.encode("utf-8")  # no lone surrogate is left
    for mark in "<>\"'":
        assert mark not in escape(text)


@given(
    st.recursive(
        TEXT | st.floats(allow_nan=False, allow_infinity=False), lambda x: st.lists(x) | st.dictionaries(TEXT, x)
    )
)
def test_embedded_json_comes_back_and_cannot_end_its_element(data: object) -> None:
    inside = embed(data)
    assert not set(inside) & set("<>&\u2028\u2029")
    assert json.loads(inside) == json.loads(json.dumps(data))


class Tags(html.parser.HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def record(path: Path, text: str = "fine", seed: int = 0, steps: int = 12) -> Record:
    found = Record(path, config={"seed": seed, "kl": {"per": "token", "note": text}})
    for step in range(1, steps + 1):
        for key, value in {"kl/steered": 0.004 * step, "reward/mean": 0.1, "kl/beta": 0.2, "kl/target": 0.05}.items():
            found.series.setdefault(key, Series()).add(step, value)
    found.alarms = [{"kind": text, "step": 3, "message": text}]
    found.probes = [{"step": steps, "prompt": text, "tokens": [text, text], "kl": [0.1, 2.0]}]
    return found


def view(text: str) -> View:
    arm = make_arm(text, [record(Path("x"), text)], 0, 1, 0.05, verdict=text, summary=text)
    reference = {"perplexity": {"heldout": 9.0}, "probes": [{"prompt": text, "tokens": [text], "kl": [0.0]}]}
    checks: list[tuple[str, str, bool | None]] = [(text, text, None)]
    return View(
        kind="compare",
        title=text,
        headline=text,
        sentence=text,
        arms=[arm],
        target=0.05,
        per="token",
        checks=checks,
        reference=reference,
        constants={text: arm.runs},
        settings={"field": text},
        notes=text,
    )


@pytest.mark.parametrize(
    "text",
    [
        "<script>alert(1)</script>",
        "</script><script>alert(1)</script>",
        "<img src=x onerror=alert(1)>",
        '" onmouseover="alert(1)',
        "' style='background:url(//evil)",
        "</style><style>*{display:none}",
        "{{data}} {{ nonce }}",
        "<!-- ",
        "javascript:alert(1)",
        "\u202eevil\x00\x1b[2J\ud800",
    ],
)
def test_hostile_text_anywhere_adds_no_element_and_no_handler(text: str) -> None:
    clean, dirty = (Tags(render(view(t))).found for t in ("plain", text))
    assert [tag for tag, _ in dirty] == [tag for tag, _ in clean]
    assert [sorted(attrs) for _, attrs in dirty] == [sorted(attrs) for _, attrs in clean]
    assert not any(name.startswith("on") for _, attrs in dirty for name in attrs)


def test_the_page_asks_nobody_for_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_module, "zipped_plotly", real_plotly)
    page = render(view("plain"))
    tags = Tags(page).found
    assert not [a for t, a in tags if "src" in a or (t == "link" and a.get("href") != "data:,")]
    policy = next(a["content"] for t, a in tags if t == "meta" and a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    nonces = {a["nonce"] for t, a in tags if t == "script" and "nonce" in a}
    assert len(nonces) == 1
    assert f"'nonce-{nonces.pop()}'" in policy
    assert len(page) < 2_500_000
    assert "{{" not in re.sub(r"<script.*?</script>", "", page, flags=re.S)


def test_the_same_runs_give_the_same_page_to_the_byte() -> None:
    assert render(view("plain")) == render(view("plain"))


def test_arms_have_colours_of_their_own_that_differ_without_colour_too() -> None:
    known = list(LOOKS.values())
    assert len({k.light for k in known}) == len({k.dark for k in known}) == len(known)
    assert len({k.dash for k in known}) >= 5


def test_bands_are_students_over_seeds_and_absent_for_one() -> None:
    several = curve([record(Path("x"), seed=s).get("kl/steered") for s in range(3)])
    assert several["low"] == pytest.approx(several["y"])  # three equal runs
    assert curve([record(Path("x")).get("kl/steered")])["low"] == []
    assert curve([]) == {"x": [], "y": [], "low": [], "high": [], "stride": 1}


def write_run(folder: Path, *, seed: int = 0, lr: float = 0.1, per: str = "token", lines: int = 5) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(f"seed: {seed}\noptim: {{lr: {lr}}}\nkl: {{per: {per}}}\n")
    line = '{{"step": {0}, "kl/steered": 0.0{0}, "kl/target": 0.05, "reward/mean": 0.{0}, "kl/beta": 0.1}}\n'
    (folder / "metrics.jsonl").write_text("".join(line.format(n) for n in range(1, lines + 1)))
    return folder


def test_what_is_drawn_on_a_logarithmic_axis_has_a_band_that_stays_above_zero() -> None:
    runs = []
    for value in (1e2, 1e6, 1e14):
        series = Series()
        series.add(1, value)
        runs.append(series)
    plain, ratio = curve(runs), curve(runs, by_ratio=True)
    assert plain["low"][0] < 0 < ratio["low"][0] < 1e2
    assert ratio["y"] == plain["y"], "the line is the mean in both"
    logs = [math.log(v) for v in (1e2, 1e6, 1e14)]
    half = 4.303 * stdev(logs) / math.sqrt(3)  # Student's t, two degrees of freedom
    assert math.log(ratio["high"][0]) == pytest.approx(fmean(logs) + half, rel=1e-4)  # the table has three decimals
    assert curve([Series(), runs[0]], by_ratio=True)["low"] == []


def test_runs_that_differ_in_their_seed_alone_are_one_arm(tmp_path: Path) -> None:
    a, b = (write_run(tmp_path / "fast" / f"seed-{s}", seed=s) for s in range(2))
    c = write_run(tmp_path / "slow", lr=0.01)
    page = write_runs([a, b, c], tmp_path / "both.html").read_text()
    rows = re.findall(r'<tr data-arm="([^"]*)">', page)
    assert rows == ["fast", "slow"]
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "figure.pdf").read_bytes().startswith(b"%PDF")
    assert write_runs([c]) == c / "report.html"


@pytest.mark.slow
def test_runs_are_looked_for_where_runs_are_kept_and_nowhere_else(tmp_path: Path) -> None:
    write_run(tmp_path / "home" / "thesis" / "old" / "attempts" / "run")
    with pytest.raises(ConfigError, match=r"holds no run.*metrics\.jsonl.*runs/\*/seed-\*"):
        write_runs([tmp_path / "home"])
    with pytest.raises(ConfigError, match="is no folder"):
        write_runs([tmp_path / "nowhere"])
    for place in ("a/one", "b/arm/seed-0", "c/runs/one", "d/runs/arm/seed-0"):
        write_run(tmp_path / place)
        top = tmp_path / place.partition("/")[0]
        assert write_runs([top]) == top / "report.html"


def test_a_folder_without_runs_and_two_units_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no metrics\.jsonl"):
        write_runs([tmp_path])
    with pytest.raises(ConfigError, match="at least one"):
        write_runs([])
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", per="sequence")
    with pytest.raises(ConfigError, match="per sequence and per token"):
        write_runs([a, b])
    (a / "config.yaml").write_text("seed: [")
    with pytest.raises(ConfigError, match="not YAML"):
        write_runs([a])


def test_a_run_with_nothing_but_nan_still_makes_a_page(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "metrics.jsonl").write_text('{"step": 1, "kl/steered": "nan", "reward/mean": "inf", "kl/beta": 0.1}\n')
    assert "<h1>KL is not a finite number.</h1>" in write_runs([folder]).read_text()
    for more in ("", ', "kl/target": 0.05'):
        (folder / "metrics.jsonl").write_text(
            f'{{"step": 1, "kl/steered": 0.0, "reward/mean": 0, "kl/beta": 0{more}}}\n'
        )
        assert "<h1>KL has" in write_runs([folder]).read_text()
    assert figures("x", [], 0.05).seeds == 0
