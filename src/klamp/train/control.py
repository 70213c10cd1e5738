"""The :class:`klamp.Control` of a run, from its configuration."""

from __future__ import annotations

from klamp.control import Control
from klamp.controllers import Controller
from klamp.monitor import Monitor, logger
from klamp.train.config import KLConfig
from klamp.train.kl_measurement import WARN


def control_of(kl: KLConfig, controller: Controller | None = None) -> Control:
    """Price, clamp and monitor as configured, before the first batch; ``controller`` in place of the named one."""
    made = controller or kl.make_controller()
    monitor = Monitor(kl.target, kl.per, bounds=getattr(made, "bounds", None), advice=advice(kl))
    return Control(made, clamp=kl.clamp_limit, monitor=monitor)


def warn_near_floor(kl: KLConfig, floor: float) -> None:
    """Say so where the target is hardly above what rounding alone makes of KL."""
    if kl.target is not None and kl.target < WARN * floor:
        logger.warning(
            "the target %.3g is less than %g times the floor: KL reads %.2g nats per %s from rounding alone. Raise "
            "kl.target, or set dtype=float32.",
            *(kl.target, WARN, floor, kl.per),
        )


def advice(kl: KLConfig) -> dict[str, str]:
    """What to change when an alarm rings, in the fields of the configuration: nothing that klamp steers by itself."""
    constant = kl.controller == "fixed"
    steer = "Raise kl.beta, lower optim.lr, or set kl.controller=hold" if constant else "Lower optim.lr"
    hold = steer if kl.clamp_limit is not None else f"{steer}, or set kl.limit with kl.clamp=true"
    free = "Lower kl.beta or raise optim.lr" if constant else "Raise optim.lr"
    return {
        "drifting": f"{hold}.",
        "not_learning": f"{free}, or look at reward/std and reward/no_signal: there may be nothing to learn from.",
        "spike": "Look at the samples of this step; if it repeats, lower optim.lr or optim.max_grad_norm.",
        "non_finite": "If it repeats, lower optim.lr, or look at the rewards and the dtype of the model.",
        "beta_at_bound": "Change kl.target, or optim.lr: lower where beta is high, higher where it is low.",
        "estimators_disagree": "The run is steered by the exact one; a higher rollout.prompts has less noise.",
        "sampler_gap": "Set dtype=float32, or rollout.top_p to 1.",
        "clamp_works_hard": f"{steer}: the clamp undoes good and bad alike.",
        "no_signal": (
            "Change reward.functions to one that differs between completions of a prompt, prompts to some that are "
            "neither too easy nor too hard, or raise rollout.group_size."
        ),
    }
