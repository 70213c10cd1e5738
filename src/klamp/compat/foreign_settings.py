"""The settings of other systems by the names that klamp's trainer has for them: one table.

The flag parser and the reader of YAML answer a foreign name from it, and ``docs/coming-from.md`` shows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Foreign:
    """A setting of other systems."""

    systems: str
    """Who calls it so."""
    here: str
    """The fields of ``klamp train`` that stand for it; empty where there is none."""
    note: str = ""
    """What else there is to know, as a sentence."""


FOREIGN = {
    # The price and what steers it.
    "init_kl_coef": Foreign("ROLL, trlx", "‹kl.beta›"),
    "init_coef": Foreign("OpenRLHF", "‹kl.beta›"),
    "kl_coef": Foreign("verl, ART", "‹kl.beta›"),
    "kl_penalty_coef": Foreign(
        "ART", "‹kl.beta› with ‹kl.controller=fixed›, ‹kl.placement=in_advantage› and ‹kl.estimator=k1›"
    ),
    "beta": Foreign("TRL", "‹kl.beta› with ‹kl.controller=fixed›"),
    "kl_loss_coef": Foreign("ROLL, verl", "‹kl.beta› with ‹kl.controller=fixed› and ‹kl.placement=in_loss›"),
    "target_kl": Foreign("ROLL, verl", "‹kl.target› with ‹kl.per=sequence_mean›"),
    "kl_target": Foreign("SkyRL", "‹kl.target› with ‹kl.per=sequence_mean›"),
    "target": Foreign(
        "trlx, OpenRLHF", "‹kl.target› with ‹kl.per›", "trlx's is per sequence, OpenRLHF's per sequence_mean."
    ),
    "horizon": Foreign("trlx, verl", "‹kl.horizon› with ‹kl.controller=ziegler›"),
    "kl_horizon": Foreign("ROLL", "‹kl.horizon› with ‹kl.controller=ziegler›"),
    "kl_ctrl": Foreign("verl", "‹kl.controller›, ‹kl.beta›, ‹kl.target›, ‹kl.per› and ‹kl.horizon›"),
    # Estimator and placement.
    "kl_penalty": Foreign("ROLL, verl", "‹kl.estimator›", "Their kl, mse and k3 are k1, k2 and k3."),
    "kl_loss_type": Foreign("verl", "‹kl.estimator› with ‹kl.placement=in_loss›"),
    "kl_estimator_type": Foreign("SkyRL", "‹kl.estimator›"),
    "estimator": Foreign("OpenRLHF", "‹kl.estimator›"),
    "add_token_level_kl": Foreign("ROLL", "‹kl.placement=in_reward› with ‹kl.estimator=k1›"),
    "use_kl_in_reward": Foreign("verl", "‹kl.placement=in_reward› with ‹kl.estimator=k1›"),
    "use_kl_loss": Foreign("ROLL, verl", "‹kl.placement=in_loss›"),
    "use_loss": Foreign("OpenRLHF", "‹kl.placement=in_loss›"),
    "use_bias_correction_kl": Foreign("TRL", "‹kl.estimator=weighted_k3› with ‹kl.placement=in_loss›"),
    "unbiased_gradient": Foreign("OpenRLHF", "‹kl.estimator=detached_weight_k2› with ‹kl.placement=in_loss›"),
    "kl_penalty_source": Foreign("ART", "‹kl.source›"),
    # The reference.
    "kl_penalty_reference_step": Foreign("ART", "‹kl.reference=step:N›"),
    "kl_penalty_step_lag": Foreign("ART", "‹kl.reference=lag:N›"),
    "kl_ref_adapter_path": Foreign("ART", "‹kl.reference=adapter:FOLDER›"),
    "sync_ref_model": Foreign("TRL", "‹kl.reference=ema:DECAY›"),
    "ref_model_mixup_alpha": Foreign("TRL", "‹kl.reference=ema:DECAY›"),
    "ref_model_sync_steps": Foreign("TRL", "‹kl.reference=periodic:N›"),
    "enable_reference": Foreign(
        "ROLL", "", "There is always a reference: ‹kl.reference› names it, and ‹kl.beta=0› only measures."
    ),
    # What is sampled.
    "num_generations": Foreign("TRL", "‹rollout.group_size›"),
    "num_return_sequences_in_group": Foreign("ROLL", "‹rollout.group_size›"),
    "n_samples_per_prompt": Foreign("OpenRLHF, SkyRL", "‹rollout.group_size›"),
    "n": Foreign("verl", "‹rollout.group_size›"),
    "max_completion_length": Foreign("TRL", "‹rollout.max_tokens›"),
    "response_length": Foreign("ROLL", "‹rollout.max_tokens›"),
    "max_response_length": Foreign("verl", "‹rollout.max_tokens›"),
    "max_new_tokens": Foreign("ROLL, trlx", "‹rollout.max_tokens›"),
    "rollout_batch_size": Foreign("ROLL, OpenRLHF", "‹rollout.prompts›"),
    "train_batch_size": Foreign("verl", "‹rollout.prompts›"),
    "num_rollouts": Foreign("trlx", "‹rollout.prompts› times ‹rollout.group_size›"),
    "chunk_size": Foreign("trlx", "‹rollout.chunk›"),
    "temperature": Foreign("TRL", "‹rollout.temperature›"),
    "top_p": Foreign("TRL", "‹rollout.top_p›"),
    # The algorithm.
    "adv_estimator": Foreign("ROLL, verl", "‹algorithm.name›", "gae is ppo."),
    "ppo_epochs": Foreign("ROLL, trlx, verl", "‹algorithm.epochs›"),
    "num_iterations": Foreign("TRL", "‹algorithm.epochs›"),
    "ppo_mini_batch_size": Foreign(
        "verl", "‹algorithm.minibatches›", "It counts optimiser steps per pass, not sequences."
    ),
    "epsilon": Foreign("TRL, ART", "‹algorithm.clip›", "It takes two numbers: how far below 1 and how far above."),
    "epsilon_high": Foreign("TRL, ART", "‹algorithm.clip›", "It takes two numbers: how far below 1 and how far above."),
    "clip_ratio": Foreign("verl", "‹algorithm.clip›", "It takes two numbers: how far below 1 and how far above."),
    "pg_clip": Foreign("ROLL", "‹algorithm.clip›", "It takes two numbers: how far below 1 and how far above."),
    "cliprange": Foreign("trlx", "‹algorithm.clip›", "It takes two numbers: how far below 1 and how far above."),
    "cliprange_value": Foreign("trlx", "‹algorithm.value_clip›"),
    "vf_coef": Foreign("trlx", "‹algorithm.value_weight›"),
    "gamma": Foreign("ROLL, trlx, verl", "‹algorithm.gamma›"),
    "lam": Foreign("trlx, verl", "‹algorithm.lam›"),
    "lambd": Foreign("ROLL", "‹algorithm.lam›"),
    "scale_rewards": Foreign("TRL", "‹algorithm.std›"),
    "norm_adv_by_std_in_grpo": Foreign("verl", "‹algorithm.std›"),
    "loss_type": Foreign("TRL, ART", "", "klamp's losses are means over counted tokens, as dapo and bnpo."),
    "loss_agg_mode": Foreign("ROLL, verl", "", "klamp's losses are means over counted tokens, as token-mean."),
    # Optimiser and run.
    "learning_rate": Foreign("TRL, ART, ROLL", "‹optim.lr›"),
    "actor_learning_rate": Foreign("OpenRLHF", "‹optim.lr›"),
    "lr": Foreign("trlx, verl", "‹optim.lr›"),
    "lr_scheduler_type": Foreign("TRL, ROLL", "‹optim.schedule›"),
    "warmup_steps": Foreign("TRL, ROLL", "‹optim.warmup›"),
    "max_grad_norm": Foreign("TRL, ROLL", "‹optim.max_grad_norm›"),
    "per_device_train_batch_size": Foreign("TRL, ROLL", "‹optim.micro_batch›", "It changes memory, not the result."),
    "max_steps": Foreign("TRL, ROLL", "‹steps›"),
    "num_train_epochs": Foreign("TRL", "‹steps›", "A run is counted in steps, not in passes over the prompts."),
    "total_epochs": Foreign("verl", "‹steps›", "A run is counted in steps, not in passes over the prompts."),
    "total_steps": Foreign("trlx", "‹steps›"),
    "total_training_steps": Foreign("verl", "‹steps›"),
    "output_dir": Foreign("TRL, ROLL", "‹run›"),
    "default_local_dir": Foreign("verl", "‹run›"),
    "save_steps": Foreign("TRL, ROLL", "‹save_every›"),
    "save_freq": Foreign("verl", "‹save_every›"),
    "checkpoint_interval": Foreign("trlx", "‹save_every›"),
    "resume_from_checkpoint": Foreign("TRL, trlx, ROLL", "‹resume›"),
    "report_to": Foreign("TRL", "‹track›"),
    "model_name_or_path": Foreign("TRL, ROLL", "‹model›"),
    "model_path": Foreign("trlx", "‹model›"),
    "pretrain": Foreign("ROLL, OpenRLHF", "‹model›"),
    "dataset_name": Foreign("TRL", "‹prompts›"),
    "reward_funcs": Foreign("TRL", "‹reward.functions›"),
    "reward_weights": Foreign("TRL", "‹reward.weights›"),
    "lora_r": Foreign("TRL", "‹lora.rank›"),
    "lora_rank": Foreign("verl, ROLL", "‹lora.rank›"),
    "lora_alpha": Foreign("TRL, verl, ROLL", "‹lora.alpha›"),
    "lora_target_modules": Foreign("TRL", "‹lora.targets›"),
}
"""Settings by the last part of their name: ``method.init_kl_coef`` and ``--init-kl-coef`` are ``init_kl_coef``."""


def foreign(name: str, value: object = None) -> str | None:
    """What to say to somebody who gave klamp another system's setting; None for a name that is nobody's.

    Where ``value`` is a section that klamp does not have, as trlx's ``method``, the settings inside are looked at.
    """
    found = FOREIGN.get(name.lstrip("-+").replace("-", "_").rpartition(".")[2])
    if found is None:
        inside = value.items() if isinstance(value, Mapping) else ()
        return next((said for k, v in inside if (said := foreign(f"{name}.{k}", v))), None)
    owners = " and ".join(found.systems.rsplit(", ", 1))
    answer = f"In klamp it is {found.here}." if found.here else "klamp has no such setting."
    return " ".join(filter(None, (f"{name} is a setting of {owners}.", answer, found.note)))
