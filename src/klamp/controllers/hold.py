"""``Hold``: find the price that keeps KL at its target, then be quiet.

Two Kalman filters follow ``x = sqrt(KL / target)``, the price ``beta*`` that holds the target, and the pace of the
plant, from the measured KL and the prices charged. One believes that KL answers a price directly, the other that it
carries on (:mod:`klamp.controllers.belief`); each counts by how well it foresaw the readings. The next price is the one
that carries x to 1 in about eight steps, or at the plant's own pace where that is faster. On a fast plant that is
``beta*`` and nothing else: quiet. A slow one is pushed, and let go in time. All is relative to the target, so the unit
of KL does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from klamp.controllers.base import (
    LARGEST,
    SMALLEST,
    Bounds,
    State,
    check_bounds,
    check_target,
    clip,
    observed,
    skip,
)
from klamp.controllers.belief import DIRECT, FIRST_RATE, INERT, NOISE, UNKNOWN_PRICE, Belief, noise_of
from klamp.errors import ConfigError, require_number, unknown
from klamp.masked import Unit

PRESETS = {"conservative": 0.02, "moderate": 0.08, "aggressive": 0.15}
"""Targets in nats per token, inside the usual bands 0.01-0.03, 0.05-0.10 and 0.10-0.20."""

# The start. Variances are of natural logarithms.
TOLD_PRICE = 0.08  # sd 0.28: the feed-forward was within 0.4 to 1.2 of the best constant
LEAST = 1e-4  # KL / target below which a reading says nothing (x = 0.01), and before which nothing has begun
HUGE = 1e4  # KL / target above which it is simply far too high
WAIT = 5  # but after that many readings it has: the price is so high that KL cannot rise

# What is measured.
FELT = 1 / 3.5  # share of a new price in what the policy feels: delay and momentum are 3 to 5 steps
FIRST_NOISE = 0.005  # 7 % of x, 14 % of KL: a batch of a hundred sequences
FIRST_ODDS = -2.0  # one in eight that KL carries on. Where it does, 30 readings say so by 5; where not, 60 by -2
ODDS, MOST_ODDS = 2.0, 5.0  # the most that a reading says, and that all of them do: a plant may change

# What a price trails: surprises of one sign, step after step.
RUN_PRICE, RUN_CHANCE = 0.8, 0.1  # beta* keeps rising: charge 0.8 of their mean more, less what chance brings, and
RUN_MOST = 0.2  # no more than a fifth: with a delay of seven steps surprises have one sign for other reasons
RUN_PACE = 6.0, 13.0, 16.0, 24.0  # in full on a plant that answers in 13 to 16 steps. With one that takes 6 the filter
# keeps up. One that takes 24 is pushed by its x, and a climb of it that bends upwards is no rise of beta*: there it is
RUN_NEAR, RUN_HALF = (0.95, 1.05), 0.5  # half of that, from x = 1.05 on

# What is done.
PACE = 8.0  # steps to the target on a slow plant: more than its delays, or the push oscillates
MOST = 8.0  # how much faster than by itself a slow plant is driven
LEAD, INERT_LEAD = 2.6, 3.3  # steps ahead at which x is judged: what is decided now is felt then
INERT_PUSH = 2.0  # known to carry on, a fast plant's wander can be damped; beyond 2 a delay of five steps oscillates
HARDEST = 0.085  # least drive asked for, when KL is far above the target
BOLDNESS, BOLDER = 6.0, 3.0  # highest drive asked for while KL is low; exp(3 sd) higher while beta* is not known
RISE, FALL = 1.4, 0.13  # largest change of log beta a step: up at once, for KL is running away; down with care
CLIMB, CLIMB_FALL = 40.0, 0.01  # on a climb that arrives within 40 steps by itself, beta falls by 1 % a step at most;
CLIMB_OWN = 3.0  # within three times its own time, where a plant is fast: what is slower is a KL that has settled

# With a clamp beside it. Strain is the clamp's effort over the free pace of x: the share of a step that it undoes.
LEAN = 0.35  # before the clamp first acts, a price 30 % under beta* brings KL to it, and keeps it from turning round
LEAN_SLOW = 14.0, 24.0  # but a plant that takes 24 steps, and
CARRIES_ON = 1.0  # carries on by odds of e to 1, gets there at any price near beta*: what it was pushed by is given
# back on the way, or the clamp undoes it for ten steps
LEAN_FALL = 0.04  # on a climb that arrives by itself it falls by 4 % a step,
LEAN_FAST = 0.5  # or by half the free pace: what a step moves far turns round within a few
LEAN_BOLD = 1.5  # highest drive asked for on the way there, where beta* is known
LEAN_FREE = 2.5  # a climb that arrives within 2.5 times its free time by itself is not pushed any further: what is
# learned under a price far too low is worth less, and has to be unlearned
STRAIN, STRAIN_FAST = 0.06, 1.3  # the strain to keep: 6 %, and 1.3 % more for each 1 % of x that a step may move. At
# that price KL rests on the clamp, which cuts the upper half of its wander. Constant prices under a clamp: 0.74 of the
# best at ramp 2.5 had a strain of 0.15, 0.9 at ramp 25
MOST_EFFORT = 0.025  # and no more than 2.5 % of the displacement a step: the clamp undoes what costs no KL, too. A run
# that lost 7 % a step had 5 % less reward than a constant at its KL; with 2.5 %, 1 % more
STRAIN_RATE, FULL_STRAIN = 0.35, 0.85  # strain is averaged over three steps; beyond 0.85 says "far too low" and no more
PAID_RATE, PAID_PACE = 0.35, 0.25  # the price paid of late, 0.35 pace^0.25 of it new: plants answer in 3 to 13 steps
SLACK, SLACK_GAIN = 0.95, 6.0  # x below which KL is slack, a tenth under target: the price falls by 6 times the lack
TIGHT, TIGHT_GAIN = 1.06, 2.0  # x that a clamp at 1.1 of the target does not let stay: under a laxer one beta rises
FAR, HARD = 0.75, 0.5  # x at which KL has left the clamp altogether: back to bringing it there, unless that undoes 40 %
MOST_CHANGE = 0.2  # of log beta a step
FIRST_STEP = 0.5  # the first step of x over the free pace is 1 to 2 with Adam, whatever the price: KL has no slope at 0
PACE_WINDOW = 0.2  # later, the free pace is the fastest climb of 0.2
PACE_KEPT = 0.9985  # and is forgotten by 0.15 % a step
ROOM, KNOWN = 0.5, 0.35  # or halfway by a slower climb that the price, told and known to a third, did not halve: the
# first reading may have been bfloat16's noise. From ten times the price a slow climb says nothing of the free pace
UNCLAMPED = 1.15  # x that a clamp would not have let pass: there is none any more


@dataclass(frozen=True)
class HoldState(State):
    """What the controller believes of the plant, relative to the target."""

    told: int = 0
    """1 where the first price was told: then it was about right, and what KL does under it can be taken at its word."""
    moved: int = 0
    """Readings since KL left zero."""
    felt: float = 0.0
    """Mean of ``1 / beta`` over the last few steps."""
    direct: Belief = field(default_factory=lambda: Belief(DIRECT))
    """What the readings say if KL answers a price directly."""
    inert: Belief = field(default_factory=lambda: Belief(INERT))
    """What they say if it carries on."""
    odds: float = FIRST_ODDS
    """Logarithm of the odds that it does."""
    noise: float = FIRST_NOISE
    """Variance of a reading of log x."""
    readings: tuple[float, ...] = ()
    """The last two readings of log x."""
    undone: float = 0.0
    """The clamp's effort after the last reading."""
    lean: float = 0.0
    """1 while there is a clamp to lean on."""
    touched: int = 0
    """1 once that clamp has acted: from then on its strain sets the price."""
    free: float = 0.0
    """The free pace: the climb of x a step that the price does not slow down."""
    climbed: float = 0.0
    """Climb of x since it was last timed, the clamp's cuts added back."""
    timed: int = 0
    """Readings since then."""
    strain: float = 0.0
    """Mean of the clamp's recent effort over the free pace."""
    paid: float = 0.0
    """Mean of the recent log beta, since the clamp first acted."""

    def mean(self, of: Callable[[Belief], float]) -> float:
        """A figure of both beliefs, by their odds. Beside a clamp, which stops KL where it is, nothing carries on."""
        inert = 0.0 if self.lean else 1 / (1 + math.exp(-self.odds))
        return (1 - inert) * of(self.direct) + inert * of(self.inert)

    @property
    def x(self) -> float:
        """``sqrt(KL / target)``, freed of noise."""
        return self.mean(lambda belief: belief.x)

    @property
    def best(self) -> float:
        """``log beta*``: the price that holds the target."""
        return self.mean(lambda belief: belief.best)

    def priced(self, best: Callable[[Belief], float]) -> HoldState:
        """Both beliefs with another ``beta*``."""
        direct, inert = (replace(belief, best=best(belief)) for belief in (self.direct, self.inert))
        return replace(self, direct=direct, inert=inert)


