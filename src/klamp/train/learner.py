"""One optimiser step under KL control: the body of the trainer, used by the loop and by LocalBackend alike."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from klamp import estimators as e
from klamp import trust
from klamp.clamp_scalers import lora_scaler, snapshot, weights_scaler
from klamp.control import Control
from klamp.controllers.hold import HoldState
from klamp.distributed import settle
from klamp.errors import warn
from klamp.masked import sum_count
from klamp.models.optimizer import optimizer_of, rate_of
from klamp.models.policy import Policy, ReferenceStates
from klamp.monitor import Alarm
from klamp.placements import future_by_position
from klamp.references import Ema, Periodic, parse
from klamp.references.cache import ReferenceCache
from klamp.references.states import AdapterOff, Reference, make_reference
from klamp.rounding_floor import measure_floor, reads_rounding, warn_near_floor
from klamp.sampling.merged_model import ADAPTER, MergedModel
from klamp.sampling.rollout import Part, Rollout, parts
from klamp.train.algorithms import Look, Prepared, algorithm_of, needs_look, prepare
from klamp.train.config import ResolvedConfig
from klamp.train.kl_after_update import (
    KLMeasurement,
    Sums,
    moments,
    relative_error,
)
from klamp.train.kl_config import control_of
from klamp.train.launch import shard_like_policy
from klamp.train.metrics import Accumulator, Totals, band, clamp_metrics, reward_metrics, sampler_gap
from klamp.train.rewards import Scored
from klamp.train.update import Anchors, optimise

logger = logging.getLogger(__name__)

PER_TOKEN = ("kl/ref/exact", "kl/ref/k1", "kl/ref/k3", "kl/sampler/k1", "kl/sampler/k3", "rollout/gap")
"""Means over the counted tokens that every step logs."""

FLOOR_ROWS = 32
"""Sequences that the floor is measured on: rounding is the same everywhere."""


@dataclass(frozen=True)
class Outcome:
    """What a step did."""

    metrics: dict[str, float]
    alarms: list[Alarm]
    token_kl: Tensor
    """[N, C] exact KL of each token before the update; for samples and maps."""
    sampler_gap: Tensor
    """[N] mean |log μ − log π| before the update over the tokens whose sampler's log-prob is known; 0 without any."""
    control: Control
    """The control of the next step."""


