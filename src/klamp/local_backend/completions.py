"""Completions of a :class:`~klamp.local_backend.worker.Worker`'s model: by klamp's own sampler or by a vLLM server."""

from __future__ import annotations

import contextlib
import os
import random
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file

from klamp.errors import ConfigError
from klamp.local_backend.trajectories import Choice, Message
from klamp.references.spec import folder_of
from klamp.sampling import vllm_server
from klamp.sampling.merged_model import ADAPTER, MergedModel
from klamp.sampling.sampler import Sampler
from klamp.sampling.server_sampler import ServerSampler
from klamp.seeds import mix
from klamp.serve import engine
from klamp.serve.engine import STEPS_IN_MEMORY, Model
from klamp.train.config import ResolvedRollout

if TYPE_CHECKING:
    from klamp.local_backend.worker import Worker


@dataclass(frozen=True)
class Request:
    """Completions somebody waits for."""

    messages: Sequence[Any]
    n: int
    tools: list[Any] | None = None


class Completions:
    """Samples from the newest weights of a worker, or from those of a saved step."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.merged: MergedModel | None = None
        """What is sampled from; made when first asked for."""
        self.past: OrderedDict[int, MergedModel] = OrderedDict()
        """The same of saved steps that were asked for."""
        self.sampler: Sampler | None = None
        self.served = None if worker.place.server is None else Served(*worker.place.server)
        self.asked = 0

    def refresh(self) -> None:
        """Take over the policy's weights, which have changed."""
        if self.merged is not None:
            self.merged.refresh()

    def sample(
        self, requests: Sequence[Request], *, max_tokens: int, temperature: float
    ) -> list[list[Choice] | Exception]:
        """``n`` choices for every request, drawn in one batch; the error of a request whose messages do not do.

        What is drawn follows from the seed, the step and the order of the calls since it.
        """
        prompts = [self._prompt(r, max_tokens) for r in requests]
        repeated = [p for p, r in zip(prompts, requests, strict=True) if isinstance(p, list) for _ in range(r.n)]
        each = iter(self._drawn(repeated, max_tokens, temperature) if repeated else [])
        return [
            [replace(next(each), index=i) for i in range(r.n)] if isinstance(p, list) else p
            for p, r in zip(prompts, requests, strict=True)
        ]

    def _prompt(self, request: Request, max_tokens: int) -> list[int] | Exception:
        try:
            ids = self.worker.encoder.prompt(request.messages, request.tools)
        except ConfigError as error:
            return error
        context = self.worker.encoder.context
        if context is not None and len(ids) + max_tokens > context:
            return ConfigError(
                f"messages of {len(ids)} tokens and max_tokens={max_tokens} exceed the model's context of {context}. "
                "Shorten the messages or lower max_tokens."
            )
        return ids

    def _drawn(self, prompts: list[list[int]], max_tokens: int, temperature: float) -> Iterator[Choice]:
        sampler = self._sampler(
            ResolvedRollout(prompts=1, group_size=1, max_tokens=max_tokens, temperature=temperature), prompts
        )
        generator = torch.Generator(self.worker.learner.device).manual_seed(
            mix(self.worker.place.seed, self.worker.step, self.asked, 3)
        )
        drawn = sampler.sample(prompts, [""] * len(prompts), generator).to("cpu")
        self.asked += 1
        assert drawn.ended is not None, "the sampler says which sequences ended"
        for row, prompt in enumerate(prompts):
            keep = drawn.mask[row]
            yield Choice(
                message=Message("assistant", drawn.completions[row]),
                finish_reason="stop" if bool(drawn.ended[row]) else "length",
                token_ids=tuple(drawn.tokens[row][keep].tolist()),
                logp=tuple(drawn.sampler_logp[row][keep].tolist()),
                prompt_token_ids=tuple(prompt),
                temperature=temperature,
                step=self.worker.step,
            )

    def _sampler(self, settings: ResolvedRollout, prompts: list[list[int]]) -> Sampler | ServerSampler:
        if self.served is not None:
            return self.served.for_step(self.worker, settings, prompts)
        if self.sampler is None or self.sampler.config.temperature != settings.temperature:
            merged = self._now()
            self.sampler = Sampler(
                self.worker.learner.policy, self.worker.tokenizer, settings, self.worker.encoder.context, merged
            )
        self.sampler.config = settings
        return self.sampler

    def _now(self) -> MergedModel:
        """The policy as it is now, to sample from."""
        if self.merged is None:
            self.merged = MergedModel(self.worker.learner.policy)
            self.merged.refresh()
        return self.merged

    def sampled_model(self, step: int | None) -> Model:
        """The weights of a saved step, or as they are now, for the endpoint."""
        if step is None or step == self.worker.step:
            return Model(self._now().model, self.worker.step)
        if step not in self.past:
            with self._weights_of(step):
                merged = MergedModel(self.worker.learner.policy)
                merged.refresh()
            self.past[step] = merged
            while len(self.past) > STEPS_IN_MEMORY - 1:
                self.past.popitem(last=False)
        return Model(self.past[step].model, step)

    @contextlib.contextmanager
    def _weights_of(self, step: int) -> Iterator[None]:
        """The adapter of a saved step in the policy's place, and afterwards the policy's again, to the bit."""
        from peft import set_peft_model_state_dict

        path = folder_of(self.worker.place.folder, step) / "adapter_model.safetensors"
        own = {p: p.detach().clone() for p in self.worker.learner.policy.trainable().values()}
        try:
            set_peft_model_state_dict(self.worker.learner.policy.model, load_file(path), adapter_name=ADAPTER)
            yield
        finally:
            with torch.no_grad():
                for parameter, value in own.items():
                    parameter.copy_(value)


