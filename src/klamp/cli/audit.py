"""``klamp audit``."""

from __future__ import annotations

import json as jsonlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from klamp.errors import ConfigError

if TYPE_CHECKING:
    from klamp.audit import Finding


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
