"""What each constant of ``Hold`` is worth: the law with one of them taken away or changed, on simulated plants.

    python benchmarks/hold_ablation.py               # six minutes on one core
    python benchmarks/hold_ablation.py --plants 20   # fewer plants of the ensemble

In band: per cent of 1500 steps on the ensemble and its corners, told nothing. The other columns have a price that was
told; their plants are those of ``tests/unit/test_hold.py``. Random walk: gradient noise moves KL, and the price that
holds it rises. Swings: batches push a fast plant about. Sudden: no signal for 60 steps, then all of it. Low: the price
over its feed-forward after 240 readings of a fifteenth of the target, high: after 240 of 2.3 times the target. tiny
and SmolLM2: plants fitted to recorded runs (``plants/fitted.py``), lowest and highest KL of the last third over the
rewards, and the highest reading.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "unit"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import test_hold as plants_of_tests

from controllers import held
from klamp.controllers import hold as law
from klamp.controllers.hold import Hold, HoldState
from plants import ensemble, fitted

FIRST = "FIRST_RATE"
ROWS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "BATCH: gradient noise makes no KL (1e-9)": {"BATCH": 1e-9},  # it starts at 0.71 of the computed price then
    "BATCH 128": {"BATCH": 128.0},
    "DOUBT: no floor (1e6)": {"DOUBT": 1e6},
    "CEILING: none": {"CEILING": 1e9},
    "FIRST_RATE 0.5": {FIRST: 0.5},
    "FIRST_RATE 0.005": {FIRST: 0.005},
    "RATES: nearly none": {"RATES": (-20.0, 20.0)},
    "LEAST 0.1": {"LEAST": 0.1},
    "SMOOTHING: none (0.99)": {"SMOOTHING": 0.99},
    "DRIFT 0.03": {"DRIFT": 0.03},
    "FASTEST 0.2": {"FASTEST": 0.2},
    "NOISE 0.3": {"NOISE": 0.3},
    "FASTEST: no bound": {"FASTEST": 9.0},
    "SURPRISE 5: hardly bounded": {"SURPRISE": 5.0},
    "CALM: none": {"CALM": 99.0},
    "CALM 0.01": {"CALM": 0.01},
    "TRUST 1: computed or given": {"TRUST": 1.0},
    "PATIENCE: no push": {"PATIENCE": 1e6},
    "BOLDEST 1.5": {"BOLDEST": 1.5},
}


@contextmanager
def changed(constants: dict[str, Any]) -> Iterator[None]:
    """The law with other constants; the first rate is the default of a state's field."""
    before = {name: getattr(law, name) for name in constants}
    defaults = HoldState.__init__.__defaults__
    for name, value in constants.items():
        setattr(law, name, value)
    if FIRST in constants:
        usual = math.log(before[FIRST])
        HoldState.__init__.__defaults__ = tuple(math.log(constants[FIRST]) if d == usual else d for d in defaults or ())
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(law, name, value)
        HoldState.__init__.__defaults__ = defaults


def in_band(plants: int) -> list[float]:
    """The ensemble and its corners, seeds 11 and 12."""
    whole, few = ensemble.draw(11, plants), ensemble.draw(12, max(plants // 2, 4))
    sets = [whole, *(few.corner(name) for name in ensemble.CORNERS)]
    return [
        ensemble.in_band(ensemble.simulate(p, held(p.beta0, int, target=p.target))[0], p.target)  # type: ignore[arg-type]
        for p in sets
    ]


def told() -> list[str]:
    """Late KL of a random walk, highest KL of swings and after a sudden signal, the price after steady readings."""
    t = plants_of_tests
    walks = [t.follow(Hold(0.05, "token"), t.walking(seed), 60, t.told(0.7))[0] for seed in range(20)]
    swings = [t.follow(Hold(0.05, "token"), t.swinging(seed), 60, t.told(0.28))[0] for seed in range(30)]
    sudden = [t.drive(t.driven(r, t.RHO, lambda s: float(s >= 60)), 200, first=0.0)[0] for r in (0.03, 0.1, 0.15)]
    low, high = (steady(kl) for kl in (1 / 15, 2.3))
    late, highest = fmean(k for run in walks for k in run[40:]), fmean(map(max, swings))
    return [f"{late:.2f}", f"{highest:.2f}", f"{max(map(max, sudden)):.2f}", f"{low:.2f}, {high:.3g}"]


def steady(kl: float) -> float:
    """The price over its feed-forward after 240 readings of ``kl`` targets."""
    start = state = Hold(6.0, "sequence").init(spread=1.0)
    for _ in range(240):
        state = Hold(6.0, "sequence").update(state, 6.0 * kl, spread=1.0)
    return state.beta / start.beta


def recorded() -> list[str]:
    """Late KL over the rewards, and the highest reading, on plants fitted to runs on tiny and on SmolLM2."""
    cells = []
    for rewards in (fitted.TINY, fitted.SMOLLM2):
        found = [fitted.run(plant) for plant in rewards.values()]
        late = [result.late for result in found]
        cells.append(f"{min(late):.2f} to {max(late):.2f}, {max(result.highest for result in found):.2f}")
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plants", type=int, default=60, help="of the ensemble; half as many in each corner")
    given = parser.parse_args()
    heads = ("", "ensemble / " + " / ".join(ensemble.CORNERS), "random walk, late KL", "swings, highest KL")
    print("| " + " | ".join((*heads, "sudden, highest KL", "low and high, price", "tiny", "SmolLM2")) + " |")
    print("|" + " --- |" * 8)
    for name, constants in ROWS.items():
        with changed(constants):
            shares = " / ".join(f"{share:.1f}" for share in in_band(given.plants))
            print("| " + " | ".join((name, shares, *told(), *recorded())) + " |", flush=True)


if __name__ == "__main__":
    main()
