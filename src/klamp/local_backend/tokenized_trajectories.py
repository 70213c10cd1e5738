"""Groups of trajectories as one batch: sequences with their counted tokens, and the advantage of each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from klamp.advantages import alike, group_advantages
from klamp.chat import Encoder, Row
from klamp.errors import ConfigError, require_number
from klamp.local_backend.arguments import Arguments
from klamp.sampling.rollout import Rollout, collate
from klamp.train.rewards import Scored

ENGINE_GAP = 0.05
"""Mean |log μ − log π| a token, in nats, up to which an engine in bfloat16 and the trainer usually differ on the same
weights. Choices that do not say their step are of another policy beyond it."""


@dataclass(frozen=True)
class Batch:
    """What a step trains on."""

    trajectories: list[list[Any]]
    """By group; groups without any are left out."""
    rows: list[list[list[Row]]]
    """The sequences of each trajectory."""
    temperature: float
    now: int
    """Step of the weights about to be trained."""
    stale: bool
    """Whether some tokens may have been drawn by other weights than those: ratios correct for it."""
    exceptions: int

    @classmethod
    def of(cls, groups: Iterable[Any], encoder: Encoder, arguments: Arguments, *, now: int) -> Batch:
        """``groups`` tokenised and checked; ``now`` is the step of the weights about to be trained."""
        given = list(groups)
        if any(getattr(g, "pending", None) for g in given):
            raise ConfigError("a TrajectoryGroup of coroutines has not run. Write: await TrajectoryGroup(coroutines).")
        members = [list(getattr(g, "trajectories", g)) for g in given]
        failed = sum(isinstance(t, BaseException) for g in members for t in g)
        members = [[t for t in g if not isinstance(t, BaseException)] for g in members]
        members = [g for g in members if g]
        failed += sum(len(getattr(g, "exceptions", ())) for g in given)
        if not members:
            raise ConfigError(f"there is no trajectory to train on ({len(given)} groups, {failed} failed rollouts).")
        for g, group in enumerate(members):
            for t, trajectory in enumerate(group):
                _check(trajectory, f"trajectory {t} of group {g}")
        rows = [[_rows(t, encoder) for t in group] for group in members]
        turns = [turn for group in rows for each in group for row in each for turn in row.turns]
        known = [v for group in rows for each in group for row in each for v in _own(row) if math.isfinite(v)]
        if arguments.kl_penalty_source == "sample" and not known:
            raise ConfigError(
                "kl_penalty_source='sample' needs the log-probs that the sampler recorded, and no trajectory has any. "
                "Keep the choices of backend.sample, or use 'current_learner'."
            )
        temperature = _temperature({t.temperature for t in turns if t.temperature is not None}, arguments.temperature)
        stale = bool(known) and any(turn.step != now for turn in turns)
        return cls(members, rows, temperature, now, stale, failed)

    @property
    def groups(self) -> int:
        return len(self.trajectories)

    @property
    def largest(self) -> int:
        return max(map(len, self.trajectories))

    @property
    def flat(self) -> list[Row]:
        return [row for group in self.rows for each in group for row in each]

    @property
    def says_something(self) -> bool:
        """Whether two counted tokens may differ in KL: a single answer, said over and over, is its own mean."""
        rows = self.flat[:8]
        return len({tuple(r.ids) for r in rows}) > 1 or any(sum(r.counted) > 1 for r in rows)

    def tensors(self, pad: int, arguments: Arguments) -> tuple[Rollout, Scored]:
        """The sequences, and their trajectory's reward, advantage within its group and weight in the loss."""
        rows = self.flat
        rollout = collate([r.ids for r in rows], [r.counted for r in rows], [r.logp for r in rows], pad=pad)
        rewards = [torch.tensor([float(t.reward) for t in g], dtype=torch.float64) for g in self.trajectories]
        art = arguments.advantages != "klamp"
        # ART: the population's standard deviation, eps 1e-6. klamp, as TRL: n - 1 and 1e-4.
        scale: dict[str, Any] = {"eps": 1e-6, "correction": 0} if art else {}
        relative = [group_advantages(r, len(r), std=arguments.std, **scale) for r in rewards]
        joined = unit_scaled(torch.cat(relative)) if arguments.advantages == "art_scaled" else torch.cat(relative)
        sizes = torch.tensor([len(each) for group in self.rows for each in group])
        valid = torch.ones(len(rows), dtype=torch.bool)
        total, own = (x.repeat_interleave(sizes).float() for x in (torch.cat(rewards), joined))
        told = torch.cat([a.any().expand(len(a)) for a in relative]).repeat_interleave(sizes)
        weights = self._weights().repeat_interleave(sizes).float() if art else None
        return rollout, Scored(total, valid, {}, own, told, weights)

    def _weights(self) -> Tensor:
        """By trajectory: ``1 / its tokens``, scaled to a mean of 1 over all tokens, so that each weighs the same."""
        tokens = torch.tensor([sum(sum(row.counted) for row in each) for group in self.rows for each in group])
        return tokens.sum() / (len(tokens) * tokens.double())

    def older(self, gap: Tensor) -> int:
        """Sequences that another policy drew: by the step that their choices name, or by ``gap`` where none does."""
        return sum(_older(row, self.now, float(g)) for row, g in zip(self.flat, gap, strict=True))

    def metrics(self, gap: Tensor) -> dict[str, float]:
        """What the batch was made of; rewards over trajectories, each once. ``gap`` is the learner's, by sequence."""
        everyone = [t for group in self.trajectories for t in group]
        rewards = torch.tensor([float(t.reward) for t in everyone], dtype=torch.float64)
        named: dict[str, list[float]] = {}
        for trajectory in everyone:
            for name, value in dict(getattr(trajectory, "metrics", None) or {}).items():
                named.setdefault(f"trajectory/{name}", []).append(float(value))
        several = [
            torch.tensor([[float(t.reward) for t in group]], dtype=torch.float64)
            for group in self.trajectories
            if len(group) > 1
        ]
        equal = sum(bool(alike(r, torch.ones_like(r, dtype=torch.bool))) for r in several)
        same = {"reward/no_signal": equal / len(several)} if several else {}
        return {
            **same,
            "reward/mean": float(rewards.mean()),
            "reward/std": float(rewards.std(correction=0)),
            "data/groups": float(self.groups),
            "data/trajectories": float(len(everyone)),
            "data/sequences": float(len(self.flat)),
            "data/retokenised": float(sum(r.retokenised for r in self.flat)),
            "data/exceptions": float(self.exceptions),
            "data/stale": float(self.older(gap)),
            **{name: sum(values) / len(values) for name, values in named.items()},
        }


