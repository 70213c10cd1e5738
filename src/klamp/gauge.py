"""The level that the clamp works on: KL on fresh samples from what a step's own tokens show."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from klamp.errors import require_number

if TYPE_CHECKING:
    from klamp.clamp import Clamped


LEAP = 4.5
"""A step that multiplies KL on its own tokens by more tells nothing of fresh ones: a first step of Adam's moves its own
tokens by 0.07 nats and fresh ones by 0.002. The level then starts anew from the next reading."""


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
    reading correct the sum, by a quarter where batches are good to 8 %, by less where they are noisier.

        gauge_state = gauge.update(gauge_state, fresh_kl, last_clamped)     # at the start of a step
        own = measure()                                                     # after its update, on its own tokens
        last_clamped = clamp(measure, scale, gauge.limit(gauge_state, limit, own), kl=own)
    """

    drift: float = 0.02
    """How far the sum of the changes goes astray in a step. Over the noise of the readings it is their weight, as in a
    steady Kalman filter."""
    learn_bias: float = 0.02
    """How fast the part of that error which has one sign is learned: an update lowers or raises KL most on its own
    tokens, on a real model by 2 % a step more than on fresh ones."""
    learn: float = 0.1
    """How fast the share of growth is learned, where a step grew by much; from small growths nothing is."""

    def init(self) -> GaugeState:
        """Nothing read."""
        return GaugeState()

    def update(self, state: GaugeState, fresh: float, last: Clamped | None, noise: float = 0.0) -> GaugeState:
        """The state after a batch read ``fresh``; ``last`` is what the clamp found and did in the step before it.

        ``noise`` is the relative standard error of the reading, from the spread over the batch's own prompts. Where KL
        sits in few rare tokens it is 30 % and more.
        """
        if not _positive(fresh):
            return state
        leapt = last is not None and last.kl_before > LEAP * state.reading
        if last is None or leapt or state.level <= 0 or not _positive(last.kl_before, last.kl_after):
            return replace(state, level=fresh, reading=fresh, spread=self._noisier(state.spread, noise))
        expected = self._expected(state, last.kl_before) * last.kl_after / last.kl_before * math.exp(state.bias)
        # Not the logarithm: most batches miss the rare tokens and read too low, a few read far too high, and it is the
        # mean that is right. Half as much again either way is as far as one may pull.
        surprise = min(max(fresh / expected - 1, -0.5), 0.7)
        first = 1 / (state.pairs + 2)
        # Noise is what changes from one surprise to the next: a level that is wrong surprises alike every time.
        spread = state.spread + 0.05 * ((surprise - state.surprise) ** 2 / 2 - state.spread)
        spread = self._noisier(spread, noise)
        grown = _growth(state.reading, last.kl_before)
        astray = math.hypot(self.drift, 0.1 * grown)  # a tenth of what KL grew by, too
        most = 0.35 if last.kl_after < last.kl_before else 0.8  # where it held, the level is what the clamp made it
        weight = min(max(astray / math.sqrt(max(spread, 1e-6)), 0.12), most)
        level = expected * math.exp(max(weight, first) * surprise)
        # What growth may explain corrects the share, the rest the bias; growth of 30 % halves it.
        bias = state.bias + self.learn_bias * surprise * 0.1 / (grown * grown + 0.1) if state.pairs > 3 else 0.0
        share = state.share + max(self.learn, first) * surprise * grown / (grown * grown + 0.1)
        share, bias = min(max(share, 0.0), 1.2), min(max(bias, -0.05), 0.05)
        return GaugeState(level, fresh, share, state.pairs + 1, spread, surprise, bias)

    def carry(self, state: GaugeState, reading: float, last: Clamped) -> GaugeState:
        """The state after a step read on tokens that were trained on before: they show the change, not the level."""
        if state.level <= 0 or not _positive(reading, last.kl_before, last.kl_after):
            return state
        level = self._expected(state, last.kl_before) * last.kl_after / last.kl_before * math.exp(state.bias)
        return replace(state, level=level, reading=reading)

    def limit(self, state: GaugeState, limit: float, own: float) -> float:
        """The limit for own tokens that read ``own`` after the update.

        It keeps 5 % back, and nearly half the noise of a reading for what of it is left in the level; 15 % / sqrt(n)
        more while that rests on n readings.
        """
        check_limit(limit)
        back = math.exp(-0.05 - 0.45 * math.sqrt(state.spread) - 0.15 / math.sqrt(state.pairs + 1))
        if not _positive(own):
            return limit * back
        return limit * back * min(max(own / self._expected(state, own), 0.5), 3.0)

    @staticmethod
    def _noisier(spread: float, noise: float) -> float:
        """The variance of a reading, drawn up by a batch that shows more of it: the mean over five such."""
        return max(spread, spread + 0.2 * (min(noise, 1.0) ** 2 - spread)) if noise > 0 else spread

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


def _growth(before: float, after: float) -> float:
    """``log(after / before)``, within a factor of :data:`LEAP`."""
    most = math.log(LEAP)
    return min(max(math.log(after / before), -most), most) if _positive(before, after) else 0.0


def check_limit(limit: float) -> None:
    """Refuse a limit that is no KL."""
    require_number("limit", limit, above=0, way_out="It is a KL in the unit of the measurement; 1.1 x target is usual.")
