"""Sweep expressions: what they mean, what they refuse and where, and that nothing else ever comes out."""

from __future__ import annotations

import itertools
import math
from pathlib import Path, PurePath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from klamp.errors import ConfigError
from klamp.experiments import sweep_grammar
from klamp.train.config import TrainConfig


def test_arts_plan_is_nine_betas_from_a_ten_thousandth_on() -> None:
    axis = sweep_grammar.parse("kl.beta=0.0001:1.0001:9")
    assert axis.field == "kl.beta"
    assert axis.values == pytest.approx([0.0001 + i / 8 for i in range(9)], abs=1e-12)


def test_log_spacing_has_equal_ratios_and_both_ends() -> None:
    values = sweep_grammar.parse("optim.lr=1e-5:1e-1:5:log").values
    assert values == pytest.approx([1e-5, 1e-4, 1e-3, 1e-2, 1e-1], rel=1e-9)


@given(low=st.floats(1e-6, 1e3), ratio=st.floats(1.001, 1e6), count=st.integers(2, 50), log=st.booleans())
def test_ranges_keep_their_ends_and_their_count_and_rise(low: float, ratio: float, count: int, log: bool) -> None:
    values = sweep_grammar.parse(f"kl.beta={low}:{low * ratio}:{count}{':log' if log else ''}").values
    assert len(values) == count
    assert (values[0], values[-1]) == pytest.approx((low, low * ratio), rel=1e-9)
    assert all(a < b for a, b in itertools.pairwise(values))


@pytest.mark.parametrize(
    ("expression", "values"),
    [
        ("seed=1,2,3", (1, 2, 3)),
        ("kl.controller=hold, ziegler", ("hold", "ziegler")),
        ("kl.clamp=true,false", (True, False)),
        ("kl.limit=none,0.1", (None, 0.1)),
        ("rollout.group_size=2:8:4", (2, 4, 6, 8)),
        ("kl.reference=step:0,lag:5", ("step:0", "lag:5")),
        ("kl.beta=0.1", (0.1,)),
        ("kl.beta=0.1,0.1", (0.1,)),
        ("model=tiny", ("tiny",)),
    ],
)
def test_lists_take_the_type_of_their_field(expression: str, values: tuple[object, ...]) -> None:
    assert sweep_grammar.parse(expression).values == values


@pytest.mark.parametrize(
    ("expression", "marked"),
    [
        ("kl.beta=0.1:x:9", "x"),
        ("kl.beta=0.1:1:nine", "nine"),
        ("kl.beta=0.1:1:0", "0"),
        ("kl.beta=0.1:1", "0.1:1"),
        ("kl.beta=0.1:1:3:lin", "lin"),
        ("kl.beta=0:1:3:log", "0"),
        ("kl.beta=1,x", "x"),
        ("kl.beta=inf:1:3", "inf"),
        ("kl.beat=1:2:3", "kl.beat"),
        ("kl.controller=hodl", "hodl"),
        ("rollout.group_size=1:2:4", "1:2:4"),
        ("kl.beta", "kl.beta"),
    ],
)
def test_what_does_not_parse_is_shown_with_a_caret_under_it(expression: str, marked: str) -> None:
    with pytest.raises(ConfigError) as error:
        sweep_grammar.parse(expression)
    line, carets = str(error.value).splitlines()[-2:]
    assert line == f"  {expression}"
    start, end = carets.index("^"), carets.rindex("^") + 1
    assert line[start:end] == marked


def test_an_unknown_field_gets_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"Did you mean 'kl\.beta'"):
        sweep_grammar.parse("kl.beat=1,2")


@given(st.text(max_size=40) | st.text("klbeta.=0123456789:,eE+-log \x00", max_size=30).map(lambda s: f"kl.beta={s}"))
def test_only_klamps_own_error_ever_comes_out(text: str) -> None:
    try:
        axis = sweep_grammar.parse(text)
    except ConfigError:
        return
    assert axis.values
    assert all(not isinstance(v, float) or math.isfinite(v) for v in axis.values)


def test_a_grid_has_every_combination_and_each_makes_a_checked_config() -> None:
    points = sweep_grammar.grid([sweep_grammar.parse("kl.beta=0.1,0.2"), sweep_grammar.parse("seed=0:2:3")])
    assert len(points) == 6
    assert points[0] == {"kl.beta": 0.1, "seed": 0}
    made = [sweep_grammar.apply(TrainConfig(), p) for p in points]
    assert [(m.kl.beta, m.seed) for m in made] == [(p["kl.beta"], p["seed"]) for p in points]
    with pytest.raises(ConfigError, match=r"kl\.beta twice"):
        sweep_grammar.grid([sweep_grammar.parse("kl.beta=1"), sweep_grammar.parse("kl.beta=2")])
    with pytest.raises(ConfigError, match="at most"):
        sweep_grammar.grid([sweep_grammar.parse("kl.beta=0:1:5000"), sweep_grammar.parse("seed=0:4999:5000")])
    with pytest.raises(ConfigError, match="lr must be > 0"):
        sweep_grammar.apply(TrainConfig(), {"optim.lr": 0.0})


@given(st.text(max_size=200), st.integers(0, 10_000))
def test_a_runs_folder_is_one_name_whatever_its_values(value: str, number: int) -> None:
    name = sweep_grammar.folder({"model": value}, number)
    assert PurePath(name).parts == (name,)
    assert ".." not in name
    assert (Path("runs") / name).resolve().parent == Path("runs").resolve()
