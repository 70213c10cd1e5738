"""From per-prompt records to figures with confidence intervals, in one pass over any number of records.

A record is one prompt's sums. Tokens of a prompt are not independent, prompts are: intervals are over prompts, by the
delta method for a ratio of sums, with Student's t.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from klamp.results.statistics import student

SUMS = ("kl", "forward_kl", "k1", "k3", "entropy", "ref_entropy", "gap")
POSITIONS = 512
"""Positions of a completion that are averaged one by one."""
TOP = 20
"""Tokens and prompts listed as drifted most."""


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95 % interval over prompts."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.4g} [{self.low:.4g}, {self.high:.4g}]"


@dataclass
class Ratio:
    """``Σ x / Σ n`` over prompts with its variance, from running sums."""

    count: int = 0
    x: float = 0.0
    n: float = 0.0
    xx: float = 0.0
    xn: float = 0.0
    nn: float = 0.0

    def add(self, x: float, n: float) -> None:
        """One prompt's sum and weight."""
        self.count += 1
        self.x += x
        self.n += n
        self.xx += x * x
        self.xn += x * n
        self.nn += n * n

    def estimate(self) -> Estimate:
        """Mean and 95 % interval; an infinite one with fewer than two prompts."""
        if self.n <= 0:
            return Estimate(0.0, 0.0, 0.0)
        mean = self.x / self.n
        if self.count < 2:
            return Estimate(mean, -math.inf, math.inf)
        # Residuals x - mean·n have mean 0; their variance over prompts gives that of the ratio.
        square = max(self.xx - 2 * mean * self.xn + mean * mean * self.nn, 0.0)
        half = student(self.count - 1) * math.sqrt(square * self.count / (self.count - 1)) / self.n
        return Estimate(mean, mean - half, mean + half)


@dataclass
class Figures:
    """Running sums of everything a measurement reports."""

    per_token: dict[str, Ratio] = field(default_factory=lambda: {k: Ratio() for k in SUMS})
    per_sequence: dict[str, Ratio] = field(default_factory=lambda: {k: Ratio() for k in ("kl", "k1")})
    floor: Ratio = field(default_factory=Ratio)
    positions: list[list[float]] = field(default_factory=list)
    tokens: int = 0
    sequences: int = 0
    top_tokens: list[tuple[float, int, dict[str, Any]]] = field(default_factory=list)
    top_prompts: list[tuple[float, int, dict[str, Any]]] = field(default_factory=list)

    def add(self, record: dict[str, Any]) -> None:
        """One prompt."""
        n, sequences = record["tokens"], record["sequences"]
        self.tokens += n
        self.sequences += sequences
        for name in SUMS:
            if record.get(name) is not None:
                self.per_token[name].add(record[name], n)
        for name, ratio in self.per_sequence.items():
            ratio.add(record[name], sequences)
        if record.get("floor") is not None:
            self.floor.add(record["floor"], record["floor_tokens"])
        for t, (total, count) in enumerate(record["by_position"][:POSITIONS]):
            while len(self.positions) <= t:
                self.positions.append([0.0, 0.0])
            self.positions[t][0] += total
            self.positions[t][1] += count
        mean = record["kl"] / n if n else 0.0
        _keep(
            self.top_prompts, mean, record["prompt"], {"prompt": record["prompt"], "kl": mean, "text": record["text"]}
        )
        for i, token in enumerate(record["top"]):
            _keep(self.top_tokens, token["kl"], record["prompt"] * 1000 + i, {**token, "prompt": record["prompt"]})

    def by_position(self) -> list[float]:
        """Mean KL of the t-th token of a completion."""
        return [total / count if count else 0.0 for total, count in self.positions]

    def most_drifted(self, what: str) -> list[dict[str, Any]]:
        """The tokens or the prompts that drifted most, the worst first."""
        heap = self.top_tokens if what == "tokens" else self.top_prompts
        return [item for _, _, item in sorted(heap, key=lambda e: (-e[0], e[1]))]


def total(records: Iterable[dict[str, Any]]) -> Figures:
    """Figures of all records."""
    figures = Figures()
    for record in records:
        figures.add(record)
    return figures


def _keep(heap: list[tuple[float, int, dict[str, Any]]], value: float, order: int, item: dict[str, Any]) -> None:
    """Keep the TOP largest; ties by order, so that the result does not depend on the order of records."""
    entry = (value, -order, item)
    if len(heap) < TOP:
        heapq.heappush(heap, entry)
    elif entry[:2] > heap[0][:2]:
        heapq.heapreplace(heap, entry)
