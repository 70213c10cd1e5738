"""A decoder layer without a gradient in few operations: for the reference's states, and for what the clamp measures.

On a GPU such a pass waits for Python where the model is small or the sequences are few, and transformers' layer and
peft's have a lot of it. Here a layer is written out in some thirty operations, which round as those of a pass with a
gradient do: KL between equal policies is 0. Where it would not be the same layer its own forward runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from klamp.models.fast_layers import QUICK, SILU, LoraForward, in_half, is_wide
from klamp.sampling.decoder_layers import LLAMAS
from klamp.sampling.fast_modules import NormForward

MAPS = (("self_attn", ("q_proj", "k_proj", "v_proj", "o_proj")), ("mlp", ("gate_proj", "up_proj", "down_proj")))


class MeasuredLayer:
    """``x + attention(norm x)``, then ``x + down(silu(gate) up)`` of its norm, with no gradient; or its own forward."""

    def __init__(self, layer: Any, *, wide: bool) -> None:
        """``wide``: rounded as the layers of a wide model are, not as PyTorch's own operations."""
        self.layer, self.own, self.wide = layer, layer.forward, wide

    def __call__(self, hidden_states: Tensor, **named: Any) -> Tensor:
        turn, cache = named.get("position_embeddings"), named.get("past_key_values")
        wanted = QUICK.get() and not torch.is_grad_enabled() and in_half(hidden_states)
        if not wanted or cache is not None or turn is None:
            return self.own(hidden_states, **named)  # type: ignore[no-any-return]
        maps = [_map(getattr(getattr(self.layer, where), name), self.wide) for where, names in MAPS for name in names]
        if any(m is None for m in maps) or self.layer.self_attn.config._attn_implementation != "sdpa":
            return self.own(hidden_states, **named)  # type: ignore[no-any-return]
        with torch.autocast("cuda", enabled=False):
            return self._forward(hidden_states, turn, named.get("attention_mask"), maps)

    def _forward(self, x: Tensor, turn: tuple[Tensor, Tensor], mask: Tensor | None, maps: list[Any]) -> Tensor:
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
        return found.view(rows, length, width)  # type: ignore[no-any-return]


class Map:
    """``x Wᵀ + b + s · (x Aᵀ) Bᵀ``, the second product added in place: inside it where the model is wide."""

    __slots__ = ("bias", "down", "scale", "up", "weight", "wide")

    def __init__(self, base: Any, down: Tensor | None, up: Tensor | None, scale: float, wide: bool) -> None:
        self.weight, self.bias, self.down, self.up, self.scale = base.weight, base.bias, down, up, scale
        self.wide = wide

    def __call__(self, x: Tensor) -> Tensor:
        result = functional.linear(x, self.weight, self.bias)
        if self.down is None or self.up is None:
            return result
        low = functional.linear(x, self.down)
        if self.wide:
            return result.addmm_(low, self.up.t(), alpha=self.scale)
        return result.add_(functional.linear(low, self.up), alpha=self.scale)


def _map(module: Any, wide: bool) -> Map | None:
    """A linear map, with its adapter where that is switched on; None for anything else."""
    if type(module) is nn.Linear:
        return Map(module, None, None, 0.0, wide) if _plain(module.weight) else None
    if not isinstance(module.forward, LoraForward):
        return None
    base = module.base_layer
    if type(base) is not nn.Linear or not _plain(base.weight) or module.merged_adapters:
        return None
    if module._disable_adapters:
        return Map(base, None, None, 0.0, wide)
    found, narrow = module.forward.matrices(), module.forward.narrow
    if found is None or narrow is None or narrow[0].dtype != base.weight.dtype:
        return None
    return Map(base, *narrow, found[2], wide)


def _plain(weight: Tensor) -> bool:
    """Whether a weight is a whole tensor in half precision."""
    return type(weight) in (Tensor, nn.Parameter) and weight.dtype in (torch.bfloat16, torch.float16)


def measured_layers(model: nn.Module) -> None:
    """Decoder layers of a known kind take :class:`MeasuredLayer`."""
    modules: Iterable[Any] = model.modules()
    wide = is_wide(model)
    for layer in modules:
        if type(layer).__name__ not in LLAMAS or isinstance(layer.forward, MeasuredLayer):
            continue
        norms = (layer.input_layernorm, layer.post_attention_layernorm)
        attention, act = layer.self_attn, type(layer.mlp.act_fn).__name__
        size = attention.head_dim
        whole = size & (size - 1) == 0 and not hasattr(attention, "q_norm")
        if whole and act in SILU and all(isinstance(n.forward, NormForward) for n in norms):
            layer.forward = MeasuredLayer(layer, wide=wide)
