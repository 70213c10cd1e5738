"""A model's forward pass without detours: the same formulas in fewer, larger operations.

On a GPU a step of a small model waits for Python, not for the device. peft's LoRA layer goes through five modules and
two casts, a composed RMSNorm through six operations, attention over grouped heads copies keys and values for every
query head. What is put in their place here gives the same numbers and gradients, and steps aside (the module's own
forward runs) wherever it would not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from klamp.kernels.layers import Lora, gated, gated_down, gated_product, lora_linear, rotated

WIDE = 2048
"""Width of the states from which a pass over a batch of them takes longer than the Python around it."""
MLPS = ("LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP")
"""Feed-forwards known to be ``down(act(gate(x)) · up(x))``."""
SILU = ("SiLU", "SiLUActivation")
ATTENTIONS = ("LlamaAttention", "MistralAttention", "Qwen2Attention")
"""Attention known to rotate whole heads, after nothing but a linear map."""


QUICK: ContextVar[bool] = ContextVar("QUICK", default=False)
"""Whether layers may take their short way without a gradient: inside :func:`narrowed`, where no weight is in shards."""


class LoraForward:
    """``x Wᵀ + b + s · (x Aᵀ) Bᵀ`` of a LoRA layer with one plain adapter, or peft's own forward.

    Modules and parameters are taken from the dictionaries that hold them: a module's attributes take a microsecond
    each, and a pass over a small model asks for thousands.
    """

    def __init__(self, layer: Any, *, wide: bool = False) -> None:
        """``wide``: on a GPU with gradients written out (:func:`~klamp.kernels.layers.lora_linear`)."""
        self.layer, self.own, self.wide = layer, layer.forward, wide
        self.narrow: tuple[Tensor, Tensor, float] | None = None
        """A and B in half precision, while :func:`narrowed` has them so, and their scale."""

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        layer = self.layer
        base = layer._modules["base_layer"]
        # The types are looked at in every call: a launcher may have wrapped what was plain when it was made.
        if type(base) is not nn.Linear or args or kwargs or layer.merged_adapters:
            return self.own(x, *args, **kwargs)  # type: ignore[no-any-return]
        weight, bias = weight_and_bias(base)
        if layer._disable_adapters:
            return functional.linear(x, weight, bias)
        found = self.matrices()
        if found is None:
            return self.own(x)  # type: ignore[no-any-return]
        down, up, scale = found
        if self.wide and (lora := self.written_out(x)) is not None:
            return lora_linear(x, lora)
        result = functional.linear(x, weight, bias)
        if not torch.is_autocast_enabled(x.device.type):
            x = x.to(down.dtype)
        scaled = torch.add(result, functional.linear(functional.linear(x, down), up), alpha=scale)
        return scaled if scaled.dtype == result.dtype else scaled.to(result.dtype)

    def matrices(self) -> tuple[Tensor, Tensor, float] | None:
        """A, B and s of the one adapter that is active; None where it is more than two matrices."""
        layer = self.layer
        names = layer._active_adapter
        name = names if isinstance(names, str) else names[0] if len(names) == 1 else ""
        down, up = layer._modules["lora_A"]._modules.get(name), layer._modules["lora_B"]._modules.get(name)
        if type(down) is not nn.Linear or type(up) is not nn.Linear or not _plain(layer, name):
            return None
        (a, first), (b, second) = weight_and_bias(down), weight_and_bias(up)
        return (a, b, layer.scaling[name]) if first is None and second is None else None

    def written_out(self, x: Tensor) -> Lora | None:
        """The matrices where the written-out gradient is the same: under autocast, with a base that does not train."""
        layer, base = self.layer, self.layer.base_layer
        if not in_half(x) or type(base) is not nn.Linear or layer.merged_adapters or layer._disable_adapters:
            return None
        found = self.matrices()
        if found is None or base.weight.dtype != x.dtype or base.weight.requires_grad:
            return None
        if any(type(w) not in (Tensor, nn.Parameter) for w in (base.weight, *found[:2])):
            return None  # a DTensor
        return Lora(base.weight, base.bias, found[0], found[1], float(found[2]))


@contextlib.contextmanager
def narrowed(layers: Iterable[Any], buffers: dict[int, tuple[Tensor, Tensor]]) -> Iterator[None]:
    """A and B of the active adapters in bfloat16 for a pass without a gradient: one operation in place of two a layer.

    ``buffers`` keeps their memory from pass to pass.
    """
    found: list[LoraForward] = []
    given: list[Tensor] = []
    narrow: list[Tensor] = []
    quick = QUICK.set(True)
    try:
        for layer in layers:
            forward = layer.forward
            active = isinstance(forward, LoraForward) and not layer._disable_adapters
            if not active or (matrices := forward.matrices()) is None:
                continue
            down, up, scale = matrices
            pair = buffers.get(id(down))
            # An adapter loaded in place of another may have its matrices' identities, in other layers.
            if pair is None or pair[0].shape != down.shape or pair[1].shape != up.shape:
                pair = buffers[id(down)] = _half(down), _half(up)
            forward.narrow = (*pair, scale)
            found.append(forward)
            given += (down, up)
            narrow += pair
        if found:
            with torch.no_grad():
                torch._foreach_copy_(narrow, given)
        yield
    finally:
        QUICK.reset(quick)
        for forward in found:
            forward.narrow = None


def _half(x: Tensor) -> Tensor:
    """Memory for a tensor in bfloat16."""
    return torch.empty_like(x, dtype=torch.bfloat16, requires_grad=False)


def weight_and_bias(linear: nn.Module) -> tuple[Any, Any]:
    """The parameters of a linear map."""
    held = linear._parameters
    return held["weight"], held["bias"]


def in_half(x: Tensor) -> bool:
    """Whether a pass is in half precision on a GPU, under autocast to the dtype of its states."""
    half = x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)
    return half and torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") == x.dtype


def is_wide(model: Any) -> bool:
    """Whether passes over a model's states take longer than the Python around them.

    By the model alone, not by a batch: KL before and after an update, on all sequences or on some, is between states
    that were rounded alike.
    """
    config = model.get_base_model().config if hasattr(model, "peft_config") else model.config
    width = getattr(config.get_text_config(), "hidden_size", None)
    return isinstance(width, int) and width >= WIDE


class MlpForward:
    """``down(silu(gate) · up)`` that keeps no product for the way back, or the module's own forward."""

    def __init__(self, mlp: Any) -> None:
        self.mlp, self.own = mlp, mlp.forward

    def __call__(self, x: Tensor) -> Tensor:
        mlp = self.mlp
        down = mlp.down_proj
        adapted = isinstance(down.forward, LoraForward)
        if not in_half(x) or not (adapted or type(down) is nn.Linear):
            return self.own(x)  # type: ignore[no-any-return]
        if not adapted:  # rounded as MeasuredLayer rounds it
            return down(gated_product(mlp.gate_proj(x), mlp.up_proj(x)))  # type: ignore[no-any-return]
        lora = down.forward.written_out(x)
        if lora is None and torch.is_grad_enabled():
            return self.own(x)  # type: ignore[no-any-return]
        gate, up = mlp.gate_proj(x), mlp.up_proj(x)
        return down(gated(gate, up)) if lora is None else gated_down(gate, up, lora)


