"""``Hold``: the price in units of the reward's spread, from a model of how KL answers it.

Near the reference KL grows with the square of the distance, so ``x = sqrt(KL / target)`` measures the distance. With no
price the optimiser moves x by ``rate`` a step. The price pulls x back in proportion to x:

    pace <- running mean, as the optimiser's momentum makes it, of  rate (drive - x rho / rho*)
    x    <- x + pace

``rho = beta / unit`` is the price in units of the RMS of the advantages in groups that show a signal. ``rho*`` is the
price under which x settles at 1. ``drive`` is 1; less where these advantages are smaller than usual, 0 without any.

Each reading of KL is compared with the forecast. The more the price holds x back, the more of the error corrects
``rho*``; the rest corrects ``rate``. So a KL that is low because learning is slow hardly lowers the price.
A price that was *computed* from the spread and the length is trusted more than one that was *given*.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from klamp.controllers import base
from klamp.controllers.base import Bounds, Known, State, clip
from klamp.errors import require_number, unknown
from klamp.masked import Unit

PRESETS = {"conservative": 0.02, "moderate": 0.08, "aggressive": 0.15}  # nats per token, inside the usual bands
DOUBT = 2.0  # how far a computed price may be wrong: rho's floor is half of it, and a quarter for sparse rewards
BATCH = 48.0  # at the computed price the gradient noise of n sequences an update makes BATCH / n of the target KL
CEILING = 10.0  # the highest rho over the computed one, half for sparse rewards: the reward is a tenth of the gradient
TRUST = 4.0  # odds that an error is the rate's and not the price's, if the price was computed; if given, 1 / TRUST
FIRST_RATE = 1 / 15  # 15 steps from the reference to the target: runs take 3 to 80, and this is their geometric mean
RATES = math.log(1 / 400), math.log(1 / 2)  # bounds of log rate: from 400 steps to the target, a run's length, to 2
LEAST = 1e-3  # the least x: a KL below a millionth of its target counts as zero
SMOOTHING = 0.28  # weight of the newest step in the pace: delays of 1 to 5 steps and Adam's ten, met in the middle
DRIFT, NOISE = 0.1, 0.07  # relative change of rho* in a step; relative error of a reading of x, unless it is larger
FASTEST = 0.3  # the largest bandwidth: a faster observer follows the swings that momentum makes, and amplifies them
SURPRISE = 0.3  # the largest error of log x that one high reading shows, however high it is: one alone says little
CALM = 0.02  # a computed rho falls by 2 % a step at most, and rises by 4 %: enough for drift, too slow for swings
PATIENCE = 24.0  # steps to the target beyond which a given price is pushed
BOLDEST = 6.0  # the highest power of x in the price; a given price is lowered to rho* / BOLDEST at most


@dataclass(frozen=True)
class HoldState(State, law=11):
    """What is known of the plant, relative to the target. Ten numbers."""

    log_rho: float = 0.0
    """``log rho*``: the price under which x settles at 1, in its unit."""
    lowest: float = 0.0
    """The lowest rho that is charged: half the computed one, less where few groups show a signal; 0 if none was."""
    x: float = 0.0
    """``sqrt(KL / target)``, freed of noise."""
    pace: float = 0.0
    """The change of x a step, averaged as the optimiser's momentum does."""
    log_rate: float = math.log(FIRST_RATE)
    """Logarithm of the change of x a step where nothing is charged."""
    square: float = 0.0
    """Running mean of the square of the unit; 0 before the first signal, or where no spread is given."""
    steps: int = -5
    """Readings since KL left zero; negative while Hold waits for that, for five updates at most."""

    of_kl = ("x", "pace", "steps")
    sane = State.sane | {"beta": (1e-300, 1e300), "log_rho": (-700, 700), "log_rate": RATES, "steps": (-5, 1e15)}
    sane |= dict.fromkeys(("lowest", "x", "square"), (0, 1e200)) | {"pace": (-1e200, 1e200)}

    def retargeted(self, old: float, new: float) -> HoldState:
        """The same plant in units of another target: x goes as ``1 / sqrt(target)``, and so does the price."""
        shift = math.log(old / new) / 2
        scaled = {name: math.exp(shift) * getattr(self, name) for name in ("beta", "lowest", "x", "pace")}
        return replace(self, **scaled, log_rho=self.log_rho + shift, log_rate=clip(self.log_rate + shift, *RATES))

    @property
    def unit(self) -> float:
        """What the price is in units of: the RMS of the advantages in groups with a signal; 1 where none is known."""
        return math.sqrt(self.square) if self.square > 0 else 1.0

    @property
    def computed(self) -> bool:
        """Whether spread and length were known, so that a first price could be computed."""
        return self.lowest > 0


