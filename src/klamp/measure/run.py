"""``measure_kl``: how far is this model from that one, and where?

Blocks of prompts stream through both models in bounded memory. Each block's records are appended to ``parts-R.jsonl``
of process R and synced, so an interrupted measurement goes on where it stopped, and several processes share the work.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from klamp import models
from klamp.chat import Prompt, problem
from klamp.errors import ConfigError, require_number, writing
from klamp.measure.scoring import GO_ON, Settings, Store, given, records, token_map
from klamp.measure.summary import Estimate, Figures, total
from klamp.measure.two_models import Pair, Sides, load_pair, sides
from klamp.sampling.rollout import Rollout
from klamp.sampling.sampler import Sampler, context_of, end_ids
from klamp.sampling.server_sampler import ServedSampler
from klamp.sampling.vllm_server import Request, Server
from klamp.seeds import mix
from klamp.train.config import ResolvedRollout, RolloutConfig
from klamp.train.run_folder import atomic_text, no_links_out

MAPPED = 6
"""Prompts whose tokens are shown one by one: those that drifted most."""


@dataclass(frozen=True)
class Measurement:
    """How far the policy is from the reference. Means are per token unless their name says otherwise."""

    kl: Estimate
    """Exact KL(policy‖reference), nats per token."""
    forward_kl: Estimate
    """Exact KL(reference‖policy), nats per token, on the policy's prefixes."""
    kl_per_sequence: Estimate
    k1: Estimate
    k1_per_sequence: Estimate
    k3: Estimate
    entropy: Estimate
    reference_entropy: Estimate
    sampler_gap: Estimate | None
    """Mean of log-prob when sampled minus log-prob when scored; None for given completions."""
    noise_floor: Estimate
    """KL of the policy against itself through the same path in other batches: what rounding alone reads as."""
    by_position: list[float]
    top_tokens: list[dict[str, Any]]
    top_prompts: list[dict[str, Any]]
    tokens: int
    sequences: int
    prompts: int
    settings: Settings
    maps: list[dict[str, Any]] = field(default_factory=list)

    @property
    def below_floor(self) -> bool:
        """Whether the KL cannot be told from rounding."""
        return self.kl.mean <= self.noise_floor.high if math.isfinite(self.noise_floor.high) else False

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON.

        Returns:
            A dictionary of every figure.
        """
        return {**asdict(self), "below_floor": self.below_floor}

    def to_json(self, path: str | Path) -> None:
        """Write every figure as JSON.

        Args:
            path: the file; it is replaced as a whole.
        """
        atomic_text(Path(path), json.dumps(_finite(self.to_dict()), indent=1, ensure_ascii=False))

    def to_html(self, path: str | Path) -> None:
        """Write the page with the map of tokens.

        Args:
            path: the file; it is replaced as a whole.
        """
        from klamp.measure.page import page

        atomic_text(Path(path), page(self))


def measure_kl(
    policy: str,
    reference: str | None = None,
    prompts: Sequence[Prompt] | None = None,
    *,
    completions: Sequence[str] | None = None,
    max_tokens: int | None = None,
    samples: int = 1,
    temperature: float | None = None,
    batch: int = 32,
    seed: int = 0,
    chat: bool | None = None,
    device: str = "auto",
    dtype: str = "auto",
    out: str | Path | None = None,
    maps: bool = True,
    trust_remote_code: bool = False,
    progress: Callable[[int, int], None] | None = None,
    url: str | None = None,
    served: str | None = None,
) -> Measurement:
    """Exact KL(policy‖reference) and KL(reference‖policy) over prompts, with intervals, positions and a noise floor.

    A model is a folder, a Hub id, a built-in name, the folder of a LoRA adapter, or the folder of a run, which stands
    for its newest checkpoint. A run also sets the arguments that are None: its base, prompts, lengths and chat.

    Args:
        policy, reference: the models. ``reference=None``: the base of the run or adapter.
        prompts: texts or lists of messages.
        completions: one text per prompt. None: sampled from the policy.
        max_tokens, samples, temperature: of the completions; 64, 1 and 1.0 where no run says otherwise.
        batch: prompts per block. It does not change the figures.
        seed: of the samples.
        chat: whether to apply the chat template. None: where the model has one.
        device, dtype: as in ``klamp train``.
        out: a folder for the records; an interrupted measurement continues from it.
        maps: whether to keep the per-token figures for the page.
        trust_remote_code: whether the models' own Python may run.
        progress: called with (blocks done, blocks).
        url, served: address of a vLLM server that samples, and the name under which it serves the policy.

    Returns:
        The figures.
    """
    asked = sides(policy, reference, prompts)
    sampled = {"max_tokens": max_tokens, "temperature": temperature, "chat": chat}
    settings = _settings(asked, completions, samples=samples, batch=batch, seed=seed, **sampled)
    pair = load_pair(
        asked.policy,
        asked.reference,
        temperature=settings.temperature,
        device=_device(device),
        dtype=dtype,
        trust_remote_code=trust_remote_code,
    )
    source = _Source(pair, settings, list(asked.prompts), None if completions is None else list(completions))
    with contextlib.closing(source):
        if url is not None:
            source.sample_from(url, served or asked.policy)
        return _measured(source, None if out is None else Path(out), progress, maps=maps)


def _settings(
    asked: Sides, completions: Sequence[str] | None, *, samples: int, batch: int, seed: int, **sampled: Any
) -> Settings:
    """What makes this measurement the same one again; what is None in ``sampled`` is as in the run, or as usual."""
    rollout = RolloutConfig(max_tokens=64) if asked.run is None else asked.run.rollout
    known = {name: getattr(rollout, name) if value is None else value for name, value in sampled.items()}
    settings = Settings(
        policy=asked.policy,
        reference=asked.reference,
        prompts=len(asked.prompts),
        samples=samples,
        batch=batch,
        seed=seed,
        given=completions is not None,
        prompts_hash=hashlib.sha256(json.dumps(asked.prompts).encode()).hexdigest()[:16],
        **known,
    )
    _check(settings, asked.prompts, completions)
    return settings


def _measured(
    source: _Source, folder: Path | None, progress: Callable[[int, int], None] | None, *, maps: bool
) -> Measurement:
    """All figures; the first of several processes draws the maps too."""
    rank = int(os.environ.get("RANK", "0"))
    figures = _figures(source, folder, rank, progress)
    return _measurement(figures, source.settings, _maps(source, figures) if maps and rank == 0 else [])


def _figures(source: _Source, folder: Path | None, rank: int, progress: Callable[[int, int], None] | None) -> Figures:
    """Measure this process's blocks that are not on disk yet, and add up those of all processes."""
    settings, ranks = source.settings, int(os.environ.get("WORLD_SIZE", "1"))
    blocks = range(0, settings.prompts, settings.batch)
    with _alone(folder, rank):
        store = Store(folder, settings, rank)
        mine = [b for i, b in enumerate(blocks) if i % ranks == rank and b not in store.done]
        for n, block in enumerate(mine):
            store.add(block, records(source.pair, source.rollout(block), block, source.samples, floor=True))
            if progress is not None:
                progress(n + 1, len(mine))
        return total(store.everything(len(blocks), ranks))


