"""The flat arguments of ``LocalBackend.train`` become the one configuration, here and once."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from klamp.controllers import Controller, Fixed
from klamp.controllers.base import check_controller
from klamp.errors import ConfigError, require_number, shown, unknown
from klamp.references import AdapterPath, Base, CheckpointStep, ReferenceSpec, StepLag, parse
from klamp.train.config import (
    AlgorithmConfig,
    KLConfig,
    LoraConfig,
    OptimConfig,
    ResolvedConfig,
    RolloutConfig,
    TrainConfig,
)

COEFFICIENT = 1.0
"""The price where neither ``kl_penalty_coef`` nor a controller is given."""

RIGHT_NAMES = {
    "lr": "learning_rate",
    "kl_coef": "kl_penalty_coef",
    "kl_beta": "kl_penalty_coef",
    "kl_loss_coef": "kl_penalty_coef",
    "init_kl_coef": "kl_penalty_coef",
    "kl_penalty": "kl_penalty_coef",
    "beta": "kl_penalty_coef",
    "kl_ref_step": "kl_penalty_reference_step",
    "kl_reference_step": "kl_penalty_reference_step",
    "reference_step": "kl_penalty_reference_step",
    "kl_penalty_ref_step": "kl_penalty_reference_step",
    "kl_penalty_adapter_path": "kl_ref_adapter_path",
    "ref_adapter_path": "kl_ref_adapter_path",
    "adapter_path": "kl_ref_adapter_path",
    "kl_lag": "kl_penalty_step_lag",
    "step_lag": "kl_penalty_step_lag",
    "kl_source": "kl_penalty_source",
    "target_kl": "controller=klamp.Hold(target=..., per=...)",
    "kl_target": "controller=klamp.Hold(target=..., per=...)",
    "max_norm": "max_grad_norm",
    "batch_size": "micro_batch",
}
"""What other systems, and ART at other times, call these arguments."""


ART_DEFAULTS: dict[str, Any] = {
    "loss_fn_config": None,
    "adam_params": None,
    "advantage_balance": 0.0,
    "importance_sampling_level": "token",
    "max_negative_advantage_importance_sampling_weight": None,
    "mask_prob_ratio": False,
    "kimi_k2_tau": None,
    "precalculate_logprobs": False,
    "allow_training_without_logprobs": False,
    "plot_tensors": False,
    "truncated_importance_sampling": None,
    "scale_learning_rate_by_reward_std_dev": False,
    "logprob_calculation_chunk_size": 1024,
    "packed_sequence_length": None,
    "num_trajectories_learning_rate_multiplier_power": 0.0,
    "save_checkpoint": True,
    "optimizer_save_interval": 5,
    "final_training_step": None,
    "grad_accumulation_sequences": None,
}
"""Arguments of ART's ``train`` (0.5.18 to 0.5.23) that klamp has no use for, at the values that ask for nothing."""

ADVANTAGES = ("art", "art_scaled", "klamp")
LOSSES: dict[str, tuple[float, float | None]] = {"ppo": (0.2, None), "cispo": (1.0, 4.0)}
"""The clip of each loss where none is given, as in ART: below 1, and above (None: the same)."""
SOURCES = ("current_learner", "sample")
POSITIVE = (
    ("learning_rate", "1e-5 to 1e-3 is usual for LoRA."),
    ("kl_limit", "It is a KL; leave it out for 1.1 x the controller's target."),
    ("temperature", "1.0 is the model itself."),
)
AT_LEAST = (
    ("kl_penalty_coef", 0, "A price is never negative; 0 only measures."),
    ("epsilon", 0, "It is how far the ratio may fall below 1; 0.2 is usual."),
    ("epsilon_high", 0, "It is how far the ratio may rise above 1; leave it out for epsilon."),
    ("max_grad_norm", 0, "0 turns clipping off."),
    ("micro_batch", 0, "0 takes all sequences at once."),
)