class Learner:
    """Policy, reference, optimiser and control of a run."""

    def __init__(self, config: ResolvedConfig, policy: Policy, accelerator: Any, run: Path) -> None:
        self.config, self.policy, self.accelerator = config, policy, accelerator
        self.sharded = policy.sharded = bool(accelerator.is_fsdp2)
        self.merged = MergedModel(policy, sharded=True) if self.sharded else None
        """The sampler's model, made while the weights are whole."""
        self.control = control_of(config.kl)
        """Price, clamp and monitor after the last step; a step puts another one in its place, and changes none."""
        spec = parse(config.kl.reference)
        # Before the launcher wraps the model: an adapter of the reference's is sharded along with it.
        trust, on_cpu = config.trust_remote_code, config.kl.reference_on_cpu
        self.reference: Reference = make_reference(
            policy, self._forward, spec, run, on_cpu=on_cpu, trust_remote_code=trust
        )
        self.module, self.optimizer = accelerator.prepare(policy, optimizer_of(policy, config.optim))
        if self.sharded:
            self.reference.shard(partial(shard_like_policy, accelerator))
        self.device = next(policy.model.parameters()).device
        self.trained = list(policy.trainable().values())
        self.scale_lora: Callable[[float], None] | None = None
        self.applied = 0
        """Updates made by this process."""
        self.skipped = 0
        """Updates left out over the whole run: nothing counted, or the gradient was not finite."""
        self.grad_norm = 0.0
        self.future_kl = torch.zeros(0, dtype=torch.float64)
        """The KL still to come after each position, the mean over the last step's sequences."""
        self.largest_gap = torch.zeros(())
        """The largest difference between sampler and policy on this process's tokens of the step."""

    # -- one step ---------------------------------------------------------------------------------------------------

    def step(self, step: int, rollout: Rollout, scored: Scored, *, stale: bool = False) -> Outcome:
        """One step on sampled and rewarded sequences. ``stale`` says that their sampler was an older policy."""
        rollout = rollout.to(self.device)
        added, control = Accumulator(self.reduce), self.control
        anchors = self.reference_states(rollout)
        look = self.look(rollout, anchors) if needs_look(self.config, stale) else None
        prepared = prepare(self.config, rollout, scored, look, control.beta if control.started else 0.0, self.reduce)
        if not control.started:
            control = self._first_price(rollout, prepared, anchors)
            if algorithm_of(self.config).values:  # PPO's advantages may hold the price, which was not known yet
                prepared = prepare(self.config, rollout, scored, look, control.beta, self.reduce)
        if self.config.correction is not None:
            prepared = replace(prepared, sampler_logp=rollout.sampler_logp)
        elif stale and look is not None:
            known = torch.isfinite(rollout.sampler_logp)
            prepared = replace(prepared, old_logp=torch.where(known, rollout.sampler_logp, look.logp))
        prepared = replace(prepared, future_kl=self._expected_future(rollout))
        origin = self._origin()
        updated = optimise(self, step, rollout, prepared, anchors, beta=control.beta, added=added)
        self.applied += updated.applied
        self.skipped += updated.skipped
        self.grad_norm = self.grad_norm if updated.grad_norm is None else updated.grad_norm
        seen = updated.met if look is None else look
        self._add_kl(rollout, prepared, seen, added)
        sums = added.totals()
        kl = sums.mean("kl") if sums.count("kl") else math.nan  # nothing counted is not a KL of 0
        rewards = reward_metrics(rollout, scored, self.reduce)
        sequences = int(sums.count("sequences"))
        measurement = self._measurement(rollout, prepared, anchors, seen, sequences, backtracks=origin is not None)
        if updated.applied:
            self._keep_future(seen.kl, prepared.counted)
            after = self._after_update(control, step, origin, kl, measurement, prepared, sums, rewards)
        else:  # controllers count on one move a measurement, and the first price waits for a batch that counts
            after = self.control.skip(kl, step=step, figures=self._watched(sums, rewards))
        self.settle()
        elsewhere = self.reference.after_step(step)  # the next batch's KL will be to another reference
        restarts = isinstance(self.reference.spec, Periodic)  # it becomes the policy, so KL begins at 0 again
        self.control = after.new_reference(restarts=restarts) if elsewhere else after
        if elsewhere and not isinstance(self.reference.spec, Ema):  # an average moves little in a step
            self.future_kl = self.future_kl[:0]
        metrics = {**self._kl_metrics(sums, kl, control), **clamp_metrics(after, measurement.share)}
        metrics |= {name: sums.mean(name) for name in sums.names() if name.startswith(("loss/", "policy/", "rollout/"))}
        metrics |= {**rewards, "policy/spread": prepared.spread, "policy/signal": prepared.signal}
        metrics["rollout/gap_max"] = self.largest(self.largest_gap)
        metrics |= {
            "train/skipped": float(self.skipped),
            "train/lr": rate_of(self.config, step),
            "train/grad_norm": self.grad_norm,
        }
        gap = sampler_gap(rollout, seen.logp, prepared.counted)
        return Outcome(metrics, list(after.alarms), seen.kl, gap, self.control)

    def _after_update(
        self,
        control: Control,
        step: int,
        origin: dict[str, Tensor] | None,
        kl: float,
        measurement: KLMeasurement,
        prepared: Prepared,
        sums: Totals,
        rewards: Mapping[str, float],
    ) -> Control:
        """The control after an update that began at ``kl``: clamped, steered and recorded."""
        noise, figures = relative_error(sums), self._watched(sums, rewards)
        n, signal = int(sums.count("sequences")), prepared.signal
        control = control.before_update(kl, prepared.spread, n, signal=signal, noise=noise)
        if control.limit is None:
            return control.after_update(step=step, figures=figures)
        own = measurement.first(kl, control.far)
        # A step that is backtracked began at kl, not at the reference.
        began = None if origin is None or not math.isfinite(kl) else kl
        scale = self._scaler(origin)
        return control.after_update(measurement, scale, kl=own, origin_kl=began, step=step, figures=figures)

    def _watched(self, sums: Totals, rewards: Mapping[str, float]) -> dict[str, Any]:
        """What the monitor judges besides KL, price and effort."""
        return {
            "estimates": {"k3": sums.mean("kl/ref/k3")} if self.config.kl.unit == "token" else {},
            "sampler_kl": sums.mean("kl/sampler/k1"),
            "no_signal": rewards.get("reward/no_signal") if algorithm_of(self.config).groups else None,
        }

    def _kl_metrics(self, sums: Totals, kl: float, control: Control) -> dict[str, float]:
        """``kl/*`` of a step at the price of ``control``, but for the clamp's."""
        metrics = {name: sums.mean(name) for name in PER_TOKEN}
        metrics |= {"kl/steered": kl, "kl/beta": control.beta, **band(kl, self.config.kl.goal)}
        return metrics | {"kl/noise": relative_error(sums), "kl/floor": control.state.floor}

    def _floor(self, rollout: Rollout, prepared: Prepared, anchors: Anchors) -> float:
        """What rounding makes of KL, in the unit of the target; 0 where nothing rounds or weights are in shards."""
        split = self.sharded or self.accelerator.distributed_type == "DEEPSPEED"
        if split or not reads_rounding(self.policy.model, autocast=self.rounds):
            return 0.0
        rows = torch.arange(min(len(rollout), FLOOR_ROWS), device=self.device)

        def measure() -> float:
            return self._sums(self._measured(rollout, rows, prepared, anchors)).mean

        return measure_floor(self.policy.model, measure, self.config.seed)

    def _first_price(self, rollout: Rollout, prepared: Prepared, anchors: Anchors) -> Control:
        """The control with its first price, from the first batch; every process has the same numbers."""
        floor = self._floor(rollout, prepared, anchors)
        warn_near_floor(self.config.kl.goal, self.config.kl.unit, floor)
        mask = prepared.counted
        sums = self.reduce(torch.stack([mask.sum().double(), mask.any(1).sum().double()]))
        length = float(sums[0] / sums[1].clamp(min=1))
        updates = self.config.algorithm.minibatches * self.config.algorithm.epochs
        n = float(sums[1]) / updates or None  # sequences that are drawn for each update
        control = self.control.init(spread=prepared.spread, length=length, n=n, floor=floor, signal=prepared.signal)
        price, given = control.state.price, getattr(control.controller, "init_beta", None)
        if given is not None and isinstance(price, HoldState) and price.computed:
            kept = math.exp(price.log_rho) * price.unit  # what Hold goes on from
            if not math.isclose(given, kept, rel_tol=1e-6):
                warn(
                    logger,
                    "the first price %.3g is far from what the rewards' spread and the length give. From the second "
                    "step on Hold starts from %.3g.",
                    *(given, kept),
                )
        return control

    # -- measuring --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def look(self, rollout: Rollout, anchors: Anchors) -> Look:
        """Log-probs (and values) of the whole batch before the update."""
        seen = Look.empty(rollout, values=self.policy.value is not None)
        for piece in parts(rollout, torch.arange(len(rollout), device=self.device), self.config.optim.micro_batch):
            with self.autocast():
                states = self.module(piece, values=self.policy.value is not None)
                stats = self.policy.stats(piece, states.hidden, anchors(piece))
            seen.keep(piece, stats)
            if states.values is not None and seen.values is not None:
                piece.put(seen.values, states.values)
        return seen

    def _measurement(
        self,
        rollout: Rollout,
        prepared: Prepared,
        anchors: Anchors,
        seen: Look,
        sequences: int,
        *,
        backtracks: bool,
    ) -> KLMeasurement:
        """KL on the step's own tokens after the update, in the unit of the target; ``seen`` is what it was before.

        ``backtracks``: the clamp scales the step, not the displacement from the reference.
        """
        stride = max(1, round(1 / self.config.kl.clamp_share))
        rows = torch.arange(0, len(rollout), stride, device=self.device)
        measured = torch.zeros_like(seen.kl)

        def before(rows: Tensor) -> Sums:
            return self._sums([(seen.kl[rows], prepared.counted[rows])])

        def now(rows: Tensor) -> Sums:
            return self._sums(self._measured(rollout, rows, prepared, anchors, measured))

        def last(rows: Tensor) -> Sums:
            return self._sums([(measured[rows], prepared.counted[rows])])

        return KLMeasurement(rows, sequences // stride, before, now, None if backtracks else last)

    @torch.no_grad()
    def _measured(
        self, rollout: Rollout, rows: Tensor, prepared: Prepared, anchors: Anchors, into: Tensor | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Exact KL of the tokens of some rows under the policy as it is now, and which of them count.

        It is written to its place in ``into`` [N, C] too.
        """
        for piece in parts(rollout, rows, self.config.optim.micro_batch) if len(rows) else ():
            piece = replace(piece, mask=piece.of(prepared.counted))
            with self.autocast():
                stats = self.policy.stats(piece, self.module(piece).hidden, anchors(piece))
            assert stats.kl is not None, "the learner always has a reference"
            if into is not None:
                piece.put(into, stats.kl)
            yield stats.kl, piece.mask

    def _sums(self, found: Iterable[tuple[Tensor, Tensor]]) -> Sums:
        """Sum and count over all processes of per-token KLs, in the unit of the target."""
        added = Accumulator(self.reduce)
        added.add("kl", torch.zeros((), device=self.device), torch.zeros((), device=self.device))
        for kl, counted in found:
            added.add("kl", *sum_count(kl, counted, per=self.config.kl.unit))
        return Sums(*added.totals().pairs["kl"])

    def reference_states(self, rollout: Rollout) -> Anchors:
        """The reference's states of any part of the rollout."""

        def fresh(piece: Part) -> ReferenceStates:
            with self.autocast():
                return self.reference.states(piece)

        def agree(mine: bool) -> bool:
            # A sharded reference is computed by all processes together, so they keep its states or none does.
            return bool(self.reduce(torch.tensor(float(mine))) > 0) if self.sharded else mine

        return ReferenceCache(fresh, rollout, self.config.optim.micro_batch, agree)

    def _add_kl(self, rollout: Rollout, prepared: Prepared, seen: Look, added: Accumulator) -> None:
        counted = prepared.counted
        added.add("kl", *sum_count(seen.kl, counted, per=self.config.kl.unit))
        added.add("kl/ref/exact", *sum_count(seen.kl, counted))
        added.add("kl/ref/k1", *sum_count(e.k1(seen.logp, seen.ref_logp), counted))
        added.add("kl/ref/k3", *sum_count(e.k3(seen.logp, seen.ref_logp, tail=self.config.kl.tail), counted))
        gap = trust.gap(seen.logp, rollout.sampler_logp, counted)
        added.add("kl/sampler/k1", gap.k1, gap.tokens)
        added.add("kl/sampler/k3", gap.k3, gap.tokens)
        added.add("rollout/gap", gap.absolute, gap.tokens)
        self.largest_gap = gap.largest
        added.add("sequences", torch.zeros(()), torch.tensor(len(rollout)))
        for name, moment in moments(seen.kl, counted, rollout.group_size, self.config.kl.unit).items():
            added.add(name, moment, torch.ones(()))

    def _expected_future(self, rollout: Rollout) -> Tensor:
        """[N, C] of the last step's KL to come. It knows nothing of this step's tokens, so the mean gradient stays."""
        count, width = rollout.mask.shape
        known = self.future_kl[:width]
        return torch.nn.functional.pad(known, (0, width - len(known))).float().to(self.device).expand(count, width)

    def _keep_future(self, kl: Tensor, counted: Tensor) -> None:
        width = int(self.largest(torch.tensor(float(kl.shape[1]))))
        own = torch.nn.functional.pad(future_by_position(kl, counted), (0, width - kl.shape[1]))
        total, number = self.reduce(own).cpu()
        if number.any() and total.isfinite().all():
            self.future_kl = total / number.clamp(min=1)

    # -- plumbing ---------------------------------------------------------------------------------------------------

    def _scaler(self, origin: dict[str, Tensor] | None) -> Callable[[float], None]:
        self.settle()
        if isinstance(self.reference, AdapterOff):
            # Finding the matrices takes longer than scaling them, and they stay the same through a run.
            scale = self.scale_lora = self.scale_lora or lora_scaler(self.policy.model, ADAPTER)
        else:
            fixed = self.reference.origin()
            scale = weights_scaler(self.policy.model, fixed if fixed is not None else origin or {})

        def settled(s: float) -> None:
            self.settle()
            scale(s)

        return settled

    def settle(self) -> None:
        """Leave the weights in their shards, before they are read or written outside a forward pass."""
        if self.sharded:
            settle(self.policy)

    def _origin(self) -> dict[str, Tensor] | None:
        """The weights before the step, where the clamp will have to backtrack to them."""
        self.settle()
        backtracks = self.config.kl.clamp_limit is not None and not isinstance(self.reference, AdapterOff)
        return snapshot(self.policy.model) if backtracks and self.reference.origin() is None else None

    def reduce(self, x: Tensor) -> Tensor:
        """The sum over all processes."""
        return self.accelerator.reduce(x.to(self.device), reduction="sum")  # type: ignore[no-any-return]

    def largest(self, x: Tensor) -> float:
        """The largest value over all processes, by the one exchange there is: a sum."""
        each = torch.zeros(self.accelerator.num_processes, device=self.device)
        each[self.accelerator.process_index] = x
        return float(self.reduce(each).max())

    def _forward(self, piece: Part) -> Any:
        return self.module(piece)

    @property
    def rounds(self) -> bool:
        """Whether forward passes are taken in bfloat16, whatever the weights are."""
        return self.device.type == "cuda" and self.config.dtype != "float32"

    def autocast(self) -> Any:
        """The context of a forward pass."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.rounds)
