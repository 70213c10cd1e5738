"""Sweep expressions: ``kl.beta=0.01:1:9:log``, ``seed=0,1,2``, and grids of several; errors show where.

field=START:STOP:COUNT        COUNT values, evenly spaced, ends included
field=START:STOP:COUNT:log    evenly spaced in the logarithm
field=A,B,C                   a list
"""

from __future__ import annotations

import itertools
import math
import re
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from klamp.compat.foreign_settings import foreign
from klamp.config_io import convert, fields_of, from_dict
from klamp.errors import ConfigError, unknown
from klamp.train.config import TrainConfig

MOST = 10_000
"""Runs of one sweep; more is a slip of the finger."""
NOT_SWEPT = ("run", "resume", "skip_damaged")


@dataclass(frozen=True)
class Axis:
    """A field and the values it takes."""

    field: str
    values: tuple[Any, ...]


class Piece(NamedTuple):
    """Part of an expression and the column it starts in."""

    text: str
    column: int


def parse(expression: str) -> Axis:
    """The axis that ``expression`` describes; :class:`ConfigError` with a caret under what does not parse."""
    field, equals, spec = expression.partition("=")
    if not equals:
        raise _wrong(expression, Piece(expression, 0), "write it as field=VALUES, as in kl.beta=0.01:1:9:log")
    name, kind = _field(expression, Piece(field.strip(), len(field) - len(field.lstrip())))
    start = len(field) + 1
    if not spec.strip():
        raise _wrong(expression, Piece(" ", start), f"no values for {name}: give START:STOP:COUNT or a list")
    is_range = ":" in spec and "," not in spec and _numeric(kind)
    values = _range(expression, Piece(spec, start), name, kind) if is_range else _list(expression, spec, start, kind)
    return Axis(name, tuple(dict.fromkeys(values)))


def grid(axes: Sequence[Axis]) -> list[dict[str, Any]]:
    """Every combination of the axes' values, the last axis fastest."""
    names = [axis.field for axis in axes]
    twice = next((n for n in names if names.count(n) > 1), None)
    if twice is not None:
        raise ConfigError(f"--over names {twice} twice. Put all its values into one expression.")
    runs = math.prod(len(axis.values) for axis in axes)
    if runs > MOST:
        raise ConfigError(f"--over makes {runs} runs; at most {MOST} are accepted. Use fewer values.")
    return [dict(zip(names, values, strict=True)) for values in itertools.product(*(a.values for a in axes))]


def apply(base: TrainConfig, changes: dict[str, Any]) -> TrainConfig:
    """``base`` with dotted fields replaced, checked as a whole."""
    nested: dict[str, Any] = {}
    for field, value in changes.items():
        part = nested
        *parents, leaf = field.split(".")
        for parent in parents:
            part = part.setdefault(parent, {})
        part[leaf] = value
    return from_dict(TrainConfig, nested, over=base, where="sweep")


def assignment(expression: str) -> tuple[str, Any]:
    """A single ``field=value``, for ``--set``."""
    axis = parse(expression)
    if len(axis.values) != 1:
        raise ConfigError(f"--set {expression!r} gives {len(axis.values)} values. Use --over to sweep a field.")
    return axis.field, axis.values[0]


def label(changes: dict[str, Any]) -> str:
    """``kl.beta=0.1 seed=3``: the name of a run."""
    return " ".join(f"{k}={_text(v)}" for k, v in changes.items())


def folder(changes: dict[str, Any], number: int) -> str:
    """A folder name of its own for every run of a grid, safe whatever its values contain."""
    return f"{number:04d}-" + re.sub(r"[^A-Za-z0-9.=_+-]", "_", label(changes)).replace("..", "__")[:80]


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _field(expression: str, piece: Piece) -> tuple[str, Any]:
    """The field's dotted name and its type."""
    kinds = {n: k for n, k in fields_of(TrainConfig) if n not in NOT_SWEPT}
    if piece.text not in kinds:
        error = foreign(piece.text) or unknown("field", piece.text, kinds)
        raise ConfigError(f"--over: {error}\n{_point(expression, piece)}")
    return piece.text, kinds[piece.text]


def _numeric(kind: Any) -> bool:
    return any(k in (int, float) for k in (kind, *typing.get_args(kind)))


def _whole(kind: Any) -> bool:
    return float not in (kind, *typing.get_args(kind))


def _range(expression: str, spec: Piece, name: str, kind: Any) -> list[Any]:
    parts = _split(spec, ":")
    if len(parts) not in (3, 4):
        raise _wrong(expression, spec, f"a range has 3 parts, START:STOP:COUNT, or 4 with :log; this one {len(parts)}")
    log = len(parts) == 4
    if log and parts[3].text != "log":
        raise _wrong(expression, parts[3], "only 'log' may follow the count")
    low, high = (_float(expression, part) for part in parts[:2])
    count = _count(expression, parts[2])
    if log and (low <= 0 or high <= 0):
        raise _wrong(expression, parts[0] if low <= 0 else parts[1], "the ends of a log range must be > 0")
    ends = (math.log(low), math.log(high)) if log else (low, high)
    step = (ends[1] - ends[0]) / max(count - 1, 1)
    if not math.isfinite(step):
        raise _wrong(expression, spec, "the ends are too far apart")
    inner = [ends[0] + i * step for i in range(count)]
    values = [float(f"{math.exp(v) if log else v:.10g}") for v in inner]
    if not _whole(kind):
        return values
    if any(v != int(v) for v in values):
        raise _wrong(expression, spec, f"{name} takes whole numbers, and this range has others")
    return [int(v) for v in values]


