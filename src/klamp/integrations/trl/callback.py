"""``KLControl``: a callback that steers ``trainer.beta`` and clamps the updates of a TRL trainer.

In TRL ``trainer.beta`` (not ``args.beta``) is read at every forward, so setting it between two steps steers. The KL
observed is TRL's own, already reduced over all processes: one entry of ``trainer._metrics["train"]["kl"]`` per
micro-batch in GRPO, per generated batch in RLOO.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from torch import Tensor
from transformers import TrainerCallback
from transformers.trainer_callback import TrainerState
from trl.trainer.rloo_trainer import RLOOTrainer

from klamp.clamp import LIMIT, Clamped
from klamp.clamp_scalers import Scaler, lora_scaler, weights_scaler
from klamp.control import Control
from klamp.controllers import Controller, State, Target
from klamp.errors import ConfigError, KlampError, require_number
from klamp.integrations.trl import checks
from klamp.integrations.trl.checks import Reminder, calling_trainer, controller_of, remind
from klamp.integrations.trl.tokens import (
    Inputs,
    OwnKL,
    Recorder,
    Trainer,
    counted,
    policy_of,
    reduce,
    squared_advantage,
    with_signal,
)
from klamp.masked import Unit
from klamp.monitor import BAND, Alarm, Monitor, logger

SAVED = "klamp.KLControl"
"""The key of klamp's state in ``trainer_state.json``. It names no callback class on purpose: with
``restore_callback_states_from_checkpoint`` the Trainer replaces a callback of that name by a new one without a trainer.
"""

MOVED = 1e-4
"""Until KL has passed this share of the target the policy still is the reference, and a price has nothing to act on."""


class Step(NamedTuple):
    """What a step's micro-batches hold, over all processes."""

    tokens: float
    """Tokens that count."""
    rows: float
    """Completions with such a token."""
    squares: float
    """Sum of the squared advantages of those that are told."""
    told: float
    """Completions with such a token in groups that show a signal."""


