"""Tables in the terminal."""

from __future__ import annotations

import math
import sys
from typing import Any

from klamp.results.figures import Figures
from klamp.results.verdict import Verdict


def console() -> Any:
    """Wide when piped, so that no row wraps."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 160, soft_wrap=not sys.stdout.isatty())


NOTHING = "–"
"""What stands in a cell without a figure."""


def number(x: float, digits: int = 3) -> str:
    """``x`` in a cell; a dash where there is none."""
    if math.isnan(x):
        return NOTHING
    rounds_away = 0 < abs(x) < 10.0 ** (1 - digits)
    return f"{x:.2g}" if rounds_away else f"{x:.{digits}f}" if abs(x) < 1000 else f"{x:.3g}"


def percent(x: float) -> str:
    """A share in a cell."""
    return NOTHING if math.isnan(x) else f"{100 * x:.1f} %"


def times(x: float) -> str:
    """A multiple of the target in a cell."""
    return NOTHING if math.isnan(x) else f"{x:.2f} ×"


COLUMNS = ("arm", "in band", "max KL", "KL", "reward", "perplexity", "on ref", "entropy", "beta", "verdict")


def cells(row: Figures, verdict: str) -> tuple[str, ...]:
    """A row as text; the report shows the same."""
    return (
        row.arm,
        percent(row.settled),
        times(row.highest),
        number(row.kl, 4),
        number(row.reward),
        number(row.perplexity, 2),
        number(row.perplexity_reference, 2),
        number(row.entropy, 2),
        NOTHING if math.isnan(row.beta) else f"{row.beta:.3g}",
        verdict,
    )


def comparison(found: Verdict) -> Any:
    """The table of arms."""
    from rich.table import Table

    table = Table(title="max KL: from first entry on; the rest: second half of the run, in band pooled over seeds")
    for i, name in enumerate(COLUMNS):
        table.add_column(name, justify="left" if i in (0, len(COLUMNS) - 1) else "right", no_wrap=0 < i < 9)
    for row in found.figures:
        label = f"{row.arm} ({found.oracle})" if row.arm == "oracle" else row.arm
        table.add_row(label, *cells(row, found.arms[row.arm])[1:])
    return table


def checks(found: Verdict) -> Any:
    """The promised figures, each with what it came to."""
    from rich.table import Table

    table = Table(show_header=False, box=None)
    for check in found.checks:
        mark = "?" if check.holds is None else "✓" if check.holds else "✗"
        table.add_row(mark, check.what, check.found)
    return table


def markdown(found: Verdict) -> str:
    """Table, checks and sentence for a README or an issue."""
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{' --- |' * len(COLUMNS)}"]
    for row in found.figures:
        label = f"{row.arm} ({found.oracle})" if row.arm == "oracle" else row.arm
        lines.append(f"| {' | '.join((label, *cells(row, found.arms[row.arm])[1:]))} |")
    marks = {True: "✓", False: "✗", None: "?"}
    lines += ["", *(f"- {marks[c.holds]} {c.what}: {c.found}" for c in found.checks), "", found.sentence, ""]
    return "\n".join(lines)
