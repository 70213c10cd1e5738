"""A decoder layer's step for one new token a sequence in few kernels: known families, in half precision on a GPU.

    norm · q k v (one product) · rotation and attention over the filled part of the cache · o + residual
    norm · gate up (one product) · act(gate) up · down + residual

That is eight kernels, and ten where attention and feed-forward have a norm behind them too (Gemma); transformers' own
layer takes some thirty. Its forward runs wherever this one would not be the same: more than one token, or a cache of
another kind. The maps of q, k and v, and of gate and up, share one matrix where they are the sampler's own, so that
one product reads it. A sliding window is left to the attention kernel, so that all layers take the same mask.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional


class Kind(NamedTuple):
    """What a decoder layer is made of."""

    shift: float = 0.0
    """Its norms are ``(shift + w) · x / rms(x)``."""
    behind: bool = False
    """Whether attention and feed-forward each have a norm behind them, before the residual is added."""
    capped: bool = False
    """Whether scores are capped; Gemma 3 has the setting and does not use it."""
    experts: bool = False
    """Whether the feed-forward is the module's own, a mixture of experts for instance, that returns its scores too."""


LLAMAS = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")
"""Layers known to be ``x + attention(norm x)``, then ``x + down(silu(gate) up)`` of its norm, with rotary positions."""
KINDS = {
    **dict.fromkeys(LLAMAS, Kind()),
    "Gemma2DecoderLayer": Kind(shift=1.0, behind=True, capped=True),
    "Gemma3DecoderLayer": Kind(shift=1.0, behind=True),
    "GptOssDecoderLayer": Kind(experts=True),
}
"""By the name of the class."""
ACTIVATIONS = {"SiLU": "silu", "SiLUActivation": "silu", "GELUTanh": "gelu", "PytorchGELUTanh": "gelu"}
"""By the name of their class in transformers: ``x sigmoid(x)``, and GELU by the hyperbolic tangent."""
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
        self.kind = KINDS[type(layer).__name__]
        self.eps = eps_of(layer.input_layernorm)
        attention = layer.self_attn
        norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        eps = 0.0 if norms[0] is None else eps_of(norms[0])
        query, key = (None if n is None else n.weight for n in norms)
        self.norms: tuple[Tensor | None, Tensor | None, float, float] = (query, key, eps, self.kind.shift)
        """Of the heads: weights, eps, and what is added to the weights."""
        self.window = window_of(attention)
        self.cap: float | None = attention.attn_logit_softcapping if self.kind.capped else None
        packs = [Packs([getattr(getattr(layer, a), n) for n in names]) for a, names in PACKED[: 1 + self.dense]]
        for maps in packs:
            if all(m in merged and type(m) is nn.Linear for m in maps.maps):
                maps.pack()
        self.qkv, self.gate_up = packs[0], packs[-1]

    @property
    def dense(self) -> bool:
        """Whether the feed-forward is gate, up and down."""
        return not self.kind.experts

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
        x = self._attended(hidden_states.squeeze(1), turn, (kept.keys, kept.values), seen, live, column)
        return self._fed(x)[:, None]

    def _attended(
        self,
        x: Tensor,
        turn: tuple[Tensor, Tensor],
        cache: tuple[Tensor, Tensor],
        seen: Tensor,
        live: Tensor,
        column: Tensor,
    ) -> Tensor:
        """``x + attention(norm x)``."""
        from klamp.kernels import triton_decode

        layer, attention = self.layer, self.layer.self_attn
        qkv = self.qkv(self._norm(x, layer.input_layernorm))
        rotary = triton_decode.Rotary(*self.norms, *turn)
        sinks: Tensor | None = getattr(attention, "sinks", None)
        found = triton_decode.attend(
            qkv, rotary, cache, seen, live, column, attention.scaling, window=self.window, cap=self.cap, sinks=sinks
        )
        return self._added(x, found, attention.o_proj, layer.post_attention_layernorm)

    def _fed(self, x: Tensor) -> Tensor:
        """``x + feedforward(norm x)``."""
        from klamp.kernels import triton_decode

        layer = self.layer
        before = layer.pre_feedforward_layernorm if self.kind.behind else layer.post_attention_layernorm
        h = self._norm(x, before)
        if not self.dense:
            return x.add_(layer.mlp(h[:, None])[0].squeeze(1))
        gate, up = self.gate_up(h)
        inner = triton_decode.gated(gate, up, ACTIVATIONS[type(layer.mlp.act_fn).__name__])
        behind = layer.post_feedforward_layernorm if self.kind.behind else None
        return self._added(x, inner, layer.mlp.down_proj, behind)

    def _norm(self, x: Tensor, norm: Any) -> Tensor:
        from klamp.kernels.triton_layers import rms_norm

        return rms_norm(x, norm.weight, self.eps, self.kind.shift)

    def _added(self, x: Tensor, y: Tensor, linear: Any, behind: Any) -> Tensor:
        """``x + linear(y)``, the sum with the ``behind`` norm of it where the kind has one; written over x."""
        from klamp.kernels.triton_layers import rms_norm

        if self.kind.behind:
            return rms_norm(linear(y), behind.weight, self.eps, self.kind.shift, onto=x)
        plain = type(linear) is nn.Linear and linear.bias is None
        return x.addmm_(y, linear.weight.t()) if plain else x.add_(linear(y))


def eps_of(norm: Any) -> float:
    """The small number under a norm's root."""
    return float(norm.eps if hasattr(norm, "eps") else norm.variance_epsilon)


def window_of(attention: Any) -> int | None:
    """Columns that a layer sees, its own included; None where it sees all. Mistral has them in its configuration."""
    source = attention if hasattr(attention, "sliding_window") else attention.config
    window = getattr(source, "sliding_window", None)
    return None if window is None else int(window)


def fits(layer: Any) -> bool:
    """Whether a layer is of a known kind, in half precision, with heads that the kernels take."""
    kind = KINDS.get(type(layer).__name__)
    if kind is None or not getattr(layer.self_attn, "is_causal", True):
        return False
    if not kind.experts and type(layer.mlp.act_fn).__name__ not in ACTIVATIONS:
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


def stepped(model: nn.Module) -> int:
    """How many decoder layers take :class:`LayerForward`."""
    modules: Iterable[Any] = model.modules()
    return sum(isinstance(m.forward, LayerForward) for m in modules)
