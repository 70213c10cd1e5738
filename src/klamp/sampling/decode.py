"""The decoding loop: prefill, then one token at a time over a static cache; on a GPU as a captured graph.

Log-probs are those of the distribution sampled from: logits divided by the temperature, cut by top-p where that is
below 1, normalised in float32.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from klamp.sampling.prompts import layout, plain_cache, sees

SLOTS = 4
"""Shapes whose cache and graph are kept."""
LONE = 1 << 24
"""Products of a map below which sleeping threads are not woken for it: half a millisecond on one core."""


class Drawn(NamedTuple):
    """Completions [n, c]: tokens, their log-probs, which of them count, and which sequences ended by themselves."""

    tokens: Tensor
    logp: Tensor
    mask: Tensor
    ended: Tensor


class Decoder:
    """Samples from a plain causal LM. Cache, masks and graph are kept between calls of the same shape."""

    def __init__(self, model: Any, temperature: float, top_p: float, end: tuple[int, ...], pad: int) -> None:
        self.model, self.temperature, self.top_p, self.pad = model, temperature, top_p, pad
        device = next(model.parameters()).device
        self.end = torch.tensor(end, device=device)
        self.slots: dict[tuple[int, int, int], Slot] = {}

    def run(self, ids: Tensor, attention: Tensor, length: int, generator: torch.Generator) -> Drawn:
        """At most ``length`` tokens after each prompt; stops as soon as every sequence has ended."""
        with fit_threads(self.model, len(ids)):
            return self._run(ids, attention, length, generator)

    def _run(self, ids: Tensor, attention: Tensor, length: int, generator: torch.Generator) -> Drawn:
        rows, prompt = ids.shape
        slot = self._slot(rows, prompt, length)
        slot.begin(attention)
        logits = self._prefill(slot, ids, attention)
        tokens, logps, alive = [], [], []
        live = torch.ones(rows, dtype=torch.bool, device=ids.device)
        for t in range(length):
            token, logp = self.draw(logits, generator)
            token = torch.where(live, token, self.pad)
            tokens.append(token)
            logps.append(torch.where(live, logp, torch.zeros_like(logp)))
            alive.append(live)
            live = live & ~torch.isin(token, self.end)
            # Looking at `live` waits for the device, so it is looked at every few tokens there.
            if t + 1 == length or ((ids.device.type == "cpu" or t % 8 == 7) and not bool(live.any())):
                break
            logits = slot.step(self.model, token, prompt + t)
        mask = torch.stack(alive, 1)
        return Drawn(torch.stack(tokens, 1), torch.stack(logps, 1), mask, ~live)

    def draw(self, logits: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """One token a row and its log-prob under the distribution it was drawn from."""
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

    def _slot(self, rows: int, prompt: int, length: int) -> Slot:
        key = (rows, prompt, length)
        if key not in self.slots:
            # A few shapes at a time: each holds a cache, and on a GPU a graph.
            while len(self.slots) >= SLOTS:
                del self.slots[next(iter(self.slots))]
            self.slots[key] = Slot(self.model, rows, prompt + length)
        return self.slots[key]

    def _prefill(self, slot: Slot, ids: Tensor, attention: Tensor) -> Tensor:
        """Logits after each prompt, whose keys and values go into the cache."""
        cache = plain_cache(self.model.config) if ids.device.type == "cpu" and slot.plain else None
        positions = (attention.long().cumsum(-1) - 1).clamp(min=0)
        slot.position.copy_(positions[:, -1:] + 1)
        if cache is not None:
            return self._prefill_once(slot, cache, ids, attention)
        prompt = ids.shape[1]
        causal = torch.ones(prompt, slot.width, dtype=torch.bool, device=ids.device).tril()
        # A padding query sees itself, so that no row of the softmax is empty.
        seen = slot.visible[:, None, None, :] | torch.eye(prompt, slot.width, dtype=torch.bool, device=ids.device)
        out = self.model(
            input_ids=ids,
            attention_mask=seen & causal,
            position_ids=positions,
            past_key_values=slot.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return out.logits[:, -1]  # type: ignore[no-any-return]

    def _prefill_once(self, slot: Slot, cache: Any, ids: Tensor, attention: Tensor) -> Tensor:
        """The same with each distinct prompt computed once and handed to all of its sequences."""
        rows, which, *_ = layout(ids, attention)
        real = attention[rows]
        logits: Tensor = self.model(
            input_ids=ids[rows],
            attention_mask=sees(ids.shape[1], 0, 0, real[:, None, None, :]),
            position_ids=(real.long().cumsum(-1) - 1).clamp(min=0),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        for index, layer in enumerate(cache.layers):
            slot.cache.update(layer.keys.index_select(0, which), layer.values.index_select(0, which), index)
        return logits.index_select(0, which)


@contextlib.contextmanager
def fit_threads(model: Any, rows: int) -> Iterator[None]:
    """One thread on a CPU where threads sleep while they wait and a decoding step's products are small.

    Under ``OMP_WAIT_POLICY=passive`` every product wakes the others. On two cores SmolLM2's steps for 8 sequences took
    as long with two threads as with one, and 30 % more processor time. Sizes and environment decide, no clock does:
    a run that is resumed decides the same.
    """
    config, threads = model.config.get_text_config(), torch.get_num_threads()
    products = rows * config.hidden_size * getattr(config, "intermediate_size", 4 * config.hidden_size)
    sleep = os.environ.get("OMP_WAIT_POLICY", "").lower() == "passive"
    if not sleep or threads == 1 or products >= LONE or next(model.parameters()).device.type != "cpu":
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class Slot:
    """Static cache, mask and positions for one shape, and on a GPU the graph of a step over them."""

    def __init__(self, model: Any, rows: int, width: int) -> None:
        from transformers.cache_utils import StaticCache, StaticLayer

        device = next(model.parameters()).device
        self.width = width
        self.cache: Any = StaticCache(config=model.config, max_cache_len=width)
        self.plain = all(type(layer) is StaticLayer for layer in self.cache.layers)
        """Whether every layer keeps all keys and values."""
        self.visible = torch.zeros(rows, width, dtype=torch.bool, device=device)
        self.position = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self.token = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self.column = torch.zeros(1, dtype=torch.long, device=device)
        self.graph: Any = None
        self.logits: Tensor | None = None

    def begin(self, attention: Tensor) -> None:
        """Forget the last batch: an empty cache in which the prompt's real tokens are visible."""
        self.cache.reset()
        self.visible.zero_()
        self.visible[:, : attention.shape[1]] = attention
        self.column.fill_(attention.shape[1])

    def step(self, model: Any, token: Tensor, column: int) -> Tensor:
        """Logits after ``token``, which goes into ``column`` of the cache."""
        self.token.copy_(token[:, None])
        if self.token.device.type != "cuda":
            return self._forward(model)
        if self.graph is None:
            self._capture(model)
        self.graph.replay()
        assert self.logits is not None
        return self.logits

    def _forward(self, model: Any) -> Tensor:
        self.visible.index_fill_(1, self.column, True)
        out = model(
            input_ids=self.token,
            attention_mask=self.visible[:, None, None, :],
            position_ids=self.position,
            past_key_values=self.cache,
            use_cache=True,
        )
        self.position.add_(1)
        self.column.add_(1)
        return out.logits[:, -1]  # type: ignore[no-any-return]

    def _capture(self, model: Any) -> None:
        """Record one step as a graph. Warm-up steps and the recording move the state; it is put back after each."""
        saved = self._state()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._forward(model)
                self._restore(saved)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.logits = self._forward(model)
        self._restore(saved)

    def _state(self) -> list[tuple[Tensor, Tensor]]:
        """Every tensor a step changes besides the cache's columns to come, with its value."""
        moving = [self.visible, self.position, self.column]
        moving += [
            t for layer in self.cache.layers if isinstance(t := getattr(layer, "cumulative_length", None), Tensor)
        ]
        return [(t, t.clone()) for t in moving]

    def _restore(self, saved: list[tuple[Tensor, Tensor]]) -> None:
        for tensor, value in saved:
            tensor.copy_(value)


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
