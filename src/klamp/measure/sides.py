"""What ``klamp measure`` is asked about: the folder of a run stands for its newest checkpoint, and brings the rest.

A run knows its base, its prompts, and how its completions were sampled, so one name is enough to measure it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from klamp import models
from klamp.chat import Prompt
from klamp.config_io import from_yaml
from klamp.errors import ConfigError, shown
from klamp.references.folders import folder_of, saved_steps
from klamp.train import data
from klamp.train.config import TrainConfig


@dataclass(frozen=True)
class Sides:
    """Both models and the prompts, with what a run says about the rest."""

    policy: str
    reference: str
    prompts: list[Prompt]
    run: TrainConfig | None = None
    """Of the run that one of the models belongs to."""

    def out(self) -> Path:
        """The usual folder of this measurement, named by its models."""
        return Path("runs/measure") / f"{_slug(short(self.policy))}-from-{_slug(short(self.reference))}"


def sides(policy: str | None, reference: str | None, prompts: str | Sequence[Prompt] | None) -> Sides:
    """Both models and the prompts; what is left out is taken from the run that the other one belongs to."""
    if policy is None:
        raise ConfigError("policy is missing. Name a run, or two models: klamp measure runs/train, klamp measure A B.")
    found = _run_of(policy) or (None if reference is None else _run_of(reference))
    run = None if found is None else from_yaml(TrainConfig, found / "config.yaml")
    if reference is None:
        reference = _base(policy, run)
    return Sides(_model(policy), _model(reference), _prompts(prompts, policy, found, run), run)


def short(name: str) -> str:
    """A model's name for a headline: ``train step 100`` for a checkpoint of a run, the last part of any other path."""
    path = Path(name)
    step = re.fullmatch(r"step-(\d+)", path.name)
    if step and path.parent.name == "checkpoints":
        return f"{path.parent.parent.name} step {int(step[1])}"
    return (path.name or name)[:60]


def _run_of(name: str) -> Path | None:
    """The folder of the run that ``name`` is, or is a checkpoint of."""
    try:
        path = Path(name)
        folders = [path, path.parent.parent] if path.parent.name == "checkpoints" else [path]
        return next((f for f in folders if path.is_dir() and (f / "config.yaml").is_file()), None)
    except (OSError, ValueError):  # too long, a NUL in it
        return None


def _model(name: str) -> str:
    """The newest checkpoint of a run's folder; any other name as it is."""
    folder = _run_of(name)
    if folder is None or folder != Path(name) or (folder / "config.json").is_file():
        return models.canonical(name)
    steps = saved_steps(folder)
    if not steps:
        raise ConfigError(f"run {name!r} has no checkpoint yet. Wait for its first one, or lower its save_every.")
    return str(folder_of(folder, steps[-1]))


def _base(policy: str, run: TrainConfig | None) -> str:
    if run is not None:
        return run.model
    if models.is_adapter(policy):
        from klamp.references.folders import check_folder

        base = check_folder(Path(policy), f"adapter {policy!r}").get("base_model_name_or_path")
        if base:
            return str(base)
    raise ConfigError(
        f"reference is missing: what is {shown(policy)} to be compared with? klamp measure {policy} REFERENCE. A "
        "run or a LoRA adapter alone is compared with its base."
    )


def _prompts(
    given: str | Sequence[Prompt] | None, policy: str, folder: Path | None, run: TrainConfig | None
) -> list[Prompt]:
    if given is not None and not isinstance(given, str):
        return list(given)
    if given is None and run is not None:
        if run.prompts is not None and not Path(run.prompts).is_file():
            raise ConfigError(
                f"run {str(folder)!r} was trained on the prompts {run.prompts!r}, which is not a file here. Run klamp "
                "in the folder that it was started in, or give --prompts."
            )
        return data.load(run.prompts, run.model).given
    return data.load(given, policy).given


def _slug(name: str) -> str:
    return re.sub(r"[^\w.]+", "-", name).strip("-.")[:80] or "model"
