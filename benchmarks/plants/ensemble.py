"""The simulated ensemble: 400 random first-order plants, all stepped at once.

State ``d = sqrt(KL)``, target T, gain g (drifts over the run, steps by 1.5 at step 900), price b of some steps ago.
Half the plants lag:  ``d <- d + (min(sqrt(T) (g b* / b)^(p/2), 6 sqrt(T)) - d) / tau``.
Half flow:            ``d <- d + clip((g sqrt(T) - (b / b*) d) / tau, +-0.15 sqrt(T))``.
Observed: ``d^2 exp(nu N - nu^2/2) + sqrt(2 d^2 / 256 T / 6) N'``. In-band is counted on the true KL, ``d^2``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Policy = Callable[[Array], Array]
"""Takes the observed KL of every plant, returns every plant's next price."""

STEPS = 1500
STEP_AT = 900
BEST_BETA = 0.3
"""The price that holds the target at gain 1; about 1 / sqrt(2 * 6), the small-tilt value for unit spread at 6 nats."""

CORNERS = {"tau 5": ("tau", 5.0), "tau 300": ("tau", 300.0), "noise 0.5": ("noise", 0.5), "delay 7": ("delay", 7)}


@dataclass(frozen=True)
class Ensemble:
    """Parameters of n plants, each an array of n, and the noise of the run."""

    tau: Array
    noise: Array
    delay: NDArray[np.int64]
    drift: Array
    slope: Array
    beta0: Array
    step: Array
    flow: NDArray[np.bool_]
    seed: int
    target: float = 6.0

    def __len__(self) -> int:
        return len(self.tau)

    def corner(self, name: str) -> Ensemble:
        """The same plants with one parameter replaced in all of them."""
        field, value = CORNERS[name]
        return replace(self, **{field: np.full_like(getattr(self, field), value)})

    def gain(self, t: int) -> Array:
        """Gain at step t: a geometric drift over the run, and the step at 900."""
        return self.drift ** (t / STEPS) * (self.step if t >= STEP_AT else 1.0)


def draw(seed: int, n: int = 400, target: float = 6.0) -> Ensemble:
    """``n`` random plants."""
    rng = np.random.default_rng(seed)

    def spread(low: float, high: float) -> Array:
        return np.exp(rng.uniform(np.log(low), np.log(high), n))

    return Ensemble(
        tau=spread(10, 150),
        noise=rng.uniform(0.05, 0.30, n),
        delay=rng.integers(1, 6, n),
        drift=spread(0.6, 2.5),
        slope=rng.uniform(1.4, 2.2, n),
        beta0=BEST_BETA * spread(0.1, 10),
        step=np.where(rng.random(n) < 0.5, 1.5, 1 / 1.5),
        flow=np.arange(n) % 2 == 1,
        seed=seed,
        target=target,
    )


def simulate(plants: Ensemble, policy: Policy, steps: int = STEPS) -> tuple[Array, Array]:
    """``(true KL, price)``, each [steps, n], under a policy that sees one observation a step."""
    rng = np.random.default_rng([plants.seed, 1])
    n, root = len(plants), np.sqrt(plants.target)
    d, betas = np.zeros(n), np.tile(plants.beta0, (steps + 1, 1))
    kl = np.empty((steps, n))
    for t in range(steps):
        felt = betas[np.maximum(t - plants.delay, 0), np.arange(n)] / BEST_BETA
        g = plants.gain(t)
        settles = np.minimum(root * (g / felt) ** (plants.slope / 2), 6 * root)
        flows = np.clip((g * root - felt * d) / plants.tau, -0.15 * root, 0.15 * root)
        d = np.maximum(d + np.where(plants.flow, flows, (settles - d) / plants.tau), 0)
        kl[t] = d**2
        normal = rng.standard_normal((2, n))
        seen = kl[t] * np.exp(plants.noise * normal[0] - plants.noise**2 / 2)
        seen += np.sqrt(2 * kl[t] / 256 * plants.target / 6) * normal[1]
        betas[t + 1] = policy(seen)
    return kl, betas[:steps]


def in_band(kl: Array, target: float, band: float = 0.2) -> float:
    """Share of steps, over all plants, in which the true KL is within ``band`` of the target; in per cent."""
    return float(100 * np.mean(np.abs(kl / target - 1) <= band))


def overshoot(kl: Array, target: float) -> tuple[float, float]:
    """Median and 90th percentile over plants of the highest excess before the gain step, in per cent."""
    excess = 100 * np.maximum(kl[:STEP_AT].max(0) / target - 1, 0)
    return float(np.median(excess)), float(np.percentile(excess, 90))
