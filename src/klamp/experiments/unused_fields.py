"""Which fields a run does not read: varying one of them trains the same policy again and again."""

from __future__ import annotations

from typing import NamedTuple

from klamp.train.config import TrainConfig

BOOKKEEPING = ("save_every", "keep", "sample_every", "preflight", "process_timeout", "track", "trust_remote_code")
"""Fields that change what is written and checked, never what is learnt."""
VALUE_HEAD = ("algorithm.gamma", "algorithm.lam", "algorithm.value_clip", "algorithm.value_weight", "optim.value_lr")


class Unused(NamedTuple):
    """Why a field changes nothing, and the setting under which it would."""

    why: str
    setting: str


def unused(field: str, run: TrainConfig) -> Unused | None:
    """What keeps ``field`` from changing anything in ``run``; None where it may."""
    if field in BOOKKEEPING:
        return Unused("it changes what is written, not what is learnt", "")
    if field.startswith("kl."):
        return _unused_kl(field.removeprefix("kl."), run)
    if field in VALUE_HEAD and run.algorithm.name != "ppo":
        return Unused("GRPO has no value head", "algorithm.name=ppo")
    if field == "algorithm.std" and run.algorithm.name != "grpo":
        return Unused("PPO has no groups", "algorithm.name=grpo")
    if field.startswith("lora.") and run.full:
        return Unused("every weight is trained, without an adapter", "full=false")
    return None


def _unused_kl(field: str, run: TrainConfig) -> Unused | None:
    kl = run.kl
    constant = Unused("beta is constant, and no clamp holds KL", "kl.controller=hold")
    no_clamp = Unused("there is no clamp", "kl.clamp=true")
    of_k2 = Unused(f"{kl.estimator} has no tail", "kl.estimator=k2")
    steered = kl.controller != "fixed"
    reads = {
        "target": (steered or (kl.clamp and kl.limit is None), constant),
        "per": (steered or kl.clamp_limit is not None, constant),
        "limit": (kl.clamp, no_clamp),
        "clamp_share": (kl.clamp_limit is not None, no_clamp),
        "horizon": (kl.controller == "ziegler", Unused(f"{kl.controller} has no horizon", "kl.controller=ziegler")),
        "gain": (kl.controller == "exponential", Unused(f"{kl.controller} has no gain", "kl.controller=exponential")),
        "tail": ("k2" in kl.estimator or "k3" in kl.estimator, of_k2),
        "max_weight": (
            kl.placement == "sequence_exact",
            Unused(f"{kl.placement} has no such weight", "kl.placement=sequence_exact"),
        ),
    }
    read, why = reads.get(field, (True, constant))
    return None if read else why
