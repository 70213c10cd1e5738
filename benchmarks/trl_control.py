"""KL held inside TRL: one GRPO run at seven fixed prices, and with KLControl, price alone and price with clamp.

    python benchmarks/trl_control.py

The built-in model with a LoRA learns a sentiment reward (VADER) in stock GRPOTrainer. For each run the share of steps
whose KL is within 20 % of the target, in the second half of the run and from the first such step on, with when that
was, the highest KL and the reward at the end. Below it the reward that KLControl gained, as a share of what constants
gain at the same KL. The best constant in hindsight is what a sweep of seven runs would have bought. Deterministic for a
seed on one machine.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table

BAND = 0.2


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One GRPO run, the same for every price."""

    steps: int = 40
    """Optimiser steps, each on completions of its own."""
    target: float = 0.05
    """KL to hold, in nats per token."""
    learning_rate: float = 1.5e-3
    """Constant. At 3e-3 the noise of the gradients does much of the moving: less reward at the same KL."""
    completions: int = 128
    """Completions a step, in groups of eight. With 64, TRL's KL has a noise of 10 %: half the band."""
    tokens: int = 24
    """Longest completion."""
    lowest: float = 0.2
    """The smallest of the seven constants."""
    highest: float = 1.25
    """The largest of them."""
    seeds: tuple[int, ...] = (0,)
    """Every run is made once for each seed."""
    workers: int = 2
    """Runs at a time, each on one thread."""
    out: Path | None = None
    """Write every step of every run to this JSON file."""
    reuse: Path | None = None
    """Take the runs at constant prices from this file of an earlier --out: no controller has a part in them."""

    @property
    def constants(self) -> list[float]:
        """Seven prices, evenly spaced on a logarithmic scale."""
        return [self.lowest * (self.highest / self.lowest) ** (i / 6) for i in range(7)]


class Plan(NamedTuple):
    """What sets one run apart from the others."""

    name: str
    beta: float
    control: bool
    clamp: bool
    seed: int


