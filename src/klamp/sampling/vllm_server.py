"""Completions from a vLLM server over HTTP, with the policy's adapter loaded anew after every update.

The server is started with ``VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve BASE --enable-lora --logprobs-mode
processed_logprobs``. Each version of the adapter is written aside, renamed, and loaded under a name of its own: a name
that is used twice would be served from the cache of the version before.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import shutil
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from klamp.errors import ConfigError, Refused, SamplerError

T = TypeVar("T")
SERVED = 2
"""Versions that the server holds: the newest, and the one that requests under way may still use."""
FIRST_WAIT = 0.5
"""Seconds before the first repetition of a failed request; each further wait is twice as long."""


class Completion(NamedTuple):
    """One completion as the server drew it."""

    tokens: list[int]
    logps: list[float]
    """Of each token, under the distribution it was drawn from."""
    ended: bool
    """It stopped at an end token, which is its last."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked for each prompt."""

    n: int
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    end: tuple[int, ...] = ()
    """Tokens that end a completion."""


class Server:
    """A vLLM server: its models, its adapters, completions and log-probs. All calls may come from any thread."""

    def __init__(self, url: str, *, key: str | None = None, timeout: float = 600.0, retries: int = 5) -> None:
        """``retries``: how often a request is repeated that failed for a reason that may pass."""
        import httpx

        self.url, self.retries = url.rstrip("/").removesuffix("/v1"), retries
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"‹rollout.url› {url!r} is not an address. Write it as http://127.0.0.1:8000.")
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self.loop = asyncio.new_event_loop()
        self.client = httpx.AsyncClient(
            headers=headers, timeout=httpx.Timeout(timeout, connect=10.0), limits=limits, trust_env=False
        )
        self.thread = threading.Thread(target=self.loop.run_forever, name="klamp-server", daemon=True)
        self.thread.start()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine, run beside the caller."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def close(self) -> None:
        """Close the connections; requests under way are given up."""
        if self.loop.is_closed():
            return
        self.call(self._give_up())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    async def _give_up(self) -> None:
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self.client.aclose()

    def models(self) -> list[str]:
        """Names that the server answers to: its base, and the adapters it has loaded."""
        found = self.call(self._json("GET", "/v1/models"))
        try:
            return [str(m["id"]) for m in found["data"]]
        except (KeyError, TypeError):
            raise SamplerError(f"{self.url} answers /v1/models with something else. Is it a vLLM server?") from None

    def load(self, name: str, folder: Path) -> None:
        """Serve the adapter in ``folder`` as ``name``; one that is served already is left alone."""
        said = self.call(self._post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)}))
        if said is not None and "already" not in said:
            raise SamplerError(f"the server at {self.url} does not load the adapter: {_advice(said, folder)}")

    def unload(self, name: str) -> None:
        """Stop serving ``name``; a server that was restarted does not know it any more."""
        self.call(self._post("/v1/unload_lora_adapter", {"lora_name": name}))

    def complete(
        self, model: str, prompts: Sequence[Sequence[int]], request: Request, seeds: Sequence[int]
    ) -> list[list[Completion] | SamplerError]:
        """``request.n`` completions of every prompt, all prompts in flight at once; a prompt that fails, its error."""

        async def one(prompt: Sequence[int], seed: int) -> list[Completion] | SamplerError:
            body = {
                "model": model,
                "prompt": list(prompt),
                "n": request.n,
                "max_tokens": request.max_tokens,
                "temperature": request.temperature,
                "top_p": request.top_p,
                "top_k": 0,  # a model's generation_config may set these for requests that do not
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "stop_token_ids": list(request.end),
                "logprobs": 0,
                "return_token_ids": True,
                "seed": seed,
            }
            try:
                return _completions(await self._json("POST", "/v1/completions", body), request)
            except SamplerError as error:
                return error

        async def every() -> list[list[Completion] | SamplerError]:
            return list(await asyncio.gather(*(one(p, s) for p, s in zip(prompts, seeds, strict=True))))

        return self.call(every())

    def score(self, model: str, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-prob of every token of each sequence but the first, at temperature 1.

        One request at a time: vLLM's CPU kernels for LoRA end the engine on two prompts with log-probs in one batch.
        """

        async def one(ids: Sequence[int]) -> list[float]:
            body = {"model": model, "prompt": list(ids), "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
            found = await self._json("POST", "/v1/completions", body)
            try:
                rows = found["choices"][0]["prompt_logprobs"][1:]
                return [float(row[str(i)]["logprob"]) for i, row in zip(ids[1:], rows, strict=True)]
            except (KeyError, TypeError, IndexError, ValueError) as error:
                raise SamplerError(f"{self.url} gives no prompt_logprobs ({error!r}). Is it a vLLM server?") from None

        return [self.call(one(ids)) for ids in sequences]

    async def _post(self, path: str, body: dict[str, Any]) -> str | None:
        """None where the server agrees, its reason where it refuses."""
        response = await self._send("POST", path, body)
        return None if response.status_code < 400 else f"{response.status_code} {_reason(response)}"

    async def _json(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        response = await self._send(method, path, body)
        if response.status_code >= 400:
            raise Refused(f"{self.url}{path} answers {response.status_code}: {_reason(response)}", response.status_code)
        try:
            return response.json()
        except ValueError:
            raise SamplerError(f"{self.url}{path} does not answer with JSON. Is it a vLLM server?") from None

    async def _send(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        """The response; what may pass (no connection, a time-out, an overloaded server) is tried again."""
        import httpx

        for attempt in range(self.retries + 1):
            said = ""
            try:
                response = await self.client.request(method, f"{self.url}{path}", json=body)
                if response.status_code not in (408, 429, 500, 502, 503, 504):
                    return response
                said = f"{response.status_code} {_reason(response)}"
            except httpx.TransportError as error:
                said = str(error) or type(error).__name__
            if attempt < self.retries:
                await asyncio.sleep(FIRST_WAIT * 2**attempt)
        raise SamplerError(
            f"the server at {self.url} gave no answer to {path} in {self.retries + 1} attempts ({said:.200}). Is it "
            "running, and is ‹rollout.url› right? Raise ‹rollout.timeout› if it is only slow."
        )


class Adapters:
    """The policy's adapter on a server: a new name for each version, the last two served."""

    def __init__(self, server: Server, folder: Path, nonce: str, save: Callable[[Path], None]) -> None:
        """``save`` writes the adapter into a folder; ``nonce`` keeps the names of different runs apart."""
        self.server, self.folder, self.nonce, self.save = server, folder.absolute(), nonce, save
        self.version = -1
        """Updates in the newest version; -1 before the first is published."""

    def name(self, version: int) -> str:
        """What the server calls a version."""
        return f"klamp-{self.nonce}-v{version}"

    def path(self, version: int) -> Path:
        """Where a version's files are."""
        return self.folder / self.name(version)

    def publish(self, version: int) -> None:
        """Write the adapter as it is now and serve it as ``version``; versions nobody can be using are taken away."""
        final = self.path(version)
        aside = self.folder / f".{final.name}.{os.getpid()}"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        self.save(aside)
        shutil.rmtree(final, ignore_errors=True)
        os.rename(aside, final)
        self.server.load(self.name(version), final)
        old = version - SERVED
        if old >= 0 and self.path(old).is_dir():
            self.server.unload(self.name(old))
        if old >= 1:  # the server may read the files of a version late, so they stay one version longer
            shutil.rmtree(self.path(old - 1), ignore_errors=True)
        self.version = version

    def restore(self, version: int) -> None:
        """Load a version again on a server that was restarted."""
        self.server.load(self.name(version), self.path(version))

    def withdraw(self) -> None:
        """Unload what is served and remove its files, at the end of a run; a server that is gone is left alone."""
        for version in range(max(0, self.version - SERVED), self.version + 1):
            if self.path(version).is_dir():
                with contextlib.suppress(SamplerError):
                    self.server.unload(self.name(version))
                shutil.rmtree(self.path(version), ignore_errors=True)


def _completions(found: Any, request: Request) -> list[Completion]:
    """The completions of an answer, each looked at: what is no sample must not be trained on."""
    try:
        choices = sorted(found["choices"], key=lambda c: int(c.get("index", 0)))
        drawn = [
            Completion(
                [int(t) for t in choice["token_ids"]],
                [float(x) for x in choice["logprobs"]["token_logprobs"]],
                choice.get("finish_reason") == "stop",
            )
            for choice in choices
        ]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SamplerError(
            f"the server's answer has no token ids with log-probs ({error!r}). It must be vLLM 0.10 or newer, which "
            "knows return_token_ids."
        ) from None
    if len(drawn) != request.n:
        raise SamplerError(f"the server drew {len(drawn)} completions where {request.n} were asked for.")
    for completion in drawn:
        _check(completion, request)
    return drawn


def _check(c: Completion, request: Request) -> None:
    if len(c.tokens) != len(c.logps):
        raise SamplerError(f"the server gave {len(c.logps)} log-probs for {len(c.tokens)} tokens.")
    if not 0 < len(c.tokens) <= request.max_tokens:
        raise SamplerError(f"the server drew {len(c.tokens)} tokens where 1 to {request.max_tokens} were asked for.")
    wrong = next((x for x in c.logps if not (math.isfinite(x) and x <= 1e-3)), None)
    if wrong is not None:
        raise SamplerError(f"the server gave {wrong} as a log-prob. It may be serving weights that are not finite.")
    early = next((t for t in c.tokens[:-1] if t in request.end), None)
    if early is not None:
        raise SamplerError(f"the server went on after the end token {early}.")


def _reason(response: Any) -> str:
    """What the server said, in one line."""
    try:
        found = response.json()
        said = found.get("error", found) if isinstance(found, dict) else found
        text = said.get("message", said) if isinstance(said, dict) else said
    except ValueError:
        text = response.text
    return " ".join(str(text).split())[:300]


def _advice(said: str, folder: Path) -> str:
    """A refusal to load an adapter, with the way out."""
    low = said.lower()
    if said.startswith("404") or "not allowed" in low or "runtime" in low:
        way = "Start the server with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora."
    elif "rank" in low:
        way = "Start the server with --max-lora-rank of at least ‹lora.rank›, or lower ‹lora.rank›."
    elif "no adapter" in low or "not found" in low or "no such file" in low or "does not exist" in low:
        way = f"The server cannot see {str(folder)!r}: set ‹rollout.adapters› to a folder that both machines see."
    else:
        way = "Check that the server's base is the run's model."
    return f"{said}. {way}"