def _list(expression: str, spec: str, start: int, kind: Any) -> list[Any]:
    values = []
    for part in _split(Piece(spec, start), ","):
        if not part.text:
            raise _wrong(expression, Piece(" ", part.column), "a value is missing here")
        try:
            values.append(convert("value", _plain(part.text, kind), kind, "--over"))
        except ConfigError as error:
            reason = str(error).removeprefix("--over: ").removesuffix(".")
            raise _wrong(expression, part, reason) from None
    return values


def _plain(text: str, kind: Any) -> Any:
    """``text`` as the number, truth value or nothing it spells, where the field's type has such."""
    kinds = (kind, *typing.get_args(kind))
    if text in ("none", "None", "null") and type(None) in kinds:
        return None
    if text in ("true", "false", "True", "False") and bool in kinds:
        return text in ("true", "True")
    if int in kinds and re.fullmatch(r"[+-]?\d{1,18}", text):
        return int(text)
    if float in kinds:
        try:
            value = float(text)
        except ValueError:
            return text
        if not math.isfinite(value):
            raise ConfigError(f"{text} is not a finite number.")
        return value
    return text


def _split(piece: Piece, mark: str) -> list[Piece]:
    """The parts between marks without their white space, each with its own column."""
    parts, column = [], piece.column
    for raw in piece.text.split(mark):
        parts.append(Piece(raw.strip(), column + len(raw) - len(raw.lstrip())))
        column += len(raw) + 1
    return parts


def _float(expression: str, piece: Piece) -> float:
    try:
        value = float(piece.text)
    except ValueError:
        raise _wrong(expression, piece, "not a number") from None
    if not math.isfinite(value):
        raise _wrong(expression, piece, "not a finite number")
    return value


def _count(expression: str, piece: Piece) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", piece.text) or not 1 <= int(piece.text) <= MOST:
        raise _wrong(expression, piece, f"the count must be a whole number from 1 to {MOST}")
    return int(piece.text)


def _wrong(expression: str, piece: Piece, reason: str) -> ConfigError:
    return ConfigError(f"--over does not parse: {reason}.\n{_point(expression, piece)}")


def _point(expression: str, piece: Piece) -> str:
    """The expression with a caret under the piece."""
    shown = "".join(c if c.isprintable() else "?" for c in expression)
    return f"  {shown}\n  {' ' * piece.column}{'^' * max(1, len(piece.text))}"


BOOKKEEPING = ("save_every", "keep", "sample_every", "preflight", "process_timeout", "track", "trust_remote_code")
"""Fields that change what is written and checked, never what is learnt."""
VALUE_HEAD = ("algorithm.gamma", "algorithm.lam", "algorithm.value_clip", "algorithm.value_weight", "optim.value_lr")


class Unused(NamedTuple):
    """Why a field changes nothing, and the setting under which it would."""

    why: str
    setting: str


def unused(field: str, run: TrainConfig) -> Unused | None:
    """What keeps ``field`` from changing anything in ``run``; None where it may."""
    if field in BOOKKEEPING:
        return Unused("it changes what is written, not what is learnt", "")
    if field.startswith("kl."):
        return _unused_kl(field.removeprefix("kl."), run)
    if field in VALUE_HEAD and run.algorithm.name != "ppo":
        return Unused("GRPO has no value head", "algorithm.name=ppo")
    if field == "algorithm.std" and run.algorithm.name != "grpo":
        return Unused("PPO has no groups", "algorithm.name=grpo")
    if field.startswith("lora.") and run.full:
        return Unused("every weight is trained, without an adapter", "full=false")
    return None


def _unused_kl(field: str, run: TrainConfig) -> Unused | None:
    kl = run.kl
    constant = Unused("beta is constant, and no clamp holds KL", "kl.controller=hold")
    no_clamp = Unused("there is no clamp", "kl.clamp=true")
    of_k2 = Unused(f"{kl.estimator} has no tail", "kl.estimator=k2")
    steered = kl.controller != "fixed"
    reads = {
        "target": (steered or (kl.clamp and kl.limit is None), constant),
        "per": (steered or kl.clamp_limit is not None, constant),
        "limit": (kl.clamp, no_clamp),
        "clamp_share": (kl.clamp_limit is not None, no_clamp),
        "horizon": (kl.controller == "ziegler", Unused(f"{kl.controller} has no horizon", "kl.controller=ziegler")),
        "gain": (kl.controller == "exponential", Unused(f"{kl.controller} has no gain", "kl.controller=exponential")),
        "tail": ("k2" in kl.estimator or "k3" in kl.estimator, of_k2),
        "max_weight": (
            kl.placement == "sequence_exact",
            Unused(f"{kl.placement} has no such weight", "kl.placement=sequence_exact"),
        ),
    }
    read, why = reads.get(field, (True, constant))
    return None if read else why
