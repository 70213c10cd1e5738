"""Configuration to and from YAML: safe loading, unknown keys refused with the nearest name, values checked by type.

Functions are named ``module:function``.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import sys
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from klamp.compat.foreign_settings import foreign
from klamp.errors import ConfigError, shown, unknown

T = TypeVar("T")
LARGEST = 1 << 20
"""Bytes of a configuration; more is refused rather than read."""


def to_dict(config: Any) -> dict[str, Any]:
    """Nested plain values, tuples as lists."""

    def plain(x: Any) -> Any:
        if isinstance(x, Mapping):
            return {k: plain(v) for k, v in x.items()}
        return [plain(v) for v in x] if isinstance(x, tuple | list) else x

    return typing.cast(dict[str, Any], plain(dataclasses.asdict(config)))


def flat(fields: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested fields by their dotted names."""
    found: dict[str, Any] = {}
    for key, value in fields.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


def to_yaml(config: Any) -> str:
    """The configuration as YAML, in the order of its fields."""
    import yaml

    return yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True)


def from_yaml(cls: type[T], path: str | Path, *, over: T | None = None) -> T:
    """The configuration in a YAML file, its missing fields taken from ``over`` or the defaults."""
    data = load_yaml(path)
    try:
        return from_dict(cls, {} if data is None else data, over=over, where=str(path))
    except ConfigError as error:
        if str(error).startswith(f"{path}: "):
            raise
        raise ConfigError(f"{path}: {error}") from None


def load_yaml(path: str | Path) -> Any:
    """Plain values from a YAML file: no Python objects, no anchors that could swell, no key twice, at most a MiB."""
    import yaml

    named = f"config {str(path)!r}"
    try:
        with Path(path).open("rb") as file:
            raw = file.read(LARGEST + 1)
        text = raw.decode("utf-8-sig")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{named} cannot be read: {error}. Give the path of a YAML file.") from None
    if len(raw) > LARGEST:
        raise ConfigError(f"{named} is larger than {LARGEST} bytes. Give the path of a configuration.")
    try:
        return yaml.load(text, Loader=_loader())
    # PyYAML's constructors stumble over values like `!!int ''` with errors of their own.
    except (yaml.YAMLError, ValueError, RecursionError, LookupError, AttributeError, TypeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark else ""
        said = getattr(error, "problem", None) or str(error) or type(error).__name__
        raise ConfigError(f"{named} is not YAML that klamp reads{where}: {said:.200}.") from None


@functools.cache
def _loader() -> Any:
    """PyYAML's safe loader without aliases and with every key once."""
    import yaml

    class Loader(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
                raise yaml.composer.ComposerError(None, None, "aliases (*name) are not read: write the value out", mark)
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            found = super().construct_mapping(node, deep=deep)
            if len(found) < len(node.value):
                names = [self.construct_object(key, deep=True) for key, _ in node.value]
                twice = next((n for n in names if names.count(n) > 1), "a key")
                raise yaml.constructor.ConstructorError(None, None, f"{twice!r:.60} stands twice", node.start_mark)
            return found

    return Loader


def from_dict(cls: type[T], data: object, *, over: T | None = None, where: str = "config", prefix: str = "") -> T:
    """``cls`` from nested plain values, each checked against its field's type."""
    if not isinstance(data, Mapping):
        raise ConfigError(
            f"{where}: {prefix.rstrip('.') or 'the file'} must be a mapping of fields, got {shown(data)}."
        )
    hints = typing.get_type_hints(cls)
    known = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    values: dict[str, Any] = {} if over is None else {name: getattr(over, name) for name in known}
    for key, value in data.items():
        if key not in known:
            if said := foreign(f"{prefix}{key}", value):
                raise ConfigError(f"{where}: {said}")
            raise unknown(f"{where}: field", f"{prefix}{key}", [f"{prefix}{name}" for name in known])
        name = f"{prefix}{key}"
        kind = hints[key]
        if dataclasses.is_dataclass(kind):
            part = values.get(key) if over is not None else None
            values[key] = from_dict(typing.cast(type[Any], kind), value, over=part, where=where, prefix=f"{name}.")
        else:
            values[key] = convert(name, value, kind, where)
    return cls(**values)


def fields_of(cls: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """(dotted name, type) of every field, those of the parts included."""
    found: list[tuple[str, Any]] = []
    for name, kind in typing.get_type_hints(cls).items():
        parts = fields_of(kind, f"{prefix}{name}.") if dataclasses.is_dataclass(kind) else [(f"{prefix}{name}", kind)]
        found += parts
    return found


def convert(name: str, value: Any, kind: Any, where: str = "config") -> Any:
    """``value`` as ``kind``: numbers widen, lists become tuples, everything else must already fit."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        for option in args:
            try:
                return convert(name, value, option, where)
            except ConfigError:
                continue
        choices = [str(a) for option in args if typing.get_origin(option) is typing.Literal for a in option.__args__]
        choices += ["a number"] if choices and float in args else []
        raise unknown(f"{where}: {name}", value, choices) if choices else _mismatch(name, value, kind, where)
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
        try:
            return float(value)
        except OverflowError:
            raise _mismatch(name, value, kind, where) from None
    if kind is float and isinstance(value, str):  # YAML reads 1e-4 as text
        try:
            return float(value)
        except ValueError:
            raise _mismatch(name, value, kind, where) from None
    if kind in (int, str, bool) and type(value) is kind:
        return value
    raise _mismatch(name, value, kind, where)


def _mismatch(name: str, value: Any, kind: Any, where: str) -> ConfigError:
    wanted = str(kind).replace("typing.", "").replace("<class '", "").replace("'>", "").removesuffix(" | None")
    return ConfigError(f"{where}: {name} must be {wanted}, got {shown(value)} ({type(value).__name__}).")


def _module_of(what: str, path: str, file: str) -> str:
    """The module of a ``file`` below the working folder."""
    parts = Path(file.removesuffix(".py")).parts
    if not all(part.isidentifier() for part in parts):
        raise ConfigError(
            f"{what} {path!r}: {file} is no file that can be imported from here. Go to its folder and write "
            "name.py:function, with a name of letters, digits and underscores."
        )
    return ".".join(parts)


def imported(what: str, path: str) -> Any:
    """The function named ``path``, ``module:function`` or ``file.py:function``, in the working folder or installed.

    A ConfigError names ``what`` it was to be, the path and what is wrong with it.
    """
    module_name, _, function_name = path.rpartition(":")
    if module_name.endswith(".py"):
        module_name = _module_of(what, path, module_name)
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{what} {path!r}: no module {error.name!r} here or installed. Run klamp in the folder that holds it."
        ) from None
    except Exception as error:  # whatever a stranger's module may raise when it is imported
        first = (str(error).splitlines() or [""])[0]
        raise ConfigError(
            f"{what} {path!r}: importing {module_name} raised {type(error).__name__}: {first}. Make it import first."
        ) from error
    found = getattr(module, function_name, None)
    if not callable(found):
        known = sorted(n for n, v in vars(module).items() if callable(v) and not n.startswith("_"))
        raise ConfigError(f"{what} {path!r}: {module_name} has no function {function_name!r}. It has: {shown(known)}.")
    return found
