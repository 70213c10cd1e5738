"""YAML and JSONL of strangers: nothing runs, nothing swells, and what is wrong is named by its line."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest

from klamp import strict_json
from klamp.cli.measure import _completions
from klamp.config_io import LARGEST, from_yaml
from klamp.errors import ConfigError
from klamp.prompts import load_prompts
from klamp.results import records
from klamp.train.config import TrainConfig


def test_yaml_makes_no_objects(tmp_path: Path) -> None:
    mark = tmp_path / "owned"
    for text in (
        f"kl: !!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path ['{mark}']]\n",
        f"!!python/object/apply:os.system ['touch {mark}']\n",
        "model: !!python/name:os.system\n",
        "model: !!python/module:antigravity\n",
    ):
        (tmp_path / "c.yaml").write_text(text)
        with pytest.raises(
            ConfigError, match="is not YAML that klamp reads at line 1: could not determine a constructor"
        ):
            from_yaml(TrainConfig, tmp_path / "c.yaml")
        (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
        (tmp_path / "config.yaml").write_text(text)
        with pytest.raises(ConfigError, match="is not YAML"):
            records.read(tmp_path)
    assert not mark.exists()


def test_yaml_does_not_swell(tmp_path: Path) -> None:
    lines = ['a0: &a0 ["x", "x", "x", "x", "x", "x", "x", "x"]']
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 8)}]" for i in range(1, 12)]
    (tmp_path / "c.yaml").write_text("\n".join([*lines, "model: *a11"]))
    tracemalloc.start()
    with pytest.raises(ConfigError, match=r"at line 2: aliases \(\*name\) are not read"):
        from_yaml(TrainConfig, tmp_path / "c.yaml")
    assert tracemalloc.get_traced_memory()[1] < 10_000_000
    tracemalloc.stop()
    (tmp_path / "c.yaml").write_bytes(b"#" * (LARGEST + 1))
    with pytest.raises(ConfigError, match="is larger than"):
        from_yaml(TrainConfig, tmp_path / "c.yaml")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("steps: 1\nsteps: 2\n", "'steps' stands twice"),
        ("kl:\n  beta: 1\n  beta: 2\n", "'beta' stands twice"),
        ("stepz: 3\n", "field 'stepz' is not known. Did you mean 'steps'"),
        ("kl: {bet: 1}\n", "field 'kl.bet' is not known. Did you mean 'kl.beta'"),
        ("steps: many\n", "steps must be int, got 'many'"),
        ("steps: 2026-01-01\n", "steps must be int"),
        ("kl: [1]\n", "kl must be a mapping"),
        ("[" * 3000, "nested|recursion|not YAML"),
        ("\x00", "not YAML"),
        ("steps: 1\n---\nsteps: 2\n", "at line 2: but found another document"),
    ],
)
def test_yaml_errors_name_what_is_wrong(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError, match=says):
        from_yaml(TrainConfig, tmp_path / "c.yaml")


def test_a_config_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_bytes(b"\xff\xfe")
    for path in (tmp_path / "c.yaml", tmp_path, tmp_path / "none", "a\0b", "x" * 5000):
        with pytest.raises(ConfigError, match="cannot be read"):
            from_yaml(TrainConfig, path)


GOOD = b'{"prompt": "one"}\n'
BAD = [
    (b"{", "not JSON"),
    (b"[1]", "must be an object, got list"),
    (b'"x"', "must be an object, got str"),
    (b'{"prompt": 3}', '"prompt" must be text, or a list of messages: got 3'),
    (b'{"prompt": ""}', '"prompt" must be text, or a list of messages: it is empty'),
    (b'{"question": "x"}', 'there is no "prompt". The keys are "question"'),
    (b'{"prompt": "a", "prompt": "b"}', "'prompt' stands twice"),
    (b'{"prompt": "a", "x": {"k": 1, "k": 2}}', "'k' stands twice"),
    (b'{"prompt": "a", "x": NaN}', "NaN is no JSON"),
    (b'{"prompt": "a", "x": -Infinity}', "-Infinity is no JSON"),
    (b'{"prompt": "a", "x": ' + b"9" * 5000 + b"}", "not JSON"),
    (b'{"prompt": "a", "x": ' + b"[" * 100_000, "nested too deep"),
    (b'{"prompt": "\\ud83d"}', "half of a surrogate pair"),
    (b'{"prompt": "a", "x": "\\udc00"}', "half of a surrogate pair"),
    (b'{"prompt": "a\x00b"}', "not JSON"),
    (b'{"prompt": "\xff"}', "not UTF-8 at byte 12"),
    ('{"prompt": "a"}'.encode("utf-16"), "not UTF-8"),
    (b'{"prompt": "a"} trailing', "not JSON"),
]


@pytest.mark.parametrize(("line", "says"), BAD, ids=[says[:24] + str(i) for i, (_, says) in enumerate(BAD)])
def test_a_bad_line_of_prompts_is_named_by_its_number(tmp_path: Path, line: bytes, says: str) -> None:
    file = tmp_path / "p.jsonl"
    file.write_bytes(GOOD + b"\n" + line + b"\n" + GOOD)
    with pytest.raises(ConfigError, match=rf"p\.jsonl', line 3: .*{says}"):
        load_prompts(str(file), "tiny")
    file.write_bytes((GOOD + b"\n" + line + b"\n").replace(b"prompt", b"completion"))
    with pytest.raises(ConfigError, match="line 3: "):
        _completions(str(file))


def test_marks_line_ends_and_odd_characters_are_read_right(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    texts = ["naïve", "שלום", "👩‍👩‍👧", "a\u2028b", "tab\tand\nline", "\x00", "\u202eabc", "\x85"]
    rows = [json.dumps({"prompt": t, "n": i}, ensure_ascii=i % 2 == 0) for i, t in enumerate(texts)]
    file.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(rows).encode() + b"\r\n")
    found = load_prompts(str(file), "tiny")
    assert found.texts == texts
    assert found.columns == {"n": list(range(len(texts)))}
    plain = tmp_path / "p.txt"
    plain.write_bytes("\ufeffone\r\n\r\ntwo \u2028 three\x85\n  \nfour".encode())
    assert load_prompts(str(plain), "tiny").texts == ["one", "two \u2028 three\x85", "four"]


def test_a_text_of_another_encoding_is_named_by_its_line(tmp_path: Path) -> None:
    file = tmp_path / "p.txt"
    for raw, says in (
        (b"one\ncaf\xe9\n", "line 2: not UTF-8 at byte 3"),
        (b"o\0n\0e\0\n\0", "line 1: holds a NUL byte"),
    ):
        file.write_bytes(raw)
        with pytest.raises(ConfigError, match=says):
            load_prompts(str(file), "tiny")


@pytest.mark.parametrize("name", ["p.jsonl", "p.txt"])
def test_a_line_without_end_is_refused_in_bounded_memory(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    with file.open("wb") as handle:
        handle.write(GOOD + b'{"prompt": "')
        handle.seek(200_000_000)  # a hole: 200 MB of NUL bytes that take no disk
        handle.write(b"x")
    tracemalloc.start()
    with pytest.raises(ConfigError, match=f"line 2: longer than {strict_json.LONGEST} bytes"):
        load_prompts(str(file), "tiny")
    assert tracemalloc.get_traced_memory()[1] < 4 * strict_json.LONGEST
    with file.open("rb+") as handle:
        handle.write(b'{"step":       1}\n')
    file.rename(tmp_path / "metrics.jsonl")
    with pytest.raises(ConfigError, match="line 2: longer than"):
        records.read(tmp_path)
    with pytest.raises(ConfigError, match="ends in a line of more than"):
        records.last_step(tmp_path)
    assert tracemalloc.get_traced_memory()[1] < 4 * strict_json.LONGEST
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"step": "x"}', "step must be a number"),
        (b'{"step": NaN}', "NaN is no JSON"),
        (b'{"step": true}', "step must be a number"),
        (b'{"step": 2, "kl/steered": "high"}', "kl/steered must be a number"),
        (b'{"step": 2, "kl/steered": [1]}', "kl/steered must be a number"),
        (b'{"step": 1}', "comes after a larger one"),
        (b'{"step": "nan"}', "comes after a larger one"),
        (b"\xff", "not UTF-8"),
        (b"[" * 100_000, "nested too deep"),
    ],
)
def test_a_bad_line_of_metrics_is_named_by_its_number(tmp_path: Path, line: bytes, says: str) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 2, "kl/steered": 0.1}\n' + line + b"\n")
    with pytest.raises(ConfigError, match=f"line 2: .*{says}"):
        records.read(tmp_path)


def test_what_klamp_writes_for_numbers_that_json_cannot_say_is_read(tmp_path: Path) -> None:
    rows = b'{"step": 1, "kl/steered": "nan"}\n{"step": 2, "kl/steered": 1e999}\n{"step": 3, "kl/steered": 4}\n{"st'
    (tmp_path / "metrics.jsonl").write_bytes(b"\xef\xbb\xbf" + rows.replace(b"}\n", b"}\r\n"))
    series = records.read(tmp_path).get("kl/steered")
    assert list(series.steps) == [1, 2, 3]
    assert list(series.from_step(0)) == [4.0]
