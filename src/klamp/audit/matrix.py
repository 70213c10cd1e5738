"""The terms that klamp and its peers use, each a function of a :class:`~klamp.audit.enumeration.Batch`, and verdicts.

A term of the user's own is examined in the same way. A verdict says whether a term is right, right token by token, in
the wrong direction, without pull or no KL, and what to use instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from klamp import estimators as e
from klamp.audit.enumeration import DRIFTS, FORWARD, NOTHING, OTHER, Batch, Finding, Term, examine
from klamp.config_io import imported
from klamp.errors import ConfigError
from klamp.placements import (
    BEST,
    IN_LOSS,
    LOCAL,
    REFUSED_IN_LOSS,
    SEQUENCE,
    TABLE,
    UNKNOWN_IN_LOSS,
    Pair,
    in_advantage,
    in_loss,
    in_reward,
    refusal,
    sequence_exact,
)

if TYPE_CHECKING:
    from rich.table import Table


Values = Callable[[Batch], Tensor]


def values_of(name: str) -> Values:
    """Per-token values of the estimator of that name."""
    if name == "exact_forward":
        return lambda b: b.forward_kl
    if name == "k3_clamped":
        return lambda b: e.k3_clamped(b.logp, b.ref_logp, limit=1.0)  # 1 nat is within the reach of these small worlds
    form = e.named(name)
    return lambda b: form(b.logp, b.ref_logp, old_logp=b.old_logp, kl=b.kl)


def stale_k1(batch: Batch) -> Tensor:
    """k1 of the sampler instead of the policy: what PPO has after the first of several epochs."""
    return e.k1(batch.old_logp, batch.ref_logp)


def reward(values: Values) -> Term:
    """A ratio objective whose advantage is the return to go of ``in_reward``."""

    def term(b: Batch) -> Tensor:
        rewards = in_reward(torch.zeros_like(b.ref_logp), values(b), 1.0, b.mask)
        return ratio_objective(b, rewards.flip(-1).cumsum(-1).flip(-1))

    return term


def advantage(values: Values) -> Term:
    """A ratio objective whose advantage is ``in_advantage``, centred on the mean of the sampled batch."""

    def term(b: Batch) -> Tensor:
        kl = torch.where(b.mask, values(b).detach(), 0.0)
        mean = (b.probability @ kl.sum(-1)) / (b.probability @ b.mask.double().sum(-1))
        return ratio_objective(b, in_advantage(torch.zeros_like(b.ref_logp), kl, 1.0, b.mask, mean=mean))

    return term


def loss(values: Values) -> Term:
    """The sum of the values, as a loss."""
    return lambda b: in_loss(values(b), 1.0, b.mask, count=1.0)


def sequence(max_weight: float | None, baseline: bool = False) -> Term:
    """Both halves of ``sequence_exact``."""

    def term(b: Batch) -> Tensor:
        parts = sequence_exact(
            b.kl,
            1.0,
            b.mask,
            logp=b.logp,
            old_logp=b.old_logp,
            max_weight=max_weight,
            baseline=b.future if baseline else None,
        )
        return parts.local.sum() + ratio_objective(b, parts.advantage)

    return term


def ratio_objective(b: Batch, advantages: Tensor) -> Tensor:
    """``-Σ π/μ · A``, the policy-gradient loss that every advantage goes into."""
    ratio = (b.logp - b.old_logp).exp()
    return -torch.where(b.mask, ratio * advantages, 0.0).sum()


def term_of(pair: Pair) -> Term:
    """The KL term of an estimator in a placement."""
    if pair.placement == "sequence_exact":
        return sequence(None)
    return {"in_reward": reward, "in_advantage": advantage, "in_loss": loss}[pair.placement](values_of(pair.estimator))


def title(pair: Pair) -> str:
    """The name of a pair's row."""
    estimator = pair.estimator.replace("detached_weight_", "detached-weight ").replace("weighted_", "weighted ")
    estimator = "k3_clamped(limit=1)" if estimator == "k3_clamped" else estimator
    return f"{estimator} · {pair.placement}{'(max_weight=None)' if pair.placement == 'sequence_exact' else ''}"


VARIANTS: dict[str, tuple[bool, Term]] = {
    "exact · sequence_exact, with a value baseline": (True, sequence(None, baseline=True)),
    "exact · sequence_exact(max_weight=2.0)": (True, sequence(2.0)),
    "k1 of the sampler · in_reward": (False, reward(stale_k1)),
}
"""Rows that are no pair of their own."""

