"""Per-token estimates, their gradients and the losses built on them: ROLL, verl, TRL, OpenRLHF, the tutorial."""

from __future__ import annotations

import pytest
import recipes
import torch
from vectors import Case, checks, grad_of

import klamp


@checks("roll_kl.json", "token_kl")
def roll_token_kl(case: Case) -> None:
    mask = case.tensor("action_mask")
    for name in ("kl", "abs", "mse", "k3"):
        logp = case.tensor("log_probs", grad=True)
        kl = recipes.roll_token_kl(name, logp, case.tensor("log_probs_base"), mask)
        case.close(name, kl)
        case.close(f"grad_{name}", grad_of(kl, logp))


@checks("roll_kl.json", "full_vocab_kl")
def roll_full_vocabulary(case: Case) -> None:
    """``grad_full`` is exempt: klamp normalises what it is given, so its gradient is that of the logits."""
    assert case.raw["summed_axis"] == -1
    case.unread.discard("grad_full")
    logp, ref, mask = case.tensor("log_probs"), case.tensor("log_probs_base"), case.tensor("action_mask")
    case.close("full", recipes.roll_token_kl("full", logp, ref, mask))


@checks("roll_kl.json", "full_on_2d")
def roll_full_on_two_axes(case: Case) -> None:
    """Refused: a sum over time is no KL per token, and nothing is broadcast to make it look like one."""
    assert case.hazard
    case.unread.clear()
    with pytest.raises(klamp.ConfigError, match="same shape"):
        recipes.roll_token_kl(
            "full", case.tensor("log_probs"), case.tensor("log_probs_base"), case.tensor("action_mask")
        )


@checks("verl_kl.json", "token_kl")
def verl_token_kl(case: Case) -> None:
    for name in list(case.unread):
        logp = case.tensor("logprob", grad=True)
        kl = recipes.verl_kl(name, logp, case.tensor("ref_logprob"))
        recorded = Case(case.file, {"id": f"{case.raw['id']}[{name}]", "kind": case.kind, "outputs": case.read(name)})
        recorded.dtype = case.dtype
        recorded.close("value", kl)
        recorded.close("grad", grad_of(kl, logp))
        assert not recorded.unread


@checks("verl_kl.json", "raises")
def verl_unknown_estimates(case: Case) -> None:
    """``full`` does better: the exact KL over the vocabulary. Any other name is refused, with the known ones."""
    case.same("raises", "NotImplementedError")
    name = case.inputs["kl_penalty"]
    if name == "full":
        assert klamp.estimator(name) is klamp.exact
        return
    with pytest.raises(klamp.ConfigError, match=f"{name}.*Choose from"):
        klamp.estimator(name)


@checks("trl.json", "grpo_kl")
def trl_loss(case: Case) -> None:
    for entry in case.entries():
        trl_setting(entry)
        assert not entry.unread


def trl_setting(entry: Case) -> None:
    mask, ref, settings = entry.tensor("mask"), entry.tensor("ref_per_token_logps"), entry.inputs
    logp = entry.tensor("per_token_logps", grad=True)
    old = entry.tensor("old_per_token_logps") if entry.read("old_given") else logp.detach()
    whole_rows = entry.read("importance_sampling_level") == "sequence"
    old = old if entry.read("bias_correction") else None
    kl = recipes.trl_per_token_kl(logp, ref, old, mask if whole_rows else None)
    loss = recipes.trl_kl_loss(kl, settings["beta"], mask, settings["loss_type"], settings["max_completion_length"])
    entry.close("per_token_kl", kl)
    entry.close("metric_kl", klamp.mean(kl, mask))
    entry.close("loss", loss)
    entry.close("grad_masked_sum", grad_of(recipes.counted(kl, mask), logp))
    entry.close("grad_loss", grad_of(loss, logp))


@checks("openrlhf.json", "token_kl")
def openrlhf_token_kl(case: Case) -> None:
    for entry in case.entries():
        openrlhf_setting(entry)
        assert not entry.unread


def openrlhf_setting(entry: Case) -> None:
    """The original casts to float32 whatever comes in, so the float32 tolerance holds for every case."""
    logp, ref = entry.tensor("log_probs", grad=True), entry.tensor("log_probs_base")
    unbiased = entry.read("unbiased_gradient")
    old = entry.tensor("log_probs_old") if entry.read("old_given") else None
    kl = recipes.openrlhf_kl(entry.read("kl_estimator"), logp, ref, unbiased_gradient=unbiased, old_logp=old)
    assert kl.dtype == torch.float32
    grad = grad_of(kl, logp)
    entry.close("grad", grad, dtype="float32")
    # The original's unbiased value is (value + s) − s in float32 and loses one spacing of s = w·d²/2 on the way (4e-6
    # at most here); grad is w·d. klamp's own value is exact.
    s = (grad * klamp.k1(logp, ref) / 2).abs().detach().double()
    entry.close("value", kl, dtype="float32", slack=torch.finfo(torch.float32).eps * s if unbiased else 0.0)


@checks("tutorial.json", "penalty")
def tutorial_penalty(case: Case) -> None:
    logp = case.tensor("log_probs", grad=True)
    penalty = recipes.tutorial_penalty(logp, case.tensor("ref_log_probs"), case.inputs["beta"])
    case.close("penalty", penalty)
    case.close("grad", grad_of(penalty, logp))
