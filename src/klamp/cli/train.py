"""``klamp train``."""

from __future__ import annotations

import contextlib
import inspect
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from klamp.cli.main import flags_named, need_report, parsed, value_of, without
from klamp.errors import ConfigError, first_process

if TYPE_CHECKING:
    from klamp.train.config import TrainConfig


def train(args: list[str]) -> None:
    """Train a language model with GRPO or PPO and hold its KL where you ask.

    --config FILE reads a YAML configuration; flags go on top of it. --resume RUN goes on with a run by its own
    configuration; --steps, --kl.beta, --kl.target, --kl.limit, --optim.lr and the settings of saving and logging may be
    given beside it. --watch serves the page of the run on 127.0.0.1 while it trains and writes report.html at its
    end; --watch PORT chooses the port. The resolved configuration is written into the run folder. Under torchrun or
    accelerate launch it runs on many processes.
    """
    from klamp.train.config import TrainConfig

    port, args = _watch(args)
    default, rest = _starting_point(args)
    text = inspect.cleandoc(train.__doc__ or "")
    with flags_named(TrainConfig):
        config = parsed(TrainConfig, rest, default=default, prog="klamp train", description=text)
        from klamp.references.spec import saved_steps
        from klamp.train.loop import train_policy

        saved = saved_steps(Path(config.run)) if config.resume and not config.skip_damaged else []
        with _stops_told(config.run), _page(config.run, port):
            train_policy(config)
        if first_process():
            print(_ended(config.run, max(saved, default=0)))


def _watch(args: list[str]) -> tuple[int | None, list[str]]:
    """The port of --watch, 0 where it is to be chosen and None where nothing is watched; and the other arguments."""
    if not any(item.partition("=")[0] == "--watch" for item in args):
        return None, args
    need_report()
    port = value_of("--watch", args) or "0"
    if not (port.isascii() and port.isdigit() and int(port) < 65536):
        raise ConfigError(f"--watch takes a port from 1 to 65535, got {port!r}. Left out, a free one is chosen.")
    return int(port), without("--watch", args)


@contextlib.contextmanager
def _page(run: str, port: int | None) -> Iterator[None]:
    """With --watch: the run's page, live while it trains, and report.html from then on."""
    if port is None or not first_process():
        yield
        return
    from klamp.report import write_runs
    from klamp.report.live import watching

    with watching(run, port) as address:
        print(f"watch: {address}", file=sys.stderr, flush=True)
        yield
    print(f"report: {write_runs([Path(run)])}", file=sys.stderr, flush=True)


def _starting_point(args: list[str]) -> tuple[TrainConfig, list[str]]:
    """What the flags go on top of, which is --config, the run that is resumed, or the defaults; and the flags."""
    from klamp.config_io import from_yaml
    from klamp.train.config import TrainConfig
    from klamp.train.run_folder import RunFolder

    file, rest = value_of("--config", args), without("--config", args)
    if file is None and any(item.partition("=")[0] == "--config" for item in args):
        raise ConfigError("--config needs the path of a YAML file.")
    run = value_of("--resume", args)
    if run in ("true", "false"):
        run = None  # a switch given a value, which is refused as such
    if run is not None:
        if not Path(run).is_dir():
            raise ConfigError(f"--resume {run!r}: there is no such folder. Give the folder of a run.")
        if value_of("--run", args) not in (None, run):
            raise ConfigError(f"--resume {run!r} and --run {value_of('--run', args)!r} name two runs. Leave one out.")
        rest = ["--run", run, "--resume", *without("--run", without("--resume", rest))]
    if file is not None:
        return from_yaml(TrainConfig, file), rest
    folder = RunFolder(value_of("--run", rest) or TrainConfig().run)
    if "--resume" in rest and folder.begun():
        return folder.own_config(), [*rest, *(() if "--run" in rest else ("--run", str(folder.path)))]
    if run is not None:
        raise ConfigError(f"--resume {run!r}: no step is finished there. Start it with --run {shlex.quote(run)}.")
    return TrainConfig(), rest


@contextlib.contextmanager
def _stops_told(run: str) -> Iterator[None]:
    """When a signal ends the run: what was saved of it, and the command that goes on."""
    try:
        yield
    except (SystemExit, KeyboardInterrupt) as end:
        if first_process():
            print(_stopped(run), file=sys.stderr)
        raise SystemExit(130 if isinstance(end, KeyboardInterrupt) else end.code) from None


def _stopped(run: str) -> str:
    from klamp.references.spec import folder_of, saved_steps
    from klamp.train.run_folder import RunFolder

    last, saved = RunFolder(run).last_step(), max(saved_steps(Path(run)), default=0)
    if not saved:
        when = f"after step {last}" if last else "before its first step was finished"
        return (
            f"stopped {when}. Nothing was saved yet: the same command begins again{' with --resume' if last else ''}."
        )
    where = f"step {saved} is saved in {shlex.quote(str(folder_of(Path(run), saved)))}"
    return f"stopped after step {last}; {where}. Go on: klamp train --resume {shlex.quote(run)}"


def _ended(run: str, before: int) -> str:
    """Where the run is, and what may be done with it next."""
    from klamp.train.run_folder import RunFolder

    named, steps = shlex.quote(run), RunFolder(run).last_step()
    if 0 < steps <= before:
        more = f"klamp train --resume {named} --steps {2 * steps} goes on"
        return f"run: {named}, complete: {steps} steps were done before. {more}"
    return f"run: {named}, {steps} steps. klamp report {named} draws it"
