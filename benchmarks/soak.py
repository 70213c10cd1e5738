"""A soak: memory, file handles and threads of a long run, early against late.

``python benchmarks/soak.py`` trains the built-in model for 5,000 steps with everything on (LoRA, exact KL, price,
clamp, monitor, metrics, samples, checkpoints) and reads the process at step 500 and at step 5,000. Growth of 2 % or
more in any of them is a leak: exit status 1. Batches are small, so that the steps are many: what leaks, leaks by step.
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from klamp.train.config import KLConfig, LoraConfig, OptimConfig, RolloutConfig, TrainConfig
from klamp.train.loop import Trainer

SPAN = 50
"""Readings are medians over this many steps: a single step may hold a buffer that the next one gives back."""


@dataclass(frozen=True)
class Reading:
    """What the process holds. Python's objects are counted to tell a leak of ours from one of an allocator."""

    rss: float
    handles: float
    threads: float
    objects: float

    def growth(self, later: Reading) -> dict[str, float]:
        """Percent that each figure grew by."""
        return {k: 100 * (v / vars(self)[k] - 1) for k, v in vars(later).items()}


def say(text: str) -> None:
    """A line now, also into a pipe."""
    print(text, flush=True)


def rss() -> int:
    """Resident bytes of this process, by the kernel."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def read() -> Reading:
    """The process as it is now."""
    gc.collect()
    threads = len(os.listdir("/proc/self/task"))
    return Reading(rss(), len(os.listdir("/proc/self/fd")), threads, len(gc.get_objects()))


class Watch:
    """Called after every step; reads the process over the last ``SPAN`` steps before each mark."""

    def __init__(self, marks: tuple[int, int], tell: Callable[[str], None]) -> None:
        self.marks, self.tell = marks, tell
        self.seen: dict[int, list[Reading]] = {mark: [] for mark in marks}
        self.begun = time.monotonic()

    def __call__(self, step: int, trainer: Trainer) -> dict[str, float]:
        """No metrics of its own."""
        for mark in self.marks:
            if mark - SPAN < step <= mark and step % 5 == 0:
                self.seen[mark].append(read())
        if step % 500 == 0:
            self.tell(f"step {step}: {rss() / 2**20:.1f} MiB, {time.monotonic() - self.begun:.0f} s")
        return {}

    def reading(self, mark: int) -> Reading:
        """Medians over the span before ``mark``."""
        found = self.seen[mark]
        return Reading(*(sorted(vars(r)[name] for r in found)[len(found) // 2] for name in vars(found[0])))


def soak(run: Path, early: int, late: int, tell: Callable[[str], None] = say) -> tuple[Reading, Reading]:
    """Train ``late`` steps in ``run`` and return the readings at ``early`` and ``late``."""
    config = TrainConfig(
        model="tiny",
        run=str(run),
        steps=late,
        device="cpu",
        save_every=50,
        sample_every=10,
        kl=KLConfig(target=0.05, per="token"),
        rollout=RolloutConfig(prompts=1, group_size=2, max_tokens=4),
        optim=OptimConfig(lr=1e-3),
        lora=LoraConfig(rank=4, alpha=8.0),
    )
    watch = Watch((early, late), tell)
    Trainer(config, quiet=True, watch=watch).run()
    return watch.reading(early), watch.reading(late)


def table(early: Reading, late: Reading, steps: tuple[int, int]) -> str:
    """Both readings and the growth, as Markdown."""
    grown = early.growth(late)
    lines = [f"| | step {steps[0]:,} | step {steps[1]:,} | growth |", "| --- | ---: | ---: | ---: |"]
    lines.append(f"| memory (RSS) | {early.rss / 2**20:.1f} MiB | {late.rss / 2**20:.1f} MiB | {grown['rss']:+.2f} % |")
    for name, title in (("handles", "file handles"), ("threads", "threads"), ("objects", "Python objects")):
        lines.append(f"| {title} | {vars(early)[name]:.0f} | {vars(late)[name]:.0f} | {grown[name]:+.2f} % |")
    return "\n".join(lines)


def main() -> int:
    """Soak, print, judge."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--early", type=int, default=500, help="step of the first reading")
    parser.add_argument("--late", type=int, default=5000, help="step of the second reading, and the last")
    parser.add_argument("--most", type=float, default=2.0, help="growth in percent that fails")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        early, late = soak(Path(folder) / "run", args.early, args.late)
    print(table(early, late, (args.early, args.late)))
    worst = max(early.growth(late).values())
    print(f"largest growth {worst:.2f} %, limit {args.most:g} %: {'holds' if worst < args.most else 'LEAKS'}")
    return int(worst >= args.most)


if __name__ == "__main__":
    raise SystemExit(main())
