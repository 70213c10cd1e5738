"""A decoder layer without a gradient in few operations: for the reference's states, and for what the clamp measures.

On a GPU such a pass waits for Python where the model is small or the sequences are few, and transformers' layer and
peft's have a lot of it. Here a layer is written out in some thirty operations, which round as those of a pass with a
gradient do: KL between equal policies is 0. Where it would not be the same layer its own forward runs.

Kernels of a narrow model, or of a few sequences, take less than Python takes to start them. So a shape of such a pass
that comes again and again is captured as a CUDA graph of all layers; others run layer by layer, with the same numbers.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from klamp.kernels.layers import adapted
from klamp.models.training_layers import QUICK, SILU, LoraForward, in_half, is_wide, weight_and_bias
from klamp.sampling.decoding_layers import LLAMAS
from klamp.sampling.decoding_modules import NormForward

MAPS = (("self_attn", ("q_proj", "k_proj", "v_proj", "o_proj")), ("mlp", ("gate_proj", "up_proj", "down_proj")))
SMALL = 1 << 25
"""Numbers in the states of a pass, up to which it is captured: 64 MiB, and a dozen times that is what a graph keeps. An
8B model's pass over so many takes 200 ms, of which Python has used 20 by then."""
SEEN = 3
"""Passes of one shape after which it is captured: capturing takes as long as several."""
KEPT = 8
"""Shapes that are remembered, and graphs that are kept."""

Forward = Callable[[Tensor, tuple[Tensor, Tensor], Tensor | None], Tensor]
"""From embeddings, cos and sin, and a mask to the states after the last layer."""


class MeasuredLayer:
    """``x + attention(norm x)``, then ``x + down(silu(gate) up)`` of its norm, with no gradient; or its own forward."""

    def __init__(self, layer: Any, *, wide: bool) -> None:
        """``wide``: rounded as the layers of a wide model are, not as PyTorch's own operations."""
        self.layer, self.own, self.wide = layer, layer.forward, wide
        self.stack: Stack | None = None
        """All layers of the model."""

    def __call__(self, hidden_states: Tensor, **named: Any) -> Tensor:
        turn, cache = named.get("position_embeddings"), named.get("past_key_values")
        wanted = QUICK.get() and not torch.is_grad_enabled() and in_half(hidden_states)
        if not wanted or cache is not None or turn is None:
            return self.own(hidden_states, **named)  # type: ignore[no-any-return]
        mask = named.get("attention_mask")
        small = hidden_states.numel() <= SMALL
        if small and self.stack and (found := self.stack(self, hidden_states, turn, mask)) is not None:
            return found
        maps = self.maps()
        if maps is None:
            return self.own(hidden_states, **named)  # type: ignore[no-any-return]
        with torch.autocast("cuda", enabled=False):
            return self.forward(hidden_states, turn, mask, maps)

    def norms(self) -> tuple[Any, Any]:
        """Before attention, and before the feed-forward."""
        return self.layer.input_layernorm, self.layer.post_attention_layernorm

    def maps(self) -> list[Map] | None:
        """The layer's linear maps in the order of :data:`MAPS`; None where it is not to be written out."""
        inner = self.layer._modules
        maps = [_map(inner[where]._modules[name], self.wide) for where, names in MAPS for name in names]
        known = [m for m in maps if m is not None]
        return known if len(known) == len(maps) and self.layer.self_attn.config._attn_implementation == "sdpa" else None

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], mask: Tensor | None, maps: list[Map]) -> Tensor:
        """The layer, without a gradient."""
        from transformers.integrations import sdpa_attention

        from klamp.kernels.triton_layers import gated, rotate

        attend: Any = sdpa_attention.sdpa_attention_forward
        layer, (rows, length, width) = self.layer, x.shape
        attention, tokens = layer.self_attn, rows * length
        cos, sin = (t.expand(rows, -1, -1).reshape(tokens, -1) for t in turn)
        h = layer.input_layernorm(x).view(tokens, width)
        query, key, value = (m(h).view(tokens, -1, attention.head_dim) for m in maps[:3])
        heads = (*(rotate(t, cos, sin, stepwise=not self.wide) for t in (query, key)), value)
        shaped = (t.view(rows, length, -1, attention.head_dim).transpose(1, 2) for t in heads)
        found, _ = attend(attention, *shaped, mask, dropout=0.0, scaling=attention.scaling)
        x = x.view(tokens, width) + maps[3](found.reshape(tokens, -1))
        h = layer.post_attention_layernorm(x)
        gate, up = maps[4](h), maps[5](h)
        found = x + maps[6](gated(gate, up) if self.wide else functional.silu(gate).mul_(up))
        return found.view(rows, length, width)


