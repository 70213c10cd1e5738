"""One block of prompts: sample, score under both models, reduce to a record a prompt.

A block is always the same prompts in the same batch, whatever the number of processes, so figures do not depend on it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from klamp import estimators as e
from klamp import strict_json
from klamp.chat import Prompt, as_text
from klamp.errors import ConfigError, writing
from klamp.kernels import TokenStats
from klamp.masked import select
from klamp.measure.two_models import Pair
from klamp.models.policy import ReferenceStates, score
from klamp.sampling.rollout import Part, Rollout, collate, part
from klamp.train.run_folder import atomic_text, no_links_out, read_jsonl

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


GO_ON = "run the same command again to go on where it stopped"


@dataclass(frozen=True)
class Settings:
    """What makes a measurement the same measurement."""

    policy: str
    reference: str
    prompts: int
    max_tokens: int
    samples: int
    temperature: float
    batch: int
    seed: int
    chat: bool | None
    given: bool
    prompts_hash: str = ""


class Store:
    """Records on disk, block by block, or in memory when there is no folder."""

    def __init__(self, folder: Path | None, settings: Settings, rank: int) -> None:
        self.folder, self.memory = folder, []  # type: ignore[var-annotated]
        self.done: set[int] = set()
        if folder is None:
            return
        no_links_out(folder)
        with writing(folder, GO_ON):
            folder.mkdir(parents=True, exist_ok=True)
        self._claim(folder, settings)
        self.file = folder / f"parts-{rank}.jsonl"
        for line in self._lines():
            self.done.add(_block(line, folder))

    def add(self, block: int, found: list[dict[str, Any]]) -> None:
        """Keep the records of a block; on disk before this returns."""
        if self.folder is None:
            self.memory.append({"block": block, "records": found})
            return
        with writing(self.file, GO_ON), self.file.open("ab") as handle:
            handle.write((json.dumps({"block": block, "records": found}, ensure_ascii=False) + "\n").encode())
            handle.flush()
            os.fsync(handle.fileno())

    def everything(self, blocks: int, ranks: int) -> Iterator[dict[str, Any]]:
        """All records in the order of their blocks, once every process has written its own."""
        if self.folder is None:
            if ranks > 1:
                raise ConfigError("several processes share a measurement through a folder. Give out= (or --out).")
            lines: list[dict[str, Any]] = self.memory
            yield from (r for line in lines for r in line["records"])
            return
        index = self._wait(blocks)
        for _, (file, offset) in sorted(index.items()):
            with file.open("rb") as handle:
                handle.seek(offset)
                line = strict_json.parse(handle.readline().decode("utf-8", "replace"), f"{str(file)!r}, byte {offset}")
            found = line.get("records")
            if not isinstance(found, list) or not all(isinstance(r, dict) for r in found):
                raise ConfigError(
                    f"{str(file)!r}, byte {offset}: no records of klamp's. Remove the file to measure again."
                )
            yield from found

    def _wait(self, blocks: int, patience: float = 3600.0) -> dict[int, tuple[Path, int]]:
        """Where each block lies; waits for the other processes."""
        import time

        begun = time.monotonic()
        while len(index := self._index()) < blocks:
            if time.monotonic() - begun > patience:
                raise ConfigError(f"only {len(index)} of {blocks} blocks arrived in {self.folder}. Run it again.")
            time.sleep(0.5)
        return index

    def _index(self) -> dict[int, tuple[Path, int]]:
        index: dict[int, tuple[Path, int]] = {}
        assert self.folder is not None
        for file in sorted(self.folder.glob("parts-*.jsonl")):
            offset = 0
            with file.open("rb") as handle:
                for raw in handle:
                    if raw.endswith(b"\n"):
                        line = strict_json.parse(raw.decode("utf-8", "replace"), f"{str(file)!r}, byte {offset}")
                        index.setdefault(_block(line, file), (file, offset))
                    offset += len(raw)
        return index

    def _lines(self) -> Iterator[dict[str, Any]]:
        """This process's whole lines; a torn last one is cut off. Blocks of other processes count as done too."""
        assert self.folder is not None
        for file in sorted(self.folder.glob("parts-*.jsonl")):
            if file == self.file:
                with file.open("rb+") as handle:
                    handle.truncate(sum(len(raw) for raw in handle.readlines() if raw.endswith(b"\n")))
            yield from read_jsonl(file)

    def _claim(self, folder: Path, settings: Settings) -> None:
        file = folder / "settings.json"
        wanted = asdict(settings)
        if file.is_file():
            try:
                saved = strict_json.parse(file.read_text(encoding="utf-8"), str(file))
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"{str(file)!r} cannot be read: {error}. Choose another --out.") from None
            different = sorted(k for k in wanted if saved.get(k) != wanted[k])
            if different:
                raise ConfigError(
                    f"{str(folder)!r} holds another measurement; {', '.join(different)} differ. Choose another --out."
                )
            return
        atomic_text(file, json.dumps(wanted, indent=1, ensure_ascii=False))


def _block(line: dict[str, Any], file: Path) -> int:
    block = line.get("block")
    if isinstance(block, bool) or not isinstance(block, int):
        raise ConfigError(f"{str(file)!r}: block must be a whole number, got {block!r:.80}. Choose another --out.")
    return block
