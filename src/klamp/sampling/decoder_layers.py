"""A decoder layer's step for one new token a sequence in nine kernels: the Llama family, in half precision on a GPU.

    norm · q k v (one product) · rotate, into the cache · attention over its filled part · o + residual
    norm · gate up (one product) · silu(gate) up · down + residual

transformers' own layer takes some thirty. Its forward runs wherever this one would not be the same: more than one
token, a cache or a mask of another kind. The maps of q, k and v, and of gate and up, share one matrix where they are
the sampler's own, so that one product reads it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

LAYERS = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")
"""Layers known to be ``x + attention(norm x)``, then ``x + down(silu(gate) up)`` of its norm, with rotary positions."""
PACKED = (("self_attn", ("q_proj", "k_proj", "v_proj")), ("mlp", ("gate_proj", "up_proj")))


class Packs:
    """Linear maps of one input: a product with their shared matrix, or one each."""

    def __init__(self, maps: list[Any]) -> None:
        self.maps = maps
        self.sizes = [m.out_features for m in maps]
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None

    def pack(self) -> None:
        """One matrix, of which the maps' own are parts: what is written there is written here."""
        whole = torch.cat([m.weight.detach() for m in self.maps])
        for m, part in zip(self.maps, torch.split(whole, self.sizes), strict=True):
            m.weight = nn.Parameter(part, requires_grad=False)
        self.weight = whole
        if self.maps[0].bias is not None:
            self.bias = torch.cat([m.bias.detach() for m in self.maps])

    def __call__(self, x: Tensor) -> list[Tensor]:
        if self.weight is None:
            return [m(x) for m in self.maps]
        return list(torch.split(functional.linear(x, self.weight, self.bias), self.sizes, -1))


class LayerForward:
    """The step of a decoder layer for one new token a sequence, or the layer's own forward."""

    def __init__(self, layer: Any, merged: set[nn.Module]) -> None:
        """``merged`` are the maps whose weights are the sampler's own."""
        self.layer, self.own = layer, layer.forward
        self.eps = float(layer.input_layernorm.variance_epsilon)
        attention = layer.self_attn
        norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        eps = 0.0 if norms[0] is None else float(norms[0].variance_epsilon)
        query, key = (None if n is None else n.weight for n in norms)
        self.norms: tuple[Tensor | None, Tensor | None, float] = (query, key, eps)
        self.qkv, self.gate_up = (Packs([getattr(getattr(layer, a), n) for n in names]) for a, names in PACKED)
        for maps in (self.qkv, self.gate_up):
            if all(m in merged and type(m) is nn.Linear for m in maps.maps):
                maps.pack()

    def __call__(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        position_ids: Any = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        position_embeddings: Any = None,
        **options: Any,
    ) -> Tensor:
        column, live = getattr(past_key_values, "column", None), getattr(past_key_values, "live", None)
        if hidden_states.shape[1] != 1 or column is None or live is None or torch.is_grad_enabled():
            return self.own(  # type: ignore[no-any-return]
                hidden_states,
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_values=past_key_values,
                use_cache=use_cache,
                position_embeddings=position_embeddings,
                **options,
            )
        cos, sin = position_embeddings
        turn = cos.view(len(hidden_states), -1), sin.view(len(hidden_states), -1)
        kept = past_key_values.layers[self.layer.self_attn.layer_idx]
        seen = attention_mask.view(len(hidden_states), -1)
        return self._step(hidden_states.squeeze(1), turn, (kept.keys, kept.values), seen, live, column)[:, None]

    def _step(
        self,
        x: Tensor,
        turn: tuple[Tensor, Tensor],
        cache: tuple[Tensor, Tensor],
        seen: Tensor,
        live: Tensor,
        column: Tensor,
    ) -> Tensor:
        from klamp.kernels import triton_decode
        from klamp.kernels.triton_norm import rms_norm

        layer = self.layer
        q, k, v = self.qkv(rms_norm(x, layer.input_layernorm.weight, self.eps, 0.0))
        q = triton_decode.place(q, k, v, self.norms, turn, column, cache)
        found = triton_decode.attend(q, cache, seen, live, column, layer.self_attn.scaling)
        x = added(x, found, layer.self_attn.o_proj)
        gate, up = self.gate_up(rms_norm(x, layer.post_attention_layernorm.weight, self.eps, 0.0))
        return added(x, triton_decode.gated(gate, up), layer.mlp.down_proj)


def added(x: Tensor, y: Tensor, linear: Any) -> Tensor:
    """``x + linear(y)``, written over x; in one product where the map is a plain one."""
    plain = type(linear) is nn.Linear and linear.bias is None
    return x.addmm_(y, linear.weight.t()) if plain else x.add_(linear(y))


def fits(layer: Any) -> bool:
    """Whether a layer is of a known kind, in half precision, with heads that the kernels take."""
    if type(layer).__name__ not in LAYERS or type(layer.mlp.act_fn).__name__ not in ("SiLU", "SiLUActivation"):
        return False
    attention = layer.self_attn
    size, weight = attention.head_dim, attention.q_proj.weight
    whole = size & (size - 1) == 0 and 16 <= size <= 256
    return whole and weight.dtype in (torch.bfloat16, torch.float16) and weight.device.type == "cuda"


def step_layers(model: nn.Module, merged: Iterable[nn.Module]) -> int:
    """Every decoder layer of a known kind takes :class:`LayerForward`; how many did."""
    own, count = set(merged), 0
    layers: Iterable[Any] = model.modules()
    for layer in layers:
        if fits(layer):
            layer.forward = LayerForward(layer, own)
            count += 1
    return count
