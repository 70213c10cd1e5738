"""What ``Hold`` believes of a plant: a Kalman filter on the readings of KL, under one of two models.

In ``x = sqrt(KL / target)`` and the drive ``d = beta* / beta``, where ``beta*`` is the price that holds the target:

    x' = x + pace',    pace' = pace + answer (rate (1 - x / d) - pace)

KL climbs at a rate that the optimiser sets, whatever the price, and settles at ``x = d``, which is
``KL = target (beta* / beta)^2``. With ``answer = 1`` it does so directly. With less, x carries on: Adam's momentum of
0.9 is an average over ten steps, so KL climbs on after the price has risen, and falls on after it has fallen. To the
direct model that is a ``beta*`` that runs away. Which of the two is right shows in the readings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from klamp.controllers.base import clip

DIRECT, INERT = 1.0, 0.2  # a fifth: 0.1 is Adam's own, 0.3 fits as well where the learning rate is high

# The start. Variances are of natural logarithms.
UNKNOWN_PRICE = 1.7  # sd 1.3: a price from nowhere is wrong by up to ten times either way
FIRST_RATE, RATE_DOUBT = 0.05, 1.5  # a climb of 20 steps, give or take 3.4 times: those of real runs took 3 to 80

# The plant is not exactly the model. Variances a step.
X_WANDER = 4e-4  # log x moves by 2 % a step on its own: batches differ
BEST_WANDER = 9e-4  # log beta* by 3 %: the reward left to win changes as it is won
PACE_WANDER = 0.08  # an inert plant's pace by 8 % of the rate, and x carries on with it. Without, what batches do to x
# for ten steps reads as a beta* that swings, and the price swings after it
RATE_WANDER = 4e-4  # log rate by 2 %
EARLY_RATE = 0.07  # and by 0.07 / n more at step n: Adam's first steps are all sign, then the climb slows down. Without
# it that slowing reads as "KL is settling far below the target", and the price falls 5 times too low on the way up
STEP_ERROR = 0.1  # (0.3 of the predicted change of log x)^2: a prediction of doubling is worth less than one of staying
SUREST = 1.4e-4  # never surer of beta* than to 1 %

# What is measured.
NOISE_RATE = 0.03  # the noise is an average over some 30 readings
NOISE = (4e-4, 0.09)  # its bounds: 2 % of x is better than any batch, 30 % is as bad as counts for anything
SMALL_KL = 0.09  # below this x the noise of KL no longer shrinks with KL, so the log of it grows
OUTLIER = 3.5  # standard deviations; one wild reading moves the filter no further
RUN_RATE, RUN_BOOST = 0.1, 0.3  # surprises of one sign, ten in a row, mean that beta* has jumped: follow faster
SPEED_RATE = 0.25  # the climb is averaged over about four steps


@dataclass(frozen=True)
class Belief:
    """What one model makes of the readings, relative to the target."""

    answer: float
    """Share of a step in the pace that follows: 1 if KL answers directly, less if it carries on."""
    best: float = 0.0
    """``log beta*``: the price that holds the target."""
    x: float = 0.0
    """``sqrt(KL / target)``, freed of noise."""
    pace: float = 0.0
    """The change of x in the last step."""
    rate: float = math.log(FIRST_RATE)
    """Logarithm of the climb of x a step, without a price."""
    doubt: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, UNKNOWN_PRICE, 0.0, RATE_DOUBT)
    """Covariance of (log x, pace, best, rate): xx, xp, xb, xr, pp, pb, pr, bb, br, rr."""
    run: float = 0.0
    """Mean of recent surprises, in standard deviations: 0 when the model is right."""
    speed: float = 0.0
    """Mean of recent changes of x."""

    @property
    def price_doubt(self) -> float:
        """Standard deviation of ``best``."""
        return math.sqrt(self.doubt[7])

    def ahead(self, felt: float, n: int, steps: float) -> float:
        """x after ``steps`` at the price felt now, at the n-th reading."""
        x, pace = self.x, self.pace
        for step in range(math.ceil(steps)):
            before, (x, pace, *_) = x, _step(x, pace, self, felt, n)
            x = before + min(steps - step, 1.0) * (x - before)
        return x

    def learn(self, reading: float, felt: float, noise: float, n: int, undone: float) -> tuple[Belief, float]:
        """Predict by the model, correct by the n-th reading of log x; and the log density that it had foreseen for it.

        ``undone`` is what a clamp took off log x after the prediction.
        """
        x, pace, to_x, to_pace = _step(self.x, self.pace, self, felt, n)
        xx, xp, xb, xr, pp, pb, pr, bb, br, rr = _carried(self.doubt, to_x, to_pace)
        change = min(math.log(x / max(self.x, 0.01)), 1.0)
        xx += X_WANDER + STEP_ERROR * change * change
        if self.answer < DIRECT:
            push = (PACE_WANDER * math.exp(self.rate)) ** 2  # felt by pace and x alike
            xx, xp, pp = xx + push / (x * x), xp + push / x, pp + push
        bb += BEST_WANDER * (1 + RUN_BOOST * max(2 * self.run**2 / RUN_RATE - 1, 0.0))
        rr += RATE_WANDER + EARLY_RATE / n
        log_x = math.log(x) - undone
        spread = xx + noise * (1 + (SMALL_KL / max(math.exp(max(reading, log_x)), 1e-3)) ** 2)
        sd = math.sqrt(spread)
        # log of a mean-one lognormal reading of KL lies below the log of KL by half its variance: in log x by the noise
        surprise = clip(reading + noise - log_x, -OUTLIER * sd, OUTLIER * sd)
        x = math.exp(log_x + xx / spread * surprise)
        after = replace(
            self,
            x=x,
            pace=pace + xp / spread * surprise,
            best=self.best + xb / spread * surprise,
            rate=clip(self.rate + xr / spread * surprise, math.log(1 / 600), math.log(1 / 2)),
            doubt=_corrected((xx, xp, xb, xr, pp, pb, pr, bb, br, rr), spread),
            run=self.run + RUN_RATE * (surprise / sd - self.run),
            speed=self.speed + SPEED_RATE * (x - self.x - self.speed),
        )
        return after, -math.log(sd) - 0.5 * (surprise / sd) ** 2


def noise_of(readings: Sequence[float], reading: float, noise: float, n: int) -> float:
    """Variance of a reading: second differences of log x are six times it, and hardly notice a trend."""
    if n <= 2:
        return noise
    one, two = readings
    bend = min((reading - 2 * one + two) ** 2 / 6, 0.25)
    return noise + max(NOISE_RATE, 1 / (n + 3)) * (bend - noise)


Row = tuple[float, float, float, float]


def _step(x: float, pace: float, belief: Belief, felt: float, n: int) -> tuple[float, float, Row, Row]:
    """x and pace a step on; the derivatives of log x and of the pace by (log x, pace, best, rate).

    ``x' = rate (1 - x / d)`` solved over a step is ``(d - x) (1 - e^-q)`` with ``q = rate / d``. The pace is an average
    of that from the first step on, as Adam's is: its n-th term counts for more than ``answer``.
    """
    drive = clip(math.exp(belief.best) * felt, 0.05, 20.0)  # beyond, real plants saturate and the model would leap
    q = min(math.exp(belief.rate) / drive, 3.0)
    left = math.exp(-q)
    new = belief.answer / (1 - (1 - belief.answer) ** n)
    by_rate = (drive - x) * left * q
    pace += new * ((drive - x) * (1 - left) - pace)
    to_pace = (-new * (1 - left) * x, 1 - new, new * (drive * (1 - left) - by_rate), new * by_rate)
    after = max(x + pace, 0.3 * x, 1e-5)
    by_x, by_pace, by_best, by_rate = to_pace
    return after, pace, ((x + by_x) / after, by_pace / after, by_best / after, by_rate / after), to_pace


def _carried(doubt: tuple[float, ...], to_x: Row, to_pace: Row) -> tuple[float, ...]:
    """The covariance a step on; best and rate stay."""
    xx, xp, xb, xr, pp, pb, pr, bb, br, rr = doubt
    columns = (xx, xp, xb, xr), (xp, pp, pb, pr), (xb, pb, bb, br), (xr, pr, br, rr)
    x = [_dot(to_x, column) for column in columns]
    pace = [_dot(to_pace, column) for column in columns]
    return _dot(to_x, x), _dot(to_pace, x), x[2], x[3], _dot(to_pace, pace), pace[2], pace[3], bb, br, rr


def _corrected(doubt: tuple[float, ...], spread: float) -> tuple[float, ...]:
    """The covariance after a reading of log x whose own was ``spread``."""
    xx, xp, xb, xr, pp, pb, pr, bb, br, rr = doubt
    return (
        *(xx - xx * xx / spread, xp - xx * xp / spread, xb - xx * xb / spread, xr - xx * xr / spread),
        *(pp - xp * xp / spread, pb - xp * xb / spread, pr - xp * xr / spread),
        *(max(bb - xb * xb / spread, SUREST), br - xb * xr / spread, rr - xr * xr / spread),
    )


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(p * q for p, q in zip(a, b, strict=True))
