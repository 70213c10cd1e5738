"""JSON read with suspicion: JSONL files line by line, and saved states field by field.

JSONL is one object a line, every error names the file and the line, memory is that of one line.

A byte-order mark and Windows line ends are read as what they are. Refused, with the line: other encodings than UTF-8,
lines of more than ``LONGEST`` bytes, nesting too deep to read, ``NaN`` and ``Infinity`` (JSON has neither), numbers of
thousands of digits, and anything that is no object; of what a person gives, also a key twice and half of a surrogate
pair, which no tokenizer takes.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from klamp.errors import ConfigError, shown

LONGEST = 10_000_000
"""Bytes of a line; more is refused rather than read into memory."""
BLOCK = 1 << 16
"""Bytes read at a time from a file's end."""


def lines(file: Path) -> Iterator[tuple[int, str, bool]]:
    """(number, text without its end, whether it had one) of every line."""
    try:
        with file.open("rb") as handle:
            number = 0
            while raw := handle.readline(LONGEST + 1):
                number += 1
                if len(raw) > LONGEST:
                    raise ConfigError(
                        f"{str(file)!r}, line {number}: longer than {LONGEST} bytes. Split it, or remove it."
                    )
                yield number, _text(file, number, raw), raw.endswith(b"\n")
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{str(file)!r} cannot be read: {error}.") from None


def rows(file: Path, *, strict: bool = False) -> Iterator[tuple[int, dict[str, Any]]]:
    """Numbered objects; empty lines are passed over. ``strict`` refuses a key twice and half of a surrogate pair."""
    for number, text, _ in lines(file):
        if text and not text.isspace():
            yield number, parse(text, f"{str(file)!r}, line {number}", strict=strict)


def whole(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """:func:`rows` of a file that a process may have been killed while writing: a torn last line is passed over."""
    if not file.is_file():
        return
    for number, text, ended in lines(file):
        if ended and text and not text.isspace():
            yield number, parse(text, f"{str(file)!r}, line {number}")


def backwards(file: Path) -> Iterator[tuple[int, bytes]]:
    """(where it ends, line) of every whole line from the last to the first, reading from the file's end."""
    with file.open("rb") as handle:
        at = end = handle.seek(0, os.SEEK_END)
        held = b""
        while at > 0:
            size = min(BLOCK, at)
            at -= size
            handle.seek(at)
            held = handle.read(size) + held
            if len(held) > LONGEST + BLOCK:
                raise ConfigError(f"{str(file)!r} ends in a line of more than {LONGEST} bytes. Remove it.")
            first = held.find(b"\n") + 1 if at > 0 else 0
            if at > 0 and first == 0:
                continue
            done, held = held[first:], held[:first]
            for line in reversed(_split(done)):
                if line.endswith(b"\n"):
                    yield end, line
                end -= len(line)


def parse(text: str, where: str, *, strict: bool = False) -> dict[str, Any]:
    """The object in ``text``; :class:`ConfigError` that begins with ``where`` for anything else."""
    try:
        row = (STRICT if strict else PLAIN).decode(text)
    except (ValueError, RecursionError) as error:
        said = str(error) if isinstance(error, ValueError) else "nested too deep"
        raise ConfigError(f"{where}: not JSON ({said:.200}).") from None
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: must be an object, got {type(row).__name__}.")
    if strict and "\\u" in text:
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except (UnicodeEncodeError, RecursionError):
            raise ConfigError(
                f"{where}: holds half of a surrogate pair (\\ud800 to \\udfff), which is no text."
            ) from None
    return row


def _split(block: bytes) -> list[bytes]:
    r"""Lines end in \n alone; bytes.splitlines would end them at a bare \r too."""
    pieces = block.split(b"\n")
    return [p + b"\n" for p in pieces[:-1]] + ([pieces[-1]] if pieces[-1] else [])


def _text(file: Path, number: int, raw: bytes) -> str:
    try:
        return raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{str(file)!r}, line {number}: not UTF-8 at byte {error.start}.") from None


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON; write null, or the text {name.lower()!r}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [k for k, _ in pairs]
        twice = next(k for k in names if names.count(k) > 1)
        raise ValueError(f"{twice!r:.60} stands twice")
    return found


PLAIN = json.JSONDecoder(parse_constant=_constant)
STRICT = json.JSONDecoder(parse_constant=_constant, object_pairs_hook=_unique)


T = TypeVar("T")


def from_plain(kind: type[T], saved: object, *, finite: bool = True) -> T:
    """``kind(**saved)`` where every field is there and is the number, flag, tuple of numbers or
    dataclass of these that its type says."""
    known = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]
    if not isinstance(saved, Mapping) or set(saved) != known.keys():
        raise ConfigError(f"a saved {kind.__name__} must have the fields {', '.join(known)}, got {shown(saved)}.")
    values: dict[str, Any] = {}
    kinds = get_type_hints(kind)
    for name, field in known.items():
        value = saved[name]
        if is_dataclass(kinds[name]):
            values[name] = from_plain(kinds[name], value, finite=finite)
            continue
        if not _fits(value, str(field.type), finite):
            raise ConfigError(
                f"a saved {kind.__name__}.{name} must be {field.type}, got {shown(value)}: it is damaged. "
                "Start anew with init(), or from an earlier checkpoint."
            )
        values[name] = tuple(value) if isinstance(value, list) else value
    return kind(**values)


def _fits(value: object, kind: str, finite: bool) -> bool:
    """Whether ``value`` is what the annotation ``kind`` says: float, int, bool, a tuple of one of them, or None."""
    if value is None:
        return "None" in kind
    if kind.startswith("tuple["):
        inner = kind.removeprefix("tuple[").partition(",")[0].rstrip("]")
        return isinstance(value, list | tuple) and all(_fits(v, inner, finite) for v in value)
    if kind.startswith("bool"):
        return isinstance(value, bool)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if kind.startswith("int"):
        return isinstance(value, int) and abs(value) < 2**63
    return not finite or (isinstance(value, int) and abs(value) < 2**63) or math.isfinite(value)


def nan_as_text(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no NaN and no infinity: they are text there."""
    return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in numbers.items()}


def nan_from_text(saved: object) -> object:
    """What :func:`nan_as_text` was given."""
    if not isinstance(saved, Mapping):
        return saved
    return {k: float(v) if v in ("nan", "inf", "-inf") else v for k, v in saved.items()}