@dataclass(frozen=True)
class Hold:
    """``log beta = log beta* - log drive``, with ``beta*`` and the pace of the plant from Kalman filters on KL."""

    target: float
    per: Unit | None = None
    init_beta: float = 0.1
    bounds: Bounds = (1e-6, 1e4)
    clamped: bool = False
    """Whether a clamp is known to stand beside the price, which then leans on it from the start; otherwise it does so
    from the clamp's first effort on."""

    def __post_init__(self) -> None:
        check_target("Hold", self.target, self.per)
        require_number("Hold.init_beta", self.init_beta, above=0, way_out="It is the price before the first update.")
        check_bounds("Hold", self.bounds, around=self.init_beta)

    @classmethod
    def preset(cls, name: str) -> Hold:
        """A controller with a usual target, in nats per token: conservative 0.02, moderate 0.08, aggressive 0.15."""
        if name not in PRESETS:
            raise unknown("Hold.preset", name, PRESETS)
        return cls(target=PRESETS[name], per="token")

    def init(self, *, spread: float | None = None, length: float | None = None) -> HoldState:
        """``beta = 0.65 spread / sqrt(2 target per sequence)``; at ``init_beta``, and less sure of it, told nothing.

        ``spread`` is the RMS spread within a prompt of the advantages as they multiply the score: about 1 after
        normalisation. ``length``, the mean number of tokens, is needed unless the target is per sequence. The factor
        is where the best constants of real and simulated runs lay: 0.4 to 0.8 of the small-tilt value.
        """
        if spread is None:
            return self._start(self.init_beta, told=False)
        require_number("spread", spread, above=0, way_out="It is the RMS spread of the advantages in a group.")
        return self._start(0.65 * spread / math.sqrt(2 * self.target * self._tokens(length)), told=True)

    def _start(self, beta: float, *, told: bool) -> HoldState:
        beta, doubt = clip(beta, *self.bounds), TOLD_PRICE if told else UNKNOWN_PRICE
        known = replace(Belief(DIRECT), best=math.log(beta), doubt=(*Belief.doubt[:7], doubt, *Belief.doubt[8:]))
        inert = replace(known, answer=INERT)
        return HoldState(beta=beta, told=int(told), felt=1 / beta, direct=known, inert=inert, lean=float(self.clamped))

    def _tokens(self, length: float | None) -> float:
        if self.per == "sequence":
            return 1.0
        if length is None:
            raise ConfigError(
                f"length is missing: Hold.init(spread=...) with per={self.per!r} needs the mean number of tokens in a "
                "completion. Pass length=..., or leave spread out to start at init_beta."
            )
        return require_number("length", length, above=0, way_out="It is the mean number of tokens in a completion.")

    def update(self, state: HoldState, kl: float, n: int = 1, effort: float = 0.0) -> HoldState:
        """The state after observing ``kl`` and, where there is a clamp, what it undid of the step that followed.

        ``effort`` is ``Clamped.effort``. Above 0 it says that the price was too low: the filter knows that x was scaled
        by ``exp(-effort)`` and reads the climb that made it necessary. One that is no positive number counts as 0.
        ``n`` is not used: the noise of a reading is estimated from the readings.
        """
        left_out = skip(state, kl, HoldState)
        if left_out is not None:
            return left_out
        effort = effort if math.isfinite(effort) and effort > 0 else 0.0
        ratio = observed(kl) / self.target
        if state.moved == 0 and ratio <= LEAST and state.updates < WAIT:
            return replace(state, updates=state.updates + 1)  # the policy is still the reference
        after = _pace(state, _learn(state, 0.5 * math.log(clip(ratio, LEAST, HUGE))))
        after = replace(after, lean=_lean(after, effort), undone=effort)
        wanted = after.mean(lambda belief: _price(state, after, belief))
        if after.lean:
            # Before the clamp acts KL is not too high, and the price falls; on a slow plant a push ends in good time.
            wanted = min(wanted, math.log(state.beta) + RISE * _slow(after))
            after = _strain(state, after)
        else:
            after = replace(after, touched=0)
        if after.touched:
            wanted = _against_clamp(state, after)
            read_off = after.paid - math.log(1 - _kept_strain(after))
            after = after.priced(lambda belief: read_off)
        low, high = max(self.bounds[0], SMALLEST), min(self.bounds[1], LARGEST)
        # No wind-up of beta* beyond a price that can be charged.
        after = after.priced(lambda belief: clip(belief.best, math.log(low), math.log(high)))
        return replace(after, beta=clip(math.exp(wanted), low, high))


