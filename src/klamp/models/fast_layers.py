"""A model's forward pass without detours: the same formulas in fewer, larger operations.

On a GPU a step of a small model waits for Python, not for the device. peft's LoRA layer goes through five modules and
two casts, a composed RMSNorm through six operations, attention over grouped heads copies keys and values for every
query head. What is put in their place here gives the same numbers and gradients, and steps aside (the module's own
forward runs) wherever it would not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class LoraForward:
    """``x Wᵀ + b + s · (x Aᵀ) Bᵀ`` of a LoRA layer with one plain adapter, or peft's own forward."""

    def __init__(self, layer: Any) -> None:
        self.layer, self.own = layer, layer.forward

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        layer = self.layer
        base, names = layer.base_layer, layer._active_adapter
        # The types are looked at in every call: a launcher may have wrapped what was plain when it was made.
        if type(base) is not nn.Linear or args or kwargs or layer.merged_adapters:
            return self.own(x, *args, **kwargs)  # type: ignore[no-any-return]
        if layer._disable_adapters:
            return functional.linear(x, base.weight, base.bias)
        name = names if isinstance(names, str) else names[0] if len(names) == 1 else ""
        down, up = layer.lora_A._modules.get(name), layer.lora_B._modules.get(name)
        if type(down) is not nn.Linear or type(up) is not nn.Linear or not _plain(layer, name):
            return self.own(x)  # type: ignore[no-any-return]
        result = functional.linear(x, base.weight, base.bias)
        if not torch.is_autocast_enabled(x.device.type):
            x = x.to(down.weight.dtype)
        low = functional.linear(x, down.weight, down.bias)
        scaled = torch.add(result, functional.linear(low, up.weight, up.bias), alpha=layer.scaling[name])
        return scaled if scaled.dtype == result.dtype else scaled.to(result.dtype)


def _plain(layer: Any, name: str) -> bool:
    """Whether an adapter is LoRA and no more: no dropout, no variant such as DoRA."""
    dropout = layer.lora_dropout._modules.get(name)
    return name not in layer.lora_variant and (type(dropout) is nn.Identity or not dropout.training)


def lean_lora(model: nn.Module) -> None:
    """Every LoRA layer over a linear map takes :class:`LoraForward`."""
    from peft.tuners.lora import Linear

    layers: Iterable[Any] = model.modules()
    for layer in layers:
        if type(layer) is Linear and not isinstance(layer.forward, LoraForward) and not layer.fan_in_fan_out:
            layer.forward = LoraForward(layer)  # type: ignore[method-assign]


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
    before = [(layer, layer._disable_adapters, layer._active_adapter) for layer in layers]
    for layer, _, active in before:
        layer._disable_adapters = name is None
        layer._active_adapter = active if name is None else [name]
    try:
        yield
    finally:
        for layer, disabled, active in before:
            layer._disable_adapters, layer._active_adapter = disabled, active
