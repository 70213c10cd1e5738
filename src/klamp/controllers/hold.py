"""``Hold``: the price in units of the drive, from a model of how KL answers it.

Near the reference KL is quadratic, so ``x = sqrt(KL / target)`` measures the distance. Where nothing is charged the
optimiser moves x by ``rate`` a step; the price pulls x back in proportion to x:

    pace <- average over the optimiser's momentum of  rate (signal - x rho / rho*)
    x    <- x + pace

``rho = beta / spread`` is the price in units of the drive; ``spread`` is the RMS of the advantages within a prompt. An
observer carries this model along and corrects it by each reading. What a reading shows beyond the forecast is shared
between ``rho*`` and ``rate``: as far as the price holds the pace back, it says something about the price; as far as the
pace is free, about the pace. So a KL that is low because learning is slow, or has not begun, lowers no price.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from klamp.controllers import base
from klamp.controllers.base import Bounds, State, clip
from klamp.errors import require_number, unknown
from klamp.masked import Unit

PRESETS = {"conservative": 0.02, "moderate": 0.08, "aggressive": 0.15}
"""Targets in nats per token, inside the usual bands 0.01-0.03, 0.05-0.10 and 0.10-0.20."""

DOUBT = 2.0  # a price that was told falls no lower than half of it: constants that hold targets lie at 0.5 to 1.9 of it
CEILING = 10.0  # times a told price the reward is a tenth of the gradient: more pulls no harder, for Adam normalises it
FIRST_RATE = 1 / 15  # a climb to the target in 15 steps: real ones take 3 to 80, and this is their geometric middle
RATES = math.log(1 / 400), math.log(1 / 2)  # of log rate: a target farther away is out of reach, nearer is no climb
LEAST = 1e-3  # the least x: a KL of a millionth of its target is none
MOMENTUM = 0.28  # share of a step's own push in the pace: delays of 1 to 5 steps and Adam's ten, met in the middle
# The observer.
DRIFT, NOISE = 0.1, 0.07  # of rho* in a step; of a reading of x. Their ratio is the gain of a steady Kalman filter
FASTEST = 0.3  # bandwidth a step: faster, it follows the swings that momentum makes and amplifies them
SURPRISE = 0.5  # of log x: the most that one reading says
TOLD = 4.0  # so much rather a surprise is put down to the pace than to a price that was told; if not told, a quarter
# The price.
DAMPING = 2.0  # least exponent of x in a told price: as KL itself. x is that of the step that the price acts on
PATIENCE = 24.0  # steps in which slower plants are brought to the target: the exponent grows with the steps they take,
BOLDEST = 6.0  # up to this, which is also the factor below rho* that a price nobody told may go to


@dataclass(frozen=True)
class HoldState(State):
    """What the observer holds true of the plant, relative to the target. Ten numbers."""

    best: float = 0.0
    """``log rho*``: the price in units of the spread that holds the target."""
    least: float = 0.0
    """The lowest rho that is charged: half the feed-forward where the price was told, 0 where it was not."""
    x: float = 0.0
    """``sqrt(KL / target)``, freed of noise."""
    pace: float = 0.0
    """The change of x in the last step."""
    rate: float = math.log(FIRST_RATE)
    """Logarithm of the climb of x a step where nothing is charged."""
    square: float = 0.0
    """Mean square of the spread, averaged as the pace is; 0 before the first signal, or where none is given."""
    steps: int = 0
    """Readings since KL left zero."""

    def retargeted(self, old: float, new: float) -> HoldState:
        """The same plant in units of another target: x goes as ``1 / sqrt(target)``, and so does the price."""
        k = math.sqrt(old / new)
        scaled = {name: k * getattr(self, name) for name in ("beta", "least", "x", "pace")}
        rate = clip(self.rate + math.log(k), *RATES)
        return replace(self, **scaled, best=self.best + math.log(k), rate=rate)

    @property
    def spread(self) -> float:
        """The spread that the price is in units of; 1 where none is known."""
        return math.sqrt(self.square) if self.square > 0 else 1.0


@dataclass(frozen=True)
class Hold:
    """``beta = rho* spread x^damping``: finds the price that holds ``target``, and takes it as a ceiling."""

    target: float | base.Target
    per: Unit | None = None
    init_beta: float | None = None
    bounds: Bounds = (1e-12, 1e12)

    def __post_init__(self) -> None:
        base.settle_target(self)
        base.first_price("Hold", self.init_beta, self.bounds)

    @classmethod
    def preset(cls, name: str) -> Hold:
        """A controller with a usual target, in nats per token: conservative 0.02, moderate 0.08, aggressive 0.15."""
        if name not in PRESETS:
            raise unknown("Hold.preset", name, PRESETS)
        return cls(target=PRESETS[name], per="token")

    def init(self, *, spread: float | None = None, length: float | None = None) -> HoldState:
        """``beta = spread / sqrt(2 target per sequence)``; at ``init_beta``, and less sure of it, told nothing.

        That is the price at which a policy that the reward alone moves rests at the target, or below it.
        ``spread`` is the RMS spread within a prompt of the advantages as they multiply the score: about 1 after
        normalisation. 0, a first batch without signal, is as good as 1: rho is known all the same. ``length``, the
        mean number of tokens, is needed unless the target is per sequence.
        """
        if spread is None:
            first = base.first_price("Hold", self.init_beta, self.bounds)
            return HoldState(beta=first, best=math.log(first))
        require_number("spread", spread, at_least=0, way_out="It is the RMS spread of the advantages in a group.")
        rho = 1 / math.sqrt(2 * base.nats(self.target) * base.tokens("Hold", self.per, length))
        beta = clip(rho * (spread or 1.0), *self.bounds)
        return HoldState(beta=beta, best=math.log(rho), least=rho / DOUBT, square=spread**2)

    def update(
        self,
        state: HoldState,
        kl: float,
        n: int = 1,
        *,
        effort: float = 0.0,
        spread: float | None = None,
        noise: float | None = None,
    ) -> HoldState:
        """The state after observing ``kl`` (``n`` is not used), and what is known of the step beside it.

        ``effort`` (``Clamped.effort``) is what a clamp undid: the model goes on from x without it, so all of it counts
        as climb. ``spread`` is constant where it is not given; ``noise`` counts where it is worse than usual.
        """
        if left_out := base.skip(state, kl, HoldState):
            return left_out
        state, signal = _driven(state, spread)
        before = state.best
        ratio = max(base.observed(kl), 0.0) / base.nats(self.target)
        if state.steps or ratio > LEAST**2 or state.updates > 5:  # before, the policy still is its reference
            state = _observe(state, ratio, signal, noise if noise and math.isfinite(noise) else 0.0)
        state = replace(state, x=state.x * math.exp(-effort if 0 < effort < math.inf else 0.0))
        low, high = (math.log(clip(b, base.SMALLEST, base.LARGEST)) - math.log(state.spread) for b in self.bounds)
        if state.least:
            low, high = max(low, math.log(state.least)), min(high, math.log(CEILING * DOUBT * state.least))
        best = clip(state.best, min(low, before), max(high, before))  # no wind-up; nor does a spread that fades move it
        rho = math.exp(clip(_price(replace(state, best=best)), low - 1e-9, high + 1e-9))  # meets a bound exactly
        return replace(state, best=best, beta=clip(state.spread * rho, *self.bounds))


def _driven(state: HoldState, spread: float | None) -> tuple[HoldState, float]:
    """The state with this batch in its spread, and the batch's signal: its share of the usual spread, at most 1."""
    state = replace(state, updates=state.updates + 1)
    if spread is None or not 0 <= spread < 1e100:
        return state, 1.0
    weight = max(MOMENTUM, 1 / state.updates) if state.square else 1.0  # the first signal, however late, counts in full
    square = state.square + weight * (spread * spread - state.square)
    after = replace(state, square=square)
    if state.square == 0 and square > 0 and not state.least:  # a price that was given stays what it was
        after = replace(after, best=state.best - math.log(after.spread))
    return after, min(spread / after.spread, 1.0) if square > 0 else 0.0


