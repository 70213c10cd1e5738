"""Norms and attention of a decoding step in fewer operations: the same formulas, and the module's own way elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from klamp.kernels import backend

NORMS = ("LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm")
"""Norms known to be ``w · x / rms(x)``, the product taken after rounding to the input's dtype."""
WIDE_NORMS = {"GemmaRMSNorm": 1.0, "Gemma2RMSNorm": 1.0, "Gemma3RMSNorm": 1.0, "GptOssRMSNorm": 0.0}
"""Norms known to be ``(s + w) · x / rms(x)`` in float32, rounded at the end, with their s."""
GROUPED = "klamp_grouped"
"""Name of :func:`grouped_attention` among transformers' attention functions."""


def lora_layers(model: nn.Module) -> list[Any]:
    """The LoRA layers of a model."""
    from peft.tuners.lora import LoraLayer

    return [m for m in model.modules() if isinstance(m, LoraLayer)]


class NormForward:
    """``w · x / sqrt(mean(x²) + eps)`` in one operation, or the norm's own forward where the dtypes are mixed."""

    def __init__(self, norm: Any) -> None:
        self.norm, self.own = norm, norm.forward

    def __call__(self, x: Tensor) -> Tensor:
        weight = self.norm.weight
        if x.dtype != weight.dtype:
            return self.own(x)  # type: ignore[no-any-return]
        return functional.rms_norm(x, weight.shape, weight, self.norm.variance_epsilon).to(x.dtype)


class WideNormForward:
    """``(s + w) · x / sqrt(mean(x²) + eps)`` in float32, rounded once to the dtype of x."""

    def __init__(self, norm: Any, shift: float, *, fused: bool) -> None:
        """``fused``: without a gradient it may be one kernel."""
        self.norm, self.shift, self.fused = norm, shift, fused
        self.eps = float(norm.eps if hasattr(norm, "eps") else norm.variance_epsilon)
        self.kept: tuple[Tensor, int, Tensor] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self.fused and not torch.is_grad_enabled():
            from klamp.kernels.triton_layers import rms_norm

            return rms_norm(x, self.norm.weight, self.eps, self.shift)
        weight = self._weight()
        return functional.rms_norm(x.float(), weight.shape, weight, self.eps).type_as(x)

    def _weight(self) -> Tensor:
        """``s + w``, computed once for a weight that does not train."""
        own: Tensor = self.norm.weight
        if own.requires_grad:
            return own.float() + self.shift
        if self.kept is None or self.kept[0] is not own or self.kept[1] != own._version:
            self.kept = own, own._version, own.float() + self.shift
        return self.kept[2]


def fast_norms(model: nn.Module, *, rounded: bool = True, fused: bool = False) -> None:
    """Every RMSNorm of a known kind takes :class:`NormForward`, where ``rounded``, or :class:`WideNormForward`."""
    modules: Iterable[Any] = model.modules()
    for module in modules:
        name = type(module).__name__
        if isinstance(module.forward, NormForward) or (
            isinstance(module.forward, WideNormForward) and module.forward.fused == fused
        ):
            continue
        if rounded and name in NORMS:
            module.forward = NormForward(module)
        elif name in WIDE_NORMS:
            module.forward = WideNormForward(module, WIDE_NORMS[name], fused=fused)


def grouped_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attention of one new token over grouped heads without a copy of keys and values; SDPA for anything else.

    The G query heads of a key head stand where queries stand: [n, K·G, 1, D] is read as [n, K, G, D], and all of them
    see what the token sees.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    rows, heads, length, size = query.shape
    groups = heads // key.shape[1]
    bare = not options.get("dropout") and options.get("softcap") is None and options.get("position_bias") is None
    if length != 1 or groups == 1 or attention_mask is None or not bare:
        found: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return found
    out = functional.scaled_dot_product_attention(
        query.reshape(rows, key.shape[1], groups, size),
        key,
        value,
        attn_mask=attention_mask.expand(-1, -1, groups, -1),
        scale=options.get("scaling"),
    )
    return out.reshape(rows, 1, heads, -1), None


def fast_decoding(model: Any) -> None:
    """A plain model whose attention is SDPA takes :func:`grouped_attention`; its norms take one operation each."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    gpu = next(model.parameters()).device.type == "cuda"  # on a CPU their own norms are as fast
    fast_norms(model, rounded=gpu, fused=gpu and backend("cuda") == "fused")
    if model.config._attn_implementation == "sdpa":
        AttentionInterface.register(GROUPED, grouped_attention)
        AttentionMaskInterface.register(GROUPED, sdpa_mask)
        model.config._attn_implementation = GROUPED
