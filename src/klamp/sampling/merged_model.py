"""The sampler's model: a plain copy of the policy's modules that shares every weight it can.

Parameters that do not train, or that train in place, are the policy's own. LoRA layers become plain linear maps with
merged weights in buffers of their own, so that sampling costs no adapter and the base stays untouched to the bit.
Under FSDP2 it keeps whole weights on every process, and :meth:`MergedModel.refresh` gathers what has changed.
"""

from __future__ import annotations

import copy
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from klamp.errors import ConfigError
from klamp.sampling.fast_modules import lean_decoding, lora_layers
from klamp.sampling.packed_linear import Packed, packs
from klamp.sharded import settle, whole

ADAPTER = "default"
"""Name of the trained adapter inside the peft model."""


class Trained(Protocol):
    """What is sampled from: the trainer's policy."""

    model: nn.Module
    lora: bool


class MergedModel:
    """A model to sample from that follows the policy. Make it before the policy's weights are sharded."""

    def __init__(self, policy: Trained, *, sharded: bool = False) -> None:
        """``sharded`` says that the policy's weights will be."""
        self.policy, self.sharded = policy, sharded
        source: Any = policy.model
        base = source.get_base_model() if policy.lora else source
        self.model, self.merged = _plain_copy(base, set(lora_layers(base)) if policy.lora else set())
        if policy.lora:
            _pack_head(self.model)
        lean_decoding(self.model)
        self.own = dict(self.model.named_parameters())

    @torch.no_grad()
    def refresh(self) -> None:
        """``W + alpha/r · B A`` into buffers of its own, or the whole weights where the policy's are in shards."""
        if self.sharded:
            settle(cast(nn.Module, self.policy))  # the policy itself may be a sharded unit
        for linear, layer in self.merged:
            if isinstance(linear, Packed):
                linear.pack(_sum(layer))
            else:
                linear.weight.copy_(_sum(layer))
        if self.sharded and not self.policy.lora:
            for name, p in self.policy.model.named_parameters():
                self.own[name].copy_(whole(p))


def _plain_copy(base: Any, layers: set[Any]) -> tuple[Any, list[tuple[nn.Linear | Packed, Any]]]:
    """The base with its tensors shared and its LoRA ``layers`` replaced, and each replacement with its layer."""
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
    return plain, merged


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
