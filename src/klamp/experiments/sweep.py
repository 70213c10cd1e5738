"""``klamp sweep``: one run for every value of a field, or every combination of several; table and frontier."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from klamp import models
from klamp.errors import ConfigError, require_number
from klamp.experiments import jobs, over, pool, records
from klamp.experiments.figures import Figures, figures
from klamp.experiments.folder import Folder
from klamp.experiments.jobs import Job
from klamp.experiments.progress import Progress
from klamp.experiments.tables import number
from klamp.train import data
from klamp.train.config import KLConfig, OptimConfig, TrainConfig
from klamp.train.settings import from_yaml

Engine = Literal["local", "ray"]


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """A sweep: the expressions, and the run they vary."""

    over: tuple[str, ...]
    set: tuple[str, ...] = ()
    config: str | None = None
    seeds: int = 1
    model: str = "tiny"
    steps: int = 20
    heldout: str | None = None

    def __post_init__(self) -> None:
        require_number("--seeds", self.seeds, at_least=1, way_out="It is a count.")
        if not self.over:
            raise ConfigError("--over is missing. Example: --over kl.beta=0.01:1:9:log.")
        if self.heldout is not None and not Path(self.heldout).is_file():
            raise ConfigError(f"--heldout {self.heldout!r} is not a file. Give a text file, one passage a line.")

    def base(self) -> TrainConfig:
        """The run that is varied: a constant beta, k1 in the advantage, held to the base; or what ``config`` says."""
        lr = 1.5e-3 if self.model == "tiny" else 5e-4
        kl = KLConfig(controller="fixed", beta=0.04, estimator="k1", placement="in_advantage", clamp=False)
        made = TrainConfig(model=self.model, steps=self.steps, kl=replace(kl, reference="step:0"), keep=1)
        made = replace(made, optim=OptimConfig(lr=lr), sample_every=max(1, self.steps))
        if self.config is not None:
            made = from_yaml(TrainConfig, self.config)
        return over.apply(made, dict(over.assignment(text) for text in self.set))

    def points(self) -> list[dict[str, Any]]:
        """The fields that vary, a dictionary for each combination."""
        return over.grid([over.parse(text) for text in self.over])


@dataclass(frozen=True)
class Point:
    """One combination and its runs."""

    label: str
    changes: dict[str, Any]
    runs: list[records.Record]
    figures: Figures


@dataclass(frozen=True)
class Sweep:
    """What came of a sweep."""

    folder: Path
    points: list[Point]
    target: float | None
    per: str
    reference: dict[str, Any]

    @property
    def frontier(self) -> list[Point]:
        """Points that no other beats in reward at the same KL or less, by KL."""
        return pareto(self.points)


def pareto(points: Sequence[Point]) -> list[Point]:
    """Points in order of KL whose reward is higher than that of every point before."""
    best, kept = -math.inf, []
    for point in sorted(points, key=lambda p: (p.figures.kl, -p.figures.reward)):
        if math.isfinite(point.figures.kl) and point.figures.reward > best:
            kept.append(point)
            best = point.figures.reward
    return kept


def run(config: SweepConfig, out: str | Path, *, engine: Engine = "local", at_once: int = 0) -> Sweep:
    """Every combination and seed, those already finished left alone; then what is on disk, read back."""
    folder = Folder(out)
    planned = plan(config, folder)
    models.resolve(planned[0][2].model) if planned[0][2].model != "smollm2" else None
    data.load(planned[0][2].prompts, planned[0][2].model)
    settings = asdict(config)
    with folder.claimed("sweep", settings, may_grow=("seeds",)):
        todo = [_job(config, folder, label, made) for label, _, made in planned if not _finished(made)]
        progress = Progress()
        if not folder.reference.is_file():
            first = _job(config, folder, planned[0][0], planned[0][2])
            with progress.live("reference", 1):
                pool.run_local([first], kind="reference", at_once=1, logs=folder.logs, progress=progress)
        already = sum(records.last_step(Path(job.config["run"])) for job in todo)
        with progress.live("sweep", sum(job.steps for job in todo), already):
            if engine == "ray":
                from klamp.experiments.on_ray import run_ray

                run_ray(todo, at_once=at_once, progress=progress)
            else:
                at_once = pool.processes(at_once, len(todo))
                pool.run_local(todo, at_once=at_once, logs=folder.logs, progress=progress)
        return load(config, folder)


def plan(config: SweepConfig, folder: Folder) -> list[tuple[str, dict[str, Any], TrainConfig]]:
    """(label, what varies, configuration) of every run, all of them checked."""
    base, planned = config.base(), []
    for n, changes in enumerate(config.points()):
        label = over.label(changes)
        made = over.apply(base, changes)
        home = folder.runs / over.folder(changes, n)
        # A seed that is swept over is the point's own; otherwise every point has the same few.
        seeds = [made.seed] if "seed" in changes else range(made.seed, made.seed + config.seeds)
        planned += [(label, changes, replace(made, seed=s, run=str(home / f"seed-{s}"))) for s in seeds]
    if len({_model(made) for _, _, made in planned}) > 1:
        raise ConfigError(
            "--over varies model or prompts; held-out text and references would differ. Sweep them apart."
        )
    return planned


def load(config: SweepConfig, folder: Folder) -> Sweep:
    """The sweep on disk."""
    grouped: dict[str, tuple[dict[str, Any], list[records.Record]]] = {}
    first: TrainConfig | None = None
    for label, changes, made in plan(config, folder):
        first = first or made
        grouped.setdefault(label, (changes, []))[1].append(records.read(Path(made.run)))
    assert first is not None, "a grid has at least one run"
    target = first.kl.target
    points = [Point(name, c, runs, figures(name, runs, target)) for name, (c, runs) in grouped.items()]
    return Sweep(folder.path, points, target, first.kl.per or "token", jobs.read_reference(folder.reference))


def table(found: Sweep) -> Any:
    """A row for each point; those on the frontier are marked."""
    from rich.table import Table

    front = {p.label for p in found.frontier}
    shown = Table(title="second half of every run; ● on the reward-KL frontier")
    for name in ("", "run"):
        shown.add_column(name)
    for name in ("KL", "reward", "perplexity", "on ref", "entropy", "beta"):
        shown.add_column(name, justify="right", no_wrap=True)
    for p in found.points:
        f = p.figures
        mark = "●" if p.label in front else ""
        kl, entropy, beta = number(f.kl, 4), number(f.entropy, 2), f"{f.beta:.3g}"
        perplexities = number(f.perplexity, 2), number(f.perplexity_reference, 2)
        shown.add_row(mark, p.label, kl, number(f.reward), *perplexities, entropy, beta)
    return shown


def sentence(found: Sweep) -> str:
    """Where the frontier lies."""
    front = found.frontier
    if not front:
        return "No run measured a finite KL: there is no frontier."
    ends = [f"{p.label} (reward {p.figures.reward:.3f} at KL {p.figures.kl:.3g})" for p in (front[0], front[-1])]
    between = ends[0] if len(front) == 1 else f"from {ends[0]} to {ends[1]}"
    return f"{len(front)} of {len(found.points)} points are on the reward-KL frontier: {between}."


def _job(config: SweepConfig, folder: Folder, label: str, made: TrainConfig) -> Job:
    return jobs.job(f"{label} seed {made.seed}", made, folder.reference.resolve(), heldout=config.heldout)


def _finished(made: TrainConfig) -> bool:
    return records.finished(Path(made.run), made.steps)


def _model(made: TrainConfig) -> tuple[str, str | None]:
    return made.model, made.prompts
