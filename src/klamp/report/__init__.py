"""One self-contained page from runs on disk: ``report.html``, and its main figure as PNG and PDF."""

from klamp.report.write import write_comparison, write_runs, write_sweep

__all__ = ["write_comparison", "write_runs", "write_sweep"]