@dataclass(frozen=True)
class Hold:
    """Finds the price that keeps KL at ``target``: ``beta = rho* unit``, and more while KL is above the target."""

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

    def init(self, *, spread: Known = None, length: Known = None, n: Known = None, signal: float = 1.0) -> HoldState:
        """``beta = init_beta`` if it is set. The computed price is ``unit / sqrt(2 target per sequence)``.

        To second order in ``1 / beta`` the best policy has the target KL under it; ``unit = spread / sqrt(signal)``.
        Hold starts at ``sqrt((1 + signal) / 2)`` times that or, if nothing clamps and ``n`` sequences are drawn for an
        update, ``sqrt(1/2 + signal min(BATCH / n, 3.5))``. It soon leaves an ``init_beta`` that is a factor of two off.
        """
        given = base.first_price("Hold", self.init_beta, self.bounds)
        if spread is None or (self.init_beta is not None and 0 in (spread, signal)):
            return HoldState(beta=given, log_rho=math.log(given))
        require_number("spread", spread, at_least=0, way_out="It is the RMS of the advantages in a group.")
        rho = 1 / math.sqrt(2 * base.nats(self.target) * base.tokens("Hold", self.per, length))
        most = rho if n is None else rho * min(math.sqrt(0.5 + BATCH / base.sequences(n)), DOUBT)
        state = HoldState(beta=given, log_rho=math.log(most), lowest=rho / DOUBT)
        state, _ = _driven(state, spread, base.groups_told(signal, spread))
        if self.init_beta is None:
            return replace(state, beta=clip(math.exp(state.log_rho) * state.unit, *self.bounds))
        near = 1 / DOUBT <= given / state.unit / rho <= DOUBT
        return replace(state, log_rho=math.log(given / state.unit)) if near else state

    def update(
        self,
        state: HoldState,
        kl: float,
        n: int = 1,
        *,
        effort: float = 0.0,
        spread: Known = None,
        noise: Known = None,
        signal: float = 1.0,
    ) -> HoldState:
        """The state after a reading, as :class:`klamp.Controller` describes it. Here ``n`` changes nothing."""
        if left_out := base.skip(state, kl, HoldState):
            return left_out
        moves = state.updates > 0 and state.square > 0 and self.bounds[0] < state.beta < self.bounds[1]
        last = math.log(state.beta) - math.log(state.unit) if state.computed and moves else None  # otherwise it jumps
        state, drive = _driven(replace(state, updates=state.updates + 1), spread, min(signal, 1.0))
        before = state.log_rho
        ratio = max(base.observed(kl), 0.0) / base.nats(self.target)
        waits = state.steps < 0 and ratio <= LEAST**2  # the policy still is its reference
        state = replace(state, steps=state.steps + 1) if waits else _observe(state, ratio, drive, noise or 0.0)
        state = replace(state, x=state.x * math.exp(-max(0.0, effort)))  # the clamp undid so much of the update
        low, high = (math.log(clip(b, base.SMALLEST, base.LARGEST)) - math.log(state.unit) for b in self.bounds)
        if state.computed:
            low, high = max(low, math.log(state.lowest)), min(high, math.log(CEILING * DOUBT * state.lowest))
        # No wind-up: rho* stays within the bounds, or where it was if they moved past it with the unit.
        state = replace(state, log_rho=clip(state.log_rho, min(low, before), max(high, before)))
        rho = math.exp(clip(_log_price(state, last), low - 1e-9, high + 1e-9))  # so that rounding misses no bound
        return replace(state, beta=clip(state.unit * rho, *self.bounds))


