"""What the clamp loses by measuring a share of the sequences: the noise of its readings, and how well KL is held.

    python benchmarks/clamp_share.py                # tiny, a CPU: three seeds of 40 steps for each batch size

Both tables are of real runs on tiny. In the first, every step's KL after the update is read twice, from the share that
the clamp would take and from all sequences: root mean square of the relative difference, for the change carried to the
whole batch (what the clamp does) and for the share's own level; and where the clamp then scaled the displacement, for
what a few sequences tell of it, if it was a little. In the second the same runs are made with the clamp reading the
share and reading everything: KL against its limit, and in band, from the first entry into the band on.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
from collections.abc import Iterator
from typing import Any
from unittest import mock

from klamp.train import kl_after_update
from klamp.train.config import KLConfig, OptimConfig, RolloutConfig, TrainConfig
from klamp.train.kl_after_update import KLMeasurement, carried
from klamp.train.loop import Trainer

TARGET = 0.05


def letters(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """The share of vowels: a reward that can be raised for long."""
    return [sum(c in "aeiou" for c in text) / max(len(text), 1) for text in completions]


def run(prompts: int, seed: int, args: argparse.Namespace) -> Iterator[dict[str, float]]:
    """The metrics of each step."""
    made = Trainer(
        TrainConfig(
            run=tempfile.mkdtemp() + "/run",
            seed=seed,
            steps=args.steps,
            rollout=RolloutConfig(prompts=prompts, group_size=8, max_tokens=16),
            optim=OptimConfig(lr=args.lr),
            kl=KLConfig(target=TARGET, per="token"),
        ),
        rewards=[letters],
        quiet=True,
    )
    for step in range(1, args.steps + 1):
        rollout = made.sample(step)
        scored = made.scorer(rollout.prompts, rollout.completions, rollout.columns)
        yield made.learner.step(step, rollout, scored).metrics
        made.sampler.refresh()


def noise(prompts: int, args: argparse.Namespace) -> dict[str, list[float]]:
    """Relative errors of readings near the limit from a share of the sequences, by what was read."""
    found: dict[str, list[float]] = {"carried": [], "level": [], "scaled": []}

    def both(self: KLMeasurement, began: float, far: Any) -> float:
        assert self.last is not None
        whole = self.now(self.rows).mean
        self.stride = kl_after_update.stride_of(self.sequences, kl_after_update.ENOUGH)
        rows = self.rows[:: self.stride]
        before, after = self.before(rows).mean, self.last(rows).mean
        self.updated, self.few = whole, self.last(self._few()).mean if self._steady(self.last(rows)) else math.nan
        if began > TARGET / 4:
            found["carried"].append(carried(began, before, after) / whole - 1)
            found["level"].append(after / whole - 1)
        return whole

    def again(self: KLMeasurement) -> float:
        assert self.last is not None
        whole = self.now(self.rows).mean
        left = self.last(self._few()).mean / self.few
        if 1 - kl_after_update.MILD <= left <= 1:
            found["scaled"].append(self.updated * left / whole - 1)
        return whole

    with mock.patch.multiple(KLMeasurement, first=both, __call__=again):
        for seed in range(args.seeds):
            for _ in run(prompts, seed, args):
                pass
    return found


def held(prompts: int, args: argparse.Namespace, *, full: bool) -> tuple[float, float, float, float]:
    """Largest KL over its limit and share of steps in band, the steps clamped, and the share that was measured."""
    highest, band, clamped, shares = 0.0, [], [], []
    sparse, mild = (1, -1.0) if full else (kl_after_update.SPARSE, kl_after_update.MILD)
    with mock.patch.multiple(kl_after_update, SPARSE=sparse, MILD=mild):
        for seed in range(args.seeds):
            kls = []
            for metrics in run(prompts, seed, args):
                kls.append(metrics["kl/steered"])
                shares.append(metrics.get("kl/clamp/share", 1.0))
                clamped.append(metrics.get("kl/clamp/effort", 0.0) > 0)
            entered = next((i for i, kl in enumerate(kls) if kl > 0.8 * TARGET), len(kls))
            band += [0.8 * TARGET <= kl <= 1.2 * TARGET for kl in kls[entered:]]
            highest = max(highest, max(kls) / (1.1 * TARGET))
    return highest, statistics.mean(band or [0.0]), statistics.mean(clamped), statistics.mean(shares)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--prompts", default="4,8,16", help="prompts a step, eight completions each")
    args = parser.parse_args()
    sizes = [int(n) for n in args.prompts.split(",")]
    print("noise of a reading, % (root mean square)")
    for prompts in sizes:
        found = noise(prompts, args)
        measured = 8 * prompts // kl_after_update.stride_of(8 * prompts, kl_after_update.ENOUGH)
        rms = {k: 100 * math.sqrt(statistics.mean([x * x for x in v] or [math.nan])) for k, v in found.items()}
        print(
            f"  {measured:3} of {8 * prompts:3} sequences, {len(found['level'])} steps: change {rms['carried']:.2f}, "
            f"level {rms['level']:.1f}; {len(found['scaled'])} scaled: {rms['scaled']:.2f}",
            flush=True,
        )
    print("KL held")
    for prompts in sizes:
        for full in (False, True):
            highest, band, clamped, share = held(prompts, args, full=full)
            print(
                f"  {8 * prompts:3} sequences, {'all' if full else 'a share'}: highest {highest:.2f} of the limit, "
                f"in band {band:.0%}, clamped {clamped:.0%}, measured {share:.0%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
