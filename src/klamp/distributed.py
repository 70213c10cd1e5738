"""FSDP2: weights that lie in shards over the processes, read and written whole.

Outside a forward pass every parameter is a DTensor, a shard of it on each process. What needs whole weights (sampler,
checkpoints, hashes) gathers them one at a time; every process takes part in that, so all of them call the same
functions in the same order. Plain tensors pass through untouched, so the callers need not know.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor


def whole(x: Tensor) -> Tensor:
    """All of a tensor, gathered where it is sharded."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def share(x: Tensor, like: Tensor) -> Tensor:
    """This process's shard of a whole tensor that every process holds, laid out as ``like``; itself where that is."""
    if not isinstance(like, DTensor) or isinstance(x, DTensor):
        return x
    # No source rank: nothing is sent, each process cuts its own part.
    return distribute_tensor(x.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


@torch.no_grad()
def put(into: Tensor, value: Tensor) -> None:
    """Write a whole tensor into a parameter, sharded or not."""
    into.copy_(share(value.to(into.device, into.dtype), into))


def gathered(named: Mapping[str, Tensor], *, keep: bool) -> dict[str, Tensor]:
    """Whole tensors in CPU memory by name; a process that does not keep them only takes part in the gathering.

    One tensor under two names (a head tied to its embedding) stays one.
    """
    found: dict[str, Tensor] = {}
    first: dict[int, str] = {}
    for name, x in named.items():
        if id(x) in first:
            if keep:
                found[name] = found[first[id(x)]]
            continue
        first[id(x)] = name
        full = whole(x.detach())
        if keep:
            found[name] = full.cpu().contiguous()
    return found


def settle(module: nn.Module) -> None:
    """Give up whole weights that a forward pass left gathered: reading them is a waste, writing them is lost."""
    from torch.distributed.fsdp import FSDPModule

    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, shapes, dtypes and bytes: equal only where all of it is, to the bit."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        t = whole(tensors[name].detach())
        total.update(f"{name}{tuple(t.shape)}{t.dtype}".encode())
        total.update(t.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)  # a scalar only when flat
    return total.hexdigest()[:32]
