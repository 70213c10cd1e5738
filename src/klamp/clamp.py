"""The clamp: undo just enough of an update that KL stays under its limit, and say how much was undone.

Near the reference KL is quadratic in the displacement of the weights, so scaling the displacement by
``s = sqrt(limit / kl)`` brings KL to the limit. Farther out the curve bends; the driver :func:`clamp` measures again
and corrects by a secant in log-log, which is exact for any power law.

    result = clamp(measure_kl, lora_scaler(model), limit=0.055)      # after optimiser.step(), on the step's own tokens
    state = hold.update(state, kl, effort=result.effort)              # effort > 0: the price is too low

The limit is meant for fresh samples, and a step is measured on its own tokens, which it moved most. :class:`Gauge`
gives the limit on those. What is scaled is in :mod:`klamp.clamp_scalers`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from klamp.clamp_scalers import Scaler as Scaler
from klamp.clamp_scalers import lora_scaler as lora_scaler
from klamp.clamp_scalers import snapshot as snapshot
from klamp.clamp_scalers import weights_scaler as weights_scaler
from klamp.errors import ConfigError, require_number

LIMIT = 1.1
"""The usual limit, in targets: readings of a KL that rests at its target scatter by less."""


@dataclass(frozen=True)
class Clamped:
    """What one call of :func:`clamp` found and did."""

    kl_before: float
    """KL after the update, before any scaling."""
    kl_after: float
    """KL as last measured; under the limit when ``held``."""
    scale: float = 1.0
    """What is left of the displacement: 1 when nothing was scaled."""
    effort: float = 0.0
    """``-log(scale)``, what the price should have prevented; feed it to ``Hold.update``. Where the displacement begins
    away from the reference it is half of ``log(kl_before / kl_after)``, above the floor: how much nearer to it the
    weights came."""
    rounds: int = 0
    """Times the displacement was scaled."""
    held: bool = True
    """False when KL is still above the limit, or could not be measured."""


def scale_for(kl: float, limit: float, *, origin_kl: float = 0.0) -> float:
    """``min(1, (sqrt(limit) - sqrt(origin_kl)) / (sqrt(kl) - sqrt(origin_kl)))``: what brings KL to the limit.

    With the reference as origin (``origin_kl = 0``) it is ``min(1, sqrt(limit / kl))``. A KL at or below the limit,
    negative ones included, needs no scaling. A KL that is NaN or infinite has no answer and is a ConfigError.

    Args:
        kl: the KL measured after the update.
        limit: the limit, in the same unit.
        origin_kl: the KL where the displacement is zero.

    Returns:
        The factor for the displacement, from 0 to 1.
    """
    check_limit(limit)
    if not math.isfinite(kl):
        raise ConfigError(f"kl must be a finite number, got {kl!r}. Leave the weights alone and measure again.")
    if kl <= limit:
        return 1.0
    start = math.sqrt(max(origin_kl, 0.0))
    return max(math.sqrt(limit) - start, 0.0) / (math.sqrt(kl) - start)


def clamp(
    measure: Callable[[], float],
    scale: Scaler,
    limit: float,
    *,
    kl: float | None = None,
    rounds: int = 4,
    origin_kl: float = 0.0,
    floor: float = 0.0,
) -> Clamped:
    """Scale the displacement until KL is in ``[0.97 limit, limit]``; at most ``rounds`` scalings and measurements.

    The total scale never exceeds 1, so an update within the limit is left as it is, to the bit. A measurement that is
    NaN or infinite ends the search, at the last scale known to be good if there is one, with ``held=False``; at the
    first measurement nothing is scaled.

    Args:
        measure: returns the KL of the weights as they are, on the same tokens every time.
        scale: multiplies the displacement, such as :func:`lora_scaler` or :func:`weights_scaler`.
        limit: the limit, in the unit of ``measure``.
        kl: a measurement already taken after the update. None: ``measure()``.
        rounds: how often the displacement is scaled and measured at most.
        origin_kl: the KL where the displacement is zero, where that is not the reference (backtracking).
        floor: what rounding alone reads as KL, also at the reference.

    Returns:
        The KL before and after, the scale, the effort, and whether the limit holds.
    """
    check_limit(limit)
    if rounds < 1:
        raise ConfigError(f"rounds must be >= 1, got {rounds!r}. Two suffice as a rule; the default is 4.")
    before = measure() if kl is None else kl
    if not math.isfinite(before) or before <= limit:
        return Clamped(before, before, held=math.isfinite(before))
    return _search(measure, scale, limit, before, rounds, max(origin_kl, 0.0), max(floor, 0.0))


def no_farther(
    measure: Callable[[], float], scale: Scaler, began: float, halvings: int = 4, *, floor: float = 0.0
) -> Clamped:
    """Halve a step until KL is no higher than where it began; undo it when that does not do."""
    before = kl = measure()
    total, rounds = 1.0, 0
    while kl > began and rounds < halvings:
        scale(0.5)
        total, rounds, kl = total / 2, rounds + 1, measure()
    if not kl <= began:  # also where it cannot be measured
        scale(0.0)
        total, kl = 0.0, began
    return Clamped(before, kl, total, _nearer(before - floor, kl - floor), rounds, held=math.isfinite(before))


def _nearer(before: float, after: float) -> float:
    """``log sqrt(before / after)``: by how much the distance from the reference shrank."""
    known = math.isfinite(before) and math.isfinite(after) and before > 0
    return max(math.log(before / max(after, 1e-12 * before)) / 2, 0.0) if known else 0.0


# Part of the limit that a clamped step may leave unused. Measuring again costs a forward pass, and 3 % of KL is 1.5 %
# of the displacement; aiming at the middle leaves room for an error of either sign.
_SLACK = 0.03


def _search(
    measure: Callable[[], float],
    scale: Scaler,
    limit: float,
    before: float,
    rounds: int,
    origin_kl: float,
    floor: float,
) -> Clamped:
    """The rounds of :func:`clamp`: the square-root rule first, secants after, the best known scale at the end."""
    aim, origin = limit * (1 - _SLACK / 2), origin_kl or floor
    low, high = (0.0, origin), (1.0, before)  # (scale, kl) known to be under and over the limit
    total, kl, used = 1.0, before, 0
    guess = scale_for(before, aim, origin_kl=origin)
    while used < rounds and not limit * (1 - _SLACK) <= kl <= limit:
        if guess == total:
            break  # the origin itself is over the limit: nothing is left to undo
        scale(guess / total)
        last, total = (total, kl), guess
        kl, used = measure(), used + 1
        if not math.isfinite(kl):
            break
        low, high = ((total, kl), high) if kl <= limit else (low, (total, kl))
        guess = _secant(last, (total, kl), aim, origin, low[0], high[0])
    if not kl <= limit and low[0] > 0:
        scale(low[0] / total)
        total, kl = low
    effort = -math.log(max(total, 1e-12))
    if origin_kl > floor:
        effort = _nearer(before - floor, (kl if math.isfinite(kl) else aim) - floor)
    return Clamped(before, kl, total, effort, used, held=kl <= limit)


def _secant(
    a: tuple[float, float], b: tuple[float, float], aim: float, origin: float, low: float, high: float
) -> float:
    """Where the line through two points of (log scale, log(kl - origin)) meets the aim, inside the bracket."""
    rise_a, rise_b, rise = a[1] - origin, b[1] - origin, aim - origin
    middle = (low + high) / 2
    if min(rise_a, rise_b, rise, a[0], b[0]) <= 0 or a[0] == b[0]:
        return middle if origin < aim else low
    slope = math.log(rise_a / rise_b) / math.log(a[0] / b[0])
    # KL rises with the displacement: linearly at the least where it starts from a slope, and hardly faster than s^8.
    # A slope outside is rounding, and its secant would leap.
    guess = b[0] * math.exp(math.log(rise / rise_b) / min(max(slope, 0.5), 8.0))
    return guess if low < guess < high else middle


LEAP = 4.5
"""A step that multiplies KL on its own tokens by more tells nothing of fresh ones: a first step of Adam's moves its own
tokens by 0.07 nats and fresh ones by 0.002. The level then starts anew from the next reading."""

MOST_BIAS = 0.5
"""Fresh KL that grew by half in a step, and own tokens that show nothing of it, would be no measurement any more."""


@dataclass(frozen=True)
class GaugeState:
    """The KL of the weights as they are, and how the present batch reads it."""

    level: float = 0.0
    """KL on fresh samples, freed of the batches' noise; 0 before the first."""
    reading: float = 0.0
    """What the present batch measured before its update."""
    share: float = 1.0
    """How much of the growth that a step shows on its own tokens is there on fresh ones, in logarithms."""
    pairs: int = 0
    spread: float = 0.006
    """Variance of a reading, in logarithms of KL: 8 % to begin with, as of a batch of some tens of sequences."""
    surprise: float = 0.0
    """How far the last reading was from what was expected."""
    bias: float = 0.0
    """What fresh KL grows by in a step beyond what own tokens show of it, in logarithms."""