@dataclass(frozen=True, kw_only=True)
class Place:
    """What a step's configuration takes from the backend and the model."""

    base_model: str
    folder: Path
    lora: LoraConfig
    seed: int
    device: str
    keep: int
    server: tuple[str, str | None] | None = None
    """Address of a vLLM server that samples, and what it calls the base."""


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """The arguments of one call of ``train``, checked when they are made."""

    learning_rate: float
    kl_penalty_coef: float | None
    kl_penalty_reference_step: int | None
    kl_ref_adapter_path: Any
    kl_penalty_source: Literal["current_learner", "sample"]
    kl_penalty_step_lag: int | None
    controller: Controller | None
    reference: ReferenceSpec | str | None
    kl_limit: float | None
    clamp: bool
    advantages: Literal["art", "art_scaled", "klamp"]
    scale_rewards: bool
    normalize_advantages: bool
    loss_fn: Literal["ppo", "cispo"]
    epsilon: float | None
    epsilon_high: float | None
    max_grad_norm: float
    micro_batch: int
    temperature: float | None

    def __post_init__(self) -> None:
        if self.controller is not None and self.kl_penalty_coef is not None:
            raise ConfigError(
                f"controller={self.controller!r} and kl_penalty_coef={self.kl_penalty_coef!r} both set the price. "
                "Give one of them."
            )
        if self.controller is not None:
            check_controller("controller", self.controller)
        for name, choices in (("kl_penalty_source", SOURCES), ("advantages", ADVANTAGES), ("loss_fn", LOSSES)):
            if getattr(self, name) not in choices:
                raise unknown(name, getattr(self, name), choices)
        for name, floor, way_out in AT_LEAST:
            if getattr(self, name) is not None:
                require_number(name, getattr(self, name), at_least=floor, way_out=way_out)
        for name, way_out in POSITIVE:
            if getattr(self, name) is not None:
                require_number(name, getattr(self, name), above=0, way_out=way_out)
        _ = self.spec, self.priced

    @property
    def priced(self) -> Controller:
        """What sets the price: the given controller, or the constant coefficient."""
        return self.controller or Fixed(COEFFICIENT if self.kl_penalty_coef is None else float(self.kl_penalty_coef))

    @property
    def std(self) -> bool:
        """Whether advantages are divided by their group's standard deviation; ART has two names for it."""
        return self.scale_rewards and self.normalize_advantages

    @property
    def clip(self) -> tuple[float, float]:
        """How far the ratio counts below and above 1."""
        low, high = LOSSES[self.loss_fn]
        low = low if self.epsilon is None else float(self.epsilon)
        high = high if self.epsilon_high is None else float(self.epsilon_high)
        return low, low if high is None else high

    @property
    def spec(self) -> ReferenceSpec:
        """The one reference that the arguments name; none of them: the base."""
        named: dict[str, ReferenceSpec] = {}
        if self.kl_penalty_reference_step is not None:
            step = _whole("kl_penalty_reference_step", self.kl_penalty_reference_step, "Step 0 is the base.")
            named["kl_penalty_reference_step"] = CheckpointStep(step)
        if self.kl_ref_adapter_path is not None:
            named["kl_ref_adapter_path"] = AdapterPath(str(self.kl_ref_adapter_path))
        if self.kl_penalty_step_lag is not None:
            lag = _whole("kl_penalty_step_lag", self.kl_penalty_step_lag, "It counts steps back.")
            named["kl_penalty_step_lag"] = StepLag(lag)
        if self.reference is not None:
            named["reference"] = parse(self.reference)
        if len(named) > 1:
            raise ConfigError(f"{' and '.join(named)} each name a reference. Give one of them.")
        return next(iter(named.values()), Base())

    def config(self, place: Place, *, step: int, groups: int, largest: int, temperature: float) -> ResolvedConfig:
        """The whole configuration of ``step``."""
        return TrainConfig(
            model=place.base_model,
            run=str(place.folder),
            steps=step,
            seed=place.seed,
            device=place.device,
            save_every=1,
            keep=place.keep,
            kl=self._kl(),
            rollout=RolloutConfig(prompts=groups, group_size=max(2, largest), temperature=temperature),
            algorithm=AlgorithmConfig(name="grpo", std=self.std, clip=self.clip, loss=self.loss_fn),
            optim=OptimConfig(
                lr=float(self.learning_rate), max_grad_norm=self.max_grad_norm, micro_batch=self.micro_batch
            ),
            lora=place.lora,
        ).resolved()

    def _kl(self) -> KLConfig:
        """k1 in the advantage at the price of the controller, whose target the clamp and the monitor know too."""
        controller = self.priced
        target = getattr(controller, "target", None)
        return KLConfig(
            target=target,
            per=getattr(controller, "per", None) or "token",
            controller="fixed" if target is None else "hold",
            beta=controller.init().beta if target is None else None,
            estimator="k1",
            placement="in_advantage",
            source=self.kl_penalty_source,
            clamp=self.clamp,
            limit=self.kl_limit,
            reference=str(self.spec),
        )


def refuse_unknown(names: Mapping[str, Any]) -> None:
    """The error for arguments that ``train`` does not have; ART's are taken at the values that ask for nothing."""
    known = sorted(f.name for f in fields(Arguments))
    for name, value in names.items():
        if name in ART_DEFAULTS:
            _refuse_other(name, value, ART_DEFAULTS[name])
            continue
        if name in RIGHT_NAMES:
            raise ConfigError(f"train() has no argument {name!r}. Write {RIGHT_NAMES[name]}.")
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)  # a slip of the pen, not a resemblance
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"train() has no argument {name!r}.{hint} Choose from: {', '.join(known)}.")


def _refuse_other(name: str, value: Any, default: Any) -> None:
    """Refuse ART's argument ``name`` at a value that asks for something."""
    if name == "allow_training_without_logprobs" and value is True:
        return  # klamp always does
    if (type(value) is not type(default) and not isinstance(value, int | float)) or value != default:
        known = ", ".join(sorted(f.name for f in fields(Arguments)))
        raise ConfigError(
            f"{name}={shown(value)} is an argument of ART's that klamp does not have. Leave it out, or at ART's "
            f"default, {default!r}. Choose from: {known}."
        )


def _whole(name: str, value: Any, way_out: str) -> int:
    number = require_number(name, value, at_least=0, way_out=way_out)
    if number != int(number):
        raise ConfigError(f"{name} must be a whole number of steps, got {value!r}. {way_out}")
    return int(number)
