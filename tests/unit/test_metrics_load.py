"""Long runs: the report keeps spikes and the table's figures, resuming reads the end alone, memory stays small."""

from __future__ import annotations

import importlib.util
import json
import sys
import tracemalloc
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from klamp.errors import ConfigError
from klamp.report.charts import View, chart_data, make_arm
from klamp.results import records
from klamp.results.statistics import figures
from klamp.train.run_folder import RunFolder

STEPS, SPIKE = 50_000, 31_234
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "metrics_load.py"


def _benchmark() -> Any:
    spec = importlib.util.spec_from_file_location("metrics_load", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its processes look it up by name
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("long") / "run"
    _benchmark().write_run(run, STEPS, spike=SPIKE)
    return run


@pytest.fixture(scope="module")
def record(long_run: Path) -> records.Record:
    return records.read(long_run)


def _view(record: records.Record) -> View:
    arms = [make_arm("run", [record], 0, 1, 0.05)]
    return View(kind="runs", title="report", headline="", sentence="", arms=arms, target=0.05, per="token")


@pytest.mark.slow
def test_the_tables_figures_are_those_of_every_step(long_run: Path, record: records.Record) -> None:
    rows = [json.loads(line) for line in (long_run / "metrics.jsonl").read_text().splitlines()]
    found = figures("run", [record], 0.05)
    late = [r for r in rows if r["step"] >= STEPS / 2]
    entry = next(r["step"] for r in rows if abs(r["kl/steered"] / 0.05 - 1) <= 0.2)
    held = [r["kl/steered"] / 0.05 for r in rows if r["step"] >= entry]
    assert found.kl == pytest.approx(fmean(r["kl/steered"] for r in late), rel=1e-12)
    assert found.reward == pytest.approx(fmean(r["reward/mean"] for r in late), rel=1e-12)
    assert found.perplexity == pytest.approx(9.0, rel=1e-12)
    assert found.in_band == pytest.approx(fmean(abs(v - 1) <= 0.2 for v in held), rel=1e-12)
    assert found.highest == pytest.approx(9.0 / 0.05, rel=1e-12)
    assert found.held_steps == len(held)


def test_a_spike_of_one_step_is_drawn(record: records.Record) -> None:
    view = _view(record)
    kl = chart_data(view)["arms"][0]["kl"]
    assert len(kl["x"]) <= records.POINTS
    assert max(kl["high"]) == 9.0
    at = kl["x"][kl["high"].index(9.0)]
    assert 0 <= at - SPIKE < kl["stride"]
    assert all(low <= y <= high for low, y, high in zip(kl["low"], kl["y"], kl["high"], strict=True))
    rewards = chart_data(view)["arms"][0]["reward"]
    assert len(rewards["x"]) <= records.POINTS
    assert len(json.dumps(chart_data(view))) < 2_000_000


def test_the_page_says_that_it_draws_stretches(record: records.Record) -> None:
    pytest.importorskip("plotly")
    from klamp.report.html import render

    page = render(_view(record))
    assert "means of 25 steps; shaded: from the least to the greatest value" in page
    assert "and 300 more." in page  # of 500 alarms 200 are listed
    assert len(page) < 4_000_000


@pytest.mark.slow
def test_reading_takes_at_most_120_bytes_a_step(tmp_path: Path) -> None:
    steps = 10_000
    _benchmark().write_run(tmp_path / "run", steps)
    (tmp_path / "run" / "config.yaml").unlink()
    records.read(tmp_path / "run")  # imports and caches
    tracemalloc.start()
    found = records.read(tmp_path / "run")
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.last_step == steps
    # Arrays grow by an eighth at a time, the old beside the new; 300 kB for the line at hand and the first alarms.
    assert held < steps * 120 * 9 / 8 + 300_000
    assert peak < steps * 120 * 9 / 8 * 1.25 + 300_000


def test_resuming_reads_the_end_alone(long_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for name in ("metrics.jsonl", "alarms.jsonl"):
        (run / name).write_bytes((long_run / name).read_bytes())
    folder = RunFolder(run)
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 50001, "kl/st')  # torn
    parsed: list[str] = []
    from klamp import strict_json

    real = strict_json.parse
    monkeypatch.setattr(strict_json, "parse", lambda text, where, **k: parsed.append(text) or real(text, where, **k))
    tracemalloc.start()
    assert folder.last_step() == STEPS
    folder.rewind(STEPS - 10)
    assert folder.last()["kl/target"] == 0.05
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(parsed) < 20
    assert peak < 2_000_000
    monkeypatch.undo()
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    assert [json.loads(lines[i])["step"] for i in (0, -1)] == [1, STEPS - 10]
    assert len(lines) == STEPS - 10
    assert (long_run / "metrics.jsonl").read_bytes().startswith(b"".join(lines))
    folder.rewind(0)
    assert (run / "metrics.jsonl").stat().st_size == 0


def test_the_last_lines_of_short_odd_and_long_lined_files(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.last() == {}
    for text, last in [
        (b"", 0),
        (b'{"step": 3', 0),
        (b'{"step": 3}\n', 3),
        (b'\xef\xbb\xbf{"step": 3}\r\n\r\n{"step": 4', 3),
        (b'{"step": 3}\n' + b'{"step": 4, "x": "' + b"y" * 200_000 + b'"}\n', 4),
        (b'{"step": 3, "x": "' + b"y" * 200_000 + b'"}\n{"step": 4}\n' + b"z" * 100_000, 4),
    ]:
        folder.metrics.write_bytes(text)
        assert folder.last_step() == last
        folder.rewind(3)
        assert folder.last_step() == min(last, 3)


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (b"{broken}\n", "line 3: not JSON"),
        (b"\xff\xfe\n", "line 3: not UTF-8"),
        (b"[1]\n", "line 3: must be an object"),
        (b'{"step": "4"}\n', "step must be a whole number"),
    ],
)
def test_a_last_line_that_is_not_klamps_is_named(tmp_path: Path, bad: bytes, said: str) -> None:
    folder = RunFolder(tmp_path)
    folder.metrics.write_bytes(b'{"step": 1}\n{"step": 2}\n' + bad)
    with pytest.raises(ConfigError, match=said):
        folder.rewind(2)
    assert folder.metrics.read_bytes().endswith(bad)  # nothing was cut


@pytest.mark.slow
def test_the_benchmark_runs(tmp_path: Path) -> None:
    module = _benchmark()
    module.write_run(tmp_path / "run", 2000, spike=600)
    assert module.report(tmp_path / "run").startswith("page of")
    assert module.resume(tmp_path / "run").startswith("back to step 1990")