class Outcome(NamedTuple):
    """A finished run: one entry a step."""

    plan: Plan
    kl: list[float]
    reward: list[float]
    beta: list[float]
    effort: list[float]

    def entered(self, target: float) -> int | None:
        """The first step in the band, from 1; None if there was none."""
        return next((i + 1 for i, kl in enumerate(self.kl) if abs(kl / target - 1) <= BAND), None)

    def share(self, target: float) -> float:
        """Share of the steps in the band from the first one in it on; 0 for a run that was never in it."""
        first = self.entered(target)
        return fmean(abs(kl / target - 1) <= BAND for kl in self.kl[first - 1 :]) if first else 0.0

    def late_share(self, target: float) -> float:
        """Share of the second half's steps in the band."""
        return fmean(abs(kl / target - 1) <= BAND for kl in self.kl[len(self.kl) // 2 :])

    def late(self) -> tuple[float, float]:
        """Means of sqrt(KL) and of the reward over the second half."""
        half = len(self.kl) // 2
        return fmean(math.sqrt(max(kl, 0.0)) for kl in self.kl[half:]), fmean(self.reward[half:])


def gained(ours: Outcome, constants: list[Outcome]) -> float:
    """Reward gained over the first step, as a share of what constants of the same seed gain at the same KL.

    Between two neighbouring constants it is read off along a line in sqrt(KL); NaN outside of them.
    """
    x, reward = ours.late()
    start = ours.reward[0]
    points = [(0.0, start), *sorted(o.late() for o in constants if o.plan.seed == ours.plan.seed)]
    for (a, low), (b, high) in itertools.pairwise(points):
        if a <= x <= b:
            theirs = low + (high - low) * (x - a) / (b - a)
            return (reward - start) / (theirs - start)
    return math.nan


def plans(settings: Settings) -> Iterator[Plan]:
    """Nine runs a seed."""
    for seed in settings.seeds:
        for beta in settings.constants:
            yield Plan(f"beta {beta:.3g}", beta, False, False, seed)
        # A price that is far too low to begin with: the controller is told nothing but its target.
        yield Plan("KLControl, price", 0.04, True, False, seed)
        yield Plan("KLControl, price and clamp", 0.04, True, True, seed)


def train(settings: Settings, plan: Plan) -> Outcome:
    """One run in stock TRL, from the built-in model."""
    import torch
    from transformers import PrinterCallback
    from transformers.utils import logging

    torch.set_num_threads(1)
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(settings, plan, folder)
        trainer.remove_callback(PrinterCallback)
        if plan.control:
            from klamp import Hold
            from klamp.integrations.trl import KLControl

            hold = Hold(target=settings.target, per="token")
            trainer.add_callback(KLControl(trainer, hold, clamp=plan.clamp))
        trainer.train()
    rows = [row for row in trainer.state.log_history if "kl" in row]
    beta = [row.get("klamp/beta", plan.beta) for row in rows]
    effort = [row.get("klamp/effort", 0.0) for row in rows]
    return Outcome(plan, [row["kl"] for row in rows], [row["reward"] for row in rows], beta, effort)


def make_trainer(settings: Settings, plan: Plan, folder: str) -> Any:
    """A GRPOTrainer with a LoRA of rank 16 on the built-in model."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer

    from klamp import models

    args = GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=settings.completions,
        num_generations=8,
        max_completion_length=settings.tokens,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="constant",
        beta=plan.beta,
        max_steps=settings.steps,
        seed=plan.seed,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
    )
    return GRPOTrainer(
        models.load_model("tiny"),
        reward_funcs=sentiment(),
        args=args,
        train_dataset=Dataset.from_dict({"prompt": models.prompts("tiny")}),
        processing_class=models.load_tokenizer("tiny"),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
    )


def sentiment() -> Callable[..., list[float]]:
    """VADER's compound score of each completion, in -1..1."""
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    analyzer = SentimentIntensityAnalyzer()

    def vader(completions: list[str], **_: Any) -> list[float]:
        return [analyzer.polarity_scores(text)["compound"] for text in completions]

    return vader


def run_all(settings: Settings, console: Console) -> list[Outcome]:
    """Every plan, ``workers`` at a time; a progress bar where there is a terminal to draw it on."""
    todo = list(plans(settings))
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        ProcessPoolExecutor(settings.workers, mp_context=get_context("spawn")) as pool,
        Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress,
    ):
        task = progress.add_task("GRPO runs in TRL", total=len(todo))
        done = recorded(settings)
        progress.advance(task, len(done))
        waiting = {pool.submit(train, settings, plan): plan for plan in todo if plan not in done}
        for future in as_completed(waiting):
            done[waiting[future]] = future.result()
            progress.advance(task)
    return [done[plan] for plan in todo]


SAME = ("steps", "target", "learning_rate", "completions", "tokens")


def recorded(settings: Settings) -> dict[Plan, Outcome]:
    """The constants' runs of an earlier file, refused where it was made with other settings."""
    if settings.reuse is None:
        return {}
    record = json.loads(settings.reuse.read_text())
    differ = [k for k in SAME if record["settings"][k] != str(getattr(settings, k))]
    if differ:
        raise SystemExit(f"{settings.reuse} was made with other settings: {', '.join(differ)}.")
    runs = [Outcome(**(run | {"plan": Plan(**run["plan"])})) for run in record["runs"]]
    return {run.plan: run for run in runs if not run.plan.control}


def show(settings: Settings, outcomes: list[Outcome], console: Console) -> None:
    """The table, and the two goals beside what was found."""
    names = list(dict.fromkeys(o.plan.name for o in outcomes))
    title = f"KL held at {settings.target:g} nats per token: GRPO in TRL, {settings.steps} steps, built-in model"
    table = Table(title=title, title_justify="left")
    for heading in (
        "run",
        "in band, 2nd half",
        "from entry",
        "first in",
        "KL max",
        "KL, last 10",
        "reward, last 10",
        "effort",
    ):
        table.add_column(heading, justify="left" if heading == "run" else "right")
    shares = {}
    for name in names:
        runs = [o for o in outcomes if o.plan.name == name]
        shares[name] = fmean(o.share(settings.target) for o in runs)
        entered = [str(o.entered(settings.target) or "never") for o in runs]
        table.add_row(
            name,
            f"{fmean(o.late_share(settings.target) for o in runs):.0%}",
            f"{shares[name]:.0%}",
            "/".join(entered),
            f"{max(max(o.kl) for o in runs):.3f}",
            f"{fmean(kl for o in runs for kl in o.kl[-10:]):.3f}",
            f"{fmean(r for o in runs for r in o.reward[-10:]):.3f}",
            f"{fmean(e for o in runs for e in o.effort):.3f}" if runs[0].plan.clamp else "",
        )
    console.print(table)
    best = max(names[:7], key=shares.__getitem__)
    price, clamp = shares["KLControl, price"], shares["KLControl, price and clamp"]
    constants = [o for o in outcomes if not o.plan.control]
    for name in ("KLControl, price", "KLControl, price and clamp"):
        share = fmean(gained(o, constants) for o in outcomes if o.plan.name == name)
        console.print(f"{name}: {share:.0%} of the reward that constants gain at the same KL")
    console.print(f"from entry on, best constant in hindsight: {best}, {shares[best]:.0%} in band")
    console.print(f"price and clamp: {clamp:.0%} (goal 95 %)")
    console.print(f"price alone: {price:.0%} (goal within 5 points of the best constant: {shares[best] - 0.05:.0%})")


def main(settings: Settings) -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    console = Console(width=None if sys.stdout.isatty() else 130)
    outcomes = run_all(settings, console)
    show(settings, outcomes, console)
    if settings.out is not None:
        plain = [o._asdict() | {"plan": o.plan._asdict()} for o in outcomes]
        record = {"settings": {k: str(v) for k, v in asdict(settings).items()}, "runs": plain}
        settings.out.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
