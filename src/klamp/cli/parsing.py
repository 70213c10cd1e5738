"""Flags from signatures and dataclasses, by tyro; errors of klamp's own in the words of the flags."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

from klamp.errors import ConfigError, KlampError


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


def parsed(target: Callable[..., Any], args: list[str], **options: Any) -> Any:
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
        _answer_foreign(args, unseen.getvalue())
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


def _answer_foreign(args: list[str], said: str) -> None:
    """Another system's name for a setting, as ``--kl.init_kl_coef``, by klamp's; tyro only says that it knows none."""
    from klamp.compat.settings import foreign

    unrecognised = re.sub(r"[│\s]+", " ", said).partition("Unrecognized options: ")[2].partition("──")[0]
    for flag in (item.partition("=")[0] for item in args if item.startswith("--")):
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
    """Errors about the fields of ``config`` as errors about the flags they are given by."""
    try:
        yield
    except KlampError as error:
        raise type(error)(as_flags(str(error), config)) from None


def as_flags(text: str, config: type) -> str:
    """``kl.max_weight=2`` in a message as ``--kl.max-weight 2``, and likewise every other field of ``config``."""
    from klamp.train.config_io import fields_of

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


def need_report() -> None:
    """Say that the report could not be written before the runs, not after."""
    for name in ("jinja2", "plotly", "matplotlib"):
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"the report needs {name}. pip install 'klamp[report]'.")
