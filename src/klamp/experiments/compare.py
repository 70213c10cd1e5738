"""``klamp compare``: the same prompts and seeds under several ways of steering beta.

Only the KL settings differ between arms. The oracle is the best of several constants in hindsight: seven a factor of 2
apart on the first seed, then seven around the best of those on every seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from klamp import models
from klamp.experiments import arms as arm_set
from klamp.experiments import jobs, runner
from klamp.experiments.arms import Arm
from klamp.experiments.folder import Folder, read_settings
from klamp.experiments.jobs import Job
from klamp.experiments.plan import CompareConfig as CompareConfig
from klamp.experiments.progress import Progress
from klamp.results import records
from klamp.results.figures import Figures, figures

MAY_GROW = ("arms", "seeds", "oracle")


@dataclass(frozen=True)
class Comparison:
    """What came of a comparison: every arm's runs, the constants the oracle was chosen from, the oracle's name."""

    folder: Path
    target: float
    per: str
    arms: dict[str, list[records.Record]]
    constants: dict[str, list[records.Record]]
    oracle: str | None
    reference: dict[str, Any]

    def figures(self) -> list[Figures]:
        """A row for each arm, the oracle last."""
        shown = dict(self.arms)
        if self.oracle is not None:
            shown[arm_set.ORACLE] = self.constants[self.oracle]
        return [figures(name, runs, self.target) for name, runs in shown.items()]


def run(config: CompareConfig, out: str | Path, *, at_once: int = 0) -> Comparison:
    """Every arm and seed, those already finished left alone; then what is on disk, read back."""
    folder = Folder(out)
    # Fetched here, where its progress is seen and before the folder is claimed; the folder names what came.
    config = replace(config, model=models.canonical(config.model))
    config = _grown(config.resolved(), folder)
    chosen = arm_set.parse(config.arms, config.static_beta)
    runner.check_asked(at_once)
    _check_runs(config, chosen, folder)
    left_out = replace(config, target=None, per=None, lr=None).resolved()
    usual = {"target": left_out.target, "per": left_out.per, "lr": left_out.lr}
    folder.check("compare", asdict(config), may_grow=MAY_GROW, usual=usual)
    models.resolve(config.model)
    with folder.claimed("compare", asdict(config), may_grow=MAY_GROW, usual=usual):
        _reference(config, chosen[0], folder)
        # The clamp's arm takes longest and comes last in the list: begun first, it does not run on alone at the end.
        _train(config, folder, [(arm, seed) for seed in range(config.seeds) for arm in reversed(chosen)], at_once)
        if config.oracle:
            coarse = _coarse(config, folder)
            _train(config, folder, [(arm, 0) for arm in coarse], at_once)
            best = closest(config, folder, coarse)
            fine = [arm_set.constant(b) for b in arm_set.fine_constants(float(best.kl["beta"]))]
            _train(config, folder, [(arm, seed) for seed in range(config.seeds) for arm in fine], at_once)
        return load(folder.path, config, chosen)


def _grown(config: CompareConfig, folder: Folder) -> CompareConfig:
    """``config`` with the arms, seeds and oracle that the folder holds already: asking for fewer drops none of them."""
    if not folder.settings.is_file():
        return config
    old = read_settings(folder.path)
    if old.get("kind") != "compare":
        return config  # refused when the folder is claimed
    arms, seeds = old.get("arms"), old.get("seeds")
    return replace(
        config,
        arms=tuple(dict.fromkeys((*(arms if isinstance(arms, list) else ()), *config.arms))),
        seeds=max(seeds if isinstance(seeds, int) else 0, config.seeds),
        oracle=config.oracle or old.get("oracle") is True,
    )


def load(path: Path, config: CompareConfig, chosen: Sequence[Arm]) -> Comparison:
    """The comparison in ``path``, of which everything was run."""
    folder = Folder(path)
    target = config.target or 0.05
    arms = {a.name: _records(config, folder, a) for a in chosen}
    constants: dict[str, list[records.Record]] = {}
    if config.oracle:
        best = closest(config, folder, _coarse(config, folder))
        for beta in arm_set.fine_constants(float(best.kl["beta"])):
            constants[arm_set.constant(beta).name] = _records(config, folder, arm_set.constant(beta))
    oracle = best_constant(constants, target, config.steps) if constants else None
    reference = jobs.read_reference(folder.reference)
    return Comparison(path, target, config.per or "token", arms, constants, oracle, reference)


def best_constant(constants: dict[str, list[records.Record]], target: float, steps: int) -> str:
    """The constant with the largest share of steps in band from first entry on.

    One that enters so late that the share rests on less than half of its steps, or not with every seed, comes after
    all others: of those the one whose KL ends nearest the target.
    """

    def rank(name: str) -> tuple[bool, float, float]:
        found = figures(name, constants[name], target)
        settled = found.entered == found.seeds and found.held_steps >= found.seeds * steps / 2
        return (settled, found.in_band if settled else 0.0, -abs(found.kl / target - 1))

    return max(constants, key=rank)


def closest(config: CompareConfig, folder: Folder, coarse: list[Arm]) -> Arm:
    """Of the coarse constants the one whose late KL is nearest the target, as a ratio."""
    target = config.target or 0.05

    def distance(arm: Arm) -> float:
        kl = figures(arm.name, [records.read(run_folder(folder, arm, 0))], target).kl
        return max(kl / target, target / kl) if kl > 0 else float("inf")

    return min(coarse, key=distance)


def run_folder(folder: Folder, arm: Arm, seed: int) -> Path:
    """Where the run of an arm and seed lies."""
    return folder.runs / arm.name / f"seed-{seed}"


def _coarse(config: CompareConfig, folder: Folder) -> list[Arm]:
    per = config.per or "token"
    length = 1.0 if per == "sequence" else float(jobs.read_reference(folder.reference)["length"])
    return [arm_set.constant(b) for b in arm_set.coarse_constants(config.target or 0.05, length)]


def _job(config: CompareConfig, folder: Folder, arm: Arm, seed: int) -> Job:
    made = config.train_config(arm, seed, run_folder(folder, arm, seed))
    return jobs.job(f"{arm.name} seed {seed}", made, folder.reference, heldout=config.heldout)


def _check_runs(config: CompareConfig, chosen: Sequence[Arm], folder: Folder) -> None:
    """Make every configuration once before anything runs: a wrong one is refused now."""
    for arm in chosen:
        config.train_config(arm, 0, run_folder(folder, arm, 0))


def _reference(config: CompareConfig, arm: Arm, folder: Folder) -> None:
    if folder.reference.is_file():
        return
    progress = Progress()
    with progress.live("reference", 1):
        job = _job(config, folder, arm, 0)
        runner.run_local([job], kind="reference", at_once=1, logs=folder.logs, progress=progress)


def _train(config: CompareConfig, folder: Folder, wanted: Sequence[tuple[Arm, int]], at_once: int) -> None:
    todo = [(a, s) for a, s in wanted if not records.finished(run_folder(folder, a, s), config.steps)]
    already = sum(records.last_step(run_folder(folder, a, s)) for a, s in todo)
    progress = Progress()
    with progress.live("compare", config.steps * len(todo), already):
        runner.run_local(
            [_job(config, folder, a, s) for a, s in todo],
            at_once=runner.processes(at_once, len(todo)),
            logs=folder.logs,
            progress=progress,
        )


def _records(config: CompareConfig, folder: Folder, arm: Arm) -> list[records.Record]:
    return [records.read(run_folder(folder, arm, seed)) for seed in range(config.seeds)]
