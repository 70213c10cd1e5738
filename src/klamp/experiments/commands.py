"""``klamp compare``, ``klamp sweep`` and ``klamp report`` as functions; flags and help come from what stands here."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated, Literal

import tyro

from klamp.errors import ConfigError
from klamp.experiments.arms import ARMS
from klamp.masked import Unit


def compare(
    *,
    arms: tuple[str, ...] = ARMS,
    seeds: int = 3,
    target: float | None = None,
    per: Unit | None = None,
    model: str = "tiny",
    prompts: str | None = None,
    reward: tuple[str, ...] = ("vader",),
    steps: int = 60,
    algorithm: Literal["grpo", "ppo"] = "grpo",
    static_beta: float = 0.04,
    oracle: bool = False,
    heldout: str | None = None,
    lr: float | None = None,
    prompts_per_step: int = 4,
    group_size: int = 8,
    max_tokens: int = 24,
    dtype: Literal["auto", "float32", "bfloat16"] = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
    out: str = "runs/compare",
    jobs: int = 0,
) -> None:
    """Train the same model on the same prompts under several ways of steering beta, and say what came of it.

    Runs in processes side by side; run the same command again to go on where it was stopped. Ends with a table, one
    sentence, and report.html, figure.png and figure.pdf in --out.

    Args:
        arms: Which arms: static, ziegler, exponential, hold-price (no clamp), hold, or a constant beta=NUMBER.
        seeds: Seeds of every arm.
        target: KL to hold, in nats per --per; 0.05 per token if not given.
        per: Unit of the target: token, sequence or sequence_mean. Needed with --target.
        model: A built-in name (tiny, smollm2), a folder or a Hub id.
        prompts: JSONL or text file of prompts; the built-in models bring their own.
        reward: vader, length:N, regex:PATTERN, model:NAME or your own module:function; several are added up.
        steps: Steps of every run.
        algorithm: grpo or ppo.
        static_beta: Price of the static arm.
        oracle: Add the best constant beta in hindsight, of seven coarse and seven fine ones.
        heldout: Text file for held-out perplexity, one passage a line.
        lr: Learning rate; 1.5e-3 for tiny, 5e-4 for others if not given.
        prompts_per_step: Prompts a step.
        group_size: Completions a prompt.
        max_tokens: Longest completion.
        dtype: bfloat16 on a GPU and float32 on a CPU if auto.
        device: cpu, cuda, or auto.
        trust_remote_code: Let a model repository run its own code.
        out: Folder of the comparison.
        jobs: Runs at a time; 0 for one a core.
    """
    from klamp.experiments import compare as comparing
    from klamp.experiments import tables, verdict
    from klamp.report import write_comparison

    config = comparing.CompareConfig(
        arms=arms,
        seeds=seeds,
        target=target,
        per=per,
        model=model,
        prompts=prompts,
        reward=reward,
        steps=steps,
        algorithm=algorithm,
        static_beta=static_beta,
        oracle=oracle,
        heldout=heldout,
        lr=lr,
        prompts_per_step=prompts_per_step,
        group_size=group_size,
        max_tokens=max_tokens,
        dtype=dtype,
        device=device,
        trust_remote_code=trust_remote_code,
    )
    _need_report()
    found = comparing.run(config, out, at_once=jobs)
    said = verdict.judge(found)
    page = write_comparison(found, said)
    console = tables.console()
    console.print(tables.comparison(said))
    console.print(tables.checks(said))
    console.print()
    console.print(said.sentence)
    console.print(f"report: {page}")


def sweep(
    *,
    over: Annotated[tuple[str, ...], tyro.conf.UseAppendAction],
    set: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = (),
    config: Path | None = None,
    seeds: int = 1,
    model: str = "tiny",
    steps: int = 20,
    heldout: str | None = None,
    out: str = "runs/sweep",
    engine: Literal["local", "ray"] = "local",
    jobs: int = 0,
) -> None:
    """Train once for every value of one field, or every combination of several, and draw the reward-KL frontier.

    Without --config and --set: a constant beta, k1 in the advantage, the base as reference, no clamp.

    Args:
        over: field=START:STOP:COUNT, field=START:STOP:COUNT:log or field=A,B,C; repeat it for a grid.
        set: field=value for every run; repeat it for several.
        config: YAML file of a training run to start from, in place of the plan above.
        seeds: Seeds of every combination.
        model: A built-in name (tiny, smollm2), a folder or a Hub id.
        steps: Steps of every run.
        heldout: Text file for held-out perplexity, one passage a line.
        out: Folder of the sweep.
        engine: Processes on this machine, or a Ray cluster (pip install 'klamp[ray]').
        jobs: Runs at a time; 0 for one a core.
    """
    from klamp.experiments import sweep as sweeping
    from klamp.experiments import tables
    from klamp.report import write_sweep

    plan = sweeping.SweepConfig(
        over=over,
        set=set,
        config=None if config is None else str(config),
        seeds=seeds,
        model=model,
        steps=steps,
        heldout=heldout,
    )
    _need_report()
    found = sweeping.run(plan, out, engine=engine, at_once=jobs)
    page = write_sweep(found)
    console = tables.console()
    console.print(sweeping.table(found))
    console.print(sweeping.sentence(found))
    console.print(f"report: {page}")


def report(runs: tuple[Path, ...], /, *, out: Path | None = None) -> None:
    """Write report.html from run folders, or from the folder of a compare or a sweep.

    Args:
        runs: Folders. Runs that differ in their seed alone are drawn as one arm with its spread.
        out: Where to write; report.html in the folder given, or here if there are several.
    """
    from klamp.experiments import tables
    from klamp.report import write_runs

    tables.console().print(f"report: {write_runs(runs, out)}")


def _need_report() -> None:
    """Say that the report could not be written before the runs, not after."""
    for name in ("plotly", "matplotlib"):
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"the report needs {name}. pip install 'klamp[report]'.")
