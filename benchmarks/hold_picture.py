"""The picture of ``docs/controllers.md``: Hold on two plants that were fitted to recorded runs, without a clamp.

python benchmarks/hold_picture.py docs/images/hold.png
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from klamp.controllers.hold import DOUBT, Hold
from plants import fitted

SHOWN = {
    "needs less than the computed price (SmolLM2, vowels)": (fitted.SMOLLM2["vowels"], "#1f77b4"),
    "needs more and more (tiny, vowels)": (fitted.TINY["vowels"], "#d95f02"),
}


def series(plant: fitted.Walk | fitted.Pull, seed: int = 3) -> tuple[list[float], list[float], list[float]]:
    """x as read, as Hold has it freed of noise, and rho over the computed one; a number a step."""
    hold = Hold(0.05, "token")
    computed = hold.init(spread=1.0, length=fitted.LENGTH).beta
    state, step = hold.init(spread=1.0, length=fitted.LENGTH, n=fitted.sequences(plant)), plant.start(seed)
    read, known, prices = [], [], []
    for _ in range(fitted.STEPS):
        kl = step(state.beta / computed)
        prices.append(state.beta / computed)
        state = hold.update(state, kl * 0.05, spread=1.0)
        read.append(math.sqrt(kl))
        known.append(state.x)
    return read, known, prices


def main(path: str) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 3.4), constrained_layout=True)
    for name, (plant, colour) in SHOWN.items():
        read, known, prices = series(plant)
        left.plot(read, ".", color=colour, alpha=0.45, markersize=5)
        left.plot(known, color=colour, label=name)
        right.plot(prices, color=colour)
    left.axhline(1, color="black", linewidth=0.8, linestyle="--")
    left.annotate("target", (0, 1), (0, 3), textcoords="offset points", fontsize=8)
    left.set(xlabel="step", title="x = √(KL / target): dots as read, line as known", ylim=(0, None))
    left.legend(loc="lower right", frameon=False, fontsize=8)
    right.axhline(1, color="black", linewidth=0.8, linestyle=":")
    right.axhline(1 / DOUBT, color="black", linewidth=0.8, linestyle="--")
    right.annotate("computed", (fitted.STEPS, 1), (-44, 3), textcoords="offset points", fontsize=8)
    right.annotate("lowest", (fitted.STEPS, 1 / DOUBT), (-34, 3), textcoords="offset points", fontsize=8)
    right.set(xlabel="step", title="price: rho over the computed one", ylim=(0, None))
    for axes in (left, right):
        axes.title.set_fontsize(10)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", nargs="?", default="hold.png", help="the picture to write")
    main(parser.parse_args().path)
