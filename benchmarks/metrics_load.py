"""A run of a million steps: how long ``klamp report`` and ``--resume`` take to read it, and in how much memory.

``python benchmarks/metrics_load.py`` writes a made-up run folder with a million lines as the trainer writes them, then
measures each in a process of its own: importing alone (what any klamp command costs), the report, and everything that
resuming reads and cuts. Figures are in docs/reliability.md.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

PIECES = 1000
"""Different lines; they repeat with another step. Writing is not what is measured."""


def write_run(run: Path, steps: int, *, spike: int | None = None) -> None:
    """config.yaml, metrics.jsonl of ``steps`` lines, alarms; KL jumps to 9 nats at step ``spike``, for one step."""
    from klamp.config_io import to_yaml
    from klamp.train.config import TrainConfig

    run.mkdir(parents=True)
    (run / "config.yaml").write_text(to_yaml(TrainConfig(run=str(run), steps=steps)))
    bodies = [json.dumps(row(i))[1:] for i in range(PIECES)]
    with (run / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            body = bodies[step % PIECES]
            if step == spike:
                body = json.dumps({**row(step % PIECES), "kl/steered": 9.0})[1:]
            file.write(f'{{"step": {step}, {body}\n')
    with (run / "alarms.jsonl").open("w") as file:
        for step in range(100, steps + 1, 100):
            alarm = {"kind": "spike", "step": step, "message": "KL jumped.", "figures": {"kl": 0.3}}
            file.write(json.dumps(alarm) + "\n")


def row(i: int) -> dict[str, float]:
    """The metrics of a step as the trainer names them."""
    noise = random.Random(i)
    kl = 0.05 * math.exp(noise.gauss(0, 0.1))
    names = ("kl/ref/k1", "kl/ref/k3", "kl/sampler/k1", "kl/clamp/before", "kl/clamp/after", "kl/clamp/effort")
    names += ("kl/clamp/limit", "kl/clamp/level", "loss/policy", "loss/price", "policy/clipped", "policy/entropy")
    names += ("kl/noise", "reward/no_signal")
    names += ("reward/vader", "reward/failed", "length/mean", "length/ended", "reward/std", "train/tokens")
    names += ("policy/spread", "train/skipped", "train/lr", "train/grad_norm", "time/sample", "time/reward")
    names += ("time/update", "time/watch", "time/step", "time/tokens_per_second")
    given = {"kl/ref/exact": kl, "kl/steered": kl, "kl/beta": 0.4 + 0.1 * noise.random(), "kl/target": 0.05}
    given |= {"kl/in_band": 1.0, "reward/mean": 0.5 + noise.gauss(0, 0.1)}
    given |= {name: noise.random() for name in names}
    read = {"heldout/perplexity": 9.0, "heldout/perplexity_reference": 6.0, "kl/fresh": kl, "kl/fresh_noise": 0.04}
    return given if i % 5 else given | read


def imported(run: Path) -> str:
    """What both need before they read a line."""
    import klamp.report
    import klamp.train.run_folder  # noqa: F401

    return ""


def report(run: Path) -> str:
    """``klamp report RUN``."""
    from klamp.report import write_runs

    return f"page of {write_runs([run]).stat().st_size / 2**20:.1f} MiB"


def resume(run: Path) -> str:
    """What ``--resume`` does to the run's files, going on ten steps before the end."""
    from klamp.train.run_folder import RunFolder

    folder = RunFolder(run)
    last = int(folder.last_step())
    folder.rewind(last - 10)
    return f"back to step {folder.last_step()}, {len(folder.last())} metrics"


def measured(work: Callable[[Path], str], run: Path) -> tuple[float, float, float, str]:
    """(seconds, seconds of CPU, peak MiB of RSS, what it says) of ``work`` in a fresh process."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(_timed, (work, run))


def _timed(work: Callable[[Path], str], run: Path) -> tuple[float, float, float, str]:
    imported(run)
    begun, worked = time.perf_counter(), time.process_time()
    said = work(run)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
    return time.perf_counter() - begun, time.process_time() - worked, peak, said


def main() -> int:
    """Write, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=1_000_000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        write_run(run, args.steps, spike=args.steps // 3)
        size = (run / "metrics.jsonl").stat().st_size
        print(f"{args.steps:,} steps, metrics.jsonl of {size / 2**20:.0f} MiB\n")
        print("| | seconds | of CPU | peak memory | |\n| --- | ---: | ---: | ---: | --- |")
        for name, work in (("imports alone", imported), ("report", report), ("resume", resume)):
            seconds, cpu, peak, said = measured(work, run)
            print(f"| {name} | {seconds:.2f} | {cpu:.2f} | {peak:.0f} MiB | {said} |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
