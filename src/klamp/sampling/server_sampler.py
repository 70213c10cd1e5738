"""The policy sampled through a vLLM server: the same interface as klamp's own sampler, the same rollouts.

Rollouts taken step by step, the next one drawn while this one trains where that is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from klamp.distributed import gathered, settle
from klamp.errors import ConfigError, Refused, SamplerError
from klamp.sampling.rollout import Rollout
from klamp.sampling.vllm_server import Adapters, Completion, Request, Server

LOOK = 0.2
"""Seconds between two looks at whether the run was asked to stop while it waits for a server."""


class Ahead:
    """``take(step)`` waits for the step's rollout; with ``ahead`` the next one is asked for at once.

    It is drawn from the weights before this step's update, so it is one update old when its turn comes.
    """

    def __init__(self, draw: Callable[[int], Rollout], *, last: int, ahead: bool, stopped: Callable[[], bool]) -> None:
        """``last`` is the run's last step; ``stopped`` says that nobody waits any more."""
        self.draw, self.last, self.ahead, self.stopped = draw, last, ahead, stopped
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="klamp-ahead")
        self.pending: dict[int, Future[Rollout]] = {}

    def take(self, step: int) -> Rollout | None:
        """The rollout of ``step``; None where the run was stopped before it came."""
        future = self.pending.pop(step, None) or self.pool.submit(self.draw, step)
        while not future.done():
            try:
                future.result(timeout=LOOK)
            except NotYet:
                if self.stopped():
                    self.pool.shutdown(wait=False, cancel_futures=True)
                    return None
        found = future.result()
        if self.ahead and step < self.last:
            self.pending[step + 1] = self.pool.submit(self.draw, step + 1)
        return found


if TYPE_CHECKING:
    from klamp.models.policy import Policy
    from klamp.train.config import ResolvedRollout

SAME_BASE = 0.1
"""Mean |Δ log-prob| in nats up to which two engines hold the same weights: rounding makes 0.01 to 0.05 in bf16."""
PROBE = 32
"""Tokens that the checks at the start look at."""