def _observe(state: HoldState, ratio: float, signal: float, noise: float) -> HoldState:
    """The model a step on, corrected by a reading of ``KL / target``."""
    # The forecast.
    n, rate = state.steps + 1, math.exp(state.rate)
    drive = math.exp(state.best) * state.spread / state.beta  # rho* / rho: where x is heading
    answer = (state.x - signal * drive) * math.expm1(-rate / drive)  # the model, solved over a step
    pace = state.pace + MOMENTUM / (1 - (1 - MOMENTUM) ** n) * (answer - state.pace)
    x = max(state.x + pace, LEAST)
    # How wrong was it?
    surprise = clip((ratio / (x * x) - 1) / 2, -SURPRISE, SURPRISE)  # no logarithm: it is KL whose noise has mean one
    # Was it the price, or the pace? Without signal KL says nothing of either.
    held = min(x / drive, 1.0)  # the share of the free pace that the price holds back
    price = held / (held + (1 - held) * (TOLD if state.least else 1 / TOLD))
    learned = signal * surprise
    # How much does a reading count? All three poles lie at w: as in a steady Kalman filter, at first as in a mean of n.
    w = max(min((DRIFT / max(noise / 2, NOISE) * MOMENTUM * rate) ** (1 / 3), FASTEST), 1 / n)
    to_x = clip(3 * w - MOMENTUM, 0.0, 1.0)
    to_pace = clip(3 * w * w - to_x * MOMENTUM - MOMENTUM * rate, 0.0, 1.0)
    to_best = min(w**3 / (MOMENTUM * rate), 1.0)
    return replace(
        state,
        steps=n,
        x=max(x * math.exp(to_x * surprise), LEAST),
        pace=pace + to_pace * x * surprise,
        rate=clip(state.rate + w * (1 - price) * learned, *RATES),
        best=state.best + to_best * price * learned,
    )


def _price(state: HoldState) -> float:
    """``log rho = log rho* + k log x``, with x as it will be when the price acts: a step ahead.

    A price that was told charges what is above the target, and pushes nothing towards it. One that was not may be wrong
    by ten, and a plant that it slows down cannot be told from one that is slow: it is pushed.
    """
    ahead = math.log(max(state.x + state.pace, LEAST))
    push = clip(1 / (math.exp(state.rate) * PATIENCE) - 1, DAMPING if state.least else 0.0, BOLDEST)
    return state.best + max(push * ahead, 0.0 if state.least else -math.log(BOLDEST))
