"""Rewards, advantages, reductions and what is fed to a controller: ROLL, verl, OpenRLHF, trlx, ART, the tutorial."""

from __future__ import annotations

import recipes
import torch
from vectors import Case, checks, near

import klamp
from klamp.compat import AdaptiveKLController

ART_EPS = {"pr562": 1e-6, "kl_penalty_source": 1e-18, "newest": 1e-18}


@checks("roll_reward.json", "reward")
def roll_reward(case: Case) -> None:
    """One controller over the batches: beta is read before the update, and updated even when it is not applied."""
    settings = case.inputs
    controller = klamp.kl_controller(settings["init"], settings["target"], settings["horizon"])
    for step in case.parts("steps"):
        roll_batch(step, settings, controller)
        assert not step.unread


def roll_batch(step: Case, settings: dict, controller: klamp.Stateful) -> None:
    assert controller.value == step.inputs["coef_before"]
    mask = step.tensor("response_mask")[:, 1:]
    scores = recipes.roll_scores(
        step.tensor("response_level_rewards"), step.tensor("attention_mask"), step.tensor("position_ids")
    )
    kl = recipes.roll_token_kl(settings["kl_penalty"], step.tensor("old_log_probs"), step.tensor("ref_log_probs"), mask)
    beta = controller.value if settings["add_token_level_kl"] else 0.0
    clip = settings["reward_clip"]
    plain = recipes.roll_token_rewards(scores, kl, beta, mask)
    current = recipes.roll_current_kl(kl, mask)
    controller.update(current, n_steps=len(kl))
    step.close("token_level_scores", scores)
    step.close("token_level_rewards", recipes.roll_token_rewards(scores, kl, beta, mask, clip))
    step.close("current_kl", current)
    step.close("coef_applied", beta)
    step.same("n_steps", len(kl))
    step.close("coef_after", controller.value)
    if clip is None:
        step.same("clip_fraction", None)
    else:
        step.close("clip_fraction", (plain.abs() > clip).double().mean())


@checks("verl_reward.json", "reward")
def verl_reward(case: Case) -> None:
    settings, mask = case.inputs, case.tensor("response_mask")
    controller = AdaptiveKLController(settings["init"], settings["target"], settings["horizon"])
    kl = recipes.verl_kl(settings["kl_penalty"], case.tensor("old_log_probs"), case.tensor("ref_log_prob"))
    case.same("coef_applied", controller.value)
    case.close("token_level_rewards", klamp.in_reward(case.tensor("token_level_scores"), kl, controller.value, mask))
    current = recipes.verl_current_kl(kl, mask)
    case.close("current_kl", current)
    case.same("n_steps", len(kl))
    controller.update(current_kl=current.item(), n_steps=len(kl))
    case.close("coef_after", controller.value)


@checks("openrlhf.json", "reward")
def openrlhf_reward(case: Case) -> None:
    given = case.inputs
    rewards = recipes.openrlhf_reward(
        case.tensor("r"), case.tensor("kl"), given["kl_coef"], case.tensor("action_mask"), given["reward_clip_range"]
    )
    case.close("reward", rewards)


@checks("trlx_rollout.json", "rollout")
def trlx_rollout(case: Case) -> None:
    settings = case.inputs
    means = []
    for chunk in case.parts("chunks"):
        means.append(trlx_chunk(chunk, settings["coef"]).item())
        assert not chunk.unread
    current = recipes.trlx_controller_kl(means)
    controller = AdaptiveKLController(settings["coef"], settings["target"], settings["horizon"])
    controller.update(current, n_steps=settings["batch_size"])
    case.close("controller_kl", current)
    case.close("coef_after", controller.value)