@dataclass(frozen=True)
class Gauge:
    """The limit on a step's own tokens that holds fresh KL under ``limit``, batch by batch.

    An update moves most the tokens it was computed on: KL on them reads higher than on fresh samples, the more so the
    smaller the batch, and clamped at the limit meant for fresh ones it would be held lower than asked.

    A batch reads KL with an error of 5 to 15 %, but it reads the weights before and after its update with the same
    error. So the change is known ten times better than the level: the gauge adds up the changes and lets each fresh
    reading correct the sum, by a half where batches are good to 10 %, by a tenth where they are good to 30 %.

        gauge_state = gauge.update(gauge_state, fresh_kl, last_clamped)     # at the start of a step
        own = measure()                                                     # after its update, on its own tokens
        last_clamped = clamp(measure, scale, gauge.limit(gauge_state, limit, own), kl=own)
    """

    error: float = 0.1
    """How far off the sum of the changes is, relative to KL. Against the noise of a reading it is the reading's weight,
    as in a Kalman filter. With 0.07 or 0.14 recorded runs are foreseen 2 % worse."""
    learn_bias: float = 0.2
    """How fast the part of that error which has one sign is learned, where a reading counts in full: an update lowers
    or raises KL most on its own tokens, at a usual learning rate by 2 % a step more than on fresh ones, at four times
    that by 15 %."""
    learn: float = 0.1
    """How fast the share of growth is learned, where a step grew by much; from small growths nothing is."""

    def init(self) -> GaugeState:
        """Nothing read."""
        return GaugeState()

    def update(self, state: GaugeState, fresh: float, last: Clamped | None, noise: float = 0.0) -> GaugeState:
        """The state after a batch read ``fresh``.

        Args:
            state: what is known so far.
            fresh: KL on the batch before its update.
            last: what the clamp found and did in the step before. None: nothing.
            noise: relative standard error of ``fresh``, from the spread over the batch's own prompts. Where KL sits in
                few rare tokens it is 30 % and more.

        Returns:
            The state for this step.
        """
        if not _positive(fresh):
            return state
        leapt = last is not None and last.kl_before > LEAP * state.reading
        if last is None or leapt or state.level <= 0 or not _positive(last.kl_before, last.kl_after):
            return replace(state, level=fresh, reading=fresh, spread=_mean_square(state.spread, noise, 0.1))
        expected = self._expected(state, last.kl_before) * last.kl_after / last.kl_before * math.exp(state.bias)
        # Not the logarithm: most batches miss the rare tokens and read too low, a few read far too high, and it is the
        # mean that is right. Half as much again either way is as far as one may pull.
        surprise = min(max(fresh / expected - 1, -0.5), 0.7)
        first = 1 / (state.pairs + 2)
        # Noise is what changes from one surprise to the next: a level that is wrong surprises alike every time.
        changed = (surprise - state.surprise) / math.sqrt(2)
        spread = _mean_square(state.spread, noise, 0.1) if noise > 0 else _mean_square(state.spread, changed, 0.05)
        grown = _growth(state.reading, last.kl_before)
        # Half as this batch says, half as those before it: a few prompts may agree by chance.
        variance = (noise * noise + spread) / 2 if noise > 0 else spread
        weight = self.error**2 / (self.error**2 + variance)
        level = expected * math.exp(max(weight, first) * surprise)
        # What growth may explain corrects the share, the rest the bias; growth of 30 % halves it.
        learn = self.learn_bias * weight * 0.1 / (grown * grown + 0.1)
        bias = state.bias + learn * surprise if state.pairs > 3 else 0.0
        share = state.share + max(self.learn, first) * surprise * grown / (grown * grown + 0.1)
        share, bias = min(max(share, 0.0), 1.2), min(max(bias, -MOST_BIAS), MOST_BIAS)
        return GaugeState(level, fresh, share, state.pairs + 1, spread, surprise, bias)

    def carry(self, state: GaugeState, reading: float, last: Clamped) -> GaugeState:
        """The state after a step read on tokens that were trained on before: they show the change, not the level.

        Args:
            state: what is known so far.
            reading: KL on those tokens before this update.
            last: what the clamp found and did in the step before.

        Returns:
            The state for this step.
        """
        if state.level <= 0 or not _positive(reading, last.kl_before, last.kl_after):
            return state
        level = self._expected(state, last.kl_before) * last.kl_after / last.kl_before * math.exp(state.bias)
        return replace(state, level=level, reading=reading)

    def limit(self, state: GaugeState, limit: float, own: float) -> float:
        """The limit for own tokens that read ``own`` after the update.

        It keeps back what fresh KL grows by beyond own tokens, 5 % at least, and nearly half the noise of a reading for
        what of it is left in the level; 15 % / sqrt(n) more while that rests on n readings.

        Args:
            state: what is known so far.
            limit: the limit on fresh samples.
            own: KL on the step's own tokens after its update.

        Returns:
            The limit on own tokens.
        """
        check_limit(limit)
        back = math.exp(-max(state.bias, 0.05) - 0.45 * math.sqrt(state.spread) - 0.15 / math.sqrt(state.pairs + 1))
        if not _positive(own):
            return limit * back
        return limit * back * min(max(own / self._expected(state, own), 0.5), 3.0)

    def _expected(self, state: GaugeState, own: float) -> float:
        """Fresh KL where own tokens read ``own``, unclamped; own itself where growth from near 0 says nothing."""
        if not state.reading > 0.05 * own:
            return own
        known = _growth(state.reading, own)
        # Growth beyond what a share was learned from is taken as it is: it is no reason to let fresh KL grow.
        beyond = math.log(own / state.reading) - known if _positive(state.reading, own) else 0.0
        return state.level * math.exp(state.share * known + beyond)


def _positive(*values: float) -> bool:
    """Whether these are KLs to reckon with: above rounding, and below what any model reaches."""
    return all(1e-12 < v < 1e12 for v in values)


def _mean_square(square: float, value: float, weight: float) -> float:
    """A running mean square with ``value`` in it, which counts as 1 at most, and as nothing where it is 0 or NaN."""
    return square + weight * (min(value * value, 1.0) - square) if value * value > 0 else square


def _growth(before: float, after: float) -> float:
    """``log(after / before)``, within a factor of :data:`LEAP`."""
    most = math.log(LEAP)
    return min(max(math.log(after / before), -most), most) if _positive(before, after) else 0.0


def check_limit(limit: float) -> None:
    """Refuse a limit that is no KL."""
    require_number("limit", limit, above=0, way_out="It is a KL in the unit of the measurement; 1.1 x target is usual.")
