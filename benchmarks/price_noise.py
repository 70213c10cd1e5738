"""How noisy the gradient of the price is, with and without the last step's KL to come as its baseline.

    python benchmarks/price_noise.py --rewards vowels "word 2 %" --batches 24

A policy is trained at a constant price, then many batches are drawn from it and each one's gradient is computed as the
trainer computes it: of the rewards alone, and of the price alone at ``--rho`` times Hold's first price. Noise is the
variance of a batch's gradient, summed over the parameters; the price's is given as a share of the rewards'.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))

from any_reward import UNIT, Job, _trainer, calibration
from klamp.train.algorithms import prepare
from klamp.train.update import loss_of

Batch = tuple[Any, Any]


def gradient(learner: Any, batch: Batch, beta: float, *, rewards: bool, known: bool) -> Tensor:
    """Of one batch: the rewards' part or the price's, the latter less what is ``known`` of the KL to come."""
    rollout, scored = batch
    anchors = learner.reference_states(rollout)
    prepared = prepare(learner.config, rollout, scored, None, beta, lambda x: x)
    if not rewards:
        prepared = replace(prepared, advantages=torch.zeros_like(prepared.advantages))
    if known:
        prepared = replace(prepared, future_kl=learner._expected_future(rollout))
    rows = torch.arange(len(rollout), device=learner.device)
    loss = loss_of(learner, rollout, rows, prepared, anchors, beta=beta)
    found = torch.autograd.grad(loss, learner.trained, allow_unused=True)
    return torch.cat([g.flatten() for g in found if g is not None]).double()


def moments(learner: Any, batches: Sequence[Batch], beta: float, **which: bool) -> tuple[float, float]:
    """Square of the mean gradient's norm, freed of noise, and the variance of one batch's."""
    each = torch.stack([gradient(learner, batch, beta, **which) for batch in batches])
    noise = float(each.var(0).sum())
    return float(each.mean(0).norm() ** 2) - noise / len(each), noise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", choices=("tiny", "smollm2"))
    parser.add_argument("--rewards", nargs="+", default=["vowels", "sentiment", "word 2 %"])
    parser.add_argument(
        "--multiple", type=float, default=2.0, help="the constant price it is trained at, as any_reward"
    )
    parser.add_argument("--steps", type=int, default=45)
    parser.add_argument("--batches", type=int, default=24)
    parser.add_argument("--rho", nargs="+", type=float, default=[1.0, 2.0])
    given = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(width=None if sys.stdout.isatty() else 160)
    known = calibration(given.model)
    drawn = Table(title=f"{given.model}: noise of the price's gradient over that of the rewards'", title_justify="left")
    for heading in ("reward", "KL a token", "KL to come at first", "rho", "without a baseline", "with it", "signal"):
        drawn.add_column(heading, justify="left" if heading == "reward" else "right")
    for name in given.rewards:
        with _trainer(Job(given.model, name, 0, f"x {given.multiple:g}", 0), known, given.steps) as trainer:
            trainer.run()
            learner = trainer.learner
            last = trainer.folder.last()
            price = known["price"] / UNIT * last["policy/spread"]
            batches = []
            for i in range(given.batches):
                rollout = trainer.sample(10_000 + i).to(learner.device)
                batches.append((rollout, trainer.scorer(rollout.prompts, rollout.completions, {})))
            _, task = moments(learner, batches, 0.0, rewards=True, known=False)
            for rho in given.rho:
                plain, without = moments(learner, batches, rho * price, rewards=False, known=False)
                less, with_it = moments(learner, batches, rho * price, rewards=False, known=True)
                cells = (f"{rho:g}", f"{without / task:.2f}", f"{with_it / task:.2f}", f"{less / plain:.2f}")
                drawn.add_row(name, f"{last['kl/steered']:.3f}", f"{float(learner.future_kl[0]):.2f}", *cells)
    console.print(drawn)
    console.print("signal: the square of the mean gradient with the baseline over that without it, 1 but for noise")


if __name__ == "__main__":
    main()
