"""Dataclasses of plain numbers, from what a file says they are: every field checked by its type."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, get_type_hints

from klamp.errors import ConfigError, shown

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