@contextlib.contextmanager
def _alone(folder: Path | None, rank: int) -> Iterator[None]:
    """Refuse a second process of this rank on the folder. The lock is the kernel's: it goes when its process does."""
    if folder is None:
        yield
        return
    no_links_out(folder)
    with writing(folder, GO_ON):
        folder.mkdir(parents=True, exist_ok=True)
        handle = (folder / f".lock-{rank}").open("a")
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(
                f"measurement {str(folder)!r} is in use by another process. Wait for it, or choose another --out."
            ) from None
        yield


def _measurement(figures: Figures, settings: Settings, maps: list[dict[str, Any]]) -> Measurement:
    token = {name: ratio.estimate() for name, ratio in figures.per_token.items()}
    return Measurement(
        kl=token["kl"],
        forward_kl=token["forward_kl"],
        kl_per_sequence=figures.per_sequence["kl"].estimate(),
        k1=token["k1"],
        k1_per_sequence=figures.per_sequence["k1"].estimate(),
        k3=token["k3"],
        entropy=token["entropy"],
        reference_entropy=token["ref_entropy"],
        sampler_gap=token["gap"] if figures.per_token["gap"].count else None,
        noise_floor=figures.floor.estimate(),
        by_position=figures.by_position(),
        top_tokens=figures.most_drifted("tokens"),
        top_prompts=figures.most_drifted("prompts"),
        tokens=figures.tokens,
        sequences=figures.sequences,
        prompts=settings.prompts,
        settings=settings,
        maps=maps,
    )


