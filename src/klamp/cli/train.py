"""``klamp train``."""

from __future__ import annotations

import inspect
import os
import shlex
from pathlib import Path

from klamp.cli.parsing import config_file, flags_named, parsed


def train(args: list[str]) -> None:
    """Train a language model with GRPO or PPO and hold its KL where you ask.

    --config FILE reads a YAML configuration; flags go on top of it. The resolved configuration is written into the
    run folder. Under torchrun or accelerate launch it runs on many processes.
    """
    from klamp.train.config import TrainConfig
    from klamp.train.settings import from_yaml

    file, rest = config_file(args)
    default = TrainConfig() if file is None else from_yaml(TrainConfig, file)
    text = inspect.cleandoc(train.__doc__ or "")
    with flags_named(TrainConfig):
        config = parsed(TrainConfig, rest, default=default, prog="klamp train", description=text)
        from klamp.train.anchors import saved_steps
        from klamp.train.loop import train_policy

        saved = saved_steps(Path(config.run)) if config.resume and not config.skip_damaged else []
        train_policy(config)
        if os.environ.get("RANK", "0") == "0":
            print(_ended(config.run, config.steps, max(saved, default=0)))


def _ended(run: str, steps: int, before: int) -> str:
    """Where the run is, and what may be done with it next."""
    named = shlex.quote(run)
    if before >= steps:
        return f"run: {named}, complete: {before} steps were done before. --steps {2 * before} --resume goes on"
    return f"run: {named}, {steps} steps. klamp report {named} draws it"
