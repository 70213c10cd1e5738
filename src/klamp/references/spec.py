"""What the policy is held to, as one typed value: ``reference=CheckpointStep(40)``, not four flags.

A reference has a short text (``step:40``) for the command line, YAML and checkpoints; :func:`parse` reads it. The saved
steps of a run lie where :func:`folder_of` says. How a reference is computed is in :mod:`klamp.references.states`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from klamp.errors import ConfigError, require_number, unknown


@dataclass(frozen=True)
class Base:
    """The model training started from: with LoRA the adapter switched off, at no cost; otherwise a frozen copy."""

    def __str__(self) -> str:
        return "base"


@dataclass(frozen=True)
class FrozenModel:
    """Another model with the same vocabulary, by folder, Hub id or built-in name."""

    model: str

    def __str__(self) -> str:
        return f"model:{self.model}"


@dataclass(frozen=True)
class CheckpointStep:
    """A saved step of this run; step 0 is the base."""

    step: int

    def __post_init__(self) -> None:
        require_number("CheckpointStep.step", self.step, at_least=0, way_out="Steps count from 0, the base.")

    def __str__(self) -> str:
        return f"step:{self.step}"


@dataclass(frozen=True)
class AdapterPath:
    """A LoRA adapter for the same base, by folder."""

    path: str

    def __str__(self) -> str:
        return f"adapter:{self.path}"


@dataclass(frozen=True)
class StepLag:
    """The newest saved step at least ``lag`` steps back; the base until there is one."""

    lag: int

    def __post_init__(self) -> None:
        require_number("StepLag.lag", self.lag, at_least=1, way_out="A lag of 0 would be the policy itself.")

    def __str__(self) -> str:
        return f"lag:{self.lag}"


@dataclass(frozen=True)
class Ema:
    """``ref ← decay · ref + (1 - decay) · policy`` after every step. With LoRA the average is of the two factors."""

    decay: float = 0.99

    def __post_init__(self) -> None:
        decay = require_number("Ema.decay", self.decay, at_least=0, way_out="0.99 averages over about 100 steps.")
        if decay >= 1:
            raise ConfigError(
                f"Ema.decay must be < 1, got {self.decay!r}. For a reference that never moves use base, Base()."
            )

    def __str__(self) -> str:
        return f"ema:{self.decay!r}"


@dataclass(frozen=True)
class Periodic:
    """``ref ← policy`` every ``every`` steps: a hard reset (ProRL)."""

    every: int

    def __post_init__(self) -> None:
        require_number("Periodic.every", self.every, at_least=1, way_out="It counts steps.")

    def __str__(self) -> str:
        return f"periodic:{self.every}"


ReferenceSpec = Base | FrozenModel | CheckpointStep | AdapterPath | StepLag | Ema | Periodic
COUNTED: dict[str, type[CheckpointStep | StepLag | Periodic]] = {
    "step": CheckpointStep,
    "lag": StepLag,
    "periodic": Periodic,
}
FARTHEST = 10**12
"""Steps; more than any run has, and still the name of a folder."""
FORMS = ("base", "model:NAME", "step:N", "adapter:FOLDER", "lag:N", "ema:DECAY", "periodic:N")


def parse(text: object) -> ReferenceSpec:
    """The reference written as ``text``: base, model:NAME, step:N, adapter:FOLDER, lag:N, ema:DECAY or periodic:N."""
    if isinstance(text, Base | FrozenModel | CheckpointStep | AdapterPath | StepLag | Ema | Periodic):
        return text
    kind, colon, value = str(text).partition(":")
    kind, value = kind.strip(), value.strip()
    if kind == "base" and not colon:
        return Base()
    if kind == "base":
        raise ConfigError(f"‹reference› {text!r}: base takes nothing after it. Write base, or step:N for a saved step.")
    if kind not in {form.partition(":")[0] for form in FORMS}:
        raise unknown("reference", text, FORMS)
    if not value:
        raise ConfigError(f"‹reference› {text!r} is incomplete. Write one of: {', '.join(FORMS)}.")
    if kind == "model":
        return FrozenModel(value)
    if kind == "adapter":
        return AdapterPath(value)
    number = _number(str(text), value)
    if kind != "ema" and number > FARTHEST:
        raise ConfigError(f"‹reference› {text!r} is beyond {FARTHEST:,} steps. Example: {kind}:40.")
    if kind != "ema" and number != int(number):
        raise ConfigError(f"‹reference› {text!r} needs a whole number of steps, got {value!r}. Example: {kind}:40.")
    try:
        return Ema(number) if kind == "ema" else COUNTED[kind](int(number))
    except ConfigError as error:
        raise ConfigError(f"‹reference› {text!r}: {error}") from None


def _number(text: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        raise ConfigError(f"‹reference› {text!r} needs a number after the colon, got {value!r}.") from None
    return require_number("reference", number, at_least=0, way_out="Steps and decays are not negative.")


def folder_of(run: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return run / "checkpoints" / f"step-{step:06d}"


def step_folder(run: Path, step: int) -> Path:
    """The checkpoint folder of a step, or the error that lists those there are."""
    folder = folder_of(run, step)
    if not folder.is_dir():
        there = ", ".join(str(s) for s in saved_steps(run)) or "none"
        raise ConfigError(f"‹kl.reference› step:{step} is not saved in {str(run)!r}. Saved steps: {there}.")
    return folder


def saved_steps(run: Path) -> list[int]:
    """Steps with a checkpoint folder, oldest first."""
    folders = (run / "checkpoints").glob("step-*") if (run / "checkpoints").is_dir() else []
    return sorted(int(f.name[5:]) for f in folders if f.name[5:].isdigit())


def newest_before(run: Path, step: int) -> Path | None:
    """The newest checkpoint at or before ``step``; None when that is the base."""
    found = [s for s in saved_steps(run) if 0 < s <= step]
    return folder_of(run, found[-1]) if found else None
