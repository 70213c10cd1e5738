"""One block of prompts: sample, score under both models, reduce to a record a prompt.

A block is always the same prompts in the same batch, whatever the number of processes, so figures do not depend on it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from klamp import estimators as e
from klamp.chat import Prompt, as_text
from klamp.kernels import TokenStats
from klamp.masked import select
from klamp.measure.pair import Pair
from klamp.models.policy import ReferenceStates, score
from klamp.sampling.batch import Part, Rollout, collate, part

TOP_TOKENS = 5
"""Tokens of a prompt that compete for the list of those that drifted most."""
CONTEXT = 8
"""Tokens of context shown before a listed token."""


def both_ways(pair: Pair, piece: Part) -> tuple[TokenStats, TokenStats, ReferenceStates]:
    """Statistics with the policy first (KL(P‖R)) and with the reference first (KL(R‖P)), and the policy's states."""
    ours, theirs = pair.policy_states(piece), pair.reference(piece)
    temperature = pair.policy.temperature
    there = score(ours.head, ours.states, piece, theirs, temperature)
    back = score(theirs.head, theirs.states, piece, ours, temperature)
    return there, back, ours


def noise_floor(pair: Pair, rollout: Rollout, ours: ReferenceStates, piece: Part) -> Tensor:
    """KL of the policy against itself, [n, c], in other batches and another order: what rounding alone reads as."""
    order = torch.arange(len(rollout) - 1, -1, -1, device=pair.device)
    states = torch.zeros_like(ours.states)
    for rows in torch.split(order, max(1, len(order) // 2)):
        again = part(rollout, rows)
        found = pair.policy_states(again).states
        states[rows, again.columns] = found.to(states.dtype)
    return _kl(score(ours.head, ours.states, piece, ours._replace(states=states), pair.policy.temperature))


@torch.no_grad()
def records(pair: Pair, rollout: Rollout, first: int, samples: int, *, floor: bool) -> list[dict[str, Any]]:
    """A record for each prompt of the block; ``first`` is the index of its first prompt."""
    rollout = rollout.to(pair.device)
    rows = torch.arange(len(rollout), device=pair.device)
    piece = part(rollout, rows)
    piece = replace(piece, mask=piece.of(rollout.mask))
    there, back, ours = both_ways(pair, piece)
    assert there.ref_logp is not None
    columns: dict[str, Tensor] = {
        "kl": _kl(there),
        "forward_kl": _kl(back),
        "k1": e.k1(there.logp, there.ref_logp),
        "k3": e.k3(there.logp, there.ref_logp),
        "entropy": there.entropy,
        "ref_entropy": back.entropy,
    }
    sampled = piece.of(rollout.sampler_logp)
    if bool(torch.isfinite(sampled[piece.mask]).all()):
        columns["gap"] = sampled - there.logp
    if floor:
        columns["floor"] = noise_floor(pair, rollout, ours, piece)
    host = {name: select(values, piece.mask).double().cpu() for name, values in columns.items()}
    return [
        _record(pair, rollout, piece, host, first + i, slice(i * samples, (i + 1) * samples))
        for i in range(len(rollout) // samples)
    ]


def _record(
    pair: Pair, rollout: Rollout, piece: Part, host: dict[str, Tensor], prompt: int, rows: slice
) -> dict[str, Any]:
    mask = piece.mask[rows].cpu()
    kl = host["kl"][rows]
    record: dict[str, Any] = {
        "prompt": prompt,
        "text": as_text(rollout.prompts[rows.start]) if rollout.prompts else "",
        "completion": rollout.completions[rows.start] if rollout.completions else "",
        "tokens": int(mask.sum()),
        "sequences": int(mask.any(1).sum()),
        "by_position": [[float(a), int(b)] for a, b in zip(kl.sum(0), mask.sum(0), strict=True)],
        "top": _top(pair, piece, kl, mask, rows),
    }
    for name, values in host.items():
        record[name] = float(values[rows].sum())
    if "floor" in host:
        record["floor_tokens"] = record["tokens"]
    return record


def _top(pair: Pair, piece: Part, kl: Tensor, mask: Tensor, rows: slice) -> list[dict[str, Any]]:
    """The tokens of a prompt's completions with the largest KL, with what stood before them."""
    tokens = piece.tokens[rows].cpu()
    flat = torch.where(mask, kl, torch.full_like(kl, -1.0)).flatten()
    found = []
    for index in flat.topk(min(TOP_TOKENS, len(flat))).indices.tolist():
        row, column = divmod(index, kl.shape[1])
        if not bool(mask[row, column]):
            continue
        before = tokens[row, max(0, column - CONTEXT) : column][mask[row, max(0, column - CONTEXT) : column]]
        found.append(
            {
                "kl": float(kl[row, column]),
                "token": pair.tokenizer.decode([int(tokens[row, column])]),
                "position": column,
                "before": pair.tokenizer.decode(before.tolist()),
            }
        )
    return found


def given(pair: Pair, prompts: list[list[int]], texts: list[Prompt], completions: list[str]) -> Rollout:
    """A rollout of completions that were given as text, tokenised once and ended."""
    end = int(pair.tokenizer.eos_token_id)
    answers = [[*pair.tokenizer.encode(c, add_special_tokens=False), end] for c in completions]
    return collate(
        [p + a for p, a in zip(prompts, answers, strict=True)],
        [[False] * len(p) + [True] * len(a) for p, a in zip(prompts, answers, strict=True)],
        [[float("nan")] * (len(p) + len(a)) for p, a in zip(prompts, answers, strict=True)],
        pad=int(pair.tokenizer.pad_token_id),
        prompts=texts,
        completions=completions,
    )


@torch.no_grad()
def token_map(pair: Pair, rollout: Rollout, row: int, alternatives: int = 4) -> list[dict[str, Any]]:
    """Every token of one completion with its KL and the likeliest tokens of both models there."""
    rollout = rollout.to(pair.device)
    piece = part(rollout, torch.tensor([row], device=pair.device))
    piece = replace(piece, mask=piece.of(rollout.mask))
    there, _, ours = both_ways(pair, piece)
    theirs = pair.reference(piece)
    tops = [_likeliest(pair, anchor, alternatives) for anchor in (ours, theirs)]
    kl = _kl(there)
    return [
        {
            "token": pair.tokenizer.decode([int(piece.tokens[0, t])]),
            "kl": float(kl[0, t]),
            "policy": tops[0][t],
            "reference": tops[1][t],
        }
        for t in range(piece.mask.shape[1])
        if bool(piece.mask[0, t])
    ]


def _likeliest(pair: Pair, anchor: ReferenceStates, count: int) -> list[list[tuple[str, float]]]:
    """The likeliest next tokens at each position, with their probabilities."""
    states = anchor.states[0]
    if anchor.head is not None:
        states = anchor.head.logits(states)
    p = (states.float() / pair.policy.temperature).softmax(-1)
    values, ids = p.topk(min(count, p.shape[-1]), -1)
    return [
        [(pair.tokenizer.decode([int(i)]), round(float(v), 4)) for v, i in zip(vs, js, strict=True)]
        for vs, js in zip(values, ids, strict=True)
    ]


def _kl(stats: TokenStats) -> Tensor:
    assert stats.kl is not None, "both models' states were given"
    return stats.kl