class KLControl(TrainerCallback):
    """Holds KL at its target: the price steers, the clamp stops.

    ``GRPOTrainer(..., callbacks=[KLControl(target=0.05, per="token")])``.
    """

    trainer: Trainer
    per: Unit
    clamp: bool

    def __init__(
        self,
        trainer: Trainer | None = None,
        controller: Controller | None = None,
        *,
        target: float | Target | None = None,
        per: Unit | None = None,
        clamp: bool | None = None,
        limit: float | None = None,
        feed_forward: bool = True,
        floor: float = 1e-8,
        monitor: Monitor | None = None,
    ) -> None:
        """``target`` nats ``per`` token or sequence with Hold, or any ``controller``.

        Args:
            trainer: the trainer it will be added to, to check the settings at once. None: found when training begins.
            controller: sets the price, in place of ``target`` and ``per``.
            target: the KL target, in nats.
            per: its unit.
            clamp: whether to scale back updates whose KL is over ``limit``. None: with a LoRA on its base only.
            limit: the largest KL. None: 1.1 times the target.
            feed_forward: whether Hold takes its first price from the first batch's advantages and lengths.
            floor: the least price, because at beta 0 TRL stops measuring the KL.
            monitor: raises the alarms. None: one with the usual thresholds.
        """
        self.controller = controller_of(controller, target, per)
        self.target: float | None = getattr(self.controller, "target", None)
        self.floor = require_number(
            "floor", floor, above=0, way_out="At beta 0 TRL measures no KL; 1e-8 prices nothing."
        )
        self.feed_forward = feed_forward
        self._asked = clamp, limit, monitor
        self._bound = False
        self._reminder: Reminder | None = None
        if trainer is not None:
            self._bind(trainer)
            self._reminder = remind(trainer)

    def _bind(self, trainer: Trainer) -> None:
        """Belong to ``trainer``; refuses at once what would fail silently or late."""
        clamp, limit, monitor = self._asked
        checks.check_trainer(trainer)
        self.trainer = trainer
        self.per = getattr(self.controller, "per", None) or _own_unit(trainer)
        checks.check_unit(trainer, self.per)
        checks.check_reference(trainer)
        checks.check_in_flight(trainer)
        self._check_alone()
        self.clamp = checks.lora_on_base(trainer) if clamp is None else clamp
        if self.clamp:
            checks.check_clamp(trainer)
        self.limit = self._limit(limit)
        bounds = getattr(self.controller, "bounds", None)
        monitor = monitor or Monitor(self.target, self.per if self.target else None, bounds=bounds)
        self.control = Control(self.controller, clamp=self.limit if self.clamp else None, monitor=monitor).init()
        """Price, clamp and monitor after the last step."""
        self.moved = self.settled = False
        self.recorder = Recorder(trainer)
        self._bound = True

    def _check_alone(self) -> None:
        others = [c for c in self.trainer.callback_handler.callbacks if isinstance(c, KLControl) and c is not self]
        if others:
            raise ConfigError("the trainer already has a KLControl; two of them would fight over beta. Remove one.")

    def _meet(self) -> None:
        """Know the trainer whose training begins."""
        caller = calling_trainer(self)
        if self._bound and caller is not None and caller is not self.trainer:
            raise ConfigError("this KLControl belongs to another trainer. Make one for each.")
        if self._reminder is not None:
            self._reminder.needed = False
        if self._bound:
            return
        if caller is None:
            raise ConfigError(
                "KLControl could not find the trainer that it was added to. Tell it: "
                "trainer.add_callback(KLControl(trainer, target=..., per=...))."
            )
        self._bind(caller)

    def _say_unclamped(self) -> None:
        """That the price is alone, where nobody asked for that, and how to clamp."""
        if self.clamp or self._asked[0] is not None or not self.trainer.is_world_process_zero():
            return
        unit = f"nats per {self.per}"
        target = "" if self.target is None else f" at {self.target:g} {unit}"
        limit = f"{self.limit:g} {unit}" if math.isfinite(self.limit) else "limit=..."
        logger.warning("%s", checks.unclamped(self.trainer, target, limit))

    def _limit(self, limit: float | None) -> float:
        if limit is None and self.clamp and self.target is None:
            raise ConfigError(
                f"limit is missing: {type(self.controller).__name__} has no target to derive it from. Pass limit=... "
                f"in nats per {self.per}, or clamp=False."
            )
        if limit is None:
            return LIMIT * (self.target or math.inf)
        return require_number("limit", limit, above=0, way_out=f"It is a KL in nats per {self.per}.")

    # The Trainer's events

    def on_init_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Refuse a trainer of another kind as soon as it is made; TRL's own has no reference yet at this point."""
        if (caller := calling_trainer(self)) is not None:
            checks.check_trainer(caller)

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Continue from the checkpoint where there is one, and set the price."""
        self._meet()
        self._say_unclamped()
        checks.check_in_flight(self.trainer)
        saved = _saved_in(state).get(SAVED)
        if saved is not None:
            self.load_state_dict(saved)
        self._own = OwnKL(self.trainer, self.per) if self.clamp else None
        self._scaler = self._displacement() if self.clamp else None
        self.recorder.attach()
        self._set_price()

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Where this step's entries in TRL's metrics begin, and whether its tokens are new to the policy."""
        trainer = self.trainer
        self._logged = len(trainer._metrics["train"].get("kl", ()))
        per_batch, often = trainer.args.steps_per_generation, trainer.num_iterations
        self._fresh = trainer._buffered_inputs is None or trainer._step % (per_batch * often) < per_batch
        self.recorder.batches = []

    def on_pre_optimizer_step(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Read KL on the step's own tokens before they move the policy: what the clamp compares its readings to."""
        self._before = None if self._own is None else self._own.on(self.recorder.batches)()

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Observe, clamp, steer, publish, save: after the optimiser's step, before TRL logs and writes a checkpoint."""
        kl, step = self._observe(self.recorder.batches)
        self._update(state.global_step, kl, step)
        self._publish(state.global_step, kl, step)
        self._set_price()
        _saved_in(state)[SAVED] = self.state_dict()
        self.recorder.batches = []

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Leave the trainer as it was found, at the last price."""
        self.recorder.detach()

    # What a step does

    def _observe(self, batches: Sequence[Inputs]) -> tuple[float | None, Step]:
        """This step's KL in the unit ``per`` from TRL's token means, and its counts; None where TRL measured none."""
        logged = self.trainer._metrics["train"].get("kl", [])[self._logged :]
        if not logged and not isinstance(self.trainer, RLOOTrainer):
            raise KlampError(
                "TRL logged no `kl` this step although beta > 0. Either another callback cleared its metrics, or this "
                "version of TRL names it differently: klamp was made for 1.16."
            )
        # RLOO measures once for a generated batch, of which this step may train on a part only.
        whole = self.trainer._buffered_inputs if isinstance(self.trainer, RLOOTrainer) and len(logged) == 1 else None
        table = self._counted(whole or batches)
        step = Step(*(sum(column) for column in zip(*table, strict=True)))
        if not logged:
            return None, step
        each = len(table) // len(logged)
        tokens = [sum(s.tokens for s in table[i * each : (i + 1) * each]) for i in range(len(logged))]
        total = math.fsum(kl * n for kl, n in zip(logged, tokens, strict=True))
        return total / max(step.tokens if self.per == "token" else step.rows, 1.0), step

    def _counted(self, batches: Sequence[Inputs]) -> list[Step]:
        """What each of some batches holds, over all processes."""
        told = with_signal(self.trainer, batches)
        return [Step(*row) for row in reduce(self.trainer, list(map(_count, batches, told)))]

    def _update(self, at: int, kl: float | None, step: Step) -> None:
        """The control after this step: clamped on its own tokens, and at the next price.

        The first step sets a first price, too, which its own KL then steers. No price follows a KL that is that of the
        reference itself, where it has nothing to act on.
        """
        if not self.settled and self.feed_forward and (spread := self._spread(step)) is not None:
            own = sum(part.rows for part in self._counted(self.recorder.batches))  # of RLOO's step the whole is more
            drawn = own / self.trainer.num_iterations  # of completions that are used so often
            length = step.tokens / max(step.rows, 1.0)
            self.control = self.control.init(spread=spread, length=length, n=drawn or None, signal=self._signal(step))
        self.settled = True
        self.moved = self.moved or (kl is not None and not abs(kl) <= MOVED * (self.target or 1.0))
        read = self.control.before_update(
            kl,
            self._spread(step),
            max(1, round(step.rows)),
            signal=self._signal(step),
            measured=self._before,
            fresh=self._fresh,
            steers=self.moved,
        )
        self.control = read.after_update(self._own, self._scaler, step=at, figures={"beta": float(self.trainer.beta)})
        if self._own is not None:
            self._own.on(())

    def _spread(self, step: Step) -> float | None:
        """RMS of the step's advantages; None where they say nothing about the price.

        RLOO with normalised advantages prices before it normalises.
        """
        hidden = getattr(self.trainer.args, "normalize_advantages", False)
        return None if hidden else math.sqrt(step.squares / max(step.rows, 1.0))

    def _signal(self, step: Step) -> float:
        """Share of the completions in groups that show a signal. In RLOO all do: its advantages hold the price."""
        return 1.0 if isinstance(self.trainer, RLOOTrainer) else min(step.told / max(step.rows, 1.0), 1.0)

    def _set_price(self) -> None:
        self.trainer.beta = max(self.control.beta, self.floor)

    def _displacement(self) -> Scaler:
        model, reference = policy_of(self.trainer), self.trainer.ref_model
        if reference is None:
            return lora_scaler(model)
        return weights_scaler(model, dict(self.trainer.accelerator.unwrap_model(reference).named_parameters()))

    # What others see

    @property
    def state(self) -> State:
        """The controller's state."""
        assert self.control.state.price is not None, "it is made with a price"
        return self.control.state.price

    @property
    def monitor(self) -> Monitor:
        """The monitor with what it has seen."""
        return self.control.seen

    def _publish(self, at: int, kl: float | None, step: Step) -> None:
        """Into TRL's metrics, which average over ``logging_steps`` and go to every tracker."""
        clamped, spread = self.control.clamped, self._spread(step)
        figures = {"beta": float(self.trainer.beta)}
        if spread is not None:
            figures |= {"spread": spread, "signal": self._signal(step)}
        if self.target is not None:
            figures["target"] = self.target
        if clamped is not None:
            figures |= {"effort": clamped.effort, "own_kl": clamped.kl_after}
            figures |= {"own_limit": self.control.own_limit or 0.0, "level": self.control.state.gauge.level}
        if kl is not None:
            alarms = [*self.control.alarms, *self._own_alarms(at, kl, clamped)]
            figures |= {"kl": kl, "alarms": float(len(alarms))} | {f"alarm/{a.kind}": 1.0 for a in alarms}
            if self.target is not None:
                figures["in_band"] = float(abs(kl / self.target - 1) <= BAND)
        for name, value in figures.items():
            self.trainer._metrics["train"][f"klamp/{name}"].append(value)

    def _own_alarms(self, at: int, kl: float, clamped: Clamped | None) -> list[Alarm]:
        """Of a reference that is another model, and of a clamp that does not hold."""
        alarms = []
        if at == 1 and self.control.state.monitor.steps == 1 and kl > 0.01 * (self.target or 1.0):
            message = (
                f"KL is {kl:.4g} before the first update, where policy and reference should be one. Look for dropout "
                "(disable_dropout=True), or weights that TRL's reference was not loaded with."
            )
            alarms.append(Alarm("off_reference", at, message, {"kl": kl}))
        if clamped is not None and not clamped.held:
            message = (
                f"the clamp could not bring KL from {clamped.kl_before:.4g} under its limit. Lower the learning rate."
            )
            alarms.append(Alarm("clamp_lost", at, message, {"kl": clamped.kl_after}))
        for alarm in alarms:
            logger.warning("%s at step %d: %s", alarm.kind, at, alarm.message)
        return alarms

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values; part of ``trainer_state.json`` in each of the trainer's checkpoints."""
        return {"per": self.per, **self.control.to_dict(), "moved": self.moved, "settled": self.settled}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`.

        Args:
            saved: of a ``KLControl`` with the same unit.
        """
        if saved["per"] != self.per:
            raise ConfigError(
                f"the checkpoint was steered per {saved['per']}, this controller is per {self.per}. Give the "
                "controller the unit of the checkpoint, or start without resuming."
            )
        try:
            self.control = self.control.from_dict(saved)
        except ConfigError as error:
            raise ConfigError(
                f"{error} In TRL: remove {SAVED!r} from stateful_callbacks in the checkpoint's trainer_state.json, and "
                "the price starts anew from the next batch."
            ) from None
        self.moved, self.settled = bool(saved["moved"]), bool(saved["settled"])


def _count(inputs: Inputs, told: Tensor) -> tuple[float, float, float, float]:
    mask, squares = counted(inputs), squared_advantage(inputs)
    return float(mask.sum()), float(mask.any(1).sum()), float(squares[told].sum()), float(told.sum())


def _saved_in(state: TrainerState) -> dict[str, Any]:
    """What goes into ``trainer_state.json`` with each checkpoint; declared a list, a dictionary from the start on."""
    return cast(dict[str, Any], state.stateful_callbacks)


def _own_unit(trainer: Trainer) -> Unit:
    """The unit a controller without one is read in: that of the trainer's price."""
    return "sequence" if isinstance(trainer, RLOOTrainer) else "token"
