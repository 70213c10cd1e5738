"""Every exception of klamp's, all under :class:`KlampError`.

A message names the field, the value it was given and the way out. Settings in a message are data: in the text they
stand between marks, as in ``"Add ‹kl.per=token›."``, and become :class:`Setting`. Whoever shows an error chooses how
they are spelled: ``kl.per=token`` in Python and YAML, ``--kl.per token`` on the command line.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import importlib.util
import logging
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

MARKED = re.compile("‹([^‹›=]*)(?:=([^‹›]*))?›")


class Setting(NamedTuple):
    """A field of a configuration that a message speaks of, with a value for it where one is named."""

    name: str
    value: str | None = None

    def __str__(self) -> str:
        return self.name if self.value is None else f"{self.name}={self.value}"

    @property
    def marked(self) -> str:
        """As it stands in the text of an error."""
        return f"‹{self}›"


class KlampError(Exception):
    """Base of every error klamp raises on purpose."""

    @property
    def settings(self) -> list[Setting]:
        """The settings that the message names, in its order."""
        return [Setting(*found) for found in MARKED.findall(self.marked)]

    @property
    def marked(self) -> str:
        """The message with its settings between marks."""
        return str(self.args[0]) if self.args else ""

    def spelled(self, spell: Callable[[Setting], str]) -> str:
        """The message with every setting as ``spell`` writes it.

        Args:
            spell: writes a :class:`Setting`: ``str`` as in Python and YAML, or as a flag.

        Returns:
            The text to show.
        """
        return MARKED.sub(lambda found: spell(Setting(found[1], found[2])), self.marked)

    def __str__(self) -> str:
        return self.spelled(str)


class ConfigError(KlampError, ValueError):
    """A setting or an argument that cannot mean what its author wants; raised before anything is computed.

    ``ConfigError("kl.limit", -1, "Leave it out for 1.1 x the target.", problem="must be > 0, got {value}")``, or
    ``ConfigError("a whole message")`` where the error is about more than one field.

    Args:
        field: the setting's dotted name, or a whole message where ``way_out`` is not given.
        value: what was given for it.
        way_out: what to do instead, as a sentence.
        problem: what is wrong, as the end of a sentence that begins with the field.

    Attributes:
        field: Dotted name of the setting; of a whole message, the first that it names. None: it names none.
        value: What was given for it.
        way_out: What to do instead.
    """

    def __init__(
        self, field: str, value: object = None, way_out: str | None = None, *, problem: str = "cannot be {value}"
    ) -> None:
        text = field
        if way_out is not None:
            text = f"‹{field}› {problem.replace('{value}', shown(value))}. {way_out}"
        super().__init__(text)
        named = self.settings
        self.field: str | None = field if way_out is not None else named[0].name if named else None
        self.value: object = value
        self.way_out = way_out or ""

    def within(self, part: str) -> ConfigError:
        """The same error about fields of ``part``: ``reference`` becomes ``kl.reference``.

        Args:
            part: the part of the configuration that the fields belong to.

        Returns:
            Another error with the same value and way out.
        """
        text = self.spelled(lambda s: s.marked if "." in s.name else s._replace(name=f"{part}.{s.name}").marked)
        found = ConfigError(text)
        found.value, found.way_out = self.value, self.way_out
        return found


class DiskError(KlampError, RuntimeError):
    """Something could not be written: no space, no permission, a read-only or failing disk."""


class MissingExtra(KlampError, ImportError):
    """A package that comes with an extra of klamp is not installed."""


class CheckpointError(KlampError, RuntimeError):
    """A checkpoint is damaged or does not fit the run."""


class ReferencePolicyError(KlampError, RuntimeError):
    """The reference is not what it was, or cannot be had."""


class RewardError(KlampError, RuntimeError):
    """A reward function raised, took too long, or returned something that is not one finite number a completion."""


class PreflightError(KlampError, RuntimeError):
    """The KL term would not do what it is there for."""


class TrainingError(KlampError, RuntimeError):
    """Training cannot go on."""


class SamplerError(KlampError, RuntimeError):
    """The server cannot be reached, refuses, or answers with something that is no sample."""


class Refused(SamplerError):
    """The server answered that it will not."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class HubUnreachable(KlampError):
    """The Hub cannot be reached, is switched off, or does not have the model."""


class ExperimentError(KlampError, RuntimeError):
    """A run of an experiment failed or was stopped; running the same command again goes on from where it was."""


class Busy(KlampError):
    """The queue is full."""


class NoSuchModel(ConfigError):
    """A name, or a step of one, that is not served."""

    def __init__(self, name: str, there: list[str]) -> None:
        super().__init__(f"there is no model {name!r}. There are: {', '.join(there)}.")


class Closed(KlampError):
    """The endpoint is closing: nothing more is decoded."""


