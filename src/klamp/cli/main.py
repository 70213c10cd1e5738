"""The command ``klamp``: which commands there are, and how what goes wrong is told."""

from __future__ import annotations

import importlib
import io
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from klamp import __version__
from klamp.errors import DISK, KlampError, disk_errno, needing, unknown

DESCRIPTION = "Measure, price and steer the KL divergence of a language model in reinforcement learning."


COMMANDS = {
    "compare": ("experiments", "Run adaptive beside static and say what came of it, with a report."),
    "sweep": ("experiments", "Train once for every value of a setting, and draw the reward-KL frontier."),
    "train": ("train", "Train a language model with GRPO or PPO and hold its KL where you ask."),
    "measure": ("measure", "Say how far one model is from another, and on which tokens."),
    "audit": ("audit", "Say what a KL term descends, by enumerating a small language model exactly."),
    "serve": ("serve", "Answer OpenAI clients with a model, or with the steps of a run."),
    "report": ("experiments", "Write the page of a run, a comparison or a sweep."),
}
"""Each command with its module, which is imported when the command is called, and its line in the usage."""

EXTRAS = {
    "compare": ("train", "report"),
    "sweep": ("train", "report"),
    "report": ("train", "report"),
    "serve": ("train", "serve"),
}
"""Commands that need several extras: whoever lacks them hears of all at once."""


ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
"""What torch and tokenizers read when they are loaded; what the user set stays. Threads that spin while they wait take
the cores from other processes: two runs side by side on two cores crawl."""


def _call(name: str, args: list[str]) -> None:
    """The command ``name``: ``train`` parses its own arguments, the others' flags come from their signatures."""
    from klamp.cli.parsing import typed

    function = getattr(importlib.import_module(f"klamp.cli.{COMMANDS[name][0]}"), name)
    run = function if name == "train" else typed(function)
    if name == "sweep":
        from klamp.cli.experiments import refuse_fields

        refuse_fields(args)
    run(args)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; an error of klamp's own, or of the disk, is one line on stderr and exit code 2."""
    args = list(sys.argv[1:] if argv is None else argv)
    if args and args[0] in ("--version", "-V"):
        print(f"klamp {__version__}")
        return 0
    if args[:1] == ["help"]:  # klamp help train
        args = [*args[1:2], "--help"]
    if not args or args[0] in ("-h", "--help"):
        print(_usage())
        return 0
    _printable(sys.stdout)
    # torch works without NumPy and warns that it is missing; a command that needs NumPy says so itself.
    warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)
    for variable, value in ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    try:
        if args[0] not in COMMANDS:
            raise unknown("command", args[0], COMMANDS)
        with needing(args[0], *EXTRAS.get(args[0], ())):
            _call(args[0], args[1:])
    except KlampError as error:
        print(f"klamp: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader, head or less, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # rich met it, and turned stdout away already
            return 0
        raise
    except KeyboardInterrupt:
        print("klamp: stopped.", file=sys.stderr)
        return 130
    except OSError as error:
        number = disk_errno(error)
        if number is None:
            raise
        where = f"{error.filename!r}: " if error.filename else ""
        print(f"klamp: {where}{os.strerror(number)}. {DISK[number]}, then try again.", file=sys.stderr)
        return 2
    return 0


def _printable(stream: Any) -> None:
    """Where a terminal or a file takes ASCII alone, π is shown as a question mark instead of ending the command."""
    if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
        stream.reconfigure(errors="replace")


def _usage() -> str:
    lines = [f"usage: klamp [-h] [--version] {{{','.join(COMMANDS)}}} ...", "", DESCRIPTION, ""]
    lines += [f"  klamp {name:<10} {summary}" for name, (_, summary) in COMMANDS.items()]
    return "\n".join([*lines, "", "klamp COMMAND --help shows the flags of a command."])
