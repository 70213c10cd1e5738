"""The command line: ``klamp audit`` and its sisters. Flags and help come from the signatures and docstrings below."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import io
import itertools
import json as jsonlib
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from klamp import __version__
from klamp.errors import DISK, ConfigError, KlampError, disk_errno, unknown

if TYPE_CHECKING:
    from klamp.audit import Finding

DESCRIPTION = "Measure, price and steer the KL divergence of a language model in reinforcement learning."


def audit(function: str | None = None, /, *, json: bool = False, worlds: int = 20) -> None:
    """Say what a KL term descends, by enumerating a small language model exactly.

    Alone it prints the whole matrix of estimators and placements. With module:function it audits your own
    f(logp, ref_logp, old_logp, mask) -> loss; sums and means are both fine.

    Args:
        function: Your loss, written module:function. Modules of the working folder are found.
        json: Print JSON for programs instead of a table.
        worlds: How many random models the medians are taken over.
    """
    from klamp.audit import audit_function, audit_matrix, load_function

    if worlds < 1:
        raise ConfigError(f"--worlds must be >= 1, got {worlds}. The default is 20.")
    seeds = range(worlds)
    if function is None:
        findings = _with_progress(lambda watch: audit_matrix(seeds, watch=watch), quiet=json)
    else:
        findings = [audit_function(load_function(function), name=function, seeds=seeds)]
    if json:
        print(jsonlib.dumps([f.to_dict() for f in findings], indent=2, ensure_ascii=False))
    else:
        _show(findings, whole=function is None)


def train(args: list[str]) -> None:
    """Train a language model with GRPO or PPO and hold its KL where you ask.

    --config FILE reads a YAML configuration; flags go on top of it. The resolved configuration is written into the
    run folder. Under torchrun or accelerate launch it runs on many processes.
    """
    from klamp.train.config import TrainConfig
    from klamp.train.settings import from_yaml

    file, rest = _config_file(args)
    default = TrainConfig() if file is None else from_yaml(TrainConfig, file)
    text = inspect.cleandoc(train.__doc__ or "")
    with _flags_named(TrainConfig):
        config = _parsed(TrainConfig, rest, default=default, prog="klamp train", description=text)
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


@contextlib.contextmanager
def _flags_named(config: type) -> Iterator[None]:
    """Errors about the fields of ``config`` as errors about the flags they are given by."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(as_flags(str(error), config)) from None


def as_flags(text: str, config: type) -> str:
    """``kl.max_weight=2`` in a message as ``--kl.max-weight 2``, and likewise every other field of ``config``."""
    from klamp.train.settings import fields_of

    names = [name for name, _ in fields_of(config)]
    dotted = "|".join(re.escape(n) for n in sorted(names, key=len, reverse=True) if "." in n)
    plain = "|".join(n for n in names if "." not in n)

    def flag(found: re.Match[str]) -> str:
        part, _, leaf = found[1].replace("_", "-").rpartition(".")
        value = found.groupdict().get("value")
        leaf = f"no-{leaf}" if value == "false" else leaf
        given = "" if value in (None, "true", "false") else f" {value}"
        return f"--{part}.{leaf}{given}" if part else f"--{leaf}"

    text = re.sub(rf"^({plain})(?= must | '| is )", flag, text)
    value = r"(?:=(?P<quote>['\"]?)(?P<value>[\w:+-]+(?:\.\w+)*)(?P=quote))?"
    return re.sub(rf"(?<![\w.'\"/-])({dotted})(?!\w|\.\w){value}", flag, text)


def measure(
    *,
    policy: str,
    reference: str,
    prompts: str | None = None,
    completions: str | None = None,
    out: str = "runs/measure",
    max_tokens: int = 64,
    samples: int = 1,
    temperature: float = 1.0,
    batch: int = 32,
    seed: int = 0,
    chat: bool | None = None,
    device: str = "auto",
    dtype: Literal["auto", "float32", "bfloat16"] = "auto",
    trust_remote_code: bool = False,
) -> None:
    """Say how far one model is from another, and on which tokens.

    Exact KL in both directions over prompts, with intervals, a noise floor and a map of tokens. Models are folders, Hub
    ids, built-in names or folders of LoRA adapters. An interrupted measurement goes on where it stopped; under torchrun
    several processes share it.

    Args:
        policy: The model whose drift is measured; completions are sampled from it.
        reference: The model it is compared with.
        prompts: JSONL with a "prompt" on each line, or text, one a line. Left out: the built-in policy's own.
        completions: JSONL with a "completion" for each prompt, in order, instead of sampling.
        out: Folder for measure.json, measure.html and the records.
        max_tokens: Longest completion, in tokens.
        samples: Completions of each prompt.
        temperature: Sampling temperature; KL is that of the tempered distributions.
        batch: Prompts a block.
        seed: Of the sampling.
        chat: Wrap prompts in the chat template. None: where the tokenizer has one.
        device: auto, cpu or cuda.
        dtype: Of both models. auto: bfloat16 on a GPU, float32 on a CPU.
        trust_remote_code: Let a model repository run its own code.
    """
    from klamp.measure.command import run

    run(
        policy,
        reference,
        prompts,
        completions,
        Path(out),
        max_tokens=max_tokens,
        samples=samples,
        temperature=temperature,
        batch=batch,
        seed=seed,
        chat=chat,
        device=device,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
    )


