"""What a comparison is made of: the flags of ``klamp compare`` and what each arm trains with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from klamp import models
from klamp.errors import ConfigError, require_number
from klamp.experiments import arms as arm_set
from klamp.experiments.arms import Arm
from klamp.masked import Unit, check_unit
from klamp.train import data, rewards
from klamp.train.config import (
    AlgorithmConfig,
    KLConfig,
    OptimConfig,
    RewardConfig,
    RolloutConfig,
    TrainConfig,
)
from klamp.train.presumed import UsualCount, left_out

USUAL = models.USUAL["tiny"]


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """A comparison. Everything but ``arms``, ``seeds`` and ``oracle`` is the same for every run."""

    arms: tuple[str, ...] = arm_set.ARMS
    """Which arms: static, ziegler, exponential, hold-price (no clamp), hold, or a constant beta=NUMBER."""
    seeds: int = 3
    """Seeds of every arm."""
    target: float | None = None
    """KL to hold, in nats per --per; 0.05 per token if not given."""
    per: Unit | None = None
    """Unit of the target: token, sequence or sequence_mean. Needed with --target."""
    model: str = "tiny"
    """A built-in name (tiny, smollm2, smollm2-q4), a folder or a Hub id."""
    prompts: str | None = None
    """JSONL or text file of prompts; the built-in models bring their own."""
    reward: tuple[str, ...] = ("vader",)
    """vader, length:N, regex:PATTERN, model:NAME or your own module:function; several are added up."""
    steps: int = UsualCount(USUAL.steps)
    """Steps of every run: 60 for the built-in models, 100 for others."""
    algorithm: Literal["grpo", "ppo"] = "grpo"
    """grpo or ppo."""
    static_beta: float = 0.04
    """Price of the static arm."""
    oracle: bool = False
    """Add the best constant beta in hindsight, of seven coarse and seven fine ones."""
    heldout: str | None = None
    """Text file for held-out perplexity, one passage a line."""
    lr: float | None = None
    """Learning rate: 1.5e-3 for tiny, 5e-4 for smollm2, 5e-4 · (576 / hidden size)^(3/4) for others."""
    prompts_per_step: int = UsualCount(USUAL.prompts)
    """Prompts a step: 4 for the built-in models, 8 for others."""
    group_size: int = UsualCount(USUAL.group_size)
    """Completions a prompt: 8."""
    max_tokens: int = UsualCount(USUAL.max_tokens)
    """Longest completion: 24 tokens for the built-in models, 128 for others."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """bfloat16 on a GPU and float32 on a CPU if auto."""
    device: str = "auto"
    """cpu, cuda, or auto."""
    trust_remote_code: bool = False
    """Let a model repository run its own code."""

    def __post_init__(self) -> None:
        require_number("--seeds", self.seeds, at_least=1, way_out="3 is usual; one gives no interval.")
        for name in ("steps", "prompts_per_step", "max_tokens"):
            flag = f"--{name.replace('_', '-')}"
            require_number(flag, getattr(self, name), at_least=1, way_out="It is a count.")
        least = 2 if self.algorithm == "grpo" else 1
        way_out = "GRPO compares completions of one prompt; --algorithm ppo does not."
        require_number("--group-size", self.group_size, at_least=least, way_out=way_out)
        if self.lr is not None:
            require_number("--lr", self.lr, above=0, way_out="Leave it out for a usual one.")
        arm_set.parse(self.arms, self.static_beta)
        if self.target is None and self.per not in (None, "token"):
            raise ConfigError(f"--per {self.per} needs a --target in nats per {self.per}.")
        if self.target is not None:
            check_unit("--per", self.per)
            require_number("--target", self.target, above=0, way_out="It is a KL in nats; 0.05 per token is usual.")
        models.resolve(self.model) if not self.model.startswith("smollm2") else None
        data.load(self.prompts, self.model)
        for name in self.reward:
            if not name.startswith("model:"):
                rewards.resolve(name)
        if self.heldout is not None and not Path(self.heldout).is_file():
            raise ConfigError(f"--heldout {self.heldout!r} is not a file. Give a text file, one passage a line.")

    def resolved(self) -> CompareConfig:
        """With its usual values written out: left out or spelt out, they are the same comparison."""
        usual = models.usual(self.model, trust_remote_code=self.trust_remote_code)
        counts = {
            "steps": usual.steps,
            "prompts_per_step": usual.prompts,
            "group_size": usual.group_size,
            "max_tokens": usual.max_tokens,
        }
        named: dict[str, Any] = {name: counts[name] for name in left_out(self)}
        return replace(self, target=self.target or 0.05, per=self.per or "token", lr=self.lr or usual.lr, **named)

    def train_config(self, arm: Arm, seed: int, run: Path) -> TrainConfig:
        """The run of one arm and seed."""
        own = self.resolved()
        assert own.lr is not None
        return TrainConfig(
            model=self.model,
            prompts=self.prompts,
            run=str(run),
            steps=own.steps,
            seed=seed,
            dtype=self.dtype,
            device=self.device,
            trust_remote_code=self.trust_remote_code,
            keep=1,
            sample_every=max(1, own.steps),
            kl=KLConfig(**{"target": own.target, "per": own.per, **arm.kl}),
            rollout=RolloutConfig(prompts=own.prompts_per_step, group_size=own.group_size, max_tokens=own.max_tokens),
            reward=RewardConfig(functions=self.reward),
            algorithm=AlgorithmConfig(name=self.algorithm),
            optim=OptimConfig(lr=own.lr),
        )
