"""KL estimators: per-token tensors in, per-token nats out, in float32 or wider whatever comes in.

Names: π the policy, ref the reference, μ the sampler; ``d = logp - ref_logp``, the log-ratio of the sampled token.
Everything estimates KL(π‖ref) unless its name says otherwise. Shapes: [B, T] log-probs, [..., V] logits; nothing is
broadcast. ``ref_logp`` and ``old_logp`` are constants: no gradient is meant to reach them.

Where a loss gives a token no weight, its gradient is 0 whatever stands there: a NaN, an infinity or an overflow at a
masked place stays at that place, in the value and in the backward pass (plain autograd makes 0 · inf = NaN of it).

What a value estimates and what its gradient descends are different questions. The second depends on where the value
is put: :mod:`klamp.placements` says which pairs are right, ``klamp audit`` proves it.
"""

from klamp.estimators.formulas import Estimator as Estimator
from klamp.estimators.formulas import (
    absolute,
    chi2_minus_kl,
    exact,
    exact_forward,
    fitted,
    k1,
    k2,
    k3,
    k3_clamped,
    r_log_r,
    straight_through,
    top_k_exact,
    weighted,
)
from klamp.estimators.names import ALIASES as ALIASES
from klamp.estimators.names import ESTIMATORS as ESTIMATORS
from klamp.estimators.names import NamedEstimator as NamedEstimator
from klamp.estimators.names import estimator
from klamp.estimators.names import named as named
from klamp.masked import mean, sum_count

__all__ = [
    "absolute",
    "chi2_minus_kl",
    "estimator",
    "exact",
    "exact_forward",
    "fitted",
    "k1",
    "k2",
    "k3",
    "k3_clamped",
    "mean",
    "r_log_r",
    "straight_through",
    "sum_count",
    "top_k_exact",
    "weighted",
]
