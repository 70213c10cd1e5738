"""Sampling: batched, with the log-probs of the tokens returned beside them, from weights of its own.

The sampler's model is :mod:`~klamp.sampling.merged_model`. Its decoding loop fills the cache with the prompts, then
draws one token at a time. The cache is static; on a GPU the decoding step is captured once as a CUDA graph and
replayed. Log-probs are those of the distribution sampled from: logits divided by the temperature, cut by top-p where
that is below 1, normalised in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from klamp.chat import Prompt
from klamp.errors import ConfigError
from klamp.kernels import backend
from klamp.sampling.caches import DynamicSteps, StaticSteps
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


SLOTS = 4
"""Shapes whose cache and graph are kept."""
ASKED = 8
"""Tokens between two questions on a GPU whether all sequences have ended."""


class Drawn(NamedTuple):
    """Completions [n, c]: tokens, their log-probs, which of them count, and which sequences ended by themselves."""

    tokens: Tensor
    logp: Tensor
    mask: Tensor
    ended: Tensor


class Over:
    """Whether every sequence has ended: known at once on a CPU, and on a GPU without waiting for it.

    There it is asked every :data:`ASKED` tokens, and the answer is taken when it is asked again: by then the device
    has long given it, and has the tokens in between to work on.
    """

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.answer = torch.ones((), dtype=torch.bool, pin_memory=self.cuda)
        self.given: Any = None

    def __call__(self, t: int, live: Tensor) -> bool:
        """After token ``t``, with the sequences that are ``live``."""
        if not self.cuda:
            return not bool(live.any())
        if t % ASKED != ASKED - 1:
            return False
        if self.given is not None:
            self.given.synchronize()
            if not bool(self.answer):
                return True
        self.answer.copy_(live.any(), non_blocking=True)
        self.given = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.given.record()
        return False


class Decoder:
    """Samples from a plain causal LM. ``fast`` keeps a static cache and a graph between calls of the same shape."""

    def __init__(
        self, model: Any, temperature: float, top_p: float, end: tuple[int, ...], pad: int, *, fast: bool
    ) -> None:
        self.model, self.temperature, self.top_p, self.pad, self.fast = model, temperature, top_p, pad, fast
        device = next(model.parameters()).device
        self.end = torch.tensor(end, device=device)
        self.slots: dict[tuple[int, int, int], StaticSteps] = {}

    def run(self, ids: Tensor, attention: Tensor, length: int, generator: torch.Generator) -> Drawn:
        """At most ``length`` tokens after each prompt; stops as soon as every sequence has ended."""
        rows, prompt = ids.shape
        steps = self._steps(rows, prompt, length)
        logits = steps.prefill(ids, attention)
        tokens, logps, alive = [], [], []
        live = torch.ones(rows, dtype=torch.bool, device=ids.device)
        over = Over(ids.device)
        for t in range(length):
            token, logp = self.draw(logits, generator)
            token = torch.where(live, token, self.pad)
            tokens.append(token)
            logps.append(torch.where(live, logp, torch.zeros_like(logp)))
            alive.append(live)
            live = live & ~torch.isin(token, self.end)
            if t + 1 == length or over(t, live):
                break
            logits = steps.step(token, live)
        mask = torch.stack(alive, 1)
        return Drawn(torch.stack(tokens, 1), torch.stack(logps, 1), mask, ~live)

    def draw(self, logits: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """One token a row and its log-prob under the distribution it was drawn from."""
        if self.top_p == 1 and logits.is_cuda and backend(logits.device) == "fused":
            from klamp.kernels.triton_draw import draw

            return draw(logits, self.temperature, generator)
        logp = (logits.float() / self.temperature).log_softmax(-1)
        if self.top_p < 1:
            logp = nucleus(logp, self.top_p)
        if logp.device.type == "cuda":
            token = race(logp, generator)
            return token.squeeze(1), logp.gather(1, token).squeeze(1)
        # The inverse of the cumulative distribution: one random number a row, where multinomial takes one a token.
        total = logp.double().exp().cumsum(-1)
        uniform = torch.rand(len(logp), 1, dtype=torch.float64, device=logp.device, generator=generator)
        token = torch.searchsorted(total, uniform * total[:, -1:], right=True).clamp(max=logp.shape[-1] - 1)
        return token.squeeze(1), logp.gather(1, token).squeeze(1)

    def _steps(self, rows: int, prompt: int, length: int) -> DynamicSteps | StaticSteps:
        if not self.fast:
            return DynamicSteps(self.model)
        key = (rows, prompt, length)
        if key not in self.slots:
            # A few shapes at a time: each holds a cache, and on a GPU a graph.
            while len(self.slots) >= SLOTS:
                del self.slots[next(iter(self.slots))]
            self.slots[key] = StaticSteps(self.model, rows, prompt + length)
        return self.slots[key]


def race(logp: Tensor, generator: torch.Generator) -> Tensor:
    """``argmax_a logp_a - log E_a`` [n, 1] with E exponential: token a with probability ``exp(logp_a)``.

    Of independent clocks with rates p_a, a rings first with probability p_a. Where random numbers are cheap this is
    two passes over the row; the cumulative distribution needs five, in float64.
    """
    clock = torch.empty_like(logp).exponential_(generator=generator)
    return (logp - clock.clamp_(min=torch.finfo(logp.dtype).tiny).log_()).argmax(-1, keepdim=True)


def nucleus(logp: Tensor, top_p: float) -> Tensor:
    """``logp`` cut to the smallest set of tokens whose probability reaches ``top_p``, normalised again."""
    ordered, index = logp.sort(-1, descending=True)
    before = ordered.exp().cumsum(-1) - ordered.exp()
    cut = torch.where(before < top_p, ordered, torch.full_like(ordered, -torch.inf))
    return torch.full_like(logp, -torch.inf).scatter(-1, index, cut).log_softmax(-1)
