"""``klamp compare``, ``klamp sweep`` and ``klamp report``."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Annotated, Literal

import tyro

from klamp.cli.main import need_report
from klamp.errors import ConfigError
from klamp.experiments.compare import CompareConfig


def compare(
    config: Annotated[CompareConfig, tyro.conf.arg(name="")], *, out: str = "runs/compare", jobs: int = 0
) -> None:
    """Train the same model on the same prompts under several ways of steering beta, and say what came of it.

    Checks what klamp promises: the reward of hold against that of constants at the same KL (with --oracle); its KL
    within 1.1 times the clamp's limit, on 256 fresh samples at the end and in every step beyond the noise of its
    reading; and KL in its band, within 20 % of the target, over the second half of the run.

    Runs in processes side by side; run the same command again to go on where it was stopped. Ends with a table, the
    checks, the finding in words, and report.html, figure.png and figure.pdf in --out.

    Args:
        config: What is compared.
        out: Folder of the comparison.
        jobs: Runs at a time; 0 for one per core, at most four per GPU.
    """
    from klamp.experiments import compare as comparing
    from klamp.report import write_comparison
    from klamp.results import verdict

    need_report()
    found = comparing.run(config, out, at_once=jobs)
    said = verdict.judge(found)
    page = write_comparison(found, said)
    console = verdict.console()
    console.print(verdict.arms_table(said, console.width))
    console.print(verdict.checks_table(said))
    console.print()
    console.print(said.sentence)
    console.print(f"report: {page}")


def sweep(
    *,
    over: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = (),
    set: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = (),
    config: Path | None = None,
    seeds: int = 1,
    model: str | None = None,
    steps: int | None = None,
    heldout: str | None = None,
    out: str = "runs/sweep",
    engine: Literal["local", "ray"] = "local",
    jobs: int = 0,
) -> None:
    """Train once for every value of one field, or every combination of several, and plot reward against KL.

    Without --config and --set: a constant beta, k1 in the advantage, held to step 0, no clamp. Without --over: five
    values of that beta, kl.beta=0.01:1:5:log.

    Args:
        over: field=START:STOP:COUNT, field=START:STOP:COUNT:log or field=A,B,C; repeat it for a grid.
        set: field=value for every run; repeat it for several.
        config: YAML file of a training run to start from, in place of the plan above; flags go on top of it.
        seeds: Seeds of every combination.
        model: A built-in name (tiny, smollm2, smollm2-q4), a folder or a Hub id. None: that of --config, or tiny.
        steps: Steps of every run. None: those of --config, or 20.
        heldout: Text file for held-out perplexity, one passage per line.
        out: Folder of the sweep.
        engine: Processes on this machine, or a Ray cluster (pip install 'klamp[ray]').
        jobs: Runs at a time; 0 for one per core, at most four per GPU.
    """
    from klamp.experiments import sweep as sweeping
    from klamp.report import write_sweep
    from klamp.results import verdict

    plan = sweeping.SweepConfig(
        over=over or sweeping.USUAL_SWEEP,
        set=set,
        config=None if config is None else str(config),
        seeds=seeds,
        model=model,
        steps=steps,
        heldout=heldout,
    )
    need_report()
    found = sweeping.run(plan, out, engine=engine, at_once=jobs)
    page = write_sweep(found)
    console = verdict.console()
    console.print(sweeping.table(found))
    console.print(sweeping.sentence(found))
    console.print(f"report: {page}")


def report(runs: tuple[Path, ...], /, *, out: Path | None = None) -> None:
    """Write report.html from run folders, or from the folder of a compare or a sweep.

    Args:
        runs: Folders. Runs that differ in their seed alone are drawn as one arm with its spread.
        out: Where to write; report.html in the folder given, or here if there are several.
    """
    from klamp.report import write_runs
    from klamp.results import verdict

    verdict.console().print(f"report: {write_runs(runs, out)}")


def refuse_fields(args: list[str]) -> None:
    """A flag of train's given to sweep, as --optim.lr 1e-3: it is a field for --set there."""
    from klamp.config_io import fields_of
    from klamp.train.config import TrainConfig

    names = {name for name, _ in fields_of(TrainConfig) if "." in name}
    for item, following in itertools.zip_longest(args, args[1:], fillvalue=""):
        flag, equals, value = item.partition("=")
        field = flag.removeprefix("--").replace("-", "_")
        if item.startswith("--") and field in names:
            value = value if equals else following or "VALUE"
            raise ConfigError(f"klamp sweep has no {flag}. Write --set {field}={value}, or --over {field}=A,B,C.")
