"""The sampler's model: a plain copy of the policy's modules that shares every weight it can.

Parameters that do not train, or that train in place, are the policy's own. LoRA layers become plain linear maps with
merged weights in buffers of their own, so that sampling costs no adapter and the base stays untouched to the bit. A
layer with more than two matrices (DoRA, a bias of its own, experts) stays as peft has it.
Under FSDP2 it keeps whole weights on every process, and :meth:`MergedModel.refresh` gathers what has changed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from klamp.distributed import settle, whole
from klamp.errors import ConfigError
from klamp.kernels import backend
from klamp.sampling.decoding_layers import step_layers
from klamp.sampling.decoding_modules import fast_decoding, lora_layers
from klamp.sampling.families import check_decoding, check_sampled, is_fast

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
        check_sampled(base)
        self.fast = is_fast(base)
        """Whether the static cache and grouped attention are known to be right for this model."""
        layers = lora_layers(base) if policy.lora else []
        self.model, self.merged = _plain_copy(base, layers)
        if sharded and len(self.merged) < len(layers):
            raise ConfigError("an adapter that is more than LoRA on linear maps cannot be sharded by FSDP2.")
        if not self.fast:
            check_decoding(self.model)
        else:
            fast_decoding(self.model)
            if backend(next(self.model.parameters()).device) == "fused":
                step_layers(self.model, [linear for linear, _ in self.merged])
        self.own = dict(self.model.named_parameters())
        self.bases: list[nn.Module] = [layer.get_base_layer() for _, layer in self.merged]
        self.narrow: list[Tensor] = []
        """Memory for A and B of each layer in the dtype of its weight."""

    @torch.no_grad()
    def refresh(self) -> None:
        """``W + alpha/r · B A`` into buffers of its own, or the whole weights where the policy's are in shards."""
        if self.sharded:
            settle(cast(nn.Module, self.policy))  # the policy itself may be a sharded unit
        self._merge()
        if self.sharded and not self.policy.lora:
            for name, p in self.policy.model.named_parameters():
                self.own[name].copy_(whole(p))

    def _merge(self) -> None:
        """The adapters, each rounded once; A and B of all layers are cast by one operation, not by one each."""
        quick: list[tuple[Tensor, Tensor, float]] = []
        matrices: list[Tensor] = []
        for (linear, layer), inner in zip(self.merged, self.bases, strict=True):
            into, base = cast(Tensor, linear._parameters["weight"]), cast(Tensor, inner._parameters["weight"])
            if not _in_one_product(base) or layer.fan_in_fan_out:
                into.copy_(_sum(layer))
                continue
            quick.append((into, base, float(layer.scaling[ADAPTER])))
            # A module's attributes take a microsecond each; the dictionaries behind them take none.
            sides = (layer._modules[side]._modules[ADAPTER]._parameters["weight"] for side in ("lora_A", "lora_B"))
            matrices += map(whole, sides)
        if [m.shape for m in self.narrow] != [m.shape for m in matrices]:
            dtypes = [base.dtype for _, base, _ in quick for _ in range(2)]
            self.narrow = [torch.empty_like(m, dtype=dtype) for m, dtype in zip(matrices, dtypes, strict=True)]
        if quick:
            torch._foreach_copy_(self.narrow, matrices)
        for (into, base, scale), down, up in zip(quick, self.narrow[::2], self.narrow[1::2], strict=True):
            torch.addmm(whole(base), up, down, alpha=scale, out=into)


def _plain_copy(base: Any, layers: Iterable[Any]) -> tuple[Any, list[tuple[nn.Module, Any]]]:
    """The base with its tensors shared and its plain LoRA ``layers`` replaced, and each replacement with its layer."""
    wanted = {layer for layer in layers if _merges(layer)}
    named = {name: m for name, m in base.named_modules() if m in wanted}
    # deepcopy with every tensor already in the memo copies the modules and shares the tensors.
    memo: dict[int, Any] = {id(t): t for t in (*base.parameters(), *base.buffers())}
    plain = copy.deepcopy(base, memo).eval()
    merged = []
    for name, layer in named.items():
        parent, _, leaf = name.rpartition(".")
        linear = _merged(layer)
        setattr(plain.get_submodule(parent), leaf, linear)
        merged.append((linear, layer))
    return plain, merged


def _merges(layer: Any) -> bool:
    """Whether a LoRA layer is a linear map and two matrices; one that is more runs as peft has it."""
    from peft.tuners.lora import Linear
    from transformers.pytorch_utils import Conv1D

    plain = type(layer) is Linear and isinstance(layer.get_base_layer(), nn.Linear | Conv1D)
    return (
        plain and ADAPTER in layer.lora_A and ADAPTER not in layer.lora_variant and layer.lora_B[ADAPTER].bias is None
    )


def _merged(layer: Any) -> nn.Module:
    """The layer's linear map with a weight of its own, as it is before the first update."""
    inner = layer.get_base_layer()
    weight = inner.weight
    memo: dict[int, Any] = {id(t): t for t in inner.parameters()}
    linear: nn.Module = copy.deepcopy(inner, memo)
    linear.weight = nn.Parameter(weight.detach().clone(), requires_grad=False)
    return linear


def _in_one_product(base: Tensor) -> bool:
    """Whether an adapter is merged by a product of W's dtype, into which a forward pass rounds A and B too."""
    return base.is_cuda and base.dtype in (torch.bfloat16, torch.float16)


def _sum(layer: Any) -> Tensor:
    """``W + alpha/r · B A`` of the trained adapter, rounded once; transposed where the map keeps its weight so."""
    base = whole(layer.get_base_layer().weight)
    down, up = (whole(side[ADAPTER].weight) for side in (layer.lora_A, layer.lora_B))
    scale = float(layer.scaling[ADAPTER])
    if layer.fan_in_fan_out:
        up, down = down.t(), up.t()
    if base.dtype == down.dtype:
        return torch.addmm(base, up, down, alpha=scale)
    return base.float() + ((up @ down) * scale).float()