class _Source:
    """The completions of any block of prompts: sampled by seed and block, or given."""

    def __init__(self, pair: Pair, settings: Settings, prompts: list[Prompt], completions: list[str] | None) -> None:
        self.pair, self.settings, self.prompts, self.completions = pair, settings, prompts, completions
        self.samples = 1 if completions is not None else settings.samples
        self.context = context_of(pair.policy.model)
        config = ResolvedRollout(
            prompts=1, group_size=self.samples, max_tokens=settings.max_tokens, temperature=settings.temperature
        )
        self.server: Server | None = None
        self.sampler: Sampler | ServedSampler | None = None
        if completions is None:
            self.sampler = Sampler(pair.policy, pair.tokenizer, config, self.context)
            if not pair.adapter_off:  # the sampler's buffers start as the base
                self.sampler.refresh()

    def sample_from(self, url: str, name: str) -> None:
        """Have a server draw the completions, which serves the policy as ``name``."""
        if self.completions is not None:
            raise ConfigError(f"url {url!r} and completions do not go together: one of them brings the completions.")
        model, tokenizer = self.pair.policy.model, self.pair.tokenizer
        request = Request(
            n=self.samples,
            max_tokens=self.settings.max_tokens,
            temperature=self.settings.temperature,
            end=end_ids(tokenizer, model),
        )
        self.server = Server(url, key=os.environ.get("VLLM_API_KEY"))
        self.sampler = ServedSampler(self.server, name, tokenizer, request)

    def close(self) -> None:
        """Close the connections to the server, where there is one."""
        if self.server is not None:
            self.server.close()

    def rollout(self, block: int) -> Rollout:
        """Prompts ``block`` to ``block + batch`` with their completions."""
        span = slice(block, block + self.settings.batch)
        texts = self.prompts[span]
        ids = models.encode_prompts(self.pair.tokenizer, texts, chat=self.settings.chat)
        self._fits(ids, block)
        if self.sampler is None:
            assert self.completions is not None
            return given(self.pair, ids, texts, self.completions[span])
        generator = torch.Generator(self.pair.device).manual_seed(mix(self.settings.seed, block, 3))
        return self.sampler.sample(ids, texts, generator).to(self.pair.device)

    def _fits(self, ids: list[list[int]], block: int) -> None:
        room = None if self.context is None else self.context - self.settings.max_tokens
        for n, row in enumerate(ids):
            if room is not None and len(row) > room:
                raise ConfigError(
                    f"prompt {block + n + 1} has {len(row)} tokens; with max_tokens={self.settings.max_tokens} the "
                    f"context of {self.context} leaves room for {room}. Shorten it."
                )


def _maps(source: _Source, figures: Figures) -> list[dict[str, Any]]:
    """Token maps of the prompts that drifted most; their blocks are drawn again, which gives the same tokens."""
    shown = []
    for item in figures.most_drifted("prompts")[:MAPPED]:
        block = item["prompt"] // source.settings.batch * source.settings.batch
        rollout = source.rollout(block)
        row = (item["prompt"] - block) * source.samples
        shown.append({"prompt": item["text"], "kl": item["kl"], "tokens": token_map(source.pair, rollout, row)})
    return shown


def _check(settings: Settings, prompts: Sequence[Prompt], completions: Sequence[str] | None) -> None:
    for name in ("max_tokens", "samples", "batch"):
        require_number(name, getattr(settings, name), at_least=1, way_out="It is a count.")
    require_number("temperature", settings.temperature, above=0, way_out="1.0 samples the model itself.")
    if not prompts:
        raise ConfigError("prompts is empty. Give at least one.")
    for n, prompt in enumerate(prompts):
        if wrong := problem(prompt):
            raise ConfigError(f"prompt {n + 1} must be text or a list of messages: {wrong}.")
    if completions is not None and len(completions) != len(prompts):
        raise ConfigError(f"{len(completions)} completions for {len(prompts)} prompts. Give one each, in order.")


def _device(device: str) -> str:
    if device != "auto":
        return device
    local = os.environ.get("LOCAL_RANK")
    return "cpu" if not torch.cuda.is_available() else "cuda" if local is None else f"cuda:{local}"


def _finite(x: Any) -> Any:
    """JSON has no infinity: an interval that is not known is null."""
    if isinstance(x, dict):
        return {k: _finite(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [_finite(v) for v in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x
