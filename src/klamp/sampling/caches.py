"""Key-value caches for decoding: prompts filled in once, then a token at a time.

A prompt that several sequences share is computed once and its cache repeated.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from klamp.sampling.decoding_layers import stepped


class Layout(NamedTuple):
    """Where the sequences of a part stand in the rows that share prompts."""

    rows: Tensor
    """[P] a sequence that has each distinct prompt."""
    which: Tensor
    """[n] the prompt of each sequence."""
    place: Tensor
    """[n] its place among the tails of that prompt."""
    tails: int
    """G."""


def layout(ids: Tensor, attention: Tensor) -> Layout:
    """Which of some prompts [n, first] are the same; padding does not count."""
    _, which = torch.unique(torch.where(attention, ids, -1), dim=0, return_inverse=True)
    order = torch.arange(len(ids), device=ids.device)
    rows = order.new_full((int(which.max()) + 1,), len(ids)).scatter_reduce_(0, which, order, "amin")
    place = ((which[:, None] == which) & (order[:, None] > order)).sum(1)
    return Layout(rows, which, place, int(place.max()) + 1)


def plain_cache(config: Any) -> Any:
    """An empty cache, or None for a model that does not attend to all that came before.

    Sliding windows keep less than all keys and values, recurrent states something else.
    """
    from transformers.cache_utils import DynamicCache, DynamicLayer

    cache: Any = DynamicCache(config=config)
    return cache if cache.layers and all(type(layer) is DynamicLayer for layer in cache.layers) else None


def sees(first: int, tails: int, width: int, real: Tensor) -> Tensor:
    """[P, 1, T, T] which token sees which: itself, and what is real and came before in its prompt and its tail."""
    order = torch.arange(first + tails * width, device=real.device)
    owner = torch.where(order < first, -1, (order - first) // max(width, 1))
    mine = (owner == -1) | (owner[:, None] == owner)
    # Padding sees itself, so that no row of the softmax is empty.
    return (mine & (order <= order[:, None]) & real) | (order == order[:, None])


def accepted(model: Any, **inputs: Any) -> dict[str, Any]:
    """Those of ``inputs`` that the model's forward names; others it would pass on or choke on."""
    kind: Any = type(model)
    names = _parameters(kind)
    return {name: value for name, value in inputs.items() if name in names}


@functools.cache
def _parameters(kind: Any) -> frozenset[str]:
    return frozenset(inspect.signature(kind.forward).parameters)


def positions_of(attention: Tensor) -> Tensor:
    """[n, L] positions that do not count padding."""
    return (attention.long().cumsum(-1) - 1).clamp(min=0)