def _learn(state: HoldState, reading: float) -> HoldState:
    """Both beliefs after a reading of log x, and the odds of the two by how well each foresaw it."""
    n = state.moved + 1
    felt = state.felt + FELT * (1 / state.beta - state.felt)
    variance = noise_of(state.readings, reading, state.noise, n)
    noise = clip(variance, *NOISE)
    direct, foreseen = state.direct.learn(reading, felt, noise, n, state.undone)
    inert, other = state.inert.learn(reading, felt, noise, n, state.undone)
    odds = state.odds
    if n > 2 and state.undone == 0:  # the first two readings, and those under a clamp, say nothing of momentum
        odds = clip(odds + clip(other - foreseen, -ODDS, ODDS), -MOST_ODDS, MOST_ODDS)
    return replace(
        state,
        updates=state.updates + 1,
        moved=n,
        felt=felt,
        direct=direct,
        inert=inert,
        odds=odds,
        noise=variance,
        readings=(reading, *state.readings[:1]),
    )


def _price(before: HoldState, state: HoldState, belief: Belief) -> float:
    """``log beta* - log d`` for the drive d that carries x to 1 at the pace wanted, with the limits on boldness."""
    lead, least = (LEAD, 1.0) if belief.answer == DIRECT else (INERT_LEAD, INERT_PUSH)
    x = belief.ahead(state.felt, state.moved + 1, lead)
    push = clip(math.exp(-belief.rate) / PACE, least, MOST)  # 1: at its own pace, whatever x is
    # sqrt(d) (1 - x/d) = push (1 - x): halfway between plants whose climb ignores the price and those that lag it
    miss = (1 - x) * push
    drive = ((miss + math.sqrt(miss * miss + 4 * x)) / 2) ** 2
    boldest = 1 + (BOLDNESS - 1) * (push - 1) / (MOST - 1) * math.exp(BOLDER * belief.price_doubt)
    if state.lean and belief.price_doubt < KNOWN:
        boldest = min(boldest, LEAN_BOLD)
    wanted = belief.best - math.log(clip(drive, HARDEST, boldest)) + (-LEAN if state.lean else _behind(belief))
    now = math.log(before.beta)
    fall = FALL
    gently = clip(LEAN_FAST * state.free, LEAN_FALL, FALL) if state.lean else CLIMB_FALL
    climb = CLIMB if state.lean else min(CLIMB, CLIMB_OWN * math.exp(-belief.rate))
    if x < 1 and belief.speed * climb > 1 - x:
        fall = gently
    if state.lean and x < 1 and belief.speed * LEAN_FREE > (1 - x) * state.free:
        wanted, fall = max(wanted, min(belief.best - LEAN, now)), gently
    return clip(wanted, now - fall, now + RISE)


