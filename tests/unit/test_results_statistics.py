"""Figures from made-up runs whose answers are known, and files that are not what klamp writes."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from klamp.controllers import Hold
from klamp.errors import ConfigError, KlampError
from klamp.experiments.compare import (
    CompareConfig,
    best_constant,
    coarse_constants,
    fine_constants,
    load,
    named_arm,
    parse_arms,
)
from klamp.results import records
from klamp.results.records import Record, Series
from klamp.results.statistics import at_equal_kl, difference, figures, first_entry, gain, interval, paired


def made(kl: list[float], reward: list[float] | None = None, seed: int = 0, **more: list[float]) -> Record:
    columns = {"kl/steered": kl, "reward/mean": reward or [0.0] * len(kl), **more}
    series = {}
    for key, values in columns.items():
        series[key] = Series()
        for step, value in enumerate(values, 1):
            series[key].add(step, value)
    return Record(Path("made"), config={"seed": seed}, series=series)


def test_the_share_in_band_counts_from_first_entry_on_and_pools_seeds() -> None:
    one = made([0.0, 0.01, 0.041, 0.05, 0.07, 0.059])  # enters at step 3; 3 of 4 in band
    two = made([0.05, 0.2], seed=1)  # 1 of 2
    never = made([0.0, 0.01], seed=2)
    found = figures("x", [one, two, never], 0.05)
    assert first_entry(one, 0.05) == 3
    assert found.in_band == pytest.approx(4 / 6)
    assert (found.entered, found.seeds, found.held_steps) == (2, 3, 6)
    assert found.highest == pytest.approx(4.0)
    assert figures("x", [never], 0.05).entered == 0
    assert math.isnan(figures("x", [never], 0.05).in_band)
    assert figures("x", [one], None).entered == 0


def test_the_ends_of_the_band_belong_to_it() -> None:
    assert figures("x", [made([0.8, 1.2, 1.2000001])], 1.0).in_band == pytest.approx(2 / 3)


def test_late_figures_are_means_over_the_second_half() -> None:
    found = figures("x", [made([0.0, 0.0, 0.2, 0.4], [1.0, 1.0, 3.0, 5.0])], 0.05)
    assert found.kl == pytest.approx((0.0 + 0.2 + 0.4) / 3)  # steps 2, 3 and 4 of 4
    assert found.reward == pytest.approx(3.0)


def test_students_interval_is_the_textbooks() -> None:
    found = interval([1.0, 2.0, 3.0])
    assert (found.mean, found.low, found.high) == pytest.approx((2.0, 2 - 4.303 / 3**0.5, 2 + 4.303 / 3**0.5))
    assert math.isnan(interval([1.0]).low)
    assert math.isnan(interval([]).mean)


def test_paired_differences_cancel_what_seeds_share() -> None:
    ours = [made([1.0] * 4, [s + 0.5] * 4, seed=s) for s in range(3)]
    theirs = [made([1.0] * 4, [float(s)] * 4, seed=s) for s in reversed(range(3))]
    found = paired(ours, theirs, "reward/mean")
    assert (found.low, found.mean, found.high) == pytest.approx((0.5, 0.5, 0.5))


def test_at_equal_kl_reads_the_constants_frontier_where_we_are() -> None:
    # reward = 2 sqrt(KL) - KL is a parabola in sqrt(KL), so the fit is exact.
    constants = [[made([x * x] * 4, [2 * x - x * x] * 4, seed=s) for s in range(2)] for x in (0.1, 0.15, 0.2, 0.3, 0.4)]
    ours = [made([0.0625] * 4, [2 * 0.25 - 0.0625 + 0.01] * 4, seed=s) for s in range(2)]
    pairs = at_equal_kl(ours, constants, "reward/mean")
    assert difference(pairs).mean == pytest.approx(0.01, abs=1e-9)
    assert gain(pairs, 0.2).mean == pytest.approx((0.4375 - 0.2 + 0.01) / (0.4375 - 0.2), abs=1e-9)
    assert math.isnan(gain(pairs, 0.5).mean)  # nothing to gain
    outside = [made([4.0] * 4, seed=0)]
    assert at_equal_kl(outside, constants, "reward/mean") == []  # no extrapolation


def test_the_oracle_is_the_constant_most_in_band_but_not_one_that_just_arrived() -> None:
    late = [made([0.0] * 9 + [0.05])]
    wandering = [made([0.05] * 6 + [0.1] * 4)]
    steady = [made([0.0] * 2 + [0.05] * 7 + [0.08])]
    assert best_constant({"late": late, "wandering": wandering, "steady": steady}, 0.05, 10) == "steady"
    assert best_constant({"late": late, "far": [made([0.5] * 10)]}, 0.05, 10) == "late"


def test_constants_are_log_spaced_around_the_first_price_of_hold() -> None:
    coarse, fine = coarse_constants(0.05, 24), fine_constants(0.4)
    assert len(coarse) >= 7
    assert len(fine) >= 7
    assert coarse[3] == pytest.approx(Hold(0.05, "token").init(spread=1.0, length=24).beta, rel=1e-3)
    assert coarse[2] <= 0.55 * coarse[3] < 1.9 * coarse[3] <= coarse[4], "constants that hold targets lie in the middle"
    for values, ratio in ((coarse, 2.0), (fine, 2**0.25)):
        assert [b / a for a, b in itertools.pairwise(values)] == pytest.approx([ratio] * 6, rel=1e-3)


def test_an_oracle_whose_constants_were_not_run_says_how_to_get_them(tmp_path: Path) -> None:
    reference = {"perplexity": {"heldout": 9.0}, "probes": [], "samples": [], "length": 24.0}
    (tmp_path / "reference.json").write_text(json.dumps(reference))
    config = CompareConfig(arms=("hold",), oracle=True).resolved()
    with pytest.raises(ConfigError, match=r"lacks constants .*Run the same klamp compare"):
        load(tmp_path, config, [])


def test_arms_are_parsed_with_commas_or_without_and_refused_by_name() -> None:
    assert [a.name for a in parse_arms(("static,hold", "beta=0.3", "hold"), 0.04)] == ["static", "hold", "beta=0.3"]
    assert named_arm("hold", 0.04).kl["clamp"] is True
    assert named_arm("hold-price", 0.04).kl["clamp"] is False
    assert named_arm("static", 0.07).kl["beta"] == 0.07
    with pytest.raises(ConfigError, match="Did you mean 'ziegler'"):
        parse_arms("zeigler", 0.04)
    with pytest.raises(ConfigError, match="not a number"):
        parse_arms("beta=x", 0.04)
    with pytest.raises(ConfigError, match="empty"):
        parse_arms("", 0.04)


def write(folder: Path, lines: bytes) -> Path:
    (folder / "metrics.jsonl").write_bytes(lines)
    return folder


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (b'{"step": 1}\n[1]\n', "line 2: must be an object"),
        (b'{"step": 1, "kl/steered": "big"}\n', "line 1: kl/steered must be a number"),
        (b'{"step": 1, "kl/steered": true}\n', "line 1: kl/steered must be a number"),
        (b'{"kl/steered": 1}\n', "line 1: step must be a number"),
        (b'{"step": 1}\n{"step": \xff}\n', "line 2: not UTF-8"),
        (b"{step}\n", "line 1: not JSON"),
        (b"[" * 100_000 + b"\n", "line 1: not JSON"),
        (b'{"step": "' + b"x" * 10_000_000 + b'"}\n', "longer than"),
    ],
)
def test_a_line_that_is_not_klamps_is_named_by_its_number(tmp_path: Path, lines: bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        records.read(write(tmp_path, lines))


def test_a_mark_windows_ends_blank_and_torn_lines_are_read_right(tmp_path: Path) -> None:
    text = b'\xef\xbb\xbf{"step": 1, "kl/steered": 0.5}\r\n\r\n{"step": 2, "kl/steered": "nan"}\r\n{"step": 3, "kl/st'
    found = records.read(write(tmp_path, text))
    assert list(found.get("kl/steered").steps) == [1, 2]
    assert found.get("kl/steered").values[0] == 0.5
    assert math.isnan(found.get("kl/steered").values[1])
    assert records.last_step(tmp_path) == 2


@given(
    st.lists(
        st.binary(max_size=60)
        | st.dictionaries(st.sampled_from(records.KEYS), st.floats() | st.text()).map(
            lambda d: json.dumps({"step": 1, **d}).encode()
        ),
        max_size=5,
    )
)
def test_any_bytes_give_a_record_or_klamps_own_error(lines: list[bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(KlampError):
        records.read(write(Path(folder), b"\n".join(lines) + b"\n"))


def test_thinning_keeps_means_and_a_bounded_number_of_points() -> None:
    series = Series()
    for step in range(1, 100_001):
        series.add(step, float(step % 2))
    thin = list(series.stretches(series.stride(1000)))
    assert len(thin) <= 1000
    assert {s.mean for s in thin} == {0.5}
    assert {(s.low, s.high) for s in thin} == {(0.0, 1.0)}
    assert thin[-1].step == 100_000


def test_of_probes_written_twice_the_later_counts(tmp_path: Path) -> None:
    def row(text: str, **more: Any) -> str:
        return json.dumps({"step": 20, "prompt": "p", "tokens": [text], "kl": [0.1], **more}) + "\n"

    (tmp_path / "probes.jsonl").write_text(row("old") + row("new") + row("x", kl=[0.1, 0.2]) + row("y", step="20"))
    found = records.read(write(tmp_path, b'{"step": 1}\n')).probes
    assert [p["tokens"] for p in found] == [["new"]]
