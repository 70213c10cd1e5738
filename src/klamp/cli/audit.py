"""``klamp audit``."""

from __future__ import annotations

import json as jsonlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from klamp.errors import ConfigError

if TYPE_CHECKING:
    from klamp.audit import Finding


def audit(function: str | None = None, /, *, json: bool = False, worlds: int = 20, samplers: bool = False) -> None:
    """Show which divergence the gradient of a KL term descends, by enumerating a small language model exactly.

    Alone it prints the whole matrix of estimators and placements. With module:function it audits your own
    f(logp, ref_logp, old_logp, mask) -> loss; sums and means are both fine. It ends with a verdict: right, right
    token by token, wrong direction, no pull or no KL, and what to use instead.

    Args:
        function: Your loss, written module:function or file.py:function, in the working folder or installed.
        json: Print JSON for programs instead of a table.
        worlds: How many random models the medians are taken over.
        samplers: What an update on another sampler's tokens descends, with each correction of algorithm.correction.
    """
    from klamp.audit import audit_function, audit_matrix, load_function, verdict

    if worlds < 1:
        raise ConfigError(f"--worlds must be >= 1, got {worlds}. The default is 20.")
    seeds = range(worlds)
    if samplers:
        _show_samplers(function, seeds, json=json)
        return
    if function is None:
        findings = _with_progress(lambda watch: audit_matrix(seeds, watch=watch), quiet=json)
    else:
        findings = [audit_function(load_function(function), name=function, seeds=seeds)]
    if json:
        rows = [f.to_dict() | {"verdict": verdict(f).word} for f in findings]
        print(jsonlib.dumps(rows, indent=2, ensure_ascii=False))
    else:
        _show(findings, whole=function is None)


def _show_samplers(function: str | None, seeds: range, *, json: bool) -> None:
    from rich.console import Console

    from klamp.audit.samplers import audit_samplers, render

    if function is not None:
        raise ConfigError(f"--samplers audits klamp's corrections and takes no function, got {function!r}.")
    findings = audit_samplers(seeds)
    if json:
        print(jsonlib.dumps([f.to_dict() for f in findings], indent=2, ensure_ascii=False))
        return
    console = Console(width=140 if not sys.stdout.isatty() else None)
    console.print(render(findings))
    console.print("\nbias and std are relative to the gradient of the reward less the price of the sequence's KL.")


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
    from rich.text import Text

    from klamp.audit import render, verdict
    from klamp.audit.matrix import LEGEND, REFUSED, WIDE, stale

    piped = not sys.stdout.isatty()
    console = Console(width=140 if piped else None, highlight=False)
    console.print(render(findings, width=console.width))
    console.print()
    if console.width < WIDE:
        console.print(f"A terminal of {WIDE} characters has all columns; so has a pipe.", style="dim")
    console.print(f"{LEGEND} {REFUSED}" if whole else LEGEND, style="dim", soft_wrap=piped)
    if not whole:
        said = verdict(findings[0])
        console.print()
        colour = "bold green" if findings[0].accepted else "bold red"
        console.print(stale(findings[0]), soft_wrap=piped)
        console.print(Text.assemble((said.word, colour), f": {said.reason}"), soft_wrap=piped)