class AttentionForward:
    """Attention without a cache whose heads are rotated in one kernel each, or the module's own forward."""

    def __init__(self, module: Any) -> None:
        self.module, self.own = module, module.forward

    def __call__(self, hidden_states: Tensor, *args: Any, **named: Any) -> Any:
        module, turn = self.module, named.get("position_embeddings")
        cached = named.get("past_key_values") is not None
        if args or turn is None or cached or not in_half(hidden_states) or self._other(turn[0], hidden_states):
            return self.own(hidden_states, *args, **named)
        from transformers.integrations import sdpa_attention

        attend: Any = sdpa_attention.sdpa_attention_forward
        shape = (*hidden_states.shape[:-1], -1, module.head_dim)
        query, key, value = (p(hidden_states).view(shape) for p in (module.q_proj, module.k_proj, module.v_proj))
        cos, sin = (t.expand(len(hidden_states), -1, -1) for t in turn)
        heads = (rotated(query, cos, sin), rotated(key, cos, sin), value)
        mask = named.get("attention_mask")
        found, _ = attend(module, *(h.transpose(1, 2) for h in heads), mask, dropout=0.0, scaling=module.scaling)
        return module.o_proj(found.reshape(*hidden_states.shape[:-1], -1).contiguous()), None

    def _other(self, cos: Tensor, x: Tensor) -> bool:
        """Whether attention is another's, or only part of a head is rotated."""
        config = self.module.config
        random = self.module.training and self.module.attention_dropout
        return config._attn_implementation != "sdpa" or cos.shape[-1] != self.module.head_dim or bool(random)


def _plain(layer: Any, name: str) -> bool:
    """Whether an adapter is LoRA and no more: no dropout, no variant such as DoRA."""
    dropout = layer._modules["lora_dropout"]._modules.get(name)
    return name not in layer.lora_variant and (type(dropout) is nn.Identity or not dropout.training)


def fast_lora(model: nn.Module) -> None:
    """Every LoRA layer over a linear map takes :class:`LoraForward`."""
    from peft.tuners.lora import Linear

    layers: Iterable[Any] = model.modules()
    wide = is_wide(model)
    for layer in layers:
        if type(layer) is Linear and not isinstance(layer.forward, LoraForward) and not layer.fan_in_fan_out:
            layer.forward = LoraForward(layer, wide=wide)  # type: ignore[method-assign]


def fast_mlp_and_attention(model: nn.Module) -> None:
    """Gated feed-forwards and attention of a known kind take :class:`MlpForward` and :class:`AttentionForward`."""
    modules: Iterable[Any] = model.modules()
    for module in modules:
        name = type(module).__name__
        if name in MLPS and type(module.act_fn).__name__ in SILU and not isinstance(module.forward, MlpForward):
            module.forward = MlpForward(module)
        elif name in ATTENTIONS and not isinstance(module.forward, AttentionForward):
            module.forward = AttentionForward(module)


def only_lora(model: Any) -> bool:
    """Whether the model's adapters are LoRA matrices and nothing besides, which :func:`adapter` can switch."""
    configs = model.peft_config.values()
    return all(c.peft_type == "LORA" and not c.modules_to_save and not c.trainable_token_indices for c in configs)


@contextlib.contextmanager
def adapter(layers: Iterable[Any], name: str | None) -> Iterator[None]:
    """The layers with another adapter, or with none; as they were afterwards, whatever happens.

    peft's own switches walk the whole model for a status report and turn requires_grad on and off on their way, which
    costs more than a forward pass and is not what a sharded model expects.
    """
    # Both are plain attributes; a module's own way of setting one looks through its parameters and modules first.
    before = [(layer.__dict__, layer._disable_adapters, layer._active_adapter) for layer in layers]
    for held, _, active in before:
        held["_disable_adapters"], held["_active_adapter"] = name is None, active if name is None else [name]
    try:
        yield
    finally:
        for held, disabled, active in before:
            held["_disable_adapters"], held["_active_adapter"] = disabled, active