def unit_scaled(advantages: Tensor) -> Tensor:
    """``A / mean |A|`` over those that are not 0: what ART's packing makes of a step's advantages."""
    moved = advantages[advantages != 0].abs()
    return advantages / moved.mean() if len(moved) else advantages


def _older(row: Row, now: int, gap: float) -> bool:
    steps = {turn.step for turn in row.turns if turn.step is not None}
    return bool(steps - {now}) if steps else gap > ENGINE_GAP


def _rows(trajectory: Any, encoder: Encoder) -> list[Row]:
    """The sequences of a trajectory, and of the side conversations that ART keeps beside it."""
    beside = getattr(trajectory, "additional_histories", None) or ()
    return [row for history in (trajectory, *beside) for row in encoder.rows(history)]


def _own(row: Row) -> Sequence[float]:
    return [v for v, counted in zip(row.logp, row.counted, strict=True) if counted]


def _check(trajectory: Any, where: str) -> None:
    if not hasattr(trajectory, "messages_and_choices") or not hasattr(trajectory, "reward"):
        raise ConfigError(f"{where} has no messages_and_choices and reward: {trajectory!r:.60}. Make it a Trajectory.")
    require_number(f"the reward of {where}", trajectory.reward, way_out="Leave a failed rollout out of the group.")


def _temperature(found: set[float], told: float | None) -> float:
    """The one temperature of the step: KL and log-probs are those of the distribution sampled from."""
    found = found | ({float(told)} if told is not None else set())
    if len(found) > 1:
        raise ConfigError(
            f"the step has temperatures {', '.join(f'{t:g}' for t in sorted(found))}. KL and log-probs are those of "
            "the distribution sampled from: train on one temperature at a time."
        )
    return next(iter(found), 1.0)