def _config_file(args: list[str]) -> tuple[str | None, list[str]]:
    """Take ``--config FILE`` out of the arguments."""
    rest, file = [], None
    items = iter(args)
    for item in items:
        if item == "--config":
            file = next(items, None)
            if file is None:
                raise ConfigError("--config needs the path of a YAML file.")
        elif item.startswith("--config="):
            file = item.partition("=")[2]
        else:
            rest.append(item)
    return file, rest


def _parsed(target: Callable[..., Any], args: list[str], **options: Any) -> Any:
    """What tyro makes of ``args``; an error of klamp's own comes out as it was raised, not in a box of tyro's."""
    import tyro

    unseen = io.StringIO()
    try:
        with contextlib.redirect_stderr(unseen), contextlib.redirect_stdout(unseen):
            return tyro.cli(target, args=args, **options)
    except SystemExit as stop:
        error: BaseException | None = stop
        while error is not None and not isinstance(error, KlampError):
            error = error.__context__
        if error is not None:
            raise error from None
        _refuse_switch_values(args, unseen.getvalue())
    return tyro.cli(target, args=args, **options)  # once more for all to see: the help, or what does not parse


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


def _typed(function: Callable[..., Any]) -> Callable[[list[str]], None]:
    """A command whose flags come from the signature of ``function``."""

    def run(args: list[str]) -> None:
        called: list[tuple[Any, Any]] = []

        @functools.wraps(function)
        def note(*given: Any, **named: Any) -> None:
            called.append((given, named))

        _parsed(note, args, prog=f"klamp {function.__name__}")
        given, named = called[0]
        function(*given, **named)

    run.__doc__ = function.__doc__
    return run


def _later(name: str, line: str) -> Callable[[list[str]], None]:
    """A command of the experiments, imported when it is called."""

    def run(args: list[str]) -> None:
        commands = importlib.import_module("klamp.experiments.commands")
        if name == "sweep":
            _refuse_fields(args)
        _typed(getattr(commands, name))(args)

    run.__doc__ = line
    return run


def _refuse_fields(args: list[str]) -> None:
    """A flag of train's given to sweep, as --optim.lr 1e-3: it is a field for --set there."""
    from klamp.train.config import TrainConfig
    from klamp.train.settings import fields_of

    names = {name for name, _ in fields_of(TrainConfig) if "." in name}
    for item, following in zip(args, [*args[1:], ""], strict=True):
        flag, equals, value = item.partition("=")
        field = flag.removeprefix("--").replace("-", "_")
        if item.startswith("--") and field in names:
            value = value if equals else following or "VALUE"
            raise ConfigError(f"klamp sweep has no {flag}. Write --set {field}={value}, or --over {field}=A,B,C.")


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "compare": _later("compare", "Run adaptive beside static and say what came of it, with a report."),
    "sweep": _later("sweep", "Train once for every value of a setting, and draw the reward-KL frontier."),
    "train": train,
    "measure": _typed(measure),
    "audit": _typed(audit),
    "report": _later("report", "Write the page of a run, a comparison or a sweep."),
}


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
    try:
        if args[0] not in COMMANDS:
            raise unknown("command", args[0], COMMANDS)
        COMMANDS[args[0]](args[1:])
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
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in EXTRAS:
            raise
        extra = EXTRAS[error.name.partition(".")[0]]
        print(f"klamp: this needs {error.name}. pip install 'klamp[{extra}]'.", file=sys.stderr)
        return 2
    return 0


def _printable(stream: Any) -> None:
    """Where a terminal or a file takes ASCII alone, π is shown as a question mark instead of ending the command."""
    if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
        stream.reconfigure(errors="replace")


EXTRAS = {
    "accelerate": "train",
    "peft": "train",
    "safetensors": "train",
    "transformers": "train",
    "yaml": "train",
    "matplotlib": "report",
    "plotly": "report",
    "ray": "ray",
}
"""Packages that come with an extra of klamp."""


def _usage() -> str:
    lines = [f"usage: klamp [-h] [--version] {{{','.join(COMMANDS)}}} ...", "", DESCRIPTION, ""]
    for name, command in COMMANDS.items():
        lines.append(f"  klamp {name:<10} {(command.__doc__ or '').strip().splitlines()[0]}")
    return "\n".join([*lines, "", "klamp COMMAND --help shows the flags of a command."])


def _with_progress(work: Callable[[Callable[[str], None]], list[Finding]], *, quiet: bool) -> list[Finding]:
    """Run ``work`` under a spinner that names the row at hand; silent when piped."""
    from rich.console import Console

    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        return work(lambda name: None)
    with console.status("enumerating") as status:
        return work(lambda name: status.update(f"enumerating {name}"))


def _show(findings: list[Finding], *, whole: bool) -> None:
    from rich.console import Console

    from klamp.audit import render

    piped = not sys.stdout.isatty()
    console = Console(width=140 if piped else None)
    console.print(render(findings))
    console.print()
    if whole:
        console.print(
            "bias: distance of the expected gradient from that of the sequence's KL, relative. cos, stale and"
        )
        console.print(
            "std are taken at the larger drift; stale: samples of an older policy, 0.02 nats away; std: of one"
        )
        console.print(
            "sequence's gradient, relative to the true one. Rows marked ✗ are refused by klamp.check and the trainer."
        )
        return
    finding = findings[0]
    console.print(f"on-policy it descends {finding.descends_on}; with a stale sampler, {finding.descends_off}.")
