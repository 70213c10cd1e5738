"""Controllers of KL side by side: the simulated ensemble, its corners, and real policy-gradient training in miniature.

    python benchmarks/controllers.py                 # about five minutes on one core
    python benchmarks/controllers.py --quick         # fewer plants, half a minute
    python benchmarks/controllers.py --seed 7        # other plants; the same seed prints the same tables

Hold is the class that klamp ships, with one set of defaults. Rivals stand with their usual gains and with gains tuned
on plants of seed 11 (ensemble, 160 plants) and seed 1 (policy gradient, 20 runs at each of three learning rates, from
the feed-forward): a grid of 9 to 13 values each, PID 150 and 40 random draws of its four gains. On
policy-gradient plants rivals see KL in units of the target, which favours the laws with an absolute error.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from klamp.controllers.hold import DOUBT, Hold, HoldState
from plants import ensemble, policy, rivals, train

Array = NDArray[np.float64]
Make = Callable[[float, Array], rivals.Rival]

# Gains tuned on the ensemble, and on policy-gradient plants.
ZIEGLER, EXPONENTIAL, DOUBLING = (0.073, 0.028), (0.0047, 0.0103), (1.023, 1.0057)
DUAL = (0.0018, 0.00316)
PID = ((0.0542, 0.003, 1.1701, 0.039), (0.1701, 0.01368, 1.9707, 0.7586))


def tuned(family: int) -> dict[str, Make]:
    """Every rival, with its usual gains and with those tuned on the ensemble (0) or on policy-gradient plants (1)."""
    n, kp, ki, kd, smooth = (256, 128)[family], *PID[family]
    return {
        "fixed at its start": rivals.Fixed,
        f"Ziegler, n {n}": lambda t, b: rivals.Ziegler(t, b, rate=n / 10_000),
        "Ziegler, tuned": lambda t, b: rivals.Ziegler(t, b, rate=ZIEGLER[family]),
        "tutorial exponential, 0.1": lambda t, b: rivals.Exponential(t, b, gain=0.1),
        "tutorial, tuned": lambda t, b: rivals.Exponential(t, b, gain=EXPONENTIAL[family]),
        "PPO doubling": rivals.Doubling,
        "PPO, tuned factor": lambda t, b: rivals.Doubling(t, b, factor=DOUBLING[family]),
        "dual ascent, tuned": lambda t, b: rivals.DualAscent(t, b, gain=DUAL[family]),
        "PID-Lagrangian, tuned": lambda t, b: rivals.PID(t, b, gains=(kp, ki, kd), smooth=smooth),
        "first log-PI": rivals.LogPI,
    }


ENSEMBLE, TRAINING = tuned(0), tuned(1)
STARTS = {"feed-forward": 1.0, "x 0.1": 0.1, "x 10": 10.0}


class Holding:
    """``klamp.Hold`` on many plants: one state each. ``tick`` is called once a step."""

    def __init__(self, hold: Hold, states: Sequence[HoldState], tick: Callable[[], None]) -> None:
        self.hold, self.states, self.tick = hold, list(states), tick

    def __call__(self, kl: Array, effort: Array | None = None, spread: Array | None = None) -> Array:
        efforts = np.zeros(len(kl)) if effort is None else effort
        spreads = [None] * len(kl) if spread is None else [float(s) for s in spread]
        self.states = [
            self.hold.update(state, float(k), effort=float(e), spread=s)
            for state, k, e, s in zip(self.states, kl, efforts, spreads, strict=True)
        ]
        self.tick()
        return np.array([s.beta for s in self.states])


def held(beta0: Array, tick: Callable[[], None], *, target: float = 1.0, told: bool = False) -> Holding:
    """Hold started at given prices, as sure of them as after ``init(spread=1)`` when ``told``."""
    states = [Hold(target, "sequence", init_beta=float(b)).init() for b in beta0]
    if told:
        states = [replace(s, lowest=s.beta / DOUBT) for s in states]
    return Holding(Hold(target, "sequence"), states, tick)


def ensemble_row(plants: ensemble.Ensemble, make: Callable[[ensemble.Ensemble], ensemble.Policy]) -> list[float]:
    """In band, median and 90th percentile of overshoot, mean change of log beta a step in the settled part."""
    kl, beta = ensemble.simulate(plants, make(plants))
    jitter = np.abs(np.diff(np.log(beta[500:900]), axis=0)).mean()
    return [ensemble.in_band(kl, plants.target), *ensemble.overshoot(kl, plants.target), float(jitter)]


def show_ensemble(console: Console, seed: int, n: int, corner: int) -> None:
    """The ensemble, its corners, and the same plants in another unit of KL."""
    whole, few = ensemble.draw(seed, n), ensemble.draw(seed + 1, corner)
    token = ensemble.draw(seed, corner, target=0.006)
    sets = [whole, *(few.corner(name) for name in ensemble.CORNERS), token]
    table = Table(title=f"Simulated ensemble: % of 1500 steps with true KL within 20 % of target (seed {seed})")
    for column in ("", f"{n} plants", *ensemble.CORNERS, "per token", "overshoot median / p90 %", "jitter"):
        table.add_column(column, justify="left" if not column else "right")
    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task("Hold on the ensemble", total=len(sets) * ensemble.STEPS)

        def hold(p: ensemble.Ensemble) -> Holding:
            return held(p.beta0, lambda: progress.advance(task), target=p.target)

        add_ensemble_row(table, "Hold", [ensemble_row(p, hold) for p in sets])
    for name, make in ENSEMBLE.items():
        add_ensemble_row(table, name, [ensemble_row(p, lambda p, m=make: m(p.target, p.beta0)) for p in sets])
    console.print(table)


def add_ensemble_row(table: Table, name: str, rows: list[list[float]]) -> None:
    """One controller's line: in band everywhere, the rest on the whole ensemble."""
    first = rows[0]
    table.add_row(name, *(f"{r[0]:.1f}" for r in rows), f"{first[1]:.0f} / {first[2]:.0f}", f"{first[3]:.3f}")


