"""Configuration to and from YAML: safe loading, unknown keys refused with the nearest name, values checked by type."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from klamp.errors import ConfigError, unknown

T = TypeVar("T")


def to_dict(config: Any) -> dict[str, Any]:
    """Nested plain values, tuples as lists."""

    def plain(x: Any) -> Any:
        if isinstance(x, Mapping):
            return {k: plain(v) for k, v in x.items()}
        return [plain(v) for v in x] if isinstance(x, tuple | list) else x

    return typing.cast(dict[str, Any], plain(dataclasses.asdict(config)))


def to_yaml(config: Any) -> str:
    """The configuration as YAML, in the order of its fields."""
    import yaml

    return yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True)


def from_yaml(cls: type[T], path: str | Path, *, over: T | None = None) -> T:
    """The configuration in a YAML file, its missing fields taken from ``over`` or the defaults."""
    import yaml

    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config {str(path)!r} cannot be read: {error}. Give the path of a YAML file.") from None
    try:
        data = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark else ""
        raise ConfigError(f"config {str(path)!r} is not YAML{where}: {getattr(error, 'problem', error)}.") from None
    return from_dict(cls, {} if data is None else data, over=over, where=str(path))


def from_dict(cls: type[T], data: object, *, over: T | None = None, where: str = "config", prefix: str = "") -> T:
    """``cls`` from nested plain values, each checked against its field's type."""
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where}: {prefix.rstrip('.') or 'the file'} must be a mapping of fields, got {data!r}.")
    hints = typing.get_type_hints(cls)
    known = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    values: dict[str, Any] = {} if over is None else {name: getattr(over, name) for name in known}
    for key, value in data.items():
        if key not in known:
            raise unknown(f"{where}: field", f"{prefix}{key}", [f"{prefix}{name}" for name in known])
        name = f"{prefix}{key}"
        kind = hints[key]
        if dataclasses.is_dataclass(kind):
            part = values.get(key) if over is not None else None
            values[key] = from_dict(typing.cast(type[Any], kind), value, over=part, where=where, prefix=f"{name}.")
        else:
            values[key] = convert(name, value, kind, where)
    return cls(**values)


def convert(name: str, value: Any, kind: Any, where: str = "config") -> Any:
    """``value`` as ``kind``: numbers widen, lists become tuples, everything else must already fit."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        for option in args:
            try:
                return convert(name, value, option, where)
            except ConfigError:
                continue
        raise _mismatch(name, value, kind, where)
    if origin is typing.Literal:
        if value in args and not isinstance(value, bool):
            return value
        raise unknown(f"{where}: {name}", value, [str(a) for a in args])
    if origin is tuple and isinstance(value, list | tuple):
        kinds = [args[0]] * len(value) if len(args) == 2 and args[1] is Ellipsis else list(args)
        if len(kinds) == len(value):
            return tuple(convert(name, v, k, where) for v, k in zip(value, kinds, strict=True))
    if kind is type(None) and value is None:
        return None
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if kind is float and isinstance(value, str):  # YAML reads 1e-4 as text
        try:
            return float(value)
        except ValueError:
            raise _mismatch(name, value, kind, where) from None
    if kind in (int, str, bool) and type(value) is kind:
        return value
    raise _mismatch(name, value, kind, where)


def _mismatch(name: str, value: Any, kind: Any, where: str) -> ConfigError:
    wanted = str(kind).replace("typing.", "").replace("<class '", "").replace("'>", "")
    return ConfigError(f"{where}: {name} must be {wanted}, got {value!r} ({type(value).__name__}).")
