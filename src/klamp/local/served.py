"""LocalBackend's completions from a vLLM server that holds the base and is given each step's adapter."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING

from klamp.sampling.server_sampler import ServerSampler
from klamp.sampling.vllm_server import Server

if TYPE_CHECKING:
    from klamp.local.worker import Worker
    from klamp.train.config import RolloutConfig


class Served:
    """The sampler of one model through a server; the adapter is published when a step has changed it."""

    def __init__(self, url: str, name: str | None) -> None:
        """``name`` is what the server calls the base; None: the model's ``base_model``."""
        self.url, self.name = url, name
        self.sampler: ServerSampler | None = None

    def for_step(self, worker: Worker, settings: RolloutConfig, prompts: Sequence[Sequence[int]]) -> ServerSampler:
        """The sampler with ``worker``'s newest weights; the first call checks the server."""
        if self.sampler is None:
            place, encoder = worker.place, worker.encoder
            self.sampler = ServerSampler(
                worker.learner.policy,
                worker.tokenizer,
                settings,
                encoder.context,
                Server(self.url, key=os.environ.get("VLLM_API_KEY")),
                base=self.name or place.base_model,
                adapters=place.folder / "adapters",
                nonce=secrets.token_hex(4),
                end=encoder.end,
            )
            self.sampler.check(prompts)
            self.sampler.refresh(worker.step)
        if self.sampler.version != worker.step:
            self.sampler.refresh(worker.step)
        self.sampler.configure(settings)
        return self.sampler

    def close(self) -> None:
        """Take the adapters off the server."""
        if self.sampler is not None:
            self.sampler.close()
