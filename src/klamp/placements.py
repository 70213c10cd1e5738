"""Where the price of KL enters: the reward, the advantage, the loss, or the true gradient of the sequence's KL.

Shapes: B sequences, T tokens; ``mask`` True where a token counts. Places outside the mask come back as they went in.
``beta`` is the price, a number or a tensor of one. :func:`check` says which estimator may go where, and why.

The gradient of KL(π‖ref) of a whole sequence has two parts, with ``s_t = ∇ log π(a_t | prefix)``::

    ∇KL = Σ_t E[∇KL_t]  +  Σ_t E[s_t · Σ_{u>t} KL_u]
          local            future

A KL term in a loss gives the local part at best. The future part is what a token does to the KL still to come.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from klamp.errors import ConfigError, require_number, unknown
from klamp.estimators import named
from klamp.masked import as_mask, same_shape, select, sum_count, wide

FARTHEST = 40.0
"""Log-ratios of sampler and policy stop here, e^40 either way: one token beyond it is a broken sampler, and float32
would make inf, and of the products NaN, of a few of them."""

Centre = Literal["batch", "sequence", "none"]
Price = float | Tensor


def in_reward(rewards: Tensor, kl: Tensor, beta: Price, mask: Tensor | None = None) -> Tensor:
    """``r_t - beta · kl_t``. With k1 of the current policy and returns to go (γ = λ = 1): the sequence's gradient.

    Any other estimator loses the local part of the gradient here: see :func:`check`.

    Args:
        rewards: rewards per token, [B, T].
        kl: KL per token, [B, T]. It is detached.
        beta: the price, a number or a tensor of one.
        mask: True where a token counts. None: everywhere.

    Returns:
        Rewards [B, T] to compute returns or advantages from.
    """
    rewards, kl, keep = _per_token("rewards", rewards, kl, mask)
    return torch.where(keep, rewards - _price(beta) * select(kl.detach(), keep), rewards)


def in_advantage(
    advantages: Tensor,
    kl: Tensor,
    beta: Price,
    mask: Tensor | None = None,
    *,
    centre: Centre = "batch",
    mean: Price | None = None,
) -> Tensor:
    """``A_t + beta · (mean(kl) - kl_t)`` over the counted tokens (ART's form): the token-local gradient of KL(π‖ref).

    Args:
        advantages: advantages per token, [B, T], already normalised.
        kl: KL per token, [B, T]. It is detached.
        beta: the price, a number or a tensor of one.
        mask: True where a token counts. None: everywhere.
        centre: the mean over the ``"batch"``, over each ``"sequence"``, or ``"none"``.
        mean: the mean, where the batch is spread over processes or micro-batches. None: computed from ``kl``.

    Returns:
        Advantages [B, T].
    """
    advantages, kl, keep = _per_token("advantages", advantages, kl, mask)
    kl = select(kl.detach(), keep)
    if mean is not None and centre != "batch":
        raise ConfigError(
            f"mean={mean!r} is the batch's mean and does not go with centre={centre!r}. Give one of them."
        )
    if centre == "batch":
        total, count = sum_count(kl, keep)
        middle = total / count.clamp(min=1) if mean is None else _one_number("mean", mean, kl)
    elif centre == "sequence":
        middle = kl.sum(-1, keepdim=True) / keep.sum(-1, keepdim=True).clamp(min=1)
    elif centre == "none":
        middle = torch.zeros((), dtype=kl.dtype, device=kl.device)
    else:
        raise unknown("centre", centre, ("batch", "sequence", "none"))
    return torch.where(keep, advantages + _price(beta) * (middle - kl), advantages)


def in_loss(kl: Tensor, beta: Price, mask: Tensor | None = None, *, count: Price | None = None) -> Tensor:
    """``beta · Σ kl_t / count``: the mean over counted tokens that is added to the loss; 0 where nothing counts.

    Args:
        kl: KL per token, [B, T], differentiable.
        beta: the price, a number or a tensor of one.
        mask: True where a token counts. None: everywhere.
        count: the step's global token count, where the batch comes in parts. None: the counted tokens.

    Returns:
        A tensor of one number.
    """
    total, own = sum_count(kl, mask)
    if count is not None and not isinstance(count, Tensor):
        require_number("count", count, at_least=0, way_out="It is the number of counted tokens of the whole step.")
    tokens = own if count is None else _one_number("count", count, total)
    return _price(beta) * total / torch.where(tokens == 0, torch.ones_like(tokens), tokens)


class SequenceKL(NamedTuple):
    """The two halves of the true gradient of the sequence's KL."""

    local: Tensor
    """[B, T], differentiable: ``beta · w_{<t} · KL_t``. Sum it over counted tokens into the loss."""
    advantage: Tensor
    """[B, T], detached: minus ``beta`` times the KL still to come. Add it to the advantages after their normalisation
    and outside the clip."""
    weights: Tensor
    """[B, T], detached: ``w_{<t}``, the (truncated) ratio of the prefix."""


def sequence_exact(
    kl: Tensor,
    beta: Price,
    mask: Tensor | None = None,
    *,
    logp: Tensor | None = None,
    old_logp: Tensor | None = None,
    max_weight: float | None = 2.0,
    baseline: Tensor | Literal["position"] | None = None,
    objective: Literal["ratio", "score"] = "ratio",
) -> SequenceKL:
    """``Σ_t w_{<t} ∇KL_t + Σ_t s_t Σ_{u>t} w_{<u} KL_u``: the gradient of KL(π‖ref) of the sequence, on samples of μ.

    ``w_t = e^(logp - old_logp)``, and ``w_{<u}`` is their product before u. Masked tokens in the middle of a sequence,
    such as a tool's output, weigh 1 and cost nothing.

    Args:
        kl: exact KL of each position, [B, T], differentiable.
        beta: the price, a number or a tensor of one.
        mask: True where a token counts. None: everywhere.
        logp: log-probs of the sampled tokens under π, with ``old_logp``.
        old_logp: the same under μ. None: the samples are the policy's own and all weights are 1.
        max_weight: largest product of ratios. None: no limit, unbiased, with the variance of such products.
        baseline: [B, T], an estimate of the KL after t made without this sequence's tokens from t on. It lowers the
            variance and leaves the mean alone, but where ``max_weight`` truncates. ``"position"``: the mean of the
            other sequences.
        objective: the loss that the advantage goes into. ``"ratio"``: ``-w_t A_t``, which multiplies by ``w_t`` once
            more, so the future enters as ``w_{<u} / w_t``. ``"score"``: ``-A_t logp_t``, where it enters as ``w_{<u}``.

    Returns:
        The local part for the loss, the future part for the advantages, and the weights.
    """
    kl = wide("kl", kl)
    keep = as_mask(mask, kl)
    _need_rows("sequence_exact", kl)
    if objective not in ("ratio", "score"):
        raise unknown("objective", objective, ("ratio", "score"))
    log_w = _log_ratio(logp, old_logp, kl, keep)
    before = _product(torch.cat([torch.zeros_like(log_w[..., :1]), log_w[..., :-1]], -1), max_weight)
    cost = select(kl.detach(), keep)
    future = _after(before * cost)
    if baseline is not None:
        # E[w_t s_t | prefix] = 0, so with the weight w_{<t} w_t anything known before t may be taken off. It is
        # truncated like the weight of the next token's KL: otherwise one large ratio would outweigh all the rest.
        future = future - _product(log_w, max_weight) * _expected_future(baseline, cost, keep)
    if objective == "ratio":
        future = future * (-log_w).exp()
    price = _price(beta)
    return SequenceKL(price * before * select(kl, keep), -price * select(future, keep), before)


def _log_ratio(logp: Tensor | None, old_logp: Tensor | None, kl: Tensor, keep: Tensor) -> Tensor:
    """log w_t, 0 where a token is not the policy's own or no sampler is named."""
    if old_logp is None:
        return torch.zeros_like(kl.detach())
    if logp is None:
        raise ConfigError("sequence_exact got old_logp without logp; the weights are their ratio. Pass both.")
    new, old = wide("logp", logp).detach(), wide("old_logp", old_logp).detach()
    same_shape(kl=kl, logp=logp, old_logp=old_logp)
    if logp.dtype != old_logp.dtype:
        raise ConfigError(
            f"logp is {logp.dtype} and old_logp is {old_logp.dtype}; the difference in rounding alone would read as a "
            "ratio. Compute both in the same dtype, best from float32 logits."
        )
    return (select(new, keep) - select(old, keep)).clamp(-FARTHEST, FARTHEST)


def _product(log_w: Tensor, max_weight: float | None) -> Tensor:
    """The product of the ratios up to each token, at most ``max_weight``."""
    product = log_w.cumsum(-1).clamp(max=FARTHEST).exp()
    if max_weight is None:
        return product
    way_out = "It truncates the product of ratios; None keeps it exact."
    return product.clamp(max=require_number("max_weight", max_weight, above=0, way_out=way_out))


def _after(x: Tensor) -> Tensor:
    """``Σ_{u>t} x_u``."""
    to_go = x.flip(-1).cumsum(-1).flip(-1)
    return torch.cat([to_go[..., 1:], torch.zeros_like(to_go[..., :1])], -1)


def future_by_position(kl: Tensor, mask: Tensor) -> Tensor:
    """[2, T]: the KL still to come after each position, summed over the sequences that go on there, and their number.

    Their quotient over one step is a ``baseline`` of :func:`sequence_exact` for the next one, whatever its parts are.
    """
    cost = select(kl.detach().double(), mask)
    return torch.stack([select(_after(cost), mask).sum(0), mask.sum(0).double()])


def _expected_future(baseline: Tensor | str, cost: Tensor, keep: Tensor) -> Tensor:
    """The given baseline, or the mean KL to come of the other sequences still going at the same position."""
    if isinstance(baseline, Tensor):
        same_shape(kl=cost, baseline=baseline)
        return select(wide("baseline", baseline).detach(), keep)
    if baseline != "position":
        raise unknown("baseline", baseline, ("position",))
    future = select(_after(cost), keep)
    others = keep.sum(0, keepdim=True) - keep.long()
    return (future.sum(0, keepdim=True) - future) / others.clamp(min=1)


def _per_token(name: str, x: Tensor, kl: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    x, kl = wide(name, x), wide("kl", kl)
    same_shape(**{name: x, "kl": kl})
    return x, kl, as_mask(mask, kl)


def _one_number(name: str, value: Price, like: Tensor) -> Tensor:
    """``value`` as a tensor of one number in the dtype of ``like``."""
    number = torch.as_tensor(value, dtype=like.dtype, device=like.device).detach()
    if number.numel() != 1:
        raise ConfigError(f"{name} must be one number, got shape {tuple(number.shape)}. Nothing is broadcast.")
    return number.reshape(())


def _need_rows(name: str, x: Tensor) -> None:
    if x.dim() != 2:
        raise ConfigError(f"{name} needs [B, T] tensors, got shape {tuple(x.shape)}. Add the batch dimension.")


def _price(beta: Price) -> Price:
    """beta >= 0; a tensor is taken as it is, so that a step need not wait for the device."""
    if isinstance(beta, Tensor):
        if beta.numel() != 1:
            raise ConfigError(f"beta must be one number, got a tensor of shape {tuple(beta.shape)}. Weigh kl instead.")
        return beta.reshape(()).detach()
    return require_number("beta", beta, at_least=0, way_out="A price is never negative; 0 only measures.")


class Pair(NamedTuple):
    """What an estimator in a placement descends."""

    estimator: str
    placement: str
    accepted: bool
    on_policy: str
    """What its expected gradient descends on samples of the policy."""
    off_policy: str
    """The same on samples of a stale sampler μ."""
    instead: str = ""
    """For a refused pair: the pair to use."""


SEQUENCE = "KL(π‖ref) of the sequence"
LOCAL = "KL(π‖ref) token by token"
LOCAL_MU = "KL(π‖ref) token by token, on prefixes of μ"
PLACEMENTS = ("in_reward", "in_advantage", "in_loss", "sequence_exact")
BEST = "exact with sequence_exact"
IN_LOSS = f"exact, k2 or weighted_k3 in_loss, or {BEST}"
UNKNOWN_IN_LOSS = "nothing that is known to be KL(π‖ref)"
NO_KL = "nothing: it estimates a KL for measuring and steering, and its gradient is not that of one"

ACCEPTED = (
    Pair("k1", "in_reward", True, SEQUENCE, f"{SEQUENCE}, but for the ratio of the prefixes"),
    Pair("k1", "in_advantage", True, LOCAL, LOCAL_MU),
    Pair("k2", "in_loss", True, LOCAL, "KL(π‖ref) token by token without the weight π/μ"),
    Pair("k2+", "in_loss", True, LOCAL, "KL(π‖ref) token by token without the weight π/μ"),
    Pair("k1+", "in_loss", True, LOCAL, "KL(π‖ref) token by token without the weight π/μ"),
    Pair("k3+", "in_loss", True, LOCAL, "KL(π‖ref) token by token without the weight π/μ"),
    Pair("weighted_k1", "in_loss", True, LOCAL, LOCAL_MU),
    Pair("weighted_k3", "in_loss", True, LOCAL, LOCAL_MU),
    Pair("detached_weight_k2", "in_loss", True, LOCAL, LOCAL_MU),
    Pair("exact", "in_loss", True, LOCAL, LOCAL_MU),
    Pair("exact", "sequence_exact", True, SEQUENCE, SEQUENCE),
)
REFUSED_IN_LOSS = {
    "k1": ("nothing: its expected gradient is zero", "−KL(μ‖π): it pushes the policy away from the sampler", IN_LOSS),
    "k3": ("KL(ref‖π), the other direction", "KL(ref‖π) without the weight π/μ", "weighted_k3 or exact in_loss"),
    "k3_clamped": (
        "KL(ref‖π), the other direction, and nothing for the tokens that drifted most",
        "the same, without the weight π/μ",
        "weighted_k3(tail=5.0) or exact in_loss",
    ),
    "detached_weight_k3": ("KL(ref‖π), the other direction", "KL(ref‖π) on prefixes of μ", "weighted_k3 in_loss"),
    "weighted_k2": ("the divergence E[d²/2], not a KL", "the same", "weighted_k3 or detached_weight_k2 in_loss"),
    "absolute": ("twice the total variation: the pull does not vanish at the reference", "the same without π/μ", BEST),
    "exact_forward": ("KL(ref‖π), the other direction", "KL(ref‖π) on prefixes of μ", "exact in_loss"),
    "k3_clamped+": ("KL(π‖ref) token by token, with the value of a clamp", "the same without π/μ", "k3+ in_loss"),
}
REFUSED_IN_REWARD = {
    "k3": ("KL(π‖ref) − KL(ref‖π): near the reference the two cancel and it pulls nowhere", "the same"),
    "exact": ("the future part alone: the KL of a position does not depend on the token sampled there", "the same"),
    "k2": ("part of the gradient of E[d²/2], not of a KL", "the same"),
}
REFUSED_IN_ADVANTAGE = {
    "k3": ("KL(π‖ref) − KL(ref‖π) token by token: near the reference the two cancel", "the same, on prefixes of μ"),
    "exact": ("nothing: the KL of a position does not depend on the token sampled there", "nothing"),
}
ANYWHERE = {
    "absolute": "no KL: an absolute log-ratio is of the order of the root of one",
    "r_log_r": "nothing known: its samples must come from the reference, and these come from the policy",
    "chi2_minus_kl": "χ²(π‖ref) − KL(π‖ref), which is not a KL",
    "top_k_exact": NO_KL,
    "fitted": NO_KL,
}


def check(estimator: object, placement: object, *, allow_biased: bool = False) -> Pair:
    """The pair's verdict; a pair that does not descend KL(π‖ref) is refused with the reason and the pair to use.

    Args:
        estimator: a name or a function. ``weighted_k3`` is ``weighted(k3, ...)``, ``detached_weight_k2`` is
            ``weighted(k2, ..., detach_weight=True)``.
        placement: a name or a function.
        allow_biased: return the verdict of a refused pair instead of raising, to reproduce other systems.

    Returns:
        The pair, with what it descends on-policy and off-policy.

    Raises:
        ConfigError: the pair is refused; the message names the pair to use.
    """
    pair = _verdict(str(named(estimator)), _placement_name(placement))
    if pair.accepted or allow_biased:
        return pair
    subject = f"estimator {pair.estimator!r} with placement {pair.placement!r}"
    raise ConfigError(
        f"{refusal(subject, pair.on_policy, pair.instead)}, or allow_biased=True to reproduce another system."
    )


def refusal(subject: str, descends: str, instead: str) -> str:
    """What is wrong with a KL term and what to use: the words of :func:`check`, the trainer and ``klamp audit``."""
    return f"{subject} descends {descends}. Use {instead}"


def _verdict(estimator: str, placement: str) -> Pair:
    for pair in ACCEPTED:
        if (pair.estimator, pair.placement) == (estimator, placement):
            return pair

    def refused(on: str, off: str, instead: str) -> Pair:
        return Pair(estimator, placement, False, on, off, instead)

    if placement == "in_loss" and estimator in REFUSED_IN_LOSS:
        return refused(*REFUSED_IN_LOSS[estimator])
    if estimator in ANYWHERE:
        return refused(ANYWHERE[estimator], ANYWHERE[estimator], BEST)
    if placement == "sequence_exact":
        what = "nothing known: its two parts are built from the exact KL of each position"
        return refused(what, what, BEST)
    if placement == "in_loss":
        return refused(UNKNOWN_IN_LOSS, "the same", IN_LOSS)
    default_reward = ("nothing near KL(π‖ref): only k1 has it for the gradient of its expected score", "the same")
    known = REFUSED_IN_REWARD if placement == "in_reward" else REFUSED_IN_ADVANTAGE
    return refused(*known.get(estimator, default_reward), f"k1 {placement}, or {BEST}")


def _placement_name(placement: object) -> str:
    name = placement if isinstance(placement, str) else str(getattr(placement, "__name__", placement))
    full = name if name in PLACEMENTS else f"in_{name}"
    if full not in PLACEMENTS:
        raise unknown("placement", name, PLACEMENTS)
    return full


TABLE: tuple[Pair, ...] = (
    *ACCEPTED,
    *(_verdict(name, "in_loss") for name in REFUSED_IN_LOSS if name != "k3_clamped+"),  # refused for its value alone
    *(_verdict(name, "in_reward") for name in REFUSED_IN_REWARD),
    *(_verdict(name, "in_advantage") for name in REFUSED_IN_ADVANTAGE),
    _verdict("r_log_r", "in_loss"),
    _verdict("chi2_minus_kl", "in_loss"),
    _verdict("absolute", "in_reward"),
)
"""The pairs that :func:`check` knows by name, of what a token's log-probs or its exact KL make. ``klamp audit`` takes
its rows from here and finds by enumeration what each descends."""