def _slow(state: HoldState) -> float:
    """1 on a slow plant whose KL carries on, and so arrives at the clamp at any price near ``beta*``; 0 on others."""
    low, high = LEAN_SLOW
    steps = math.exp(-state.direct.rate)
    return clip((steps - low) / (high - low), 0.0, 1.0) if state.odds > CARRIES_ON else 0.0


def _behind(belief: Belief) -> float:
    """How far the filter's ``beta*`` trails one that rises, as real ones do: KL above its forecast, step after step.

    Upwards only. A price too low is a KL that runs away; one too high costs a little reward, and the filter sees to it.
    """
    steps = math.exp(-belief.rate)
    low, from_, to, high = RUN_PACE
    near = RUN_HALF * clip((belief.x - RUN_NEAR[0]) / (RUN_NEAR[1] - RUN_NEAR[0]), 0.0, 1.0)
    share = clip(min((steps - low) / (from_ - low), max((high - steps) / (high - to), near)), 0.0, 1.0)
    return share * clip(RUN_PRICE * (belief.run - RUN_CHANCE), 0.0, RUN_MOST)


def _pace(before: HoldState, state: HoldState) -> HoldState:
    """Follow the free pace. At the reference KL has no slope, so the first step shows it under any price."""
    if state.moved == 1:
        return replace(state, free=FIRST_STEP * state.x if state.x < 1 else FIRST_RATE)
    cut = math.exp(min(before.undone, 5.0))  # beyond, a step went astray altogether
    climbed, timed = before.climbed + state.x * cut - before.x, before.timed + 1
    free = before.free * PACE_KEPT
    if climbed >= PACE_WINDOW:
        pace = climbed / timed
        room = 1 - state.x / (math.exp(state.best) * state.felt)  # the share of the free pace that the price leaves
        if state.told and state.direct.price_doubt < KNOWN and room > ROOM and pace / room < free:
            free = math.sqrt(free * pace / room)
        return replace(state, free=min(max(free, pace), 1.0), climbed=0.0, timed=0)
    if climbed <= 0:
        climbed, timed = 0.0, 0
    return replace(state, free=free, climbed=climbed, timed=timed)


