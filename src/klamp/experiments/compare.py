"""``klamp compare``: the same prompts and seeds under several ways of steering beta, the arms of a comparison.

Only the KL settings differ between arms. Rivals run with the settings they are published with; Hold is told its target
and nothing else. The oracle is the best of several constants in hindsight: seven a factor of 2 apart on the first seed,
then seven around the best of those on every seed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from klamp import models
from klamp.errors import ConfigError, require_number, unknown
from klamp.experiments import job_process, runner
from klamp.experiments.folder import Folder, read_settings
from klamp.experiments.job_process import Job
from klamp.masked import Unit, check_unit
from klamp.progress import Progress
from klamp.prompts import load_prompts
from klamp.results import records
from klamp.results.promises import FRESH
from klamp.results.statistics import ADAPTIVE, Comparison, figures
from klamp.train import rewards
from klamp.train.config import AlgorithmConfig, KLConfig, OptimConfig, RewardConfig, RolloutConfig, TrainConfig
from klamp.train.kl_config import USUAL_TARGET

ARMS = ("static", *ADAPTIVE)
COARSE = 2.0
FINE = 2.0**0.25
"""Ratios between neighbouring constants: KL goes as 1 / beta^2, so a fine step changes it by 1.4."""
CONSTANTS = 7


@dataclass(frozen=True)
class Arm:
    """A name and the fields of KLConfig that make it."""

    name: str
    summary: str
    kl: dict[str, Any] = field(default_factory=dict)


def named_arm(name: str, static_beta: float) -> Arm:
    """The arm called ``name``."""
    if name == "static":
        return Arm(name, f"beta = {static_beta:g}", {"controller": "fixed", "beta": static_beta, "clamp": False})
    if name == "ziegler":
        summary = "Ziegler et al. 2019, from 0.2, horizon 10000"
        return Arm(name, summary, {"controller": "ziegler", "beta": 0.2, "clamp": False})
    if name == "exponential":
        summary = "exponential rule, from 0.1, gain 0.1"
        return Arm(name, summary, {"controller": "exponential", "beta": 0.1, "clamp": False})
    if name == "hold-price":
        return Arm(name, "Hold, price only", {"controller": "hold", "clamp": False})
    if name == "hold":
        return Arm(name, "Hold, price and clamp", {"controller": "hold", "clamp": True})
    if name.startswith("beta="):
        return constant_arm(_beta_of(name))
    raise unknown("arm", name, (*ARMS, "beta=NUMBER"))


def constant_arm(beta: float) -> Arm:
    """A constant price, named after it."""
    return Arm(f"beta={beta:.4g}", f"beta = {beta:.4g}", {"controller": "fixed", "beta": beta, "clamp": False})


def parse_arms(names: Sequence[str] | str, static_beta: float) -> list[Arm]:
    """Arms from names with commas or without, each once, in the order given."""
    require_number("--static-beta", static_beta, at_least=0, way_out="It is the static arm's price; 0.04 is usual.")
    listed = [names] if isinstance(names, str) else list(names)
    flat = [part.strip() for text in listed for part in str(text).split(",") if part.strip()]
    if not flat:
        raise ConfigError(f"--arms is empty. Choose from: {', '.join(ARMS)}.")
    return [named_arm(name, static_beta) for name in dict.fromkeys(flat)]


def coarse_constants(target: float, length: float) -> list[float]:
    """Seven constants a factor 2 apart around Hold's computed price, ``1 / sqrt(2 target per sequence)``.

    Constants that held a target lay at 0.5 to 1.9 of it (docs/log/2026-11-15-hold-study.md), and these reach from an
    eighth of it to eight times it.
    """
    centre = 1 / math.sqrt(2 * target * length)
    return [_round(centre * COARSE**i) for i in range(-(CONSTANTS // 2), CONSTANTS // 2 + 1)]


def fine_constants(around: float) -> list[float]:
    """Seven constants a quarter of an octave apart around one."""
    return [_round(around * FINE**i) for i in range(-(CONSTANTS // 2), CONSTANTS // 2 + 1)]


def _round(x: float) -> float:
    return float(f"{x:.4g}")


def _beta_of(name: str) -> float:
    text = name.removeprefix("beta=")
    try:
        value = float(text)
    except ValueError:
        raise ConfigError(f"arm {name!r}: {text!r} is not a number. Write it as beta=0.3.") from None
    return require_number(f"arm {name!r}", value, at_least=0, way_out="A price is never negative.")


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """A comparison. Everything but ``arms``, ``seeds`` and ``oracle`` is the same for every run."""

    arms: tuple[str, ...] = ARMS
    """Which arms: static, ziegler, exponential, hold-price (no clamp), hold, or a constant beta=NUMBER."""
    seeds: int = 3
    """Seeds of every arm."""
    target: float | None = None
    """KL to hold, in nats per --per. None: 0.05 per token."""
    per: Unit | None = None
    """Unit of the target: token, sequence or sequence_mean. Needed with --target."""
    model: str = "tiny"
    """A built-in name (tiny, smollm2, smollm2-q4), a folder or a Hub id."""
    prompts: str | None = None
    """JSONL or text file of prompts; the built-in models bring their own."""
    reward: tuple[str, ...] = ("vader",)
    """vader, length:N, regex:PATTERN, match:COLUMN, model:NAME or your own module:function; several are added up."""
    steps: int | None = None
    """Steps of every run. None: 60 for the built-in models, 100 for others."""
    algorithm: Literal["grpo", "ppo"] = "grpo"
    """grpo or ppo."""
    static_beta: float = 0.04
    """Price of the static arm."""
    oracle: bool = False
    """Add the best constant beta in hindsight, of seven coarse and seven fine ones; reward is compared at equal KL."""
    heldout: str | None = None
    """Text file for held-out perplexity, one passage per line."""
    lr: float | None = None
    """Learning rate. None: 1.5e-3 for tiny, 5e-4 for smollm2, 5e-4 · (576 / hidden size)^(3/4) for others."""
    prompts_per_step: int | None = None
    """Prompts per step. None: 4 for the built-in models, 8 for others."""
    group_size: int | None = None
    """Completions per prompt. None: 8."""
    max_tokens: int | None = None
    """Longest completion. None: 24 tokens for the built-in models, 128 for others."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """bfloat16 on a GPU and float32 on a CPU if auto."""
    device: str = "auto"
    """cpu, cuda, or auto."""
    trust_remote_code: bool = False
    """Let a model repository run its own code."""

    def __post_init__(self) -> None:
        require_number("--seeds", self.seeds, at_least=1, way_out="3 is usual; one gives no interval.")
        for name in ("steps", "prompts_per_step", "max_tokens"):
            if (count := getattr(self, name)) is not None:
                require_number(f"--{name.replace('_', '-')}", count, at_least=1, way_out="It is a count.")
        least = 2 if self.algorithm == "grpo" else 1
        way_out = "GRPO compares completions of one prompt; --algorithm ppo does not."
        if self.group_size is not None:
            require_number("--group-size", self.group_size, at_least=least, way_out=way_out)
        if self.lr is not None:
            require_number("--lr", self.lr, above=0, way_out="Leave it out for a usual one.")
        parse_arms(self.arms, self.static_beta)
        if self.target is None and self.per not in (None, "token"):
            raise ConfigError(f"--per {self.per} needs a --target in nats per {self.per}.")
        if self.target is not None:
            check_unit("--per", self.per)
            require_number("--target", self.target, above=0, way_out="It is a KL in nats; 0.05 per token is usual.")
        models.resolve(self.model) if not self.model.startswith("smollm2") else None
        load_prompts(self.prompts, self.model)
        for name in self.reward:
            if not name.startswith("model:"):
                rewards.resolve(name)
        if self.heldout is not None and not Path(self.heldout).is_file():
            raise ConfigError(f"--heldout {self.heldout!r} is not a file. Give a text file, one passage per line.")

    def resolved(self) -> ResolvedComparison:
        """With its usual values written out: left out or spelt out, they are the same comparison."""
        usual = models.usual(self.model, trust_remote_code=self.trust_remote_code)
        numbers = {
            "target": self.target or USUAL_TARGET,
            "per": self.per or "token",
            "steps": self.steps or usual.steps,
            "lr": self.lr or usual.lr,
            "prompts_per_step": self.prompts_per_step or usual.prompts,
            "group_size": self.group_size or usual.group_size,
            "max_tokens": self.max_tokens or usual.max_tokens,
        }
        return ResolvedComparison(**{**vars(self), **numbers})


@dataclass(frozen=True, kw_only=True)
class ResolvedComparison(CompareConfig):
    """A comparison in numbers: what :meth:`CompareConfig.resolved` makes and is run."""

    target: float
    per: Unit
    steps: int
    lr: float
    prompts_per_step: int
    group_size: int
    max_tokens: int

    def train_config(self, arm: Arm, seed: int, run: Path) -> TrainConfig:
        """The run of one arm and seed."""
        return TrainConfig(
            model=self.model,
            prompts=self.prompts,
            run=str(run),
            steps=self.steps,
            seed=seed,
            dtype=self.dtype,
            device=self.device,
            trust_remote_code=self.trust_remote_code,
            keep=1,
            sample_every=max(1, self.steps),
            kl=KLConfig(**{"target": self.target, "per": self.per, **arm.kl}),
            rollout=RolloutConfig(
                prompts=self.prompts_per_step, group_size=self.group_size, max_tokens=self.max_tokens
            ),
            reward=RewardConfig(functions=self.reward),
            algorithm=AlgorithmConfig(name=self.algorithm),
            optim=OptimConfig(lr=self.lr),
        )


MAY_GROW = ("arms", "seeds", "oracle")


def run(config: CompareConfig, out: str | Path, *, at_once: int = 0) -> Comparison:
    """Every arm and seed, those already finished left alone; then what is on disk, read back."""
    folder = Folder(out)
    # Fetched here, where its progress is seen and before the folder is claimed; the folder names what came.
    asked = replace(config, model=models.canonical(config.model))
    config = _grown(asked.resolved(), folder)
    chosen = parse_arms(config.arms, config.static_beta)
    runner.check_asked(at_once)
    _check_runs(config, chosen, folder)
    left_out = replace(asked, target=None, per=None, lr=None).resolved()
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
            fine = [constant_arm(b) for b in fine_constants(float(best.kl["beta"]))]
            _train(config, folder, [(arm, seed) for seed in range(config.seeds) for arm in fine], at_once)
        return load(folder.path, config, chosen)


def _grown(config: ResolvedComparison, folder: Folder) -> ResolvedComparison:
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


def load(path: Path, config: ResolvedComparison, chosen: Sequence[Arm]) -> Comparison:
    """The comparison in ``path``, of which everything was run."""
    folder = Folder(path)
    target = config.target
    arms = {a.name: _records(config, folder, a) for a in chosen}
    constants: dict[str, list[records.Record]] = {}
    if config.oracle:
        coarse = _coarse(config, folder)
        if not all((run_folder(folder, arm, 0) / "metrics.jsonl").is_file() for arm in coarse):
            raise ConfigError(
                f"{str(path)!r} lacks constants that the oracle is chosen from: it was stopped before, or an earlier "
                "klamp took others. Run the same klamp compare again; it runs what is missing."
            )
        best = closest(config, folder, coarse)
        for beta in fine_constants(float(best.kl["beta"])):
            constants[constant_arm(beta).name] = _records(config, folder, constant_arm(beta))
    oracle = best_constant(constants, target, config.steps) if constants else None
    reference = job_process.read_reference(folder.reference)
    return Comparison(path, target, config.per, arms, constants, oracle, reference)


def best_constant(constants: dict[str, list[records.Record]], target: float, steps: int) -> str:
    """The constant with the largest share of the second half's steps in band.

    One that enters the band in the second half only, or not with every seed, comes after all others: of those the one
    whose KL ends nearest the target.
    """

    def rank(name: str) -> tuple[bool, float, float]:
        found = figures(name, constants[name], target)
        settled = found.entered == found.seeds and found.held_steps >= found.seeds * steps / 2
        return (settled, found.settled if settled else 0.0, -abs(found.kl / target - 1))

    return max(constants, key=rank)


def closest(config: ResolvedComparison, folder: Folder, coarse: list[Arm]) -> Arm:
    """Of the coarse constants the one whose late KL is nearest the target, as a ratio."""
    target = config.target

    def distance(arm: Arm) -> float:
        kl = figures(arm.name, [records.read(run_folder(folder, arm, 0))], target).kl
        return max(kl / target, target / kl) if kl > 0 else float("inf")

    return min(coarse, key=distance)


def run_folder(folder: Folder, arm: Arm, seed: int) -> Path:
    """Where the run of an arm and seed lies."""
    return folder.runs / arm.name / f"seed-{seed}"


def _coarse(config: ResolvedComparison, folder: Folder) -> list[Arm]:
    per = config.per
    length = 1.0 if per == "sequence" else float(job_process.read_reference(folder.reference)["length"])
    return [constant_arm(b) for b in coarse_constants(config.target, length)]


def _job(config: ResolvedComparison, folder: Folder, arm: Arm, seed: int) -> Job:
    made = config.train_config(arm, seed, run_folder(folder, arm, seed))
    return job_process.job(f"{arm.name} seed {seed}", made, folder.reference, heldout=config.heldout, fresh=FRESH)


def _check_runs(config: ResolvedComparison, chosen: Sequence[Arm], folder: Folder) -> None:
    """Make every configuration once before anything runs: a wrong one is refused now."""
    for arm in chosen:
        config.train_config(arm, 0, run_folder(folder, arm, 0))


def _reference(config: ResolvedComparison, arm: Arm, folder: Folder) -> None:
    if folder.reference.is_file():
        return
    progress = Progress()
    with progress.live("reference", 1):
        job = _job(config, folder, arm, 0)
        runner.run_local([job], kind="reference", at_once=1, logs=folder.logs, progress=progress)


def _train(config: ResolvedComparison, folder: Folder, wanted: Sequence[tuple[Arm, int]], at_once: int) -> None:
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


def _records(config: ResolvedComparison, folder: Folder, arm: Arm) -> list[records.Record]:
    return [records.read(run_folder(folder, arm, seed)) for seed in range(config.seeds)]
