"""Hold on rewards of many kinds, against constant prices at the same KL: the benchmark that decides about the law.

    python benchmarks/any_reward.py --half development --out dev.jsonl              # tiny, two processes
    python benchmarks/any_reward.py --half held-out --out held.jsonl
    python benchmarks/any_reward.py --show held.jsonl dev.jsonl                     # tables of finished runs
    python benchmarks/any_reward.py --page                                          # those of docs/results.md

One line a run is appended to ``--out`` as it finishes; a second call takes up where the first ended. Runs at constant
prices, in which no controller has a part, are kept beside this file (``--reuse`` takes others; ``--reuse`` without a
file runs all of them again, as after a change to the trainer). ``--models smollm2`` runs on a GPU.
``--set optim.lr=6e-3`` gives every run another setting of ``klamp train``; its tables stand apart.
For each reward and learning rate the table has the highest KL, KL in the last third, the reward gained there as a share
of what constant prices gain at the same KL, the clamp's effort, and the price over ``rho0 spread``.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import many_rewards

CONSTANTS = Path(__file__).with_name("any_reward_constants.jsonl.gz")
HELD = Path(__file__).with_name("any_reward_hold.jsonl.gz")
"""Runs of Hold as it is, those of docs/results.md."""
CALIBRATED = ("kl.per", "kl.limit", "model", "seed", "run")
"""Settings that would need a calibration of their own, or other figures. So do constant prices with ``rollout.``."""
TARGET, LIMIT = 0.05, 1.1
GROUP = 8
FRESH = 256
PROBED = 32
"""Prompts that the reward is measured on in every other step of the last third, beside the batch that is trained on."""
CLIMB = 15
"""Steps to the target, about: a horizon of Ziegler's rule is four times as long, as docs/controllers.md has it."""
OTHERS = ("static", "ziegler", "ff", "ziegler-ff", "ff-clamp")
"""Other rules: a constant 0.04, Ziegler's with its usual settings, and three that start at the computed price."""
UNIT = 0.65
"""Constant prices are multiples of this share of Hold's computed price, where Hold once started."""


@dataclass(frozen=True)
class Setting:
    """What a model is trained with."""

    prompts: int
    tokens: int
    rates: tuple[float, float]
    """The usual learning rate, and a tenth of it."""
    steps: tuple[int, int] = (60, 120)
    multiples: tuple[float, ...] = (0.5, 0.8, 1.25, 2.0, 3.2)
    """Constant prices, in multiples of UNIT of the feed-forward; every other one at the low rate."""
    dtype: str = "auto"
    drawn: int = 8192
    """Completions of the reference that the rewards are calibrated on."""


SETTINGS = {
    "tiny": Setting(4, 24, (1.5e-3, 1.5e-4), dtype="float32"),  # on a GPU too
    "smollm2": Setting(16, 48, (5e-4, 5e-5), (60, 60), (0.7, 1.2, 2.0, 3.4)),
}


@dataclass(frozen=True)
class Job:
    """One run."""

    model: str
    reward: str
    rate: int
    """0: the usual learning rate, 1: a tenth of it."""
    arm: str
    seed: int
    settings: str = ""
    """``optim.lr=6e-3 full=true``: fields of klamp train's configuration that are not as usual."""


def constant(arm: str) -> bool:
    """Whether a run of this arm is the same whatever Hold does."""
    return arm.startswith("x ") or (arm in OTHERS and arm != "ff-clamp")


def jobs(model: str, half: str, given: argparse.Namespace) -> Iterator[Job]:
    """Every run of one half, those that matter most first."""
    arms = given.arms
    rewards = [name for name in many_rewards.HALVES[half] if not given.rewards or name in given.rewards]
    constants = [f"x {m:g}" for m in given.multiples or SETTINGS[model].multiples]
    few = constants[::2]
    for seed in range(given.seeds):
        for rate in given.rates:
            for reward in rewards:
                learned = reward not in many_rewards.NOTHING
                wanted = [a for a in arms if a.startswith("hold")]
                wanted += (constants if rate == 0 else few) if learned and "constants" in arms else []
                wanted += [a for a in OTHERS if a in arms and rate == 0]
                for arm in wanted:
                    yield Job(model, reward, rate, arm, seed, " ".join(sorted(given.set)))