EXTRAS = {
    "accelerate": "train",
    "gguf": "train",
    "huggingface_hub": "train",
    "numpy": "train",
    "peft": "train",
    "safetensors": "train",
    "transformers": "train",
    "vaderSentiment": "train",
    "yaml": "train",
    "jinja2": "report",
    "markupsafe": "report",
    "matplotlib": "report",
    "plotly": "report",
    "datasets": "trl",
    "trl": "trl",
    "ray": "ray",
    "torchao": "adamw8bit",
    "httpx": "server",
    "fastapi": "serve",
    "starlette": "serve",
    "uvicorn": "serve",
}
"""Packages that klamp imports, and the extra that brings each."""


@contextlib.contextmanager
def needing(what: str, *extras: str) -> Iterator[None]:
    """Say of a package that is missing that ``what`` needs it, and name every one of ``extras`` to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name not in EXTRAS:
            raise
        lacking = [p for p, extra in EXTRAS.items() if extra in extras and importlib.util.find_spec(p) is None]
        wanted = dict.fromkeys(EXTRAS[package] for package in (name, *lacking))
        said = f"{what} needs {name}, which is not installed. pip install 'klamp[{','.join(wanted)}]'."
        raise MissingExtra(said, name=name) from None


DISK = {
    errno.ENOSPC: "Free some space",
    errno.EDQUOT: "Free some of your quota",
    errno.EFBIG: "Raise the limit on the size of a file (ulimit -f)",
    errno.EROFS: "Make it writable or choose another folder",
    errno.EACCES: "Make it writable or choose another folder",
    errno.EPERM: "Make it writable or choose another folder",
    errno.EIO: "Check the disk",
}
"""What a disk can refuse a write with, and what to do about it."""


@contextlib.contextmanager
def writing(what: object, then: str) -> Iterator[None]:
    """Turn a refusal of the disk into the :class:`DiskError` that names ``what``, the reason and the way on."""
    try:
        yield
    except Exception as error:
        number = disk_errno(error)
        if number is None or isinstance(error, KlampError):
            raise
        raise DiskError(
            f"{str(what)!r} could not be written: {os.strerror(number)}. {DISK[number]}, then {then}."
        ) from error


def disk_errno(error: BaseException) -> int | None:
    """The number of :data:`DISK` behind an error; safetensors and tokenizers say it in their text alone."""
    number = error.errno if isinstance(error, OSError) else None
    if number is None and (said := re.search(r"\(os error (\d+)\)", str(error))):
        number = int(said[1])
    return number if number in DISK else None


def first_process() -> bool:
    """Whether this is the process of a launch that speaks for all of them."""
    return os.environ.get("RANK", "0") == "0"


def warn(logger: logging.Logger, message: str, *values: object) -> None:
    """A warning that all processes of a launch come to, and the first one gives."""
    if first_process():
        logger.warning(f"klamp: {message}", *values)


def shown(value: object, most: int = 200) -> str:
    """``repr(value)``, cut: a message is a line, whatever the value is."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a whole number of thousands of digits; nesting without end
        text = f"a {type(value).__name__}"
    return text if len(text) <= most else f"{text[:most]}..."


def unknown(field: str, value: object, choices: Iterable[str]) -> ConfigError:
    """The error for a name that is not one of ``choices``, with the nearest one as the way out."""
    known = sorted(choices)
    near = difflib.get_close_matches((value if isinstance(value, str) else shown(value))[:200], known, n=1, cutoff=0.5)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    choose = f"Choose from: {', '.join(known)}."
    return ConfigError(field, value, f"{hint}{choose}", problem="{value} is not known")


def require_number(
    field: str,
    value: object,
    *,
    above: float | None = None,
    at_least: float | None = None,
    way_out: str,
) -> float:
    """``value`` as a float, or the ConfigError that names ``field``, the value and ``way_out``."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(field, value, way_out, problem="must be a number, got {value}") from None
    if isinstance(value, bool) or not math.isfinite(number):
        raise ConfigError(field, value, way_out, problem="must be a finite number, got {value}")
    if above is not None and number <= above:
        raise ConfigError(field, value, way_out, problem=f"must be > {above:g}, got {{value}}")
    if at_least is not None and number < at_least:
        raise ConfigError(field, value, way_out, problem=f"must be >= {at_least:g}, got {{value}}")
    return number


def require_ranges(name: str, values: object, ranges: Mapping[str, tuple[float, float]], *, way_out: str) -> None:
    """Refuse an object whose attributes lie outside their ranges: ‹gauge.pairs must be from 0 to 1e+15, got -2›."""
    for field, (low, high) in ranges.items():
        if not low <= (value := getattr(values, field)) <= high:
            raise ConfigError(
                f"{name}.{field}", value, way_out, problem=f"must be from {low:g} to {high:g}, got {{value}}"
            )