class Stack:
    """The layers of a model as one graph: the first runs it for all of them, and the others pass its states on."""

    def __init__(self, layers: list[MeasuredLayer]) -> None:
        self.layers = layers
        self.captured = CapturedLayers()
        self.passed: Tensor | None = None

    def __call__(
        self, layer: MeasuredLayer, x: Tensor, turn: tuple[Tensor, Tensor], mask: Tensor | None
    ) -> Tensor | None:
        """What a layer returns; None where it has to run by itself."""
        if layer is not self.layers[0]:
            return x if x is self.passed else None
        self.passed = None
        maps = [each.maps() for each in self.layers]
        known = [m for m in maps if m is not None]
        if len(known) < len(maps):
            return None

        def forward(x: Tensor, turn: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
            for each, own in zip(self.layers, known, strict=True):
                x = each.forward(x, turn, mask, own)
            return x

        norms = (n.weight.data_ptr() for each in self.layers for n in each.norms())
        reads = (*norms, *(number for own in known for m in own for number in m.reads()))
        with torch.autocast("cuda", enabled=False):
            self.passed = self.captured(forward, x, turn, mask, reads)
        return self.passed


class Captured(NamedTuple):
    """A graph, the tensors that it reads, and the one that it writes."""

    graph: Any
    given: list[Tensor]
    found: Tensor

    def __call__(self, given: Sequence[Tensor]) -> Tensor:
        torch._foreach_copy_(self.given, list(given))
        self.graph.replay()
        return self.found


class CapturedLayers:
    """Runs ``forward`` by a graph where the same shape was met before, on weights that lie where they lay."""

    def __init__(self) -> None:
        self.met: OrderedDict[Any, int] = OrderedDict()
        self.graphs: OrderedDict[Any, Captured] = OrderedDict()
        self.pool: Any = None
        self.refused = False
        """Whether capturing failed once: it is not tried again."""

    def __deepcopy__(self, memo: dict[int, Any]) -> CapturedLayers:
        """A copy of a model captures its own passes."""
        return CapturedLayers()

    def __call__(
        self, forward: Forward, x: Tensor, turn: tuple[Tensor, Tensor], mask: Tensor | None, reads: Sequence[float]
    ) -> Tensor | None:
        """The states, valid until the next call; None for a shape that was not met often enough.

        ``reads`` are the addresses of all weights that ``forward`` reads, and its numbers: where one of them is
        another, the graph is another.
        """
        given = [x, *turn, *([] if mask is None else [mask])]
        key = (*((t.shape, t.dtype) for t in given), *reads)
        if key in self.graphs:
            self.graphs.move_to_end(key)
            return self.graphs[key](given)
        times = self.met.pop(key, 0) + 1
        if times <= SEEN or self.refused or not _current(x):
            self.met[key] = times
            while len(self.met) > KEPT:
                self.met.popitem(last=False)
            return None
        while len(self.graphs) >= KEPT:
            self.graphs.popitem(last=False)
        try:
            self.graphs[key] = self._capture(forward, given)
        except RuntimeError as error:
            self.refused = True
            torch.cuda.synchronize()
            first = (str(error).splitlines() or [""])[0][:120]
            warnings.warn(f"passes without a gradient run uncaptured: {first}", stacklevel=2)
            return None
        return self.graphs[key](given)

    def _capture(self, forward: Forward, given: list[Tensor]) -> Captured:
        """The kernels of a pass; what it needs was compiled by the passes before."""
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        own = [t.clone(memory_format=torch.contiguous_format) for t in given]
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        # By hand, for torch.cuda.graph() gives all free memory back first, and the next step would ask for it anew.
        with torch.cuda.stream(stream):
            # Threads of the endpoint or of a reward may use the device meanwhile.
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                found = forward(own[0], (own[1], own[2]), own[3] if len(own) > 3 else None)
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        return Captured(graph, own, found)


def _current(x: Tensor) -> bool:
    """Whether a tensor lies where this thread's kernels go: a graph is captured on the current device's stream."""
    return not x.is_cuda or x.device.index == torch.cuda.current_device()


class Map:
    """``x Wᵀ + b + s · (x Aᵀ) Bᵀ``, the sum inside a product where the model is wide."""

    __slots__ = ("bias", "down", "scale", "up", "weight", "wide")

    def __init__(self, base: Any, down: Tensor | None, up: Tensor | None, scale: float, wide: bool) -> None:
        self.weight, self.bias = weight_and_bias(base)
        self.down, self.up, self.scale, self.wide = down, up, scale, wide

    def reads(self) -> Iterator[float]:
        """Where the tensors that it reads lie, and its scale."""
        yield self.scale
        yield from (w.data_ptr() for w in (self.weight, self.bias, self.down, self.up) if w is not None)

    def __call__(self, x: Tensor) -> Tensor:
        if self.down is None or self.up is None:
            return functional.linear(x, self.weight, self.bias)
        low = functional.linear(x, self.down)
        if self.wide:
            return adapted(x, self.weight, self.bias, low, self.up, self.scale)
        result = functional.linear(x, self.weight, self.bias)
        return result.add_(functional.linear(low, self.up), alpha=self.scale)


def _map(module: Any, wide: bool) -> Map | None:
    """A linear map, with its adapter where that is switched on; None for anything else."""
    forward = module.forward
    adapted = isinstance(forward, LoraForward)
    base = module._modules["base_layer"] if adapted else module
    if type(base) is not nn.Linear or not _plain(weight := weight_and_bias(base)[0]):
        return None
    if not adapted:
        return Map(base, None, None, 0.0, wide)
    if module.merged_adapters:
        return None
    if module._disable_adapters:
        return Map(base, None, None, 0.0, wide)
    if forward.narrow is None or forward.narrow[0].dtype != weight.dtype:
        return None
    down, up, scale = forward.narrow
    return Map(base, down, up, scale, wide)


def _plain(weight: Any) -> bool:
    """Whether a weight is a whole tensor in half precision."""
    return type(weight) in (Tensor, nn.Parameter) and weight.dtype in (torch.bfloat16, torch.float16)


def measured_layers(model: nn.Module) -> None:
    """Decoder layers of a known kind take :class:`MeasuredLayer`."""
    modules: Iterable[Any] = model.modules()
    wide = is_wide(model)
    found: list[MeasuredLayer] = []
    layers = [m for m in modules if type(m).__name__ in LLAMAS]
    for layer in layers:
        if isinstance(layer.forward, MeasuredLayer):
            continue
        norms = (layer.input_layernorm, layer.post_attention_layernorm)
        attention, act = layer.self_attn, type(layer.mlp.act_fn).__name__
        size = attention.head_dim
        whole = size & (size - 1) == 0 and not hasattr(attention, "q_norm")
        if whole and act in SILU and all(isinstance(n.forward, NormForward) for n in norms):
            layer.forward = MeasuredLayer(layer, wide=wide)
            found.append(layer.forward)
    windows = {getattr(layer.self_attn, "sliding_window", None) for layer in layers}
    if found and len(found) == len(layers) and len(windows) == 1:  # a stack has one mask, that of its first layer
        stack = Stack(found)
        for each in found:
            each.stack = stack