def show_training(console: Console, seed: int, n: int, points: int, ramps: Sequence[float]) -> None:
    """Price alone, and price with clamp, at every learning rate and from every start."""
    alone = Table(title=f"Policy gradient, price alone: % in band from first entry on, {n} runs each (seed {seed})")
    both = Table(title="Policy gradient, Hold with the clamp (limit 1.1 x target)")
    for column in ("", *(f"ramp {r:g}, {s}" for r in ramps for s in STARTS)):
        alone.add_column(column, justify="left" if not column else "right")
    for column in (
        "ramp, start",
        "in band %",
        "worst run %",
        "max KL / limit",
        "runs > 1.1 limit",
        "reward vs constant %",
        "effort",
    ):
        both.add_column(column, justify="left" if column.startswith("ramp") else "right")
    cells: dict[str, list[str]] = {name: [] for name in ("best constant in hindsight", "Hold", *TRAINING)}
    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task("policy-gradient runs", total=len(ramps) * (1 + len(STARTS)))
        for ramp in ramps:
            runs = policy.draw(seed, n, ramp)
            best = train.constants(runs, points)
            progress.advance(task)
            for start, factor in STARTS.items():
                beta0, told = runs.feed_forward * factor, factor == 1.0
                cells["best constant in hindsight"].append(f"{best.best.mean():.0f}")
                trace = train.train(runs, held(beta0, int, told=told), beta0)
                cells["Hold"].append(cell(trace, best))
                for name, make in TRAINING.items():
                    law = make(1.0, beta0)
                    cells[name].append(
                        cell(train.train(runs, lambda kl, effort, spread, law=law: law(kl), beta0), best)
                    )
                clamped = train.train(runs, held(beta0, int, told=told), beta0, clamped=True)
                both.add_row(f"{ramp:g}, {start}", *together(clamped, best))
                progress.advance(task)
    for name, row in cells.items():
        alone.add_row(name, *row)
    console.print(alone)
    console.print(both)


def cell(trace: train.Trace, best: train.Constants) -> str:
    """In band, and the distance to the best constant."""
    share = train.in_band(trace.kl).mean()
    return f"{share:.0f} ({share - best.best.mean():+.0f})"


def together(trace: train.Trace, best: train.Constants) -> list[str]:
    """What price and clamp did: in band, worst run, highest KL, reward at the same KL, effort in the second half."""
    share, peak = train.in_band(trace.kl), trace.kl.max(0) / train.LIMIT
    effort = trace.effort[len(trace.effort) // 2 :].mean()
    over = f"{(peak > 1.1).sum()} / {len(peak)}"
    return [
        f"{share.mean():.1f}",
        f"{share.min():.0f}",
        f"{peak.max():.2f}",
        over,
        f"{best.gain(trace):+.1f}",
        f"{effort:.4f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=2026, help="of the plants and their noise; 11 and 1 were tuned on")
    parser.add_argument("--quick", action="store_true", help="fewer plants and learning rates")
    given = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 220)
    if given.quick:
        show_ensemble(console, given.seed, 40, 10)
        show_training(console, given.seed, 4, 9, policy.RAMPS[1:3])
    else:
        show_ensemble(console, given.seed, 400, 60)
        show_training(console, given.seed, 12, 21, policy.RAMPS)


if __name__ == "__main__":
    main()