class ServerSampler:
    """Draws completions from the adapter that a server holds; ``refresh`` publishes it anew after every update."""

    def __init__(
        self,
        policy: Policy,
        tokenizer: Any,
        config: ResolvedRollout,
        context: int | None,
        server: Server,
        *,
        base: str,
        adapters: Path,
        nonce: str,
        end: tuple[int, ...],
        main: bool = True,
        wait: Callable[[], None] = lambda: None,
    ) -> None:
        """``main`` writes and loads the adapter, the other processes ``wait``; ``nonce`` is the same on all of them."""
        self.policy, self.tokenizer, self.config, self.context = policy, tokenizer, config, context
        self.server, self.base, self.main, self.wait = server, base, main, wait
        self.state: dict[str, Tensor] | None = None
        self.adapters = Adapters(server, adapters, nonce, self._save)
        self.version, self.end = 0, end
        self.configure(config)

    def configure(self, config: ResolvedRollout) -> None:
        """Sample from now on as ``config`` says."""
        self.config = config
        self.request = Request(
            n=config.group_size,
            max_tokens=config.max_tokens,
            temperature=config.temperature,
            top_p=config.top_p,
            end=self.end,
        )

    def refresh(self, step: int = 0) -> None:
        """Publish the adapter as it is after ``step`` updates; every process calls."""
        sharded = self.policy.sharded
        if sharded:
            settle(self.policy)
            named = self.policy.model.state_dict(keep_vars=True)
            self.state = gathered({k: v for k, v in named.items() if "lora_" in k}, keep=self.main)
        if self.main:
            self.adapters.publish(step)
        self.version = step
        self.wait()

    def sample(self, prompts: Sequence[Sequence[int]], texts: Sequence[Any], generator: torch.Generator) -> Rollout:
        """``group_size`` completions of every prompt, in order; prompts that failed for good are left out or raise."""
        self._fits(max(map(len, prompts), default=0))
        version = self.version
        found = self.complete(version, prompts, self.request, seeds(generator, len(prompts)))
        skip = self.config.on_failure == "skip"
        return replace(rollout_of(found, prompts, texts, self.tokenizer, skip=skip), version=version)

    def complete(
        self, version: int, prompts: Sequence[Sequence[int]], request: Request, seeds: Sequence[int]
    ) -> list[list[Completion] | SamplerError]:
        """All prompts, from any thread.

        A server that was restarted gets the adapter again, and those prompts that it refused once more.
        """
        name = self.adapters.name(version)
        found = self.server.complete(name, prompts, request, seeds)
        lost = [n for n, drawn in enumerate(found) if isinstance(drawn, Refused) and drawn.status == 404]
        if lost:
            self.adapters.restore(version)
            again = self.server.complete(name, [prompts[n] for n in lost], request, [seeds[n] for n in lost])
            for n, drawn in zip(lost, again, strict=True):
                found[n] = drawn
        return found

    def check(self, texts: Sequence[Sequence[int]]) -> dict[str, float]:
        """Look before the first step that the server holds the run's base and says its log-probs as they are drawn."""
        names = self.server.models()
        if self.base not in names:
            raise ConfigError(
                f"the server at {self.server.url} does not serve {self.base!r}, but {', '.join(names[:5])}. Start it "
                "with the run's model, or name what it serves with ‹rollout.served›."
            )
        ids = [list(t)[:PROBE] for t in texts if len(t) > 1][:4]
        found = self.server.score(self.base, ids)
        own = [self._base_logp(row, 1.0) for row in ids]
        gap = _mean_gap(found, own)
        if not gap <= SAME_BASE:
            raise ConfigError(
                f"the server at {self.server.url} holds other weights than the run's base: their log-probs of a prompt "
                f"differ by {gap:.2g} nats a token. Start it with the same model."
            )
        self._check_mode(ids)
        return {"preflight/server_gap": gap}

    def _check_mode(self, ids: list[list[int]]) -> None:
        """Draw at temperature 2: the log-probs must be those of the tempered distribution."""
        request = Request(n=1, max_tokens=min(8, self.config.max_tokens), temperature=2.0)
        drawn = self.server.complete(self.base, ids, request, list(range(len(ids))))
        tempered: list[float] = []
        plain: list[float] = []
        for prompt, answer in zip(ids, drawn, strict=True):
            if isinstance(answer, SamplerError):
                raise answer
            row = [*prompt, *answer[0].tokens]
            for into, temperature in ((tempered, 2.0), (plain, 1.0)):
                logp = self._base_logp(row, temperature)[len(prompt) - 1 :]
                into.append(_mean_gap([answer[0].logps], [logp]))
        if sum(plain) < sum(tempered):
            raise ConfigError(
                f"the server at {self.server.url} gives log-probs of the model, not of the distribution it draws from. "
                "Start it with --logprobs-mode processed_logprobs."
            )

    @torch.no_grad()
    def _base_logp(self, row: Sequence[int], temperature: float) -> list[float]:
        """The trainer's own log-probs of a sequence's tokens under the base."""
        model: Any = self.policy.model
        device = next(model.parameters()).device
        ids = torch.tensor([list(row)], device=device)
        with self.policy.without_adapter():
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float() / temperature
        return logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0].tolist()  # type: ignore[no-any-return]

    def _save(self, folder: Path) -> None:
        from klamp.sampling.merged_model import ADAPTER

        model: Any = self.policy.model
        extra = {} if self.state is None else {"state_dict": self.state}
        model.save_pretrained(
            folder, safe_serialization=True, selected_adapters=[ADAPTER], save_embedding_layers=False, **extra
        )

    def _fits(self, prompt: int) -> None:
        if self.context is not None and prompt + self.config.max_tokens > self.context:
            raise ConfigError(
                f"a prompt of {prompt} tokens and ‹rollout.max_tokens={self.config.max_tokens}› exceed the model's "
                f"context of {self.context}. Shorten the prompt or lower max_tokens."
            )

    def close(self) -> None:
        """Take the adapters off the server and close the connections."""
        if self.main:
            self.adapters.withdraw()
        self.server.close()