def calibration(model: str, known: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """Completions of the reference: their length, the words of sparse rewards, the spread of each reward.

    What ``known``, a calibration with fewer rewards, says already stays: runs that are kept were made with it.
    """
    made = SETTINGS[model]
    with _trainer(Job(model, "never", 0, "static", 0), {"words": {}, "price": 1.0}, steps=1) as trainer:
        prompts, texts, tokens = [], [], 0.0
        for step in range(made.drawn // (PROBED * GROUP)):
            rollout = drawn(trainer, step, seed=0)
            prompts += rollout.prompts
            texts += rollout.completions
            tokens += float(rollout.mask.sum())
    found = many_rewards.calibrate(prompts, texts, GROUP, known.get("words", {}))
    length = tokens / len(texts)
    if known:
        return {**known, **{name: {**values, **known[name]} for name, values in found.items()}}
    return {"model": model, "length": length, "price": UNIT / (2 * TARGET * length) ** 0.5, **found}


def drawn(trainer: Any, step: int, seed: int) -> Any:
    """Completions of the policy as it is, for ``PROBED`` prompts that only ``step`` decides, whatever the run."""
    import torch

    picked = trainer.prompts.of_step(step, PROBED, 0)
    generator = torch.Generator(trainer.learner.device).manual_seed(10**6 * seed + step)
    prompts = [trainer.prompts.given[i] for i in picked]
    return trainer.sampler.sample([trainer.encoded[i] for i in picked], prompts, generator)


class Probe:
    """The reward in the last third of a run, on completions of its own: the batches alone leave a tenth of noise."""

    def __init__(self, trainer: Any, job: Job, known: dict[str, Any]) -> None:
        self.trainer, self.seed = trainer, job.seed
        self.reward = many_rewards.settled(job.reward, known["words"])
        self.found: list[float] = []
        self.take, trainer._take = trainer._take, self

    def __call__(self, step: int) -> Any:
        """Stands in for the trainer's own drawing of a batch."""
        if step > 2 * self.trainer.config.steps // 3 and step % 2 == 0:
            rollout = drawn(self.trainer, step, self.seed)
            self.found.append(fmean(self.reward(rollout.prompts, rollout.completions)))
        return self.take(step)


class _trainer:
    """A Trainer in a folder that is removed afterwards."""

    def __init__(self, job: Job, known: dict[str, Any], steps: int | None = None) -> None:
        self.job, self.known, self.steps = job, known, steps

    def __enter__(self) -> Any:
        from klamp.experiments import sweep_grammar
        from klamp.train.config import KLConfig, OptimConfig, RolloutConfig, TrainConfig
        from klamp.train.loop import Trainer

        job, made = self.job, SETTINGS[self.job.model]
        self.folder = tempfile.mkdtemp(prefix="any-reward-")
        steps = self.steps or made.steps[job.rate]
        config = TrainConfig(
            model=job.model,
            run=str(Path(self.folder) / "run"),
            steps=steps,
            seed=job.seed,
            dtype=made.dtype,
            save_every=10**6,
            sample_every=10**6,
            keep=1,
            preflight=False,
            kl=KLConfig(target=TARGET, per="token", **arm(job, self.known)),
            rollout=RolloutConfig(prompts=made.prompts, group_size=GROUP, max_tokens=made.tokens),
            optim=OptimConfig(lr=made.rates[job.rate]),
        )
        if job.settings:
            config = sweep_grammar.apply(config, dict(map(sweep_grammar.assignment, job.settings.split())))
        reward = many_rewards.reward(job.reward, self.known["words"], job.seed)
        return Trainer(config, rewards=[reward], quiet=True)

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def arm(job: Job, known: dict[str, Any]) -> dict[str, Any]:
    """The fields of KLConfig that make an arm."""
    unit = known["price"] * (known.get("spreads", {}).get(job.reward) or 1.0)
    horizon = 4 * CLIMB * SETTINGS[job.model].prompts * GROUP
    if job.arm.startswith("x "):
        return {"controller": "fixed", "beta": unit * float(job.arm[2:]), "clamp": False}
    return {
        "hold": {"controller": "hold"},
        "hold-price": {"controller": "hold", "clamp": False},
        "static": {"controller": "fixed", "beta": 0.04, "clamp": False},
        "ziegler": {"controller": "ziegler", "beta": 0.2, "clamp": False},
        "ff": {"controller": "fixed", "beta": unit / UNIT, "clamp": False},
        "ziegler-ff": {"controller": "ziegler", "beta": unit / UNIT, "horizon": horizon, "clamp": False},
        "ff-clamp": {"controller": "fixed", "beta": unit / UNIT},
    }[job.arm.partition("@")[0]]


@contextlib.contextmanager
def _variant(arm: str) -> Iterator[None]:
    """``hold@SURPRISE=0.5,DRIFT=0.03``: the law with other constants, for ablations."""
    from klamp.controllers import hold

    changed = dict(pair.split("=") for pair in arm.partition("@")[2].split(",") if pair)
    before = {name: getattr(hold, name) for name in changed}
    for name, value in changed.items():
        setattr(hold, name, float(value))
    try:
        yield
    finally:
        for name, kept in before.items():
            setattr(hold, name, kept)


KEPT = {
    "kl": "kl/steered",
    "noise": "kl/noise",
    "beta": "kl/beta",
    "reward": "reward/mean",
    "spread": "policy/spread",
    "signal": "policy/signal",
    "effort": "kl/clamp/effort",
}


def run(job: Job, known: dict[str, Any]) -> dict[str, Any]:
    """Train, and read KL once more on fresh completions."""
    import torch

    from klamp.controllers import HoldState

    torch.set_num_threads(1)
    began = time.time()
    with _variant(job.arm), _trainer(job, known) as trainer:
        checkpoint = sys.modules["klamp.train.loop"].checkpoint
        checkpoint.save = lambda *_, **__: None  # nobody resumes these runs
        probe = None if job.reward in many_rewards.NOTHING else Probe(trainer, job, known)
        trainer.run()
        rows = [json.loads(line) for line in Path(trainer.folder.metrics).read_text().splitlines()]
        found = {name: [float(f"{row.get(key, 0.0):.5g}") for row in rows] for name, key in KEPT.items()}
        name = {"reward_name": job.reward, "late_reward": fmean(probe.found) if probe else 0.0}
        made = {"law": HoldState.law, "seconds": time.time() - began}
        return {**asdict(job), **name, **found, "fresh": fresh(trainer), **made}


def fresh(trainer: Any) -> list[float]:
    """KL of the final policy on completions of its own, and its standard error over prompts."""
    from klamp.experiments.job_process import token_kl

    each, counts = [], []
    per, group = trainer.config.rollout.prompts, trainer.config.rollout.group_size
    for i in range(max(1, FRESH // (per * group))):
        rollout = trainer.sample(10_000 + i)
        kl, mask = token_kl(trainer, rollout), rollout.mask.cpu()
        each += (kl * mask).sum(1).view(per, group).sum(1).tolist()
        counts += mask.sum(1).view(per, group).sum(1).tolist()
    mean = sum(each) / sum(counts)
    errors = [(k - mean * c) ** 2 for k, c in zip(each, counts, strict=True)]
    return [mean, (sum(errors) * len(each) / max(len(each) - 1, 1)) ** 0.5 / sum(counts)]


def read(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Every line of some files, the last one of a kind only."""
    return latest([json.loads(line) for path in paths if path.is_file() for line in _text(path).splitlines()])


def _text(path: Path) -> str:
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix == ".gz" else data).decode()


def latest(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last row of a kind only."""
    return list({key(row): row for row in rows}.values())


def key(row: dict[str, Any]) -> str:
    """What a line is the result of."""
    reward = row.get("reward_name", row.get("reward"))
    parts = (row["model"], reward, row.get("rate"), row.get("arm"), row.get("seed"))
    return "/".join(map(str, (*parts, *filter(None, [row.get("settings")]))))


def reused(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Runs at constant prices in ``paths`` and their calibrations."""
    if missing := [str(path) for path in paths if not path.is_file()]:
        raise SystemExit(f"--reuse: there is no {', '.join(missing)}. Pass --reuse alone to run every constant again.")
    return [row for row in read(paths) if "price" in row or constant(row["arm"])]


def work(given: argparse.Namespace) -> None:
    """Run what is not there yet, so many at a time a model, until the deadline."""
    have = {key(row): row for row in [*reused(given.reuse), *read([given.out])]}
    end = time.time() + given.seconds
    workers = dict(zip(given.models, given.workers, strict=True))
    pools = {m: ProcessPoolExecutor(n, mp_context=get_context("spawn")) for m, n in workers.items()}
    with given.out.open("a") as out:

        def keep(row: dict[str, Any]) -> None:
            have[key(row)] = row
            out.write(json.dumps(row) + "\n")
            out.flush()

        todo = {m: [j for half in given.half for j in jobs(m, half, given)] for m in given.models}
        known = {m: have.get(f"{m}/None/None/None/None", {}) for m in given.models}
        lacking = [m for m in todo if not {j.reward for j in todo[m]} <= known[m].get("means", {}).keys()]
        for done in [pools[m].submit(calibration, m, known[m]) for m in lacking]:
            keep(done.result())
        todo = {m: [j for j in listed if key(asdict(j)) not in have] for m, listed in todo.items()}
        _drain(pools, workers, todo, have, keep, end)
    for pool in pools.values():
        processes = list((pool._processes or {}).values())  # shutdown forgets them
        pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.kill()


def _drain(pools: Any, workers: dict[str, int], todo: Any, have: Any, keep: Any, end: float) -> None:
    """Feed every pool with its jobs, as many as it has processes, and keep what comes back."""
    running: dict[Future[dict[str, Any]], str] = {}
    total, began = sum(map(len, todo.values())), time.time()
    done = 0
    while True:
        for model, listed in todo.items():
            while listed and sum(m == model for m in running.values()) < workers[model]:
                job = listed.pop(0)
                running[pools[model].submit(run, job, have[f"{model}/None/None/None/None"])] = model
        if not running or time.time() > end:
            return
        finished, _ = wait(running, timeout=max(0.1, end - time.time()), return_when=FIRST_COMPLETED)
        for future in finished:
            del running[future]
            done += 1
            try:
                keep(future.result())
            except Exception as error:  # one run that fails must not take the others with it
                print(f"failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            print(f"{done} of {total} runs, {time.time() - began:.0f} s", file=sys.stderr, flush=True)


def pages() -> Iterator[tuple[str, list[str]]]:
    """The tables of docs/results.md, from the runs that are kept."""
    import any_reward_tables

    rows = read([CONSTANTS, HELD])
    for model in SETTINGS:
        for arm in any_reward_tables.COLUMNS:
            yield f"{model} {arm}", any_reward_tables.page(rows, model, arm)
    for model in SETTINGS:
        yield f"{model} beside other rules", any_reward_tables.beside(rows, model)
    yield "low rate", any_reward_tables.slow(rows)
    yield "rewards", any_reward_tables.rewards()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    halves = (*many_rewards.HALVES, "all")
    parser.add_argument(
        "--half",
        nargs="+",
        choices=halves,
        default=["development"],
        help="of the rewards, in the order they were written",
    )
    parser.add_argument(
        "--rewards", nargs="+", choices=tuple(many_rewards.WHAT), help="only these, whatever their half"
    )
    parser.add_argument("--models", nargs="+", choices=tuple(SETTINGS), default=["tiny"])
    parser.add_argument("--workers", nargs="+", type=int, default=[2], help="processes of each model")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument(
        "--multiples", nargs="+", type=float, help="constant prices, in multiples of 0.65 of Hold's computed one"
    )
    parser.add_argument("--rates", nargs="+", type=int, choices=(0, 1), default=[0, 1], help="usual and low rate")
    every = ("hold", "hold-price", "constants", *OTHERS)
    parser.add_argument(
        "--arms", nargs="+", default=every, help=f"of {', '.join(every)}, or hold@SURPRISE=0.5,DRIFT=0.03"
    )
    parser.add_argument(
        "--set",
        nargs="+",
        default=[],
        metavar="FIELD=VALUE",
        help="other settings of klamp train: optim.lr=6e-3 full=true",
    )
    parser.add_argument("--out", type=Path, default=Path("any_reward.jsonl"))
    parser.add_argument(
        "--reuse", nargs="*", type=Path, default=[CONSTANTS], help="files of earlier runs to take constants from"
    )
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after so long; runs under way are given up")
    parser.add_argument("--show", nargs="+", type=Path, help="only print the tables of these files")
    parser.add_argument("--page", action="store_true", help="only print the tables of docs/results.md, in Markdown")
    given = parser.parse_args()
    if given.page:
        print("\n".join(line for _, lines in pages() for line in [*lines, ""]))
        return
    if given.rewards or "all" in given.half:
        given.half = list(many_rewards.HALVES)
    needs = (*CALIBRATED, *([] if all(arm.startswith("hold") for arm in given.arms) else ["rollout."]))
    if fixed := [pair for pair in given.set if pair.startswith(needs)]:
        parser.error(f"--set {' '.join(fixed)}: prices and figures are those of a target per token and these rollouts")
    if not given.show:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        given.out.parent.mkdir(parents=True, exist_ok=True)
        work(given)
    import any_reward_tables

    own = read(given.show or [given.out])
    shown = {(row["model"], row["reward_name"]) for row in own if "arm" in row}
    kept = [r for r in reused(given.reuse) if "price" in r or (r["model"], r["reward_name"]) in shown]
    any_reward_tables.show(latest([*kept, *own]))


if __name__ == "__main__":
    main()