def trlx_chunk(chunk: Case, beta: float) -> torch.Tensor:
    """``ends`` is trlx's own bookkeeping and is taken as recorded."""
    logp, ref, attention = chunk.tensor("logprobs"), chunk.tensor("ref_logprobs"), chunk.tensor("attention_mask")
    log_ratio, kl = recipes.trlx_log_ratio(logp, ref, attention), recipes.trlx_kl(logp, ref, attention)
    chunk.close("log_ratio", log_ratio)
    chunk.close("kl", kl)
    statistics = recipes.trlx_statistics(kl)
    for name, value in statistics.items():
        chunk.close(name, value)
    dense = chunk.inputs["scores_mask"] is not None
    rewards = recipes.trlx_rewards(
        log_ratio,
        beta,
        chunk.inputs["start"],
        chunk.read("ends"),
        chunk.tensor("scores"),
        chunk.tensor("scores_mask") if dense else None,
    )
    recorded = chunk.read("rewards")
    assert len(rewards) == len(recorded)
    for i, (mine, theirs) in enumerate(zip(rewards, recorded, strict=True)):
        near(mine, theirs, chunk.dtype, 0.0, f"{chunk.id}: rewards[{i}]")
    return statistics["mean_kl"]


@checks("art.json", "advantage")
def art_advantage(case: Case) -> None:
    """Hazards (a NaN in an ignored place that spreads) do better: klamp's answer is that of the counted tokens."""
    given = {name: case.tensor(name) for name in ("new_logprobs", "sample_logprobs", "ref_logprobs", "advantages")}
    given |= {name: case.tensor(name) for name in ("weights", "mask")}
    settings = case.inputs | {"version": case.raw["version"]}
    answer = art_answer(given, settings)
    if case.hazard:
        case.unread.clear()
        art_ignores_what_is_masked(given, settings, answer)
        return
    adjusted, mean_kl, kl, loss = answer
    case.close("adjusted_advantages", adjusted)
    case.close("policy_loss_sum", loss)
    if settings["coef"] == 0:  # the original measures nothing then; klamp always does
        case.same("kl_policy_ref", None)
        case.same("kl_per_token", None)
        assert mean_kl.isfinite()
        return
    case.close("kl_policy_ref", mean_kl)
    case.close("kl_per_token", kl)


def art_answer(given: dict[str, torch.Tensor], settings: dict) -> tuple[torch.Tensor, ...]:
    new, sample, mask = given["new_logprobs"], given["sample_logprobs"], given["mask"]
    source = recipes.art_source(new, sample, settings["kl_penalty_source"])
    adjusted, mean_kl, kl = recipes.art_advantages(
        given["advantages"], source, given["ref_logprobs"], settings["coef"], mask, ART_EPS[settings["version"]]
    )
    return adjusted, mean_kl, kl, recipes.art_policy_loss(new, sample, adjusted, given["weights"], mask)


def art_ignores_what_is_masked(given: dict[str, torch.Tensor], settings: dict, answer: tuple) -> None:
    """To the bit the answer with zeros in the ignored places, and finite."""
    ignored = given["mask"] == 0
    clean = {k: v if k in ("mask", "advantages") else v.masked_fill(ignored, 0.0) for k, v in given.items()}
    for mine, expected in zip(answer, art_answer(clean, settings), strict=True):
        assert torch.equal(mine, expected)
        assert mine.isfinite().all()


@checks("aggregation.json", "aggregation")
def aggregation(case: Case) -> None:
    x, mask = case.tensor("values"), case.tensor("mask")
    reduce = {
        "roll": lambda mode: recipes.roll_agg_loss(x, mask, mode),
        "verl": lambda mode: recipes.verl_agg_loss(x, mask, mode),
        "art": lambda mode: recipes.art_reduce(x, mask, mode),
        "trlx": lambda name: recipes.trlx_statistics(x)[name],
        "controller_feed": lambda who: getattr(recipes, f"{who}_current_kl")(x, mask),
    }
    for system in list(case.unread):
        for mode, recorded in case.read(system).items():
            near(reduce[system](mode), recorded, case.dtype, 0.0, f"{case.id}: {system}.{mode}")


@checks("tutorial.json", "monitor")
def tutorial_monitor(case: Case) -> None:
    batches = [
        [torch.tensor(batch[name], dtype=torch.float64) for name in ("log_probs", "ref_log_probs")]
        for batch in case.inputs["batches"]
    ]
    kls = [klamp.mean(klamp.r_log_r(logp, ref)).item() for logp, ref in batches]
    average, warning = recipes.tutorial_warning(kls, case.inputs["target"])
    case.close("kl_estimates", torch.tensor(kls, dtype=torch.float64))
    case.close("avg_kl", average)
    case.same("warning", warning)
