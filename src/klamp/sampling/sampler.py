"""Sampling: batched, with the log-probs of the tokens returned beside them, from weights of its own.

The sampler's model is :mod:`~klamp.sampling.merged_model`. The cache is static; on a GPU the decoding step is
captured once as a CUDA graph and replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from klamp.chat import Prompt
from klamp.errors import ConfigError
from klamp.sampling.decode import Decoder
from klamp.sampling.merged_model import MergedModel, Trained
from klamp.sampling.rollout import Rollout

if TYPE_CHECKING:
    from klamp.train.config import ResolvedRollout

BUCKET = 32
"""On a GPU prompts are padded to a multiple of this, so that few CUDA graphs serve all of them."""


class Sampler:
    """Draws completions from the current policy. Make it before training starts; ``refresh`` after every update."""

    def __init__(
        self,
        policy: Trained,
        tokenizer: Any,
        config: ResolvedRollout,
        context: int | None,
        merged: MergedModel | None = None,
    ) -> None:
        """``merged`` is the sampler's model where it had to be made before the policy was sharded."""
        self.policy, self.tokenizer, self.config, self.context = policy, tokenizer, config, context
        self.merged = merged or MergedModel(policy)
        self.model = self.merged.model
        self.end = end_ids(tokenizer, self.model)
        self.stretch = stretch_of(self.model.config)
        self.decoder = Decoder(
            self.model, config.temperature, config.top_p, self.end, int(tokenizer.pad_token_id), fast=self.merged.fast
        )

    def refresh(self, step: int = 0) -> None:
        """Sample from the policy's weights as they are now, after ``step`` updates; every process calls."""
        self.merged.refresh()

    def close(self) -> None:
        """Nothing to give back: it all lives in this process."""

    @torch.no_grad()
    def sample(self, prompts: Sequence[Sequence[int]], texts: Sequence[Prompt], generator: torch.Generator) -> Rollout:
        """``group_size`` completions of every prompt, in order, with their log-probs at the sampling temperature."""
        config = self.config
        repeated = [list(p) for p in prompts for _ in range(config.group_size)]
        device = next(self.model.parameters()).device
        self.check(prompts)
        ids, attention = _pad_left(repeated, int(self.tokenizer.pad_token_id), device)
        size = config.chunk or len(ids)
        pieces = [
            self.decoder.run(i, a, config.max_tokens, generator)
            for i, a in zip(torch.split(ids, size), torch.split(attention, size), strict=True)
        ]
        width = max(p.tokens.shape[1] for p in pieces)
        tokens, logp, mask = (
            torch.cat([_widen(getattr(p, k), width) for p in pieces]) for k in ("tokens", "logp", "mask")
        )
        tokens = torch.where(mask, tokens, int(self.tokenizer.pad_token_id))
        ended = torch.cat([p.ended for p in pieces])
        return Rollout(
            ids=torch.cat([ids, tokens], 1),
            attention=torch.cat([attention, mask], 1),
            mask=mask,
            sampler_logp=logp,
            first=ids.shape[1],
            group_size=config.group_size,
            prompts=[t for t in texts for _ in range(config.group_size)],
            completions=self.decode(tokens, mask),
            ended=ended,
        )

    def decode(self, tokens: Tensor, mask: Tensor) -> list[str]:
        """The completions as text, for rewards and people; training never reads it back."""
        rows = [row[keep].tolist() for row, keep in zip(tokens.cpu(), mask.cpu(), strict=True)]
        return list(self.tokenizer.batch_decode(rows, skip_special_tokens=True))

    def check(self, prompts: Sequence[Sequence[int]]) -> None:
        """Refuse prompts that are too long for the model, or hold tokens that it does not know."""
        shortest, longest = min(map(len, prompts), default=0), max(map(len, prompts), default=0)
        length = self.config.max_tokens
        if self.context is not None and longest + length > self.context:
            raise ConfigError(
                f"a prompt of {longest} tokens and ‹rollout.max_tokens={length}› exceed the model's context of "
                f"{self.context}. Shorten the prompt or lower max_tokens."
            )
        # Beyond this length all positions are scaled otherwise, those that are cached too.
        if self.stretch is not None and shortest <= self.stretch < longest + length:
            raise ConfigError(
                f"prompts of {shortest} to {longest} tokens and ‹rollout.max_tokens={length}› cross {self.stretch}, "
                "where the model's LongRoPE changes the positions of the whole sequence. Stay below it, or above."
            )
        best = getattr(self.model.config.get_text_config(), "keep_window_size", None)
        if best is not None and longest + length > best:
            raise ConfigError(
                f"a prompt of {longest} tokens and ‹rollout.max_tokens={length}› exceed keep_window_size={best}. "
                "From there on the model attends to its best keys only, and decodes otherwise than it trains."
            )
        known = self.model.get_input_embeddings().weight.shape[0]
        largest = max((max(p, default=0) for p in (*prompts, (self.decoder.pad,))), default=0)
        if largest >= known:
            name = self.tokenizer.convert_ids_to_tokens(largest)
            raise ConfigError(
                f"token {largest} ({name!r}) is beyond the model's {known} embeddings: the tokenizer is larger than "
                "the model. Resize the embeddings, or use the tokenizer that belongs to the model."
            )


def end_ids(tokenizer: Any, model: Any) -> tuple[int, ...]:
    """Every token that ends a sequence: the tokenizer's and the generation config's."""
    found = [tokenizer.eos_token_id]
    other = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    found += list(other) if isinstance(other, list | tuple) else [other]
    return tuple(dict.fromkeys(int(i) for i in found if i is not None))


def context_of(model: Any) -> int | None:
    """The longest sequence the model was made for, where it says so."""
    length = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return int(length) if length else None


def stretch_of(config: Any) -> int | None:
    """Tokens beyond which LongRoPE takes its other set of factors, for all positions of the sequence; None: never."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    flat = [rope, *(v for v in rope.values() if isinstance(v, dict))]
    if not any((r.get("rope_type") or r.get("type")) == "longrope" for r in flat):
        return None
    found = next(
        (r["original_max_position_embeddings"] for r in flat if r.get("original_max_position_embeddings")), None
    )
    found = found or getattr(text, "original_max_position_embeddings", None)
    return int(found) if found else None


def _pad_left(rows: list[list[int]], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    width = max((len(r) for r in rows), default=1)
    if device.type == "cuda":  # few widths, few graphs
        width = -(-width // BUCKET) * BUCKET
    ids = torch.tensor([[pad] * (width - len(r)) + r for r in rows], device=device)
    attention = torch.tensor([[False] * (width - len(r)) + [True] * len(r) for r in rows], device=device)
    return ids, attention


def _widen(x: Tensor, width: int) -> Tensor:
    return nn.functional.pad(x, (0, width - x.shape[1]))
