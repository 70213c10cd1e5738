"""The audit's last word on a term: right, right token by token, wrong direction, no pull or no KL, and what to use."""

from __future__ import annotations

from typing import NamedTuple

from klamp.audit.core import FORWARD, NOTHING, OTHER, Finding
from klamp.placements import BEST, IN_LOSS, LOCAL, REFUSED_IN_LOSS, SEQUENCE, UNKNOWN_IN_LOSS, refusal

LEGEND = (
    "bias: distance of the expected gradient from that of the sequence's KL, relative. cos: of the angle between the "
    "two. std: of one sequence's gradient, relative to the true one. stale: on samples of an older policy μ, 0.02 nats "
    "away. cos, stale and std are taken at the larger drift. Token by token: what a token does to the KL still to come "
    "is left out."
)
REFUSED = "Rows marked ✗ are refused by klamp.check and the trainer."


class Verdict(NamedTuple):
    """What a term is, in a word or two, and why, in the words of the trainer's refusal."""

    word: str
    reason: str

    def __str__(self) -> str:
        return f"{self.word}: {self.reason}"


def verdict(finding: Finding) -> Verdict:
    """Judged by what it descends on samples of the policy itself."""
    name, on = finding.name, finding.descends_on
    if on == SEQUENCE:
        return Verdict("right", f"{name} descends {SEQUENCE}.")
    if on == LOCAL:
        missing = f"{BEST} also counts what a token does to the KL still to come"
        return Verdict("right token by token", f"{name} descends {LOCAL}; {missing}.")
    if on == FORWARD:
        what, _, instead = REFUSED_IN_LOSS["k3"]
        return Verdict("wrong direction", f"{refusal(name, what, instead)}.")
    if on == NOTHING:
        what, _, instead = REFUSED_IN_LOSS["k1"]
        return Verdict("no pull", f"{refusal(name, what, instead)}.")
    if on == OTHER and max(finding.cosine_on) < 0:
        away = "away from the reference: its gradient points against that of KL(π‖ref). Check its sign"
        return Verdict("wrong direction", f"{refusal(name, away, IN_LOSS)}.")
    return Verdict("no KL", f"{refusal(name, UNKNOWN_IN_LOSS, IN_LOSS)}.")


def stale(finding: Finding) -> str:
    """What becomes of the term on samples of an older policy."""
    off = finding.descends_off
    what = f"none of the KLs known here (bias {finding.bias_off[-1]:.2f})" if off == OTHER else off
    return f"On samples of an older policy μ it descends {what}."
