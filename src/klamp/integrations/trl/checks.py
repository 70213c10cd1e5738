"""How :class:`~klamp.integrations.trl.KLControl` comes to its trainer, and the settings that it refuses."""

from __future__ import annotations

import inspect
from types import FrameType
from typing import Any

import transformers
from torch import nn
from transformers import TrainerCallback
from transformers.trainer_callback import TrainerState
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer

from klamp.controllers import Controller, Hold, Target
from klamp.controllers.base import split_target
from klamp.errors import ConfigError
from klamp.integrations.trl.tokens import Trainer, policy_of
from klamp.masked import Unit


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


def calling_trainer(callback: TrainerCallback) -> transformers.Trainer | None:
    """The trainer whose event ``callback`` is handling; None where no caller is one that it was added to.

    transformers hands a callback the model, the optimiser and more, but not the trainer. The trainer is the ``self`` of
    the method that raised the event, so it is looked for among the callers, and taken only if the callback is its own.
    """
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, transformers.Trainer) and any(c is callback for c in owner.callback_handler.callbacks):
            return owner
        frame = frame.f_back
    return None


def controller_of(controller: Controller | None, target: float | Target | None, per: Unit | None) -> Controller:
    """The controller, or ``Hold`` at ``target`` nats ``per`` token or sequence."""
    if controller is not None:
        if target is not None or per is not None:
            raise ConfigError("KLControl was given a controller and target or per as well. Set them in the controller.")
        return controller
    target, per = split_target("KLControl", target, per)
    if target is None or per is None:
        missing = "target and per are" if target is None and per is None else f"{'per' if per is None else 'target'} is"
        raise ConfigError(
            f"{missing} missing. Write KLControl(target=0.05, per='token') for 0.05 nats per token, or give a "
            "controller."
        )
    return Hold(target=target, per=per)


class Reminder(TrainerCallback):
    """Stops a training run whose trainer a KLControl was made for, but never added to."""

    def __init__(self) -> None:
        self.needed = True
        """Until the control's first event: one that is removed after that was removed on purpose."""

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Refuse to train without what was meant to steer."""
        trainer = calling_trainer(self)
        if not self.needed or trainer is None:
            return
        from klamp.integrations.trl.callback import KLControl

        if not any(isinstance(c, KLControl) for c in trainer.callback_handler.callbacks):
            raise ConfigError(
                "a KLControl was made for this trainer and never added to it, so nothing would hold KL. Add it: "
                "trainer.add_callback(control), or leave the trainer out and pass callbacks=[KLControl(target=..., "
                "per=...)] to it."
            )


def remind(trainer: transformers.Trainer) -> Reminder:
    """The trainer's reminder; it is added where there is none."""
    found = next((c for c in trainer.callback_handler.callbacks if isinstance(c, Reminder)), None)
    if found is None:
        found = Reminder()
        trainer.add_callback(found)
    return found
