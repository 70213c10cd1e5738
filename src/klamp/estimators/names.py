"""Estimators by name: ``k3``, ``k3+``, ``weighted_k3``, ``detached_weight_k2``, and what other systems call them.

:func:`named` reads a name, once and for all of klamp; what it returns computes.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from klamp.errors import unknown
from klamp.estimators import formulas as f
from klamp.estimators.formulas import Estimator

ESTIMATORS: dict[str, Estimator] = {
    k.__name__: k
    for k in (
        *(f.k1, f.k2, f.k3, f.absolute, f.exact, f.exact_forward, f.k3_clamped, f.r_log_r, f.top_k_exact, f.fitted),
        f.chi2_minus_kl,
    )
}
ALIASES = {"kl": "k1", "mse": "k2", "abs": "absolute", "full": "exact", "low_var_kl": "k3_clamped"}
"""Names of other systems."""
Weight = Literal["", "weighted_", "detached_weight_"]
FORMS: tuple[Weight, ...] = ("detached_weight_", "weighted_")


@dataclass(frozen=True)
class NamedEstimator:
    """An estimator in one of its forms. ``str()`` of it is klamp's name."""

    base: str
    """A name of :data:`ESTIMATORS`."""
    weight: Weight = ""
    """Times ``π/μ``, or times that weight held constant."""
    plus: bool = False
    """The value of the estimator with the gradient of k2."""

    def __str__(self) -> str:
        return f"{self.weight}{self.base}{'+' if self.plus else ''}"

    @property
    def prices(self) -> bool:
        """Whether it is a number for each token that a loss may hold; others are for measuring."""
        return self.base == "exact" or ESTIMATORS[self.base] not in f.NOT_SAMPLED

    @property
    def sampled(self) -> bool:
        """Whether its mean over the drawn token is the KL: samples of another policy then need a weight."""
        return self.base != "exact" and not self.weight

    @property
    def function(self) -> Estimator:
        """The estimator without its weight, as a function of (logp, ref_logp), or of logits for the exact ones."""
        found = ESTIMATORS[self.base]
        return f.straight_through(f.sampled(str(self), found), f.k2) if self.plus else found

    def __call__(
        self,
        logp: Tensor,
        ref_logp: Tensor,
        *,
        old_logp: Tensor | None = None,
        kl: Tensor | None = None,
        tail: float | None = None,
    ) -> Tensor:
        """Nats per token.

        Args:
            logp: log-probs of the sampled tokens under the policy.
            ref_logp: the same under the reference.
            old_logp: the same under the sampler; for the weighted forms.
            kl: the exact KL of each position; for ``exact``.
            tail: log-ratio beyond which k2 and k3 go on linearly.
        """
        value = self._value(logp, ref_logp, old_logp, kl, tail)
        return f.straight_through(value.detach(), f.k2(logp, ref_logp, tail=tail)) if self.plus else value

    def _value(
        self, logp: Tensor, ref_logp: Tensor, old_logp: Tensor | None, kl: Tensor | None, tail: float | None
    ) -> Tensor:
        found = ESTIMATORS[self.base]
        edge = tail if found in (f.k2, f.k3) else None
        if found is f.exact:
            assert kl is not None, "the exact KL comes from logits, not from a token's two log-probs"
            return kl
        if self.weight:
            assert old_logp is not None, "a weight is a ratio to the sampler"
            detached = self.weight == "detached_weight_"
            return f.weighted(found, logp, old_logp, ref_logp, detach_weight=detached, tail=edge)
        return found(logp, ref_logp) if edge is None else found(logp, ref_logp, tail=edge)


def named(estimator: object) -> NamedEstimator:
    """The estimator that a name, a function or a ``functools.partial`` of one means.

    Args:
        estimator: klamp's name or another system's, with ``weighted_`` or ``detached_weight_`` before it and ``+``
            behind it where that form is meant; or the function.

    Returns:
        The estimator and its form.
    """
    while isinstance(estimator, functools.partial):  # partial(k3, tail=5.0) is k3
        estimator = estimator.func
    name = estimator if isinstance(estimator, str) else str(getattr(estimator, "__name__", estimator))
    name = name.replace(" ", "_").replace("-", "_")
    weight: Weight = next((form for form in FORMS if name.startswith(form)), "")
    plain = name.removeprefix(weight)
    base = plain.removesuffix("+")
    base = ALIASES.get(base, base)
    if base not in ESTIMATORS:
        raise unknown("estimator", name, [*ESTIMATORS, *ALIASES, "weighted_k1", "weighted_k3", "detached_weight_k2"])
    return NamedEstimator(base, weight, plain.endswith("+"))


def estimator(name: str) -> Estimator:
    """The estimator of that name, klamp's or another system's (``kl mse abs full low_var_kl``).

    Args:
        name: the name. A ``+`` behind it keeps the value and takes the gradient of k2, as in verl.

    Returns:
        The function.
    """
    found = named(name)
    if found.weight:
        raise unknown("estimator", name, [*ESTIMATORS, *ALIASES])
    return found.function
