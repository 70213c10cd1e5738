"""The sampler's model: a plain copy of the policy's modules that shares every weight it can.

Parameters that do not train, or that train in place, are the policy's own. LoRA layers become plain linear maps with
merged weights in buffers of their own, so that sampling costs no adapter and the base stays untouched to the bit.
Under FSDP2 the twin keeps whole weights on every process, and :meth:`Twin.refresh` gathers what has changed.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from klamp.errors import ConfigError
from klamp.train.lean import lean_decoding, lora_layers
from klamp.train.policy import ADAPTER, Policy
from klamp.train.sharded import settle, whole


class Twin:
    """A model to sample from, and how it follows the policy. Make it before the policy's weights are sharded."""

    def __init__(self, model: Any, merged: list[tuple[Tensor, Any]], policy: Policy, *, sharded: bool) -> None:
        self.model, self.merged, self.policy, self.sharded = model, merged, policy, sharded
        self.own = dict(model.named_parameters())

    @torch.no_grad()
    def refresh(self) -> None:
        """``W + alpha/r · B A`` into the twin's buffers, or the whole weights where the policy's are in shards."""
        if self.sharded:
            settle(self.policy)
        for buffer, layer in self.merged:
            base, delta = whole(layer.base_layer.weight), _delta(layer)
            torch.add(base, delta.to(base.dtype), out=buffer) if base.dtype == delta.dtype else buffer.copy_(
                base.float() + delta.float()
            )
        if self.sharded and not self.policy.lora:
            for name, p in self.policy.model.named_parameters():
                self.own[name].copy_(whole(p))


def twin(policy: Policy, *, sharded: bool = False) -> Twin:
    """The sampler's model for this policy; ``sharded`` says that the policy's weights will be."""
    model: Any = policy.model
    base = model.get_base_model() if policy.lora else model
    layers = set(lora_layers(base)) if policy.lora else set()
    named = {name: m for name, m in base.named_modules() if m in layers}
    # deepcopy with every tensor already in the memo copies the modules and shares the tensors.
    memo: dict[int, Any] = {id(t): t for t in (*base.parameters(), *base.buffers())}
    plain = copy.deepcopy(base, memo).eval()
    merged = []
    for name, layer in named.items():
        parent, _, leaf = name.rpartition(".")
        linear = _merged(name, layer)
        setattr(plain.get_submodule(parent), leaf, linear)
        merged.append((linear.weight.data, layer))
    if next(plain.parameters()).device.type == "cuda":
        lean_decoding(plain)
    return Twin(plain, merged, policy, sharded=sharded)


def _merged(name: str, layer: Any) -> nn.Linear:
    """A linear map with a weight of its own, as it is before the first update."""
    inner = layer.get_base_layer()
    if type(inner) is not nn.Linear:
        raise ConfigError(f"LoRA on {name}, a {type(inner).__name__}, cannot be sampled from. Use linear lora.targets.")
    linear = nn.Linear(inner.in_features, inner.out_features, bias=inner.bias is not None, device="meta")
    linear.weight = nn.Parameter(inner.weight.detach().clone(), requires_grad=False)
    linear.bias = inner.bias
    return linear


def _delta(layer: Any) -> Tensor:
    """``alpha/r · B A`` of the trained adapter."""
    down, up = (whole(side[ADAPTER].weight) for side in (layer.lora_A, layer.lora_B))
    return (up @ down) * float(layer.scaling[ADAPTER])