def _driven(state: HoldState, spread: Known, signal: float) -> tuple[HoldState, float]:
    """The state with a batch's spread in its unit, and the batch's drive. The first signal sets the price, too."""
    unit = spread / math.sqrt(signal) if spread and signal > 0 else 0.0
    if spread is None or not 1e-100 < unit <= 1e100:
        return state, float(spread != 0 and signal != 0)
    weight = max(SMOOTHING * signal, 1 / state.updates) if state.square else 1.0  # few groups say little of the usual
    after = replace(state, square=state.square + weight * (unit * unit - state.square))
    if state.square == 0 and state.computed:
        computed = DOUBT * state.lowest
        noise = (math.exp(state.log_rho) / computed) ** 2 - 0.5  # what init added for it, as if all groups had a signal
        log_start = math.log(computed * math.sqrt(0.5 + signal * noise))
        after = replace(after, log_rho=log_start, lowest=state.lowest * max(math.sqrt(signal), 1 / DOUBT))
    elif state.square == 0:  # a price that was given stays what it was
        after = replace(after, log_rho=state.log_rho - math.log(after.unit))
    return after, min(unit / after.unit, 1.0)


def _observe(state: HoldState, ratio: float, drive: float, noise: float) -> HoldState:
    """The model's forecast of x a step on, and the model corrected by a reading of ``KL / target``."""
    count, rate = max(state.steps, 0) + 1, math.exp(state.log_rate)
    settles = math.exp(state.log_rho) * state.unit / state.beta  # rho* / rho: where x comes to rest
    answer = (state.x - drive * settles) * math.expm1(-rate / settles)  # the model, solved over a step
    pace = state.pace + SMOOTHING / (1 - (1 - SMOOTHING) ** count) * (answer - state.pace)
    x = max(state.x + pace, LEAST)
    error = min((ratio / (x * x) - 1) / 2, SURPRISE)  # of x, relative; no logarithm: it is KL whose noise has mean one
    held = min(x / settles, 1.0)  # the share of a step that the price holds back; so far the error is its own
    to_price = held / (held + (1 - held) * (TRUST if state.computed else 1 / TRUST))
    # How much of it is believed: three poles at one bandwidth, as in a steady Kalman filter; at first 1 / readings.
    w = max(min((DRIFT / max(NOISE, noise / 2) * SMOOTHING * rate) ** (1 / 3), FASTEST), 1 / count)
    gain_x = clip(3 * w - SMOOTHING, 0.0, 1.0)
    gain_pace = clip(3 * w * w - gain_x * SMOOTHING - SMOOTHING * rate, 0.0, 1.0)
    log_rate = clip(state.log_rate + w * (1 - to_price) * drive * error, *RATES)
    log_rho = state.log_rho + min(w**3 / (SMOOTHING * rate), 1.0) * to_price * drive * error
    x, pace = max(x * math.exp(gain_x * error), LEAST), pace + gain_pace * x * error
    return replace(state, steps=count, x=x, pace=pace, log_rate=log_rate, log_rho=log_rho)


def _log_price(state: HoldState, last: float | None) -> float:
    """``log rho = log rho* + exponent log x``, with x a step ahead: as it will be when the price acts.

    A computed price brings x back from above 1 in the time constant of momentum. A given one is lowered below 1, too.
    """
    ahead = math.log(max(state.x + state.pace, LEAST))
    exponent = clip((SMOOTHING if state.computed else 1 / PATIENCE) * math.exp(-state.log_rate) - 1, 0.0, BOLDEST)
    wanted = state.log_rho + max(exponent * ahead, 0.0 if state.computed else -math.log(BOLDEST))
    return wanted if last is None else clip(wanted, last - CALM, last + 2 * CALM)