class ServedSampler:
    """Draws completions from a model that a server holds under a name of its own, and that nobody trains."""

    def __init__(self, server: Server, name: str, tokenizer: Any, request: Request) -> None:
        self.server, self.name, self.tokenizer, self.request = server, name, tokenizer, request
        if name not in (names := server.models()):
            raise ConfigError(f"the server at {server.url} does not serve {name!r}, but {', '.join(names[:5])}.")

    def sample(self, prompts: Sequence[Sequence[int]], texts: Sequence[Any], generator: torch.Generator) -> Rollout:
        """``request.n`` completions of every prompt, in order."""
        found = self.server.complete(self.name, prompts, self.request, seeds(generator, len(prompts)))
        return rollout_of(found, prompts, texts, self.tokenizer)


def seeds(generator: torch.Generator, count: int) -> list[int]:
    """One seed for each of ``count`` requests."""
    drawn = torch.randint(2**31 - 1, (count,), generator=generator, device=generator.device)
    return drawn.tolist()


def rollout_of(
    found: Sequence[list[Completion] | SamplerError],
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Any],
    tokenizer: Any,
    *,
    skip: bool = False,
) -> Rollout:
    """The completions of each prompt as a rollout; the first error is raised, unless such prompts are to be skipped."""
    groups = {n: drawn for n, drawn in enumerate(found) if not isinstance(drawn, SamplerError)}
    errors = [error for error in found if isinstance(error, SamplerError)]
    if errors and not (skip and groups):
        raise errors[0]
    rollout = collate_completions(
        [prompts[n] for n in groups],
        list(groups.values()),
        pad=int(tokenizer.pad_token_id),
        texts=[texts[n] for n in groups],
        decode=lambda rows: list(tokenizer.batch_decode(rows, skip_special_tokens=True)),
    )
    return replace(rollout, left_out=tuple(n for n in range(len(prompts)) if n not in groups))


def collate_completions(
    prompts: Sequence[Sequence[int]],
    groups: Sequence[Sequence[Completion]],
    *,
    pad: int,
    texts: Sequence[Any],
    decode: Callable[[list[list[int]]], list[str]],
) -> Rollout:
    """Groups of completions as a rollout on the CPU: prompts padded on the left, completions on the right."""
    size = len(groups[0])
    rows = [(prompt, c) for prompt, group in zip(prompts, groups, strict=True) for c in group]
    first, width = max(len(p) for p, _ in rows), max(len(c.tokens) for _, c in rows)
    ids = torch.full((len(rows), first + width), pad)
    attention = torch.zeros(len(rows), first + width, dtype=torch.bool)
    logp = torch.zeros(len(rows), width)
    for n, (prompt, c) in enumerate(rows):
        ids[n, first - len(prompt) : first] = torch.tensor(list(prompt))
        ids[n, first : first + len(c.tokens)] = torch.tensor(c.tokens)
        attention[n, first - len(prompt) : first + len(c.tokens)] = True
        logp[n, : len(c.tokens)] = torch.tensor(c.logps)
    return Rollout(
        ids=ids,
        attention=attention,
        mask=attention[:, first:].clone(),
        sampler_logp=logp,
        first=first,
        group_size=size,
        prompts=[t for t in texts for _ in range(size)],
        completions=decode([c.tokens for _, c in rows]),
        ended=torch.tensor([c.ended for _, c in rows]),
    )


def _mean_gap(one: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> float:
    pairs = [(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True)]
    return sum(abs(a - b) for a, b in pairs) / max(1, len(pairs))
