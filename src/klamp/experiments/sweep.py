"""``klamp sweep``: one run for every value of a field, or every combination of several; table and frontier."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from klamp import models
from klamp.config_io import from_yaml
from klamp.errors import ConfigError, require_number
from klamp.experiments import job_process, runner, sweep_grammar
from klamp.experiments.folder import Folder
from klamp.experiments.job_process import Job
from klamp.experiments.sweep_grammar import unused
from klamp.progress import Progress
from klamp.prompts import load_prompts
from klamp.results import records
from klamp.results.statistics import Figures, figures
from klamp.results.verdict import number
from klamp.train.config import KLConfig, ResolvedConfig, TrainConfig

Engine = Literal["local", "ray"]
USUAL_SWEEP = ("kl.beta=0.01:1:5:log",)
"""What ``klamp sweep`` varies where nothing is named: from a price that hardly holds to one that hardly lets learn."""


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """A sweep: the expressions, and the run they vary. What is given here wins over ``config``."""

    over: tuple[str, ...]
    set: tuple[str, ...] = ()
    config: str | None = None
    seeds: int = 1
    model: str | None = None
    steps: int | None = None
    heldout: str | None = None

    def __post_init__(self) -> None:
        require_number("--seeds", self.seeds, at_least=1, way_out="It is a count.")
        if not self.over:
            raise ConfigError("--over is missing. Example: --over kl.beta=0.01:1:9:log.")
        if self.heldout is not None and not Path(self.heldout).is_file():
            raise ConfigError(f"--heldout {self.heldout!r} is not a file. Give a text file, one passage a line.")

        if self.config is None:  # written down as what they come to
            object.__setattr__(self, "model", self.model or "tiny")
            object.__setattr__(self, "steps", 20 if self.steps is None else self.steps)

    def base(self) -> TrainConfig:
        """The run that is varied: a constant beta, k1 in the advantage, held to step 0; or what ``config`` says."""
        if self.config is None:
            return _plan(self.model or "tiny", self.steps or 0)
        made = from_yaml(TrainConfig, self.config)
        return replace(made, model=self.model or made.model, steps=made.steps if self.steps is None else self.steps)

    def assigned(self) -> dict[str, Any]:
        """The fields of ``set``, the same for every run."""
        return dict(sweep_grammar.assignment(text) for text in self.set)

    def points(self) -> list[dict[str, Any]]:
        """The fields that vary, a dictionary for each combination."""
        return sweep_grammar.grid([sweep_grammar.parse(text) for text in self.over])


def _plan(model: str, steps: int) -> TrainConfig:
    """ART's own test plan."""
    kl = KLConfig(
        controller="fixed", beta=0.04, estimator="k1", placement="in_advantage", clamp=False, reference="step:0"
    )
    return TrainConfig(model=model, steps=steps, kl=kl, keep=1, sample_every=max(1, steps))


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
    runner.check_asked(at_once)
    planned = plan(config, folder)
    # Fetched here, where its progress is seen and before the folder is claimed; the folder names what came.
    model = models.canonical(planned[0][2].model)
    if model != planned[0][2].model:
        config = replace(config, model=model)
        planned = plan(config, folder)
    load_prompts(planned[0][2].prompts, planned[0][2].model)
    settings = asdict(config)
    folder.check("sweep", settings, may_grow=("seeds",))
    if engine == "ray":
        runner.need_ray()
    models.resolve(model)
    with folder.claimed("sweep", settings, may_grow=("seeds",)):
        todo = [_job(config, folder, label, made) for label, _, made in planned if not _finished(made)]
        progress = Progress()
        if not folder.reference.is_file():
            first = _job(config, folder, planned[0][0], planned[0][2])
            with progress.live("reference", 1):
                runner.run_local([first], kind="reference", at_once=1, logs=folder.logs, progress=progress)
        already = sum(records.last_step(Path(job.config["run"])) for job in todo)
        with progress.live("sweep", sum(job.steps for job in todo), already):
            if engine == "ray":
                runner.run_ray(todo, at_once=at_once, progress=progress)
            else:
                at_once = runner.processes(at_once, len(todo))
                runner.run_local(todo, at_once=at_once, logs=folder.logs, progress=progress)
        return load(config, folder)


