"""The settings of other systems, composed from klamp's functions: one function a setting.

``docs/coming-from.md`` shows these same functions; a test holds the two together. Shapes: B sequences, T tokens. Each
function returns what the other system computes, traps included where they are part of the number; the page says what
to use instead.
"""

from __future__ import annotations

import torch
from torch import Tensor

import klamp
from klamp.compat import AdaptiveKLController, FixedKLController
from klamp.masked import as_mask, select


def counted(x: Tensor, mask: Tensor) -> Tensor:
    """``x`` where the mask counts, 0 elsewhere; nothing is broadcast, and a NaN in an ignored place is dropped."""
    return select(x, as_mask(mask, x))


# ROLL


def roll_token_kl(kl_penalty: str, logp: Tensor, ref_logp: Tensor, mask: Tensor) -> Tensor:
    """``compute_approx_kl``: the named estimate per token, 0 outside the mask; ``full`` takes [B, T, V]."""
    name = {"k3": "k3_clamped"}.get(kl_penalty, kl_penalty)
    return counted(klamp.estimator(name)(logp, ref_logp), mask)


def roll_current_kl(kl: Tensor, mask: Tensor) -> Tensor:
    """``critic/kl``, which feeds the controller: sequence mean of token means, empty rows counted as 0."""
    return klamp.mean(kl, mask, per="sequence_mean", count_empty=True)


def roll_token_rewards(scores: Tensor, kl: Tensor, beta: float, mask: Tensor, clip: float | None = None) -> Tensor:
    """``add_token_level_kl: true``, then ``reward_clip`` on score and penalty together."""
    rewards = klamp.in_reward(scores, kl, beta, mask)
    return rewards if clip is None else rewards.clamp(-clip, clip)


