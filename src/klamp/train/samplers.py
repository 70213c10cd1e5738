"""The sampler of a run: klamp's own, or a vLLM server."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from klamp.errors import ConfigError
from klamp.sampling.batch import Rollout
from klamp.sampling.sampler import Sampler as BuiltinSampler
from klamp.sampling.sampler import end_ids
from klamp.sampling.server_sampler import ServerSampler
from klamp.sampling.vllm_server import Server
from klamp.train.config import TrainConfig
from klamp.train.learner import Learner


class Sampler(Protocol):
    """Draws completions from the policy as it was at the last ``refresh``."""

    def refresh(self, step: int = 0) -> None:
        """Sample from the policy's weights as they are now, after ``step`` updates; every process calls."""
        ...

    def sample(self, prompts: Any, texts: Any, generator: torch.Generator) -> Rollout:
        """``group_size`` completions of every prompt, in order, with their log-probs."""
        ...

    def close(self) -> None:
        """Give back what the sampler holds outside this process."""
        ...


def make_sampler(
    config: TrainConfig, learner: Learner, tokenizer: Any, context: int | None, prompts: Sequence[Sequence[int]]
) -> Sampler:
    """The sampler that ``config`` describes, for a learner that is ready and the run's encoded prompts."""
    if config.rollout.engine == "builtin":
        own = BuiltinSampler(learner.policy, tokenizer, config.rollout, context, learner.merged)
        own.check(prompts)
        return own
    return _server(config, learner, tokenizer, context)


def _server(config: TrainConfig, learner: Learner, tokenizer: Any, context: int | None) -> Sampler:
    from accelerate.utils import broadcast_object_list

    rollout, accelerator = config.rollout, learner.accelerator
    assert rollout.url is not None, "the configuration asks for it"
    model: Any = learner.policy.model
    key = os.environ.get("VLLM_API_KEY")
    try:
        server = Server(rollout.url, key=key, timeout=rollout.timeout, retries=rollout.retries)
    except ModuleNotFoundError as error:
        raise ConfigError(f"‹rollout.engine=vllm› needs {error.name}. pip install 'klamp[server]'.") from None
    return ServerSampler(
        learner.policy,
        tokenizer,
        rollout,
        context,
        server,
        base=rollout.served or config.model,
        adapters=Path(rollout.adapters or Path(config.run) / "adapters"),
        nonce=broadcast_object_list([secrets.token_hex(4)])[0],
        end=end_ids(tokenizer, model.get_base_model()),
        main=accelerator.is_main_process,
        wait=accelerator.wait_for_everyone,
    )