class Served:
    """The sampler of one model through a server; the adapter is published when a step has changed it."""

    def __init__(self, url: str, name: str | None) -> None:
        """``name`` is what the server calls the base; None: the model's ``base_model``."""
        self.url, self.name = url, name
        self.sampler: ServerSampler | None = None

    def for_step(self, worker: Worker, settings: ResolvedRollout, prompts: Sequence[Sequence[int]]) -> ServerSampler:
        """The sampler with ``worker``'s newest weights; the first call checks the server."""
        if self.sampler is None:
            place, encoder = worker.place, worker.encoder
            self.sampler = ServerSampler(
                worker.learner.policy,
                worker.tokenizer,
                settings,
                encoder.context,
                vllm_server.Server(self.url, key=os.environ.get("VLLM_API_KEY")),
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

    def begin(self, worker: Worker, request: engine.Request, prompt: list[int], most: int) -> Callable[[], None]:
        """In the model's thread: the newest adapter is published. What is returned draws and tells, in any thread."""
        ask, encoder = request.ask, worker.encoder
        if ask.top_logprobs:
            raise ConfigError("top_logprobs is not supported where a vLLM server samples. Leave it out.")
        sampler = self.for_step(worker, ResolvedRollout(prompts=1, group_size=1, max_tokens=most), [prompt])
        version, seed = sampler.version, random.getrandbits(31) if ask.seed is None else ask.seed % 2**31
        wanted = vllm_server.Request(
            n=ask.n, max_tokens=most, temperature=ask.temperature, top_p=ask.top_p, end=encoder.end
        )
        request.tell(engine.Begun(prompt, version))

        def draw() -> None:
            [found] = sampler.complete(version, [prompt], wanted, [seed])
            if isinstance(found, Exception):
                raise found
            for index, drawn in enumerate(found):
                sequence = engine.Sequence(request, prompt, index, encoder, most)
                for token, logp in zip(drawn.tokens, drawn.logps, strict=True):
                    if not sequence.take(token, logp, []):
                        break

        return draw

    def close(self) -> None:
        """Take the adapters off the server."""
        if self.sampler is not None:
            self.sampler.close()