def plan(config: SweepConfig, folder: Folder) -> list[tuple[str, dict[str, Any], ResolvedConfig]]:
    """(label, what varies, configuration) of every run, all of them checked."""
    base, assigned, planned = config.base(), config.assigned(), []
    points = config.points()
    twice = [field for field in assigned if field in points[0]]
    if twice:
        raise ConfigError(f"--set and --over both give {twice[0]}. Leave it out of --set.")
    for n, changes in enumerate(points):
        label = sweep_grammar.label(changes)
        made = _made(base, {**assigned, **changes})
        home = folder.runs / sweep_grammar.folder(changes, n)
        # A seed that is swept over is the point's own; otherwise every point has the same few.
        seeds = [made.seed] if "seed" in changes else range(made.seed, made.seed + config.seeds)
        planned += [(label, changes, replace(made, seed=s, run=str(home / f"seed-{s}"))) for s in seeds]
    for field in points[0]:
        if len(points) > 1:
            _check_used(field, [made for _, _, made in planned])
    if len({_model(made) for _, _, made in planned}) > 1:
        raise ConfigError(
            "--over varies model or prompts; held-out text and references would differ. Sweep them apart."
        )
    if len({made.kl.unit for _, _, made in planned}) > 1:
        raise ConfigError("--over varies kl.per; KLs in several units are not on one axis. Sweep them apart.")
    return planned


def _made(base: TrainConfig, changes: dict[str, Any]) -> ResolvedConfig:
    try:
        return sweep_grammar.apply(base, changes).resolved()
    except ConfigError as error:
        raise ConfigError(f"{sweep_grammar.label(changes)}: {error} Fields go into --set, one at a time.") from None


def _check_used(field: str, runs: list[ResolvedConfig]) -> None:
    """Refuse to vary what no run of the sweep reads: all its points would be one and the same."""
    found = [unused(field, made) for made in runs]
    if all(found):
        why, setting = next(reason for reason in found if reason)
        way_out = f", or add --set {setting}" if setting else ""
        raise ConfigError(f"--over {field} has no effect: {why}. Sweep another field{way_out}.")


def load(config: SweepConfig, folder: Folder) -> Sweep:
    """The sweep on disk."""
    grouped: dict[str, tuple[dict[str, Any], list[records.Record]]] = {}
    planned = plan(config, folder)
    for label, changes, made in planned:
        grouped.setdefault(label, (changes, []))[1].append(records.read(Path(made.run)))
    targets = {None if unused("kl.target", made) else made.kl.goal for _, _, made in planned}
    target = targets.pop() if len(targets) == 1 else None
    points = [Point(name, c, runs, figures(name, runs, target)) for name, (c, runs) in grouped.items()]
    return Sweep(folder.path, points, target, planned[0][2].kl.unit, job_process.read_reference(folder.reference))


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


def headline(found: Sweep) -> str:
    """The finding in at most fifteen words."""
    if not found.frontier:
        return "No run measured a finite KL."
    return f"{len(found.frontier)} of {len(found.points)} points are on the reward-KL frontier."


def sentence(found: Sweep) -> str:
    """Where the frontier lies."""
    front = found.frontier
    if not front:
        return "No run measured a finite KL: there is no frontier."
    ends = [f"{p.label} (reward {p.figures.reward:.3f} at KL {p.figures.kl:.3g})" for p in (front[0], front[-1])]
    between = ends[0] if len(front) == 1 else f"from {ends[0]} to {ends[1]}"
    return f"{len(front)} of {len(found.points)} points are on the reward-KL frontier: {between}."


def _job(config: SweepConfig, folder: Folder, label: str, made: ResolvedConfig) -> Job:
    return job_process.job(f"{label} seed {made.seed}", made, folder.reference.resolve(), heldout=config.heldout)


def _finished(made: ResolvedConfig) -> bool:
    return records.finished(Path(made.run), made.steps)


def _model(made: ResolvedConfig) -> tuple[str, str | None]:
    return made.model, made.prompts