ROWS: dict[str, tuple[bool, Term]] = {title(pair): (pair.accepted, term_of(pair)) for pair in TABLE} | VARIANTS
"""Every pair of :data:`klamp.placements.TABLE`, and the variants: whether klamp accepts it, and the term."""


Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def audit_matrix(seeds: Iterable[int] = range(20), *, watch: Callable[[str], None] | None = None) -> list[Finding]:
    """What every known pair of estimator and placement descends: the rows of ``klamp audit``.

    Args:
        seeds: one random model per seed; a finding is the median over them.
        watch: called with the name of each row as it starts.

    Returns:
        One finding per row.
    """
    worlds = list(seeds)
    findings = []
    for name, (accepted, term) in ROWS.items():
        if watch:
            watch(name)
        findings.append(examine(name, term, accepted=accepted, seeds=worlds))
    return findings


def audit_function(loss: Loss, *, name: str | None = None, seeds: Iterable[int] = range(20)) -> Finding:
    """What ``loss(logp, ref_logp, old_logp, mask)`` descends, up to a constant factor: sums and means are both fine.

    Args:
        loss: called with [N, T] float64 tensors that hold every sequence of a small model once; returns one number.
            Only ``logp`` carries a gradient. On-policy, ``old_logp`` equals it.
        name: its name in the finding. None: the function's own.
        seeds: one random model per seed; the finding is the median over them.

    Returns:
        The finding.
    """

    def term(batch: Batch) -> Tensor:
        try:
            return loss(batch.logp, batch.ref_logp, batch.old_logp, batch.mask)
        except Exception as error:  # whatever a stranger's function may raise
            first = (str(error).splitlines() or [""])[0]
            raise ConfigError(
                f"{label} raised {type(error).__name__}: {first}. It is called as f(logp, ref_logp, old_logp, mask) "
                "with [N, T] tensors and returns one number."
            ) from error

    label = name or str(getattr(loss, "__name__", "function"))
    finding = examine(label, term, seeds=list(seeds), rescale=True)
    return replace(finding, accepted=finding.descends_on in (SEQUENCE, LOCAL))


def load_function(path: str) -> Loss:
    """The function named ``module:function`` or ``file.py:function``; the working folder is searched first.

    Args:
        path: its name.

    Returns:
        The function.
    """
    module_name, _, function_name = path.partition(":")
    if not module_name or not function_name:
        raise ConfigError(f"function {path!r} must be written module:function, as in my_losses:kl_term.")
    found: Loss = imported("function", path)
    return found


WIDE = 140
"""Characters in a line that hold all columns of :func:`render`; fewer leave out all figures but the larger bias."""


def render(findings: Iterable[Finding], title: str | None = None, width: int = WIDE) -> Table:
    """The findings as a table; accepted rows first.

    Args:
        findings: rows of the table.
        title: of the table.
        width: of the terminal, in characters.

    Returns:
        A table for rich.
    """
    from rich.table import Table

    low, high = DRIFTS
    table = Table(title=title, title_justify="left", header_style="bold", show_edge=False, pad_edge=False)
    table.add_column("term", overflow="fold")
    table.add_column("descends, on-policy", no_wrap=True)
    columns = (f"bias at {low:g}", f"bias at {high:g}", "cos", "stale: bias", "cos", "std")
    shown = slice(None) if width >= WIDE else slice(1, 2)
    for column in columns[shown]:
        table.add_column(column, justify="right", no_wrap=True)
    for f in sorted(findings, key=lambda f: not f.accepted):
        figures = [f.bias_on[0], f.bias_on[-1], f.cosine_on[-1], f.bias_off[-1], f.cosine_off[-1], f.std_on[-1]]
        row = ("" if f.accepted else "✗ ") + f.name, f.descends_on, *(_figure(x) for x in figures[shown])
        table.add_row(*row, style=None if f.accepted else "dim")
    return table


def _figure(x: float) -> str:
    return "0" if abs(x) < 5e-7 else f"{x:.2f}"


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
    """Judged by what it descends on samples of the policy itself.

    Args:
        finding: of one term.

    Returns:
        The verdict in a word and in a sentence.
    """
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
