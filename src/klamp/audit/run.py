"""The whole matrix, one function of the user's own, and the table that shows either."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from klamp.audit.core import DRIFTS, Batch, Finding, examine
from klamp.audit.matrix import ROWS
from klamp.errors import ConfigError
from klamp.placements import LOCAL, SEQUENCE
from klamp.user_functions import imported

if TYPE_CHECKING:
    from rich.table import Table

Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def audit_matrix(seeds: Iterable[int] = range(20), *, watch: Callable[[str], None] | None = None) -> list[Finding]:
    """What every known pair of estimator and placement descends: the rows of ``klamp audit``.

    Args:
        seeds: one random model per seed; a finding is the median over them.
        watch: called with the name of each row as it starts.

    Returns:
        One finding per row.
    """
    worlds = list(seeds)
    findings = []
    for name, (accepted, term) in ROWS.items():
        if watch:
            watch(name)
        findings.append(examine(name, term, accepted=accepted, seeds=worlds))
    return findings


def audit_function(loss: Loss, *, name: str | None = None, seeds: Iterable[int] = range(20)) -> Finding:
    """What ``loss(logp, ref_logp, old_logp, mask)`` descends, up to a constant factor: sums and means are both fine.

    Args:
        loss: called with [N, T] float64 tensors that hold every sequence of a small model once; returns one number.
            Only ``logp`` carries a gradient. On-policy, ``old_logp`` equals it.
        name: its name in the finding. None: the function's own.
        seeds: one random model per seed; the finding is the median over them.

    Returns:
        The finding.
    """

    def term(batch: Batch) -> Tensor:
        try:
            return loss(batch.logp, batch.ref_logp, batch.old_logp, batch.mask)
        except Exception as error:  # whatever a stranger's function may raise
            first = (str(error).splitlines() or [""])[0]
            raise ConfigError(
                f"{label} raised {type(error).__name__}: {first}. It is called as f(logp, ref_logp, old_logp, mask) "
                "with [N, T] tensors and returns one number."
            ) from error

    label = name or str(getattr(loss, "__name__", "function"))
    finding = examine(label, term, seeds=list(seeds), rescale=True)
    return replace(finding, accepted=finding.descends_on in (SEQUENCE, LOCAL))


def load_function(path: str) -> Loss:
    """The function named ``module:function``; modules of the working folder are found too."""
    module_name, _, function_name = path.partition(":")
    if not module_name or not function_name:
        raise ConfigError(f"function {path!r} must be written module:function, as in my_losses:kl_term.")
    found: Loss = imported("function", path)
    return found


def render(findings: Iterable[Finding], title: str | None = None) -> Table:
    """The findings as a table; accepted rows first."""
    from rich.table import Table

    low, high = DRIFTS
    table = Table(title=title, title_justify="left", header_style="bold", show_edge=False, pad_edge=False)
    table.add_column("term", no_wrap=True)
    table.add_column("descends, on-policy")
    for column in (f"bias at {low:g}", f"bias at {high:g}", "cos", "stale: bias", "cos", "std"):
        table.add_column(column, justify="right", no_wrap=True)
    for f in sorted(findings, key=lambda f: not f.accepted):
        figures = (f.bias_on[0], f.bias_on[-1], f.cosine_on[-1], f.bias_off[-1], f.cosine_off[-1], f.std_on[-1])
        mark = "" if f.accepted else "✗ "
        table.add_row(mark + f.name, f.descends_on, *(_figure(x) for x in figures), style=None if f.accepted else "dim")
    return table


def _figure(x: float) -> str:
    return "0" if abs(x) < 5e-7 else f"{x:.2f}"