class DynamicSteps:
    """Prefill and steps over ``DynamicCache``; the mask is [n, columns so far]."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.cache: Any = None

    def prefill(self, ids: Tensor, attention: Tensor) -> Tensor:
        """Logits after each prompt."""
        from transformers.cache_utils import DynamicCache

        self.cache = DynamicCache(config=self.model.config)
        self.attention = attention.long()
        self.position = positions_of(attention)[:, -1:]
        return self._forward(ids, positions_of(attention))

    def step(self, token: Tensor, live: Tensor | None = None) -> Tensor:
        """Logits after ``token`` [n]; those of sequences that are not ``live`` say nothing."""
        self.attention = torch.cat([self.attention, self.attention.new_ones(len(token), 1)], 1)
        self.position = self.position + 1
        return self._forward(token[:, None], self.position)

    def _forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        options = accepted(self.model, position_ids=positions, logits_to_keep=1)
        cached: dict[str, Any] = {"past_key_values": self.cache, "use_cache": True}
        out = self.model(input_ids=ids, attention_mask=self.attention, **cached, **options)
        return out.logits[:, -1]  # type: ignore[no-any-return]


class StaticSteps:
    """Static cache, mask and positions for one shape, and on a GPU the graph of a step over them."""

    def __init__(self, model: Any, rows: int, width: int) -> None:
        from transformers.cache_utils import StaticCache

        device = next(model.parameters()).device
        self.model, self.width = model, width
        self.cache: Any = StaticCache(config=model.config, max_cache_len=width)
        windows = keep_all(self.cache, width)
        self.one_mask = not windows and attention_of(model) != "eager"
        """Whether every layer sees the same, and takes it as booleans; transformers makes the masks where not."""
        self.added_masks = attention_of(model) == "eager" and device.type == "cuda"
        """Whether eager attention's masks are made here: transformers' way of making them cannot be captured."""
        self.window = getattr(model.config.get_text_config(), "sliding_window", None) if windows else None
        self.columns = torch.arange(width, device=device)
        self.visible = torch.zeros(rows, width, dtype=torch.bool, device=device)
        self.position = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self.token = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self.column = torch.zeros(1, dtype=torch.long, device=device)
        self.live = torch.ones(rows, dtype=torch.bool, device=device)
        self.own_windows = self.one_mask or stepped(model) == len(self.cache.layers)
        """Whether the layers look for their windows themselves in a step, so that all take what is no padding."""
        if self.own_windows:  # where a layer that keeps keys and values itself finds them
            vars(self.cache).update(column=self.column, live=self.live)
        self.graph: Any = None
        self.captures = device.type == "cuda"
        """Whether a step is recorded as a graph and replayed."""
        self.logits: Tensor | None = None

    def prefill(self, ids: Tensor, attention: Tensor) -> Tensor:
        """Logits after each prompt; its keys and values, computed once for all of its sequences, go into the cache."""
        from transformers.cache_utils import DynamicCache

        self._begin(attention)
        rows, which, *_ = layout(ids, attention)
        real = attention[rows]
        cache: Any = DynamicCache(config=self.model.config)
        keep_all(cache)
        mask = sees(ids.shape[1], 0, 0, real[:, None, None, :]) if self.one_mask else real
        logits = self._logits(ids[rows], mask, positions_of(real), cache)
        for index, layer in enumerate(cache.layers):
            self.cache.update(layer.keys.index_select(0, which), layer.values.index_select(0, which), index)
        return logits.index_select(0, which)

    def _begin(self, attention: Tensor) -> None:
        """Forget the last batch: an empty cache in which the prompt's real tokens are visible."""
        self.cache.reset()
        self.visible.zero_()
        self.visible[:, : attention.shape[1]] = attention
        self.live.fill_(True)
        self.column.fill_(attention.shape[1])
        self.position.copy_(positions_of(attention)[:, -1:] + 1)

    def step(self, token: Tensor, live: Tensor | None = None) -> Tensor:
        """Logits after ``token`` [n], which goes into the next column of the cache.

        Those of sequences that are not ``live`` say nothing: their attention may be left out.
        """
        self.token.copy_(token[:, None])
        if live is not None:
            self.live.copy_(live)
        if self.captures and self.graph is None:
            self._capture()
        if not self.captures:
            return self._forward()
        self.graph.replay()
        assert self.logits is not None
        return self.logits

    def _forward(self) -> Tensor:
        self.visible.index_fill_(1, self.column, True)
        mask: Any = self.visible[:, None, None, :] if self.own_windows else self.visible
        if self.added_masks and not self.own_windows:
            mask = self._added()
        logits = self._logits(self.token, mask, self.position, self.cache)
        self.position.add_(1)
        self.column.add_(1)
        return logits

    def _added(self) -> Any:
        """Numbers to add to the scores of the next token, for each kind of layer where there are two."""
        dtype = next(self.model.parameters()).dtype
        seen = self.visible[:, None, None, :]

        def added(seen: Tensor) -> Tensor:
            return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, torch.finfo(dtype).min)

        if self.window is None:
            return added(seen)
        near = seen & (self.columns > self.column - self.window)
        return {"full_attention": added(seen), "sliding_attention": added(near)}

    def _logits(self, ids: Tensor, mask: Any, positions: Tensor, cache: Any) -> Tensor:
        places: dict[str, Any] = {"attention_mask": mask, "position_ids": positions}
        found: Tensor = self.model(
            input_ids=ids, **places, past_key_values=cache, use_cache=True, logits_to_keep=1
        ).logits
        return found[:, -1]

    def _capture(self) -> None:
        """Record one step as a graph. Warm-up steps and the recording move the state; it is put back after each."""
        saved = self._state()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._forward()
                _restore(saved)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(self.graph):
                self.logits = self._forward()
        except RuntimeError as error:  # a step that waits for the device, such as a loop over the experts that were hit
            self.graph, self.captures = None, False
            torch.cuda.synchronize()
            first = (str(error).splitlines() or [""])[0][:120]
            warnings.warn(f"a decoding step of {type(self.model).__name__} runs uncaptured: {first}", stacklevel=2)
        _restore(saved)

    def _state(self) -> list[tuple[Tensor, Tensor]]:
        """Every tensor a step changes besides the cache's columns to come, with its value."""
        moving = [self.visible, self.position, self.column]
        moving += [
            t for layer in self.cache.layers if isinstance(t := getattr(layer, "cumulative_length", None), Tensor)
        ]
        return [(t, t.clone()) for t in moving]


def _restore(saved: list[tuple[Tensor, Tensor]]) -> None:
    for tensor, value in saved:
        tensor.copy_(value)


def attention_of(model: Any) -> str:
    """The name of the model's attention implementation."""
    return str(model.config.get_text_config()._attn_implementation)


def keep_all(cache: Any, width: int | None = None) -> bool:
    """Put a layer that keeps every column in place of each that keeps a window of them; whether there was one."""
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer

    windows = [
        i for i, x in enumerate(cache.layers) if type(x) in (DynamicSlidingWindowLayer, StaticSlidingWindowLayer)
    ]
    for i in windows:
        kind: Any = DynamicLayer if width is None else functools.partial(StaticLayer, max_cache_len=width)
        cache.layers[i] = kind()
    return bool(windows)
