"""Defaults that know they are defaults: what nobody gave can be told from what somebody did."""

from __future__ import annotations

from dataclasses import fields
from typing import Any


class Presumed:
    """Marks a value that nobody gave."""


class PresumedTarget(Presumed, float):
    """A target that goes with the presumed unit alone."""


class PresumedUnit(Presumed, str):
    """A unit that goes with the presumed target alone."""


class UsualRate(Presumed, float):
    """A learning rate that stands for the one usual for the model."""

    def __str__(self) -> str:
        return "usual for the model"


class UsualCount(Presumed, int):
    """A count that stands for the one usual for the model."""

    def __str__(self) -> str:
        return "usual for the model"


def left_out(config: Any) -> list[str]:
    """The names of the fields of a dataclass that nobody gave."""
    return [f.name for f in fields(config) if isinstance(getattr(config, f.name), Presumed)]
