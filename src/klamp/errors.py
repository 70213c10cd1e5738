"""The errors klamp raises at people, all under :class:`KlampError`.

Every message names the field, the value it was given and the way out.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import importlib.util
import math
import os
import re
from collections.abc import Iterable, Iterator


class KlampError(Exception):
    """Base of every error klamp raises on purpose."""


class ConfigError(KlampError, ValueError):
    """A setting or an argument that cannot mean what its author wants; raised before anything is computed."""


class DiskError(KlampError, RuntimeError):
    """Something could not be written: no space, no permission, a read-only or failing disk."""


class MissingExtra(KlampError, ImportError):
    """A package that comes with an extra of klamp is not installed."""


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
    "httpx": "server",
    "fastapi": "serve",
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
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return ConfigError(f"{field} {shown(value)} is not known.{hint} Choose from: {', '.join(known)}.")


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
        raise ConfigError(f"{field} must be a number, got {shown(value)}. {way_out}") from None
    if isinstance(value, bool) or not math.isfinite(number):
        raise ConfigError(f"{field} must be a finite number, got {shown(value)}. {way_out}")
    if above is not None and number <= above:
        raise ConfigError(f"{field} must be > {above:g}, got {shown(value)}. {way_out}")
    if at_least is not None and number < at_least:
        raise ConfigError(f"{field} must be >= {at_least:g}, got {shown(value)}. {way_out}")
    return number
