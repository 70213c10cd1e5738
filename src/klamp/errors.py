"""The errors klamp raises at people, all under :class:`KlampError`.

Every message names the field, the value it was given and the way out.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable


class KlampError(Exception):
    """Base of every error klamp raises on purpose."""


class ConfigError(KlampError, ValueError):
    """A setting or an argument that cannot mean what its author wants; raised before anything is computed."""


def unknown(field: str, value: object, choices: Iterable[str]) -> ConfigError:
    """The error for a name that is not one of ``choices``, with the nearest one as the way out."""
    known = sorted(choices)
    near = difflib.get_close_matches(str(value), known, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return ConfigError(f"{field} {value!r} is not known.{hint} Choose from: {', '.join(known)}.")


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
    except (TypeError, ValueError):
        raise ConfigError(f"{field} must be a number, got {value!r}. {way_out}") from None
    if isinstance(value, bool) or not math.isfinite(number):
        raise ConfigError(f"{field} must be a finite number, got {value!r}. {way_out}")
    if above is not None and number <= above:
        raise ConfigError(f"{field} must be > {above:g}, got {value!r}. {way_out}")
    if at_least is not None and number < at_least:
        raise ConfigError(f"{field} must be >= {at_least:g}, got {value!r}. {way_out}")
    return number