def _strain(before: HoldState, state: HoldState) -> HoldState:
    """Follow the strain, and the price paid while there is some."""
    strain = min(state.undone * state.x / max(state.free, 1 / 600), 1.0)
    strain = before.strain + STRAIN_RATE * (strain - before.strain)
    now, acts = math.log(before.beta), before.touched or state.undone > 0
    touched = int(acts and (state.x > FAR or state.undone > HARD))
    paid = before.paid if before.touched else now
    rate = clip(PAID_RATE * state.free**PAID_PACE, 0.03, 0.5)
    return replace(state, strain=strain, touched=touched, paid=paid + rate * (now - paid))


def _kept_strain(state: HoldState) -> float:
    return min(STRAIN + STRAIN_FAST * state.free, MOST_EFFORT / max(state.free, 1 / 600))


def _against_clamp(before: HoldState, state: HoldState) -> float:
    """The price under which the clamp undoes a small, known share of each step.

    At x = 1 a step would climb by ``free (1 - beta / beta*)``, and the clamp undoes that. So strain is
    ``1 - beta / beta*`` and reads off ``beta*`` without knowing how the plant answers. The price paid of late stands
    for the one that this strain came from, so nothing is corrected twice.
    """
    change = math.log((1 - _kept_strain(state)) / (1 - min(state.strain, FULL_STRAIN)))
    if state.undone == 0:
        change -= SLACK_GAIN * max(SLACK - state.x, 0.0)
    if state.x > TIGHT:
        change = max(change, 0.0) + TIGHT_GAIN * (state.x - TIGHT)
    now = math.log(before.beta)
    return clip(state.paid + change, now - MOST_CHANGE, now + MOST_CHANGE)


def _lean(state: HoldState, effort: float) -> float:
    """1 once a clamp has acted; 0 again when KL passes what a clamp would have stopped."""
    if effort > 0:
        return 1.0
    return 0.0 if state.x > UNCLAMPED else state.lean
