"""The command ``klamp``: which commands there are, flags from signatures by tyro, and how what goes wrong is told."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import io
import itertools
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from klamp import __version__
from klamp.errors import DISK, ConfigError, KlampError, Setting, disk_errno, needing, unknown

DESCRIPTION = "Measure, price and steer the KL divergence of a language model in reinforcement learning."


COMMANDS = {
    "compare": ("experiments", "Train with adaptive and constant prices side by side, and report what each did."),
    "sweep": ("experiments", "Train once for every value of a setting, and plot reward against KL."),
    "train": ("train", "Train a language model with GRPO or PPO and hold its KL where you ask."),
    "measure": ("measure", "Say how far one model is from another, and on which tokens."),
    "audit": ("audit", "Show which divergence the gradient of a KL term descends, by exact enumeration."),
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


QUOTES = "'\""


def typed(function: Callable[..., Any]) -> Callable[[list[str]], None]:
    """A command whose flags come from the signature of ``function``."""

    def run(args: list[str]) -> None:
        called: list[tuple[Any, Any]] = []

        @functools.wraps(function)
        def note(*given: Any, **named: Any) -> None:
            called.append((given, named))

        parsed(note, args, prog=f"klamp {function.__name__}")
        given, named = called[0]
        function(*given, **named)

    run.__doc__ = function.__doc__
    return run


class Held(io.StringIO):
    """What is written for a stream, held back; a terminal is still a terminal to whoever asks."""

    def __init__(self, stream: Any) -> None:
        super().__init__()
        self.stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """That of the stream: what is drawn for it may be more than ASCII."""
        return str(self.stream.encoding)

    def isatty(self) -> bool:
        return bool(self.stream.isatty())

    def release(self) -> None:
        """Write it after all."""
        self.stream.write(self.getvalue())
        self.stream.flush()


def parsed(target: Callable[..., Any], args: list[str], **options: Any) -> Any:
    """What tyro makes of ``args``; an error of klamp's own comes out as it was raised, not in a box of tyro's."""
    import tyro

    out, errors = Held(sys.stdout), Held(sys.stderr)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            return tyro.cli(target, args=args, **options)
    except SystemExit as stop:
        error: BaseException | None = stop
        while error is not None and not isinstance(error, KlampError):
            error = error.__context__
        if error is not None:
            raise error from None
        said = out.getvalue() + errors.getvalue()
        _refuse_switch_values(args, said)
        _answer_foreign(args, said)
        out.release()  # the help, or what does not parse
        errors.release()
        raise


def _refuse_switch_values(args: list[str], said: str) -> None:
    """``--kl.clamp false`` by the flag that does it; tyro only says that it does not know ``false``."""
    unknown_options = next((line for line in said.splitlines() if "Unrecognized options: " in line), "")
    for flag, value in itertools.pairwise(" ".join(args).replace("=", " ").split()):
        if not flag.startswith("--") or value not in ("true", "false"):
            continue
        if value not in unknown_options or flag in unknown_options:
            continue
        part, dot, leaf = flag[2:].rpartition(".")
        on, off = f"--{part}{dot}{leaf.removeprefix('no-')}", f"--{part}{dot}no-{leaf.removeprefix('no-')}"
        raise ConfigError(f"{flag} is a switch and takes no value, got {value!r}. {on} is on, {off} is off.")


def _answer_foreign(args: list[str], said: str) -> None:
    """Another system's name for a setting, as ``--kl.init_kl_coef``, by klamp's; tyro only says that it knows none.

    verl's users write ``algorithm.kl_ctrl.kl_coef=0.1`` and ``+algorithm...``, as Hydra has it.
    """
    from klamp.compat.foreign_settings import foreign

    unrecognised = re.sub(r"[│\s]+", " ", said).partition("Unrecognized options: ")[2].partition("──")[0]
    for flag in (item.partition("=")[0] for item in args if item.startswith("--") or "=" in item):
        if re.search(rf"(?<!\S){re.escape(flag)}(?![\w.-])", unrecognised) and (answer := foreign(flag)):
            raise ConfigError(answer)


def value_of(flag: str, args: list[str]) -> str | None:
    """What follows the last ``flag VALUE`` or ``flag=VALUE``; None where it stands nowhere, or nothing follows it."""
    found = None
    for item, following in itertools.zip_longest(args, args[1:], fillvalue="--"):
        if item == flag:
            found = None if following.startswith("--") else following
        elif item.startswith(f"{flag}="):
            found = item.partition("=")[2]
    return found


def without(flag: str, args: list[str]) -> list[str]:
    """The arguments with every ``flag``, ``flag VALUE`` and ``flag=VALUE`` taken out."""
    rest: list[str] = []
    items = iter([*args, "--"])
    for item in items:
        if item == flag:
            item = next(items)
            if not item.startswith("--"):
                continue
        if not item.startswith(f"{flag}="):
            rest.append(item)
    return rest[:-1]


@contextlib.contextmanager
def flags_named(config: type) -> Iterator[None]:
    """Errors that name fields of ``config``, by the flags that these are given by."""
    from klamp.config_io import fields_of

    known = {name for name, _ in fields_of(config)}
    try:
        yield
    except KlampError as error:
        raise type(error)(error.spelled(lambda s: flag(s) if s.name in known else str(s))) from None


def flag(setting: Setting) -> str:
    """``kl.max_weight=2`` as ``--kl.max-weight 2``; a switch as ``--kl.clamp`` or ``--kl.no-clamp``."""
    part, dot, leaf = setting.name.replace("_", "-").rpartition(".")
    if setting.value == "false":
        return f"--{part}{dot}no-{leaf}"
    value = "" if setting.value in (None, "true") else f" {(setting.value or '').strip(QUOTES)}"
    return f"--{part}{dot}{leaf}{value}"


def need_report() -> None:
    """Say that the report could not be written before the runs, not after."""
    for name in ("jinja2", "plotly", "matplotlib"):
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"the report needs {name}. pip install 'klamp[report]'.")
