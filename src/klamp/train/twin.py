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
from klamp.train.packed import Packed, packs
from klamp.train.policy import ADAPTER, Policy
from klamp.train.sharded import settle, whole


class Twin:
    """A model to sample from, and how it follows the policy. Make it before the policy's weights are sharded."""

    def __init__(
        self, model: Any, merged: list[tuple[nn.Linear | Packed, Any]], policy: Policy, *, sharded: bool
    ) -> None:
        self.model, self.merged, self.policy, self.sharded = model, merged, policy, sharded
        self.own = dict(model.named_parameters())

    @torch.no_grad()
    def refresh(self) -> None:
        """``W + alpha/r · B A`` into the twin's buffers, or the whole weights where the policy's are in shards."""
        if self.sharded:
            settle(self.policy)
        for linear, layer in self.merged:
            if isinstance(linear, Packed):
                linear.pack(_sum(layer))
            else:
                linear.weight.copy_(_sum(layer))
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
        merged.append((linear, layer))
    if policy.lora:
        _pack_head(plain)
    lean_decoding(plain)
    return Twin(plain, merged, policy, sharded=sharded)


def _merged(name: str, layer: Any) -> nn.Linear | Packed:
    """A linear map with a weight of its own, as it is before the first update."""
    inner = layer.get_base_layer()
    if type(inner) is not nn.Linear:
        raise ConfigError(f"LoRA on {name}, a {type(inner).__name__}, cannot be sampled from. Use linear lora.targets.")
    if packs(inner.weight):
        return Packed(inner.weight, inner.bias)
    linear = nn.Linear(inner.in_features, inner.out_features, bias=inner.bias is not None, device="meta")
    linear.weight = nn.Parameter(inner.weight.detach().clone(), requires_grad=False)
    linear.bias = inner.bias
    return linear


def _pack_head(model: Any) -> None:
    """A head that does not train is packed once, the embedding that it may be tied to stays."""
    head = model.get_output_embeddings()
    if type(head) is nn.Linear and not head.weight.requires_grad and packs(head.weight):
        model.set_output_embeddings(Packed(head.weight, head.bias))


def _sum(layer: Any) -> Tensor:
    """``W + alpha/r · B A`` of the trained adapter, rounded once."""
    base = whole(layer.base_layer.weight)
    down, up = (whole(side[ADAPTER].weight) for side in (layer.lora_A, layer.lora_B))
    scale = float(layer.scaling[ADAPTER])
    if base.dtype == down.dtype:
        return torch.addmm(base, up, down, alpha=scale)
    return base.float() + ((up @ down) * scale).float()
