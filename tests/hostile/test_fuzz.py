"""Fuzz: whatever text, bytes or values come in, what comes out is read right or an error of klamp's own.

A hundred examples each here, the same in every run; ``KLAMP_FUZZ=long`` takes two thousand new ones.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import string
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from klamp import State, references, strict_json
from klamp.clamp import Clamped, GaugeState
from klamp.cli import main
from klamp.config_io import fields_of, from_dict, from_yaml, to_dict, to_yaml
from klamp.controllers import Hold
from klamp.errors import ConfigError, KlampError
from klamp.experiments import compare, sweep_grammar
from klamp.monitor import Monitor
from klamp.prompts import load_prompts
from klamp.strict_json import from_plain
from klamp.train import rewards
from klamp.train.config import TrainConfig

pytestmark = pytest.mark.slow

LONG = os.environ.get("KLAMP_FUZZ") == "long"
FUZZ = settings(
    max_examples=2000 if LONG else 100,
    derandomize=not LONG,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TEXT = st.text(max_size=60)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)
FIELDS = sorted(name for name, _ in fields_of(TrainConfig))
NUMBER = st.sampled_from(
    ["nan", "inf", "-inf", "1e999", "-0", "0x10", "1_0", "٣", "1e-400", "9" * 400, "", " 1", "1.", "½"]
)
NUMBER = NUMBER | st.floats().map(str) | st.integers().map(str) | TEXT


@FUZZ
@given(
    TEXT
    | st.tuples(st.sampled_from(FIELDS), st.lists(NUMBER, max_size=5), st.sampled_from(":,")).map(
        lambda t: f"{t[0]}={t[2].join(t[1])}"
    )
)
@example("kl.beta=1:1e308:10000:log")
@example("steps=1:1e300:3")
@example("kl.beta=" + "1," * 5000)
def test_sweep_expressions(text: str) -> None:
    with contextlib.suppress(KlampError):
        axis = sweep_grammar.parse(text)
        assert axis.values
        name = sweep_grammar.folder({axis.field: axis.values[0]}, 0)
        assert re.fullmatch(r"[A-Za-z0-9.=_+-]+", name)
        assert ".." not in name


@FUZZ
@given(
    TEXT
    | st.tuples(st.sampled_from(["base", "model", "step", "adapter", "lag", "ema", "periodic"]), NUMBER).map(
        lambda t: ":".join(t)
    )
)
@example("step:1e300")
@example("adapter:" + "x" * 5000)
@example("adapter:\0")
@example("model:~nobody-here/x")
def test_reference_strings(text: str) -> None:
    from klamp.references.states import check_reference

    with contextlib.suppress(KlampError):
        spec = references.parse(text)
        assert references.parse(str(spec)) == spec
        if not isinstance(spec, references.FrozenModel):
            check_reference(spec, Path("no-such-run"), "tiny", full=False)


@FUZZ
@given(st.binary(max_size=200) | TEXT.map(str.encode) | PLAIN.map(lambda x: json.dumps(x).encode()))
@example(b"kl: !!python/object/apply:os.system ['true']\n")
@example(b"steps: !!int ''\n")
@example(b"steps: !!timestamp x\n")
@example(b"a: &a [1]\nb: *a\n")
@example(b"? {}\n: 1\n")
@example(b"[" * 5000)
@example(b"steps: " + b"9" * 5000)
def test_config_files(tmp_path: Path, raw: bytes) -> None:
    file = tmp_path / "config.yaml"
    file.write_bytes(raw)
    with contextlib.suppress(KlampError):
        assert isinstance(from_yaml(TrainConfig, file), TrainConfig)


def _nested(names: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, value in names.items():
        part, _, leaf = name.rpartition(".")
        (made.setdefault(part, {}) if part else made)[leaf] = value
    return made


@FUZZ
@given(st.dictionaries(st.sampled_from(FIELDS), PLAIN, max_size=4) | st.dictionaries(TEXT, PLAIN, max_size=3))
@example({"kl.target": 10**400})
@example({"seed": 10**400})
@example({"steps": True})
def test_config_values(values: dict[str, Any]) -> None:
    with contextlib.suppress(KlampError):
        config = from_dict(TrainConfig, _nested(values))
        assert from_dict(TrainConfig, to_dict(config)) == config


@FUZZ
@given(
    st.lists(st.binary(max_size=60) | PLAIN.map(lambda x: json.dumps({"prompt": x}).encode()), max_size=4),
    st.sampled_from([b"\n", b"\r\n", b"\r", b"\x00"]),
    st.sampled_from(["p.jsonl", "p.txt", "p"]),
)
@example([b'{"prompt": ' + b"[" * 100_000], b"\n", "p.jsonl")
@example([b'{"prompt": "\\ud800"}'], b"\n", "p.jsonl")
@example([b'{"prompt": "a", "n": ' + b"9" * 5000 + b"}"], b"\n", "p.jsonl")
def test_prompt_files(tmp_path: Path, lines: list[bytes], end: bytes, name: str) -> None:
    file = tmp_path / name
    file.write_bytes(end.join(lines))
    with contextlib.suppress(KlampError):
        prompts = load_prompts(str(file), "tiny")
        assert all(isinstance(text, str) and text.encode() for text in prompts.texts)


@FUZZ
@given(st.binary(max_size=100) | st.lists(PLAIN.map(lambda x: json.dumps(x).encode()), max_size=3).map(b"\n".join))
def test_a_file_reads_the_same_from_both_ends(tmp_path: Path, raw: bytes) -> None:
    file = tmp_path / "lines"
    file.write_bytes(raw)
    forwards = raw.split(b"\n")[:-1]
    assert [line for _, line in strict_json.backwards(file)][::-1] == [line + b"\n" for line in forwards]
    with contextlib.suppress(KlampError):
        list(strict_json.whole(file))


@FUZZ
@given(
    TEXT
    | st.tuples(st.sampled_from(["length", "regex", "match", "vader", "", "klamp.none"]), NUMBER).map(
        lambda t: ":".join(t)
    )
)
@example("regex:" + "(" * 5000)
@example("regex:a{99999999999999999999}")
@example("length:nan")
@example(".x:y")
@example("a..b:c")
@example("klamp.errors:" + "x" * 5000)
def test_reward_strings(text: str) -> None:
    module = text.partition(":")[0].partition(".")[0].strip()
    if module == "model" or (module in sys.stdlib_module_names and ":" in text):
        return  # reward models are loaded, not parsed; importing what is there is what was asked for
    with contextlib.suppress(KlampError), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # re has opinions about odd patterns
        assert callable(rewards.resolve(text))


@FUZZ
@given(st.lists(st.sampled_from(["static", "hold", "beta="]) | NUMBER.map(lambda n: f"beta={n}") | TEXT, max_size=4))
def test_arms(names: list[str]) -> None:
    with contextlib.suppress(KlampError):
        for arm in compare.parse_arms(names, 0.04):
            assert "/" not in arm.name
            assert ".." not in arm.name


@FUZZ
@given(PLAIN | st.fixed_dictionaries({name: PLAIN | st.floats(0, 5) for name in Hold(0.05, "token").init().to_dict()}))
@example({"kind": ["State"]})
@example({"kind": "State", "beta": True, "updates": 0, "skipped": 0})
@example({"kind": "State", "beta": 1.0, "updates": 1.5, "skipped": 0})
def test_controller_states(saved: Any) -> None:
    if isinstance(saved, dict) and len(saved) > 5:
        saved = {**saved, "kind": "HoldState"}
    with contextlib.suppress(KlampError):
        state = State.from_json(json.dumps(saved))
        assert State.from_json(state.to_json()) == state
        Hold(0.05, "token").update(state, 0.04) if type(state).__name__ == "HoldState" else None


@FUZZ
@given(TEXT | PLAIN.map(json.dumps))
@example("[" * 100_000)
@example("9" * 5000)
def test_state_text(text: str) -> None:
    with contextlib.suppress(KlampError):
        State.from_json(text)


@FUZZ
@given(PLAIN)
def test_saved_gauges_clamps_and_monitors(saved: Any) -> None:
    for kind in (GaugeState, Clamped):
        with contextlib.suppress(KlampError):
            from_plain(kind, saved)
    with contextlib.suppress(KlampError):
        Monitor().load_state_dict(
            saved if isinstance(saved, dict) else {"window": saved, "steps": saved, "raised": saved}
        )


FLAGS = ["--steps", "--seed", "--kl.target", "--kl.beta", "--optim.lr", "--rollout.top-p", "--lora.rank", "--kl.limit"]


@settings(FUZZ, max_examples=2000 if LONG else 40)
@given(st.lists(st.tuples(st.sampled_from(FLAGS), NUMBER), min_size=1, max_size=3))
def test_flags_for_numbers(pairs: list[tuple[str, str]]) -> None:
    from klamp.train import loop

    seen: list[TrainConfig] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "train_policy", seen.append)
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            try:
                code = main(["train", *(f"{flag}={value}" for flag, value in pairs)])
            except SystemExit as stop:
                code = int(stop.code or 0)
    assert code in (0, 2)
    assert bool(seen) == (code == 0)


@FUZZ
@given(st.sampled_from(FIELDS), st.integers(0, 20), st.sampled_from(string.ascii_lowercase))
def test_a_misspelt_key_is_named_with_its_nearest(field: str, at: int, letter: str) -> None:
    part, _, leaf = field.rpartition(".")
    wrong = leaf[: at % len(leaf)] + letter + leaf[at % len(leaf) :]
    own = {f for f in FIELDS if f.rpartition(".")[0] == part}
    if (f"{part}.{wrong}" if part else wrong) in own:
        return
    with pytest.raises(ConfigError, match=f"{re.escape(wrong)}.* is not known. Did you mean"):
        from_dict(TrainConfig, nested([*part.split("."), wrong] if part else [wrong]))


def nested(names: list[str]) -> dict[str, Any]:
    """``{a: {b: 1}}`` of [a, b]."""
    first, *rest = names
    return {first: nested(rest) if rest else 1}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(TrainConfig()), encoding="utf-8")
    assert from_yaml(TrainConfig, file) == TrainConfig()
