"""One configuration: frozen dataclasses, a docstring under each field. Command line, YAML and Python build this one.

All checks that can be made without loading anything are made here, when the object is made.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

from klamp import models
from klamp.errors import ConfigError, require_number, unknown
from klamp.train.kl_config import KLConfig as KLConfig

Part = TypeVar("Part", "RolloutConfig", "OptimConfig")

USUAL_LIMIT = 2.0
"""The largest weight, or ratio either way: what TRL, verl, SkyRL and NeMo-RL truncate at."""


@dataclass(frozen=True, kw_only=True)
class CorrectionConfig:
    """What is done about tokens on which the sampler and the trainer disagree; w = e^(logp - sampler_logp)."""

    kind: Literal["auto", "none", "truncate", "mask_ratio", "mask_tv", "mask_kl"] = "auto"
    """truncate: weigh each token by min(w, limit). mask_*: leave out tokens beyond limit, measured by the ratio, the
    total variation or the KL of the token against all others. auto: truncate for a server's completions, else none."""
    limit: float | None = None
    """truncate and mask_ratio: 2 if not given. mask_tv and mask_kl: a divergence, to be given."""
    per: Literal["token", "sequence"] = "token"
    """truncate: the weight of a token, or of its whole sequence."""
    side: Literal["both", "away"] = "both"
    """mask_*: every token beyond the limit, or only those whose update would widen the gap."""
    pays: bool = True
    """A token that is left out of the policy loss still pays its KL."""

    def __post_init__(self) -> None:
        kinds = ("auto", "none", "truncate", "mask_ratio", "mask_tv", "mask_kl")
        if self.kind not in kinds:
            raise unknown("algorithm.correction.kind", self.kind, kinds)
        if self.limit is None and self.kind in ("mask_tv", "mask_kl"):
            raise ConfigError(
                f"‹algorithm.correction.limit› is missing for ‹algorithm.correction.kind={self.kind}›. It is the "
                "largest divergence that stays; there is no usual one."
            )
        if self.limit is not None:
            above = 1 if self.kind == "mask_ratio" else 0
            require_number("algorithm.correction.limit", self.limit, above=above, way_out="Leave it out for 2.")


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """What is sampled each step."""

    prompts: int | None = None
    """Prompts per step, over all processes. None: 4 for the built-in models, 8 for others."""
    group_size: int | None = None
    """Completions of each prompt. None: 8."""
    max_tokens: int | None = None
    """Longest completion, in tokens. None: 24 for the built-in models, 128 for others."""
    temperature: float = 1.0
    """Sampling temperature. KL and log-probs are those of the distribution sampled from."""
    top_p: float = 1.0
    """Nucleus sampling; below 1 the ratios cannot correct for what it cuts off."""
    chat: bool | None = None
    """Wrap prompts in the chat template. None: where the tokenizer has one."""
    chunk: int = 0
    """Completions sampled at once; 0: all of a process's share."""
    engine: Literal["builtin", "vllm"] = "builtin"
    """builtin: klamp's own sampler. vllm: a vLLM server at url, which gets the adapter after every update."""
    url: str | None = None
    """vllm: address of the server, such as http://127.0.0.1:8000. A key is read from VLLM_API_KEY."""
    served: str | None = None
    """vllm: what the server calls the base. None: the model's name."""
    adapters: str | None = None
    """vllm: folder for the adapter's versions that the server can read. None: adapters/ in the run's folder."""
    ahead: Literal[0, 1] = 0
    """vllm: draw the next step's completions while this step trains. They are then one update old, and corrected."""
    timeout: float = 600.0
    """vllm: seconds that one request may take."""
    retries: int = 5
    """vllm: how often a request is repeated that failed for a reason that may pass."""
    on_failure: Literal["stop", "skip"] = "stop"
    """vllm: a prompt whose request fails for good stops the run, or is left out of the step and counted."""
    max_gap: float | None = None
    """Mean |log-prob of the trainer - of the sampler|, in nats per token, that stops the run. None: it only alarms."""

    def __post_init__(self) -> None:
        for name in ("prompts", "group_size", "max_tokens"):
            if getattr(self, name) is not None:
                require_number(f"rollout.{name}", getattr(self, name), at_least=1, way_out="It is a count.")
        require_number("rollout.temperature", self.temperature, above=0, way_out="1.0 samples the model itself.")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"‹rollout.top_p› must be in (0, 1], got {self.top_p!r}. 1.0 samples the model itself.")
        self._check_engine()

    def _check_engine(self) -> None:
        if self.engine not in ("builtin", "vllm"):
            raise unknown("rollout.engine", self.engine, ("builtin", "vllm"))
        if self.engine == "vllm" and self.url is None:
            raise ConfigError("‹rollout.url› is missing for ‹rollout.engine=vllm›. Give it as http://127.0.0.1:8000.")
        if self.engine == "builtin":
            for name in ("url", "served", "adapters"):
                if getattr(self, name) is not None:
                    raise ConfigError(f"‹rollout.{name}› belongs to a server. Add ‹rollout.engine=vllm›.")
        if self.ahead not in (0, 1) or (self.ahead and self.engine == "builtin"):
            raise ConfigError(
                f"‹rollout.ahead› must be 0, or 1 with ‹rollout.engine=vllm›, got {self.ahead!r}: klamp's own sampler "
                "shares the device with the update."
            )
        require_number("rollout.timeout", self.timeout, above=0, way_out="It is in seconds; 600 is usual.")
        require_number("rollout.retries", self.retries, at_least=0, way_out="It is a count; 5 is usual.")
        if self.max_gap is not None:
            require_number("rollout.max_gap", self.max_gap, above=0, way_out="It is in nats a token; 0.5 is wide.")


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """What is rewarded."""

    functions: tuple[str, ...] = ("vader",)
    """vader, length:N, regex:PATTERN, match:COLUMN, model:NAME, or your own module:function."""
    weights: tuple[float, ...] = ()
    """One weight per function; empty: 1 each."""
    on_error: Literal["stop", "mask"] = "stop"
    """A reward that raises or is NaN stops the run, or masks its samples and is counted."""
    timeout: float | None = None
    """Seconds a reward function may take for a step; past them it counts as failed. None: as long as it takes."""

    def __post_init__(self) -> None:
        if not self.functions:
            raise ConfigError("‹reward.functions› is empty. Name at least one, such as vader or my_module:my_function.")
        if self.weights and len(self.weights) != len(self.functions):
            raise ConfigError(
                f"‹reward.weights› has {len(self.weights)} entries for {len(self.functions)} functions. Give one each."
            )
        for weight in self.weights:
            require_number("reward.weights", weight, way_out="Each is a finite factor; 0 leaves a function out.")
        if self.timeout is not None:
            require_number("reward.timeout", self.timeout, above=0, way_out="It is in seconds; None waits for ever.")


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """GRPO or PPO."""

    name: Literal["grpo", "ppo"] = "grpo"
    """grpo: group advantages. ppo: value head and generalised advantages."""
    std: bool = True
    """GRPO: divide by the group's standard deviation."""
    epochs: int = 1
    """Passes over each batch."""
    minibatches: int = 1
    """Optimiser steps per pass."""
    clip: tuple[float, float] = (0.2, 0.2)
    """How far below and above 1 the ratio counts."""
    loss: Literal["ppo", "cispo"] = "ppo"
    """ppo: a token beyond the clip has no gradient. cispo: its clipped ratio is a constant weight on log π."""
    gamma: float = 1.0
    """PPO: discount."""
    lam: float = 0.95
    """PPO: λ of the generalised advantage."""
    value_clip: float = 0.2
    """PPO: how far the value may move from the old one."""
    value_weight: float = 0.1
    """PPO: weight of the value loss."""
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)

    def __post_init__(self) -> None:
        if self.name not in ("grpo", "ppo"):
            raise unknown("algorithm.name", self.name, ("grpo", "ppo"))
        if self.loss not in ("ppo", "cispo"):
            raise unknown("algorithm.loss", self.loss, ("ppo", "cispo"))
        for name in ("epochs", "minibatches"):
            require_number(f"algorithm.{name}", getattr(self, name), at_least=1, way_out="It is a count.")


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW and its schedule."""

    name: Literal["adamw", "adamw8bit"] = "adamw"
    """PyTorch's AdamW, or torchao's with moments in 8 bits; with full, weights on a GPU are then bfloat16."""
    lr: float | None = None
    """Learning rate. None: 1.5e-3 (tiny), 5e-4 (smollm2) or 5e-4 · (576 / hidden size)^(3/4); a tenth with full."""
    value_lr: float = 1e-3
    """Learning rate of PPO's value head."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Adam's decay rates."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate goes after the warm-up."""
    warmup: int = 0
    """Steps of linear warm-up."""
    max_grad_norm: float = 1.0
    """Gradients are clipped to this norm; 0: not at all."""
    micro_batch: int = 0
    """Sequences per forward pass; 0: the whole share at once. It changes memory, not the result, beyond rounding."""
    checkpointing: bool = False
    """Keep the states between layers only and compute the rest again for the gradient: less memory, more time."""
    on_nonfinite: Literal["skip", "stop"] = "skip"
    """A step whose loss or gradient is not finite is skipped and counted, or stops the run."""

    def __post_init__(self) -> None:
        if self.lr is not None:
            require_number("optim.lr", self.lr, above=0, way_out="1e-4 is usual for LoRA.")
        require_number("optim.max_grad_norm", self.max_grad_norm, at_least=0, way_out="0 turns clipping off.")
        require_number("optim.micro_batch", self.micro_batch, at_least=0, way_out="0 takes the whole share.")


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """The adapter."""

    rank: int = 16
    """Rank of the update."""
    alpha: float = 32.0
    """Scale: the update counts alpha / rank."""
    targets: str = "all-linear"
    """Layers that get one: all-linear, or a comma-separated list of module names."""

    def __post_init__(self) -> None:
        require_number("lora.rank", self.rank, at_least=1, way_out="16 is usual.")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training run."""

    model: str = "tiny"
    """The policy: a folder, a Hub id, or a built-in name (tiny, smollm2, smollm2-q4)."""
    prompts: str | None = None
    """JSONL with a "prompt" on each line, text or a list of messages (other columns go to the rewards), or plain text,
    one prompt per line. None: the built-in model's own."""
    run: str = "runs/train"
    """Folder of the run: config.yaml, metrics.jsonl, samples.jsonl, checkpoints/."""
    steps: int | None = None
    """Steps in all. None: 60 for the built-in models, 100 for others."""
    seed: int = 0
    """Of prompts, sampling and initial weights."""
    full: bool = False
    """Train every weight instead of a LoRA adapter."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 on a GPU, float32 on a CPU. The reference has the same."""
    device: str = "auto"
    """auto: the GPU where there is one."""
    save_every: int = 20
    """Steps between checkpoints; the last step is always saved."""
    keep: int = 2
    """Checkpoints kept besides those the reference needs; 0: all."""
    sample_every: int = 10
    """Steps between entries of samples.jsonl."""
    resume: bool = False
    """Go on from the newest whole checkpoint of the run folder; --resume RUN names it and takes its configuration."""
    skip_damaged: bool = False
    """When resuming, pass over a damaged checkpoint instead of stopping at it."""
    preflight: bool = True
    """Check before step 1 that the KL term is wired right."""
    process_timeout: float = 600.0
    """Seconds that one process of several waits for the others before it gives up; a reward may take no longer."""
    deterministic: bool = False
    """Ask torch for deterministic algorithms."""
    track: str | None = None
    """A tracker of accelerate's: tensorboard, wandb, mlflow, ..."""
    trust_remote_code: bool = False
    """Let a model repository run its own code."""
    kl: KLConfig = field(default_factory=KLConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)

    def __post_init__(self) -> None:
        if self.steps is not None:
            require_number("steps", self.steps, at_least=1, way_out="It counts optimiser steps.")
        if not -(2**63) <= self.seed < 2**63:
            raise ConfigError(f"‹seed› must fit in 64 bits, got {self.seed!r}. Any smaller whole number will do.")
        require_number("save_every", self.save_every, at_least=1, way_out="It counts steps.")
        require_number("sample_every", self.sample_every, at_least=1, way_out="It counts steps.")
        require_number("process_timeout", self.process_timeout, above=0, way_out="It is in seconds; 600 is usual.")
        require_number("keep", self.keep, at_least=0, way_out="0 keeps every checkpoint.")
        prompts, group_size = self.rollout.prompts, self.rollout.group_size  # None: checked once it is resolved
        if prompts and group_size and self.algorithm.minibatches > prompts * group_size:
            raise ConfigError(
                f"‹algorithm.minibatches› {self.algorithm.minibatches} is more than the "
                f"{prompts * group_size} completions of a step. Lower it."
            )
        if self.rollout.engine == "vllm" and self.full:
            raise ConfigError(
                "‹full› and ‹rollout.engine=vllm› do not go together: a server takes adapters over HTTP, not whole "
                "models. Train a LoRA adapter, or sample with ‹rollout.engine=builtin›."
            )
        if self.algorithm.name == "grpo" and group_size == 1:
            raise ConfigError(
                "‹rollout.group_size› is 1, and GRPO compares completions of one prompt. Use 2 or more, or "
                "‹algorithm.name=ppo›."
            )

    @property
    def correction(self) -> CorrectionConfig | None:
        """What corrects for the sampler; None where nothing does."""
        found = self.algorithm.correction
        if found.kind == "auto":
            return CorrectionConfig(kind="truncate", limit=found.limit) if self.rollout.engine == "vllm" else None
        return None if found.kind == "none" else found

    def resolved(self, run: TrainConfig | None = None) -> ResolvedConfig:
        """Every field that was left out written down: as ``run`` has it, or else as is usual for the model.

        Args:
            run: The configuration of the run that goes on; None for a new one.

        Returns:
            The configuration in numbers, as it is run, shown and saved.
        """
        if run is not None:
            return self._with(run).resolved()
        rollout, optim = self.rollout, self.optim
        steps, lr = self.steps, optim.lr
        counts = {name: getattr(rollout, name) for name in ("prompts", "group_size", "max_tokens")}
        if None in (steps, lr, *counts.values()):
            usual = models.usual(self.model, full=self.full, trust_remote_code=self.trust_remote_code)
            steps, lr = steps or usual.steps, lr or usual.lr
            counts = {name: count or getattr(usual, name) for name, count in counts.items()}
        return ResolvedConfig(
            **{
                **vars(self),
                "steps": steps,
                "kl": self.kl.resolved(),
                "rollout": ResolvedRollout(**{**vars(rollout), **counts}),
                "optim": ResolvedOptim(**{**vars(optim), "lr": lr}),
            }
        )

    def _with(self, run: TrainConfig) -> TrainConfig:
        """What was left out here as ``run`` has it."""
        kl = self.kl
        if kl.controller == run.kl.controller:  # another one is refused, and may not fit the run's target
            target = run.kl.target if kl.target == "auto" else kl.target
            kl = replace(kl, target=target, per=kl.per or run.kl.per)
        return replace(
            self,
            steps=self.steps or run.steps,
            rollout=_filled(self.rollout, run.rollout, "prompts", "group_size", "max_tokens"),
            optim=_filled(self.optim, run.optim, "lr"),
            kl=kl,
        )


def _filled(part: Part, other: Part, *names: str) -> Part:
    """``part`` with those of its fields that are None as ``other`` has them."""
    return replace(part, **{name: getattr(other, name) for name in names if getattr(part, name) is None})


@dataclass(frozen=True, kw_only=True)
class ResolvedRollout(RolloutConfig):
    """What is sampled each step, in numbers."""

    prompts: int
    group_size: int
    max_tokens: int


@dataclass(frozen=True, kw_only=True)
class ResolvedOptim(OptimConfig):
    """AdamW and its schedule, in numbers."""

    lr: float


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig(TrainConfig):
    """A training run with nothing left to decide: what :meth:`TrainConfig.resolved` makes and a run takes."""

    steps: int
    rollout: ResolvedRollout
    optim: ResolvedOptim
