"""What would silently fail inside TRL, refused when :class:`~klamp.integrations.trl.KLControl` is made."""

from __future__ import annotations

from typing import Any

from torch import nn
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer

from klamp.errors import ConfigError
from klamp.integrations.trl_tokens import Trainer, policy_of


def check_trainer(trainer: object) -> None:
    """A GRPOTrainer or RLOOTrainer whose loss reads ``trainer.beta`` at every step."""
    name = f"{type(trainer).__module__}.{type(trainer).__qualname__}"
    if any("unsloth" in f"{c.__module__}.{c.__qualname__}".lower() for c in type(trainer).__mro__):
        raise ConfigError(
            f"trainer is {name}: Unsloth compiles beta into its loss as a constant, so a new price would be ignored or "
            "compiled anew at every step. Use TRL's own GRPOTrainer."
        )
    if type(trainer).__module__.startswith("klamp.controllers"):
        raise ConfigError(f"trainer is a {name}. Write KLControl(controller={type(trainer).__name__}(...)).")
    if not isinstance(trainer, GRPOTrainer | RLOOTrainer):
        raise ConfigError(
            f"trainer must be a TRL GRPOTrainer or RLOOTrainer, got {name}. Others have no KL to a reference, or log "
            "another quantity as `kl` (AsyncGRPOTrainer: policy against sampler)."
        )
    if getattr(trainer.args, "use_liger_loss", False) or getattr(trainer, "use_liger_loss", False):
        raise ConfigError(
            "use_liger_loss=True: Liger's fused loss takes beta as a compile-time constant and would be compiled anew "
            "at every step. Leave it off; TRL's own loss reads beta at run time."
        )


def check_unit(trainer: Trainer, per: str) -> None:
    """The units in which this trainer's KL can be told from its own metric."""
    if isinstance(trainer, RLOOTrainer) and per != "sequence":
        raise ConfigError(
            f"controller.per is {per!r}, but RLOOTrainer prices KL as a sum over the sequence, in the reward: at one "
            "beta the KL per token falls as completions grow, so a target per token would steer the length. Use "
            "per='sequence' with the nats of a whole completion (0.05 per token of 48 tokens is 2.4)."
        )
    if per == "sequence_mean":
        raise ConfigError(
            "controller.per is 'sequence_mean', which cannot be had from the token mean that GRPOTrainer logs. "
            "Use per='token' or per='sequence'."
        )


def check_reference(trainer: Trainer) -> None:
    """There is a reference, and it is the model that training starts from."""
    model: Any = policy_of(trainer)
    adapters = getattr(model, "peft_config", None)
    if trainer.beta == 0.0 and trainer.ref_model is None and adapters is None:
        raise ConfigError(
            "beta is 0 and the model has no adapter: TRL made no reference model, and the first beta > 0 would fail "
            "in the middle of training. Set beta > 0 in the config (1e-6 will do: the controller sets the price), or "
            "train with a LoRA."
        )
    fresh = trainer.state.global_step == 0
    if adapters is None or "ref" in adapters or not fresh or not _displaced(model):
        return
    if trainer.beta == 0.0:
        raise ConfigError(
            "beta is 0 and the model came with a trained adapter: TRL made no copy of it to refer to, so KL would be "
            "measured to the base model instead. Set beta > 0 in the config (1e-6 will do)."
        )
    raise ConfigError(
        "the adapter is not at zero when training starts, and TRL's reference is the model with the adapter off: KL "
        "would not start at 0. Use init_lora_weights=True (PiSSA, OLoRA and LoftQ change the base as well)."
    )


def check_in_flight(trainer: Trainer) -> None:
    """No generated batch is waiting that was made without the reference's log-probs."""
    waiting = trainer._buffered_inputs
    if trainer.beta == 0.0 and waiting and isinstance(trainer, GRPOTrainer):
        missing = [b for b in waiting if "ref_per_token_logps" not in b]
        if missing:
            raise ConfigError(
                f"beta is 0 and {len(missing)} generated micro-batches without reference log-probs are still to be "
                "trained on; a beta > 0 now would fail on them. Attach KLControl before training, or set beta > 0 "
                "from the start (1e-6 will do)."
            )


def check_clamp(trainer: Trainer) -> None:
    """The displacement from the reference can be scaled in place."""
    why = why_no_clamp(trainer)
    if why is not None:
        raise ConfigError(f"clamp=True cannot work here: {why}. Use clamp=False; the price alone still steers.")


def why_no_clamp(trainer: Trainer) -> str | None:
    """Why the clamp cannot act on this trainer, in words; None where it can."""
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        return "FSDP and DeepSpeed shard or copy the weights that it would scale"
    if getattr(trainer.args, "sync_ref_model", False):
        return "sync_ref_model=True moves the reference, and with it the point to scale towards"
    model: Any = policy_of(trainer)
    adapters = getattr(model, "peft_config", None)
    if adapters is None:
        return None if trainer.ref_model is not None else "there is no reference model to scale towards"
    if "ref" in adapters:
        return (
            "the model came with a trained adapter, and TRL refers to a copy of it; scaling lora_B would lead to the "
            "base model, which is not the reference"
        )
    return None


def unclamped(trainer: Trainer, target: str, limit: str) -> str:
    """What a user should know where the clamp is off without having been asked to be."""
    why = why_no_clamp(trainer)
    if why is not None:
        return f"KLControl does not clamp here: {why}. beta alone holds KL{target}."
    return (
        f"KLControl does not clamp this full fine-tune: beta alone holds KL{target}, and one update can go past that. "
        f"clamp=True stops each update at {limit}, for one more forward of the reference and two or three of the "
        "policy a step. clamp=False leaves this line out."
    )


def lora_on_base(trainer: Trainer) -> bool:
    """A LoRA whose reference is its own base: where the clamp is on unless switched off."""
    model: Any = policy_of(trainer)
    return getattr(model, "peft_config", None) is not None and why_no_clamp(trainer) is None


def _displaced(model: nn.Module) -> bool:
    """Whether any lora_B is not zero."""
    return any("lora_B" in name and bool(p.detach().any()) for name, p in model.named_parameters())