def roll_scores(response_rewards: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
    """The response's score on its last attended token, shifted like the log-probs: [B, S] in, [B, S-1] out."""
    last = (position_ids * attention_mask).argmax(-1, keepdim=True)
    empty = torch.zeros(attention_mask.shape, dtype=response_rewards.dtype)
    return empty.scatter(-1, last, response_rewards.unsqueeze(-1))[:, 1:]


def roll_agg_loss(x: Tensor, mask: Tensor, mode: str) -> Tensor:
    """``agg_loss``: rows are counted as ``B + 1e-8``; ``token-mean`` sums what the mask excludes too."""
    (rows, width), (total, tokens) = x.shape, klamp.sum_count(x, mask)
    if mode == "token-mean":
        return klamp.sum_count(x)[0] / tokens
    if mode == "seq-mean-token-sum-norm":
        return total / width
    per = {"seq-mean-token-sum": "sequence", "seq-mean-token-mean": "sequence_mean"}[mode]
    return klamp.sum_count(x, mask, per=per)[0] / (rows + 1e-8)


# trlx


def trlx_log_ratio(logp: Tensor, ref_logp: Tensor, attention_mask: Tensor) -> Tensor:
    """k1 under the input-aligned mask: prompt tokens count, and so does the first padding token."""
    return counted(klamp.k1(logp, ref_logp), attention_mask[:, :-1])


def trlx_kl(logp: Tensor, ref_logp: Tensor, attention_mask: Tensor) -> Tensor:
    """The statistic behind ``policy/sqrt_kl``: χ² − KL per token, 0 outside the mask."""
    return counted(klamp.chi2_minus_kl(logp, ref_logp), attention_mask[:, :-1])


def trlx_statistics(kl: Tensor) -> dict[str, Tensor]:
    """The means of a chunk over every position, padding and prompt included, and their roots as logged."""
    per_token, per_sequence = klamp.mean(kl), klamp.mean(kl, per="sequence")
    return {
        "mean_kl_per_token": per_token,
        "mean_kl": per_sequence,
        "metric_kl_per_token": per_token.sqrt(),
        "sqrt_kl": per_sequence.sqrt(),
    }


def trlx_controller_kl(mean_kl_of_chunks: list[float]) -> float:
    """The KL fed to the controller: the square of the mean root over the chunks."""
    return (sum(kl**0.5 for kl in mean_kl_of_chunks) / len(mean_kl_of_chunks)) ** 2


def trlx_rewards(
    log_ratio: Tensor, beta: float, start: int, ends: list[int], scores: Tensor, scores_mask: Tensor | None = None
) -> list[Tensor]:
    """``−β·log-ratio`` on each row's span, plus the score on its last token, or dense scores from its first."""
    penalty = klamp.in_reward(torch.zeros_like(log_ratio), log_ratio, beta)
    rows = [penalty[i, start:end].clone() for i, end in enumerate(ends)]
    for i, row in enumerate(rows):
        if scores_mask is None:
            row[-1] += scores[i, 0]
        else:
            n = min(int(scores_mask[i].sum()), len(row))
            row[:n] += scores[i, :n]
    return rows


# ART


def art_source(new: Tensor, sample: Tensor, kl_penalty_source: str = "current_learner") -> Tensor:
    """The log-probs that the KL is taken of; ART reads a missing (NaN) sampler log-prob as the learner's."""
    return new if kl_penalty_source == "current_learner" else torch.where(sample.isnan(), new, sample)


def art_advantages(
    advantages: Tensor, source: Tensor, ref_logp: Tensor, coef: float, mask: Tensor, eps: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """``kl_penalty_coef``: (adjusted advantages, ``kl_policy_ref``, KL per token). ``eps``: 1e-6 just after #562."""
    kl = counted(klamp.k1(source, ref_logp), mask)
    total, count = klamp.sum_count(kl, mask)
    middle = total / (count.to(total.dtype).clamp(min=1) + eps)
    return klamp.in_advantage(advantages, kl, coef, mask, mean=middle), middle, kl


def art_policy_loss(new: Tensor, sample: Tensor, advantages: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
    """CISPO's sum ``−min(π/μ, 5)·A·log π·w`` over counted tokens, with the ratio held constant."""
    new, sample = counted(new, mask), counted(art_source(new, sample, "sample"), mask)
    ratio = klamp.k1(new, sample).exp().clamp(0, 5).detach()
    return klamp.sum_count(-ratio * advantages * new * weights, mask)[0]


def art_reduce(x: Tensor, mask: Tensor, loss_type: str) -> Tensor:
    """``loss_type``: bnpo is the token mean, grpo the sequence mean, dr_grpo divides by every position."""
    if loss_type == "bnpo":
        return klamp.mean(x, mask)
    if loss_type == "grpo":
        return klamp.mean(x, mask, per="sequence_mean", count_empty=True)
    return klamp.in_loss(x, 1.0, mask, count=x.numel())


# The PPO tutorial


def tutorial_penalty(logp: Tensor, ref_logp: Tensor, beta: float) -> Tensor:
    """``compute_kl_penalty``: ``β · mean(e^d · d)``, three times the KL and more on samples of the policy."""
    return beta * klamp.mean(klamp.r_log_r(logp, ref_logp))


def tutorial_warning(kls: list[float], target: float) -> tuple[float, str]:
    """The loop's mean over the last 100 batches and its verdict on it, passed once at the end."""
    last = kls[-100:]
    monitor = klamp.Monitor(target, per="token", window=100, limits=klamp.Limits(warmup=0, fewest=len(last)))
    alarms = [alarm.kind for step, kl in enumerate(last) for alarm in monitor.record(step, kl=kl)]
    verdict = "high" if "drifting" in alarms else "low" if "not_learning" in alarms else "none"
    return float(monitor.mean() or 0.0), verdict


# TRL


def trl_per_token_kl(
    logp: Tensor, ref_logp: Tensor, old_logp: Tensor | None = None, mask: Tensor | None = None
) -> Tensor:
    """k3; times the ratio with ``use_bias_correction_kl`` (give ``old_logp``).

    ``importance_sampling_level="sequence"`` (give ``mask`` too) takes one ratio a row, of the mean log-ratio.
    """
    if old_logp is None:
        return klamp.k3(logp, ref_logp)
    if mask is None:
        return klamp.weighted(klamp.k3, logp, old_logp, ref_logp)
    rows = counted(klamp.k1(logp, old_logp), mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    return rows.exp() * klamp.k3(logp, ref_logp)


def trl_kl_loss(kl: Tensor, beta: float, mask: Tensor, loss_type: str, max_completion_length: int) -> Tensor:
    """``beta`` times the KL as ``loss_type`` reduces it: with dr_grpo and luspo the price depends on the length."""
    if loss_type in ("bnpo", "dapo"):
        return klamp.in_loss(kl, beta, mask)
    if loss_type == "dr_grpo":
        return klamp.in_loss(kl, beta, mask, count=len(kl) * max_completion_length)
    per = {"grpo": "sequence_mean", "luspo": "sequence"}[loss_type]
    return beta * klamp.mean(kl, mask, per=per, count_empty=True)


# verl


def verl_kl(kl_penalty: str, logp: Tensor, ref_logp: Tensor) -> Tensor:
    """``kl_penalty``: ``low_var_kl`` and ``k3`` are the clamped k3; ``+`` takes the gradient of k2."""
    plain = kl_penalty.removesuffix("+")
    name = {"k3": "k3_clamped"}.get(plain, plain) + kl_penalty[len(plain) :]
    return klamp.estimator(name)(logp, ref_logp)


def verl_current_kl(kl: Tensor, mask: Tensor) -> Tensor:
    """``actor/reward_kl_penalty``, which feeds the controller: as ROLL's, empty rows counted."""
    return klamp.mean(kl, mask, per="sequence_mean", count_empty=True)


def verl_agg_loss(x: Tensor, mask: Tensor, mode: str) -> Tensor:
    """``loss_agg_mode``; verl leaves empty rows out, as klamp does unless told otherwise."""
    if mode == "token-mean":
        return klamp.mean(x, mask)
    if mode == "token-sum":
        return klamp.sum_count(x, mask)[0]
    if mode == "seq-mean-token-sum-norm":
        return klamp.mean(x, mask, per="sequence") / x.shape[-1]
    per = {"seq-mean-token-sum": "sequence", "seq-mean-token-mean": "sequence_mean"}[mode]
    return klamp.mean(x, mask, per=per)


def verl_get_kl_controller(kl_ctrl) -> klamp.Stateful:
    """``core_algos.get_kl_controller``: in its place, every trainer of verl steers by klamp."""
    if kl_ctrl.type == "fixed":
        return FixedKLController(kl_ctrl.kl_coef)
    if kl_ctrl.type == "adaptive":
        return AdaptiveKLController(kl_ctrl.kl_coef, kl_ctrl.target_kl, kl_ctrl.horizon)
    if kl_ctrl.type == "hold":
        return klamp.Stateful(klamp.Hold(kl_ctrl.target_kl, per="sequence_mean", init_beta=kl_ctrl.kl_coef))
    raise klamp.ConfigError(f"kl_ctrl.type must be 'fixed', 'adaptive' or 'hold', got {kl_ctrl.type!r}.")


# OpenRLHF


def openrlhf_kl(
    estimator: str, logp: Tensor, ref_logp: Tensor, *, unbiased_gradient: bool = False, old_logp: Tensor | None = None
) -> Tensor:
    """``compute_approx_kl`` in float32: a clamp of ±10 on every value; unbiased: the gradient of ``w·k2``, w ≤ 10."""
    logp, ref_logp = logp.float(), ref_logp.float()
    value = klamp.estimator(estimator)(logp, ref_logp).clamp(-10, 10)
    if not unbiased_gradient:
        return value
    old_logp = logp if old_logp is None else old_logp.float()
    weight = klamp.k1(logp, old_logp).detach().exp().clamp(max=10)
    return klamp.straight_through(value, weight * klamp.k2(logp, ref_logp))


def openrlhf_reward(
    r: Tensor, kl: Tensor, kl_coef: float, action_mask: Tensor, clip: tuple[float, float] | None = None
) -> Tensor:
    """``compute_reward``: the clipped score on the last action, minus ``max(kl_coef, 0)·kl`` everywhere."""
    r = r if clip is None else r.clamp(*clip)
    last = action_mask.shape[-1] - 1 - action_mask.long().fliplr().argmax(-1, keepdim=True)
    scores = torch.zeros_like(kl).scatter(-1, last, r.to(kl.dtype).unsqueeze(-1))
    return klamp.in_reward(scores, kl, max(kl_coef, 0.0))
