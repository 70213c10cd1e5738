"""Groups of trajectories: the advantages and weights of ART, by what LocalBackend trains with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from vectors import Case, checks, near

from klamp.chat import Row
from klamp.local_backend.tokenized_trajectories import Batch


@checks("art_groups.json", "groups")
def art_groups(case: Case) -> None:
    """``advantages="art"`` is ART's when it tokenises, ``"art_scaled"`` when it has packed; weights are those of both.

    ART leaves out trajectories whose advantage is 0; klamp keeps them, since they pay for their KL. Their weights are
    compared relative to those that ART keeps.
    """
    groups = case.inputs["groups"]
    recorded = {name: _flat(case.read(name)) for name in ("advantages", "packed_advantages", "packed_weights")}
    kept = [i for i, value in enumerate(recorded["advantages"]) if value is not None]
    tokens = torch.tensor([sum(t["tokens"]) for group in groups for t in group], dtype=torch.float64)
    for kind, name in (("art", "advantages"), ("art_scaled", "packed_advantages")):
        scored = trained_on(groups, advantages=kind, std=case.inputs["scale_rewards"])
        first = _first_rows(groups)
        mine = scored.advantages[first]
        left_out = [i for i in range(len(mine)) if i not in kept]
        assert not mine[left_out].any(), f"{case.id}: klamp's are 0 where ART leaves a trajectory out"
        near(mine[kept], [recorded[name][i] for i in kept], "float32", 0.0, f"{case.id}: {name}")
        weights = scored.weights[first].double()[kept]
        share = (weights * tokens[kept]).sum() / tokens[kept].sum()
        theirs = [recorded["packed_weights"][i] for i in kept]
        # ART's 1e-6 beside the number of tokens is one part in a million at one token, and as much in the mean.
        near(weights / share, theirs, "float32", 2e-6 * torch.tensor(theirs), f"{case.id}: packed_weights")


def trained_on(groups: list[list[dict[str, Any]]], *, advantages: str, std: bool) -> Any:
    """What LocalBackend makes of the groups, with made-up tokens."""
    members = [[SimpleNamespace(reward=t["reward"]) for t in group] for group in groups]
    rows = [
        [
            [Row([1] * (n + 1), [False] + [True] * n, [0.0] * (n + 1), []) for n in t["tokens"]]
            for t in group
        ]
        for group in groups
    ]  # fmt: skip
    batch = Batch(members, rows, 1.0, 0, False, 0)
    arguments: Any = SimpleNamespace(advantages=advantages, std=std)
    return batch.tensors(0, arguments)[1]


def _first_rows(groups: list[list[dict[str, Any]]]) -> list[int]:
    """The row at which each trajectory begins."""
    sizes = [len(t["tokens"]) for group in groups for t in group]
    return [sum(sizes[:i]) for i in range(len(sizes))]


def _flat(nested: list[list[Any]]) -> list[Any]:
    return [value for group in nested for value in group]
