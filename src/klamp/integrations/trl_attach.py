"""How :class:`~klamp.integrations.trl.KLControl` comes to its trainer, and what is said where it does not."""

from __future__ import annotations

import inspect
from types import FrameType
from typing import Any

from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import TrainerState

from klamp.controllers import Controller, Hold, Target
from klamp.controllers.base import split_target
from klamp.errors import ConfigError
from klamp.masked import Unit


def calling_trainer(callback: TrainerCallback) -> Trainer | None:
    """The trainer whose event ``callback`` is handling; None where no caller is one that it was added to.

    transformers hands a callback the model, the optimiser and more, but not the trainer. The trainer is the ``self`` of
    the method that raised the event, so it is looked for among the callers, and taken only if the callback is its own.
    """
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, Trainer) and any(c is callback for c in owner.callback_handler.callbacks):
            return owner
        frame = frame.f_back
    return None


def controller_of(controller: Controller | None, target: float | Target | None, per: Unit | None) -> Controller:
    """The controller, or ``Hold`` at ``target`` nats ``per`` token or sequence."""
    if controller is not None:
        if target is not None or per is not None:
            raise ConfigError("KLControl was given a controller and target or per as well. Set them in the controller.")
        return controller
    target, per = split_target("KLControl", target, per)
    if target is None or per is None:
        missing = "target and per are" if target is None and per is None else f"{'per' if per is None else 'target'} is"
        raise ConfigError(
            f"{missing} missing. Write KLControl(target=0.05, per='token') for 0.05 nats per token, or give a "
            "controller."
        )
    return Hold(target=target, per=per)


class Reminder(TrainerCallback):
    """Stops a training run whose trainer a KLControl was made for, but never added to."""

    def __init__(self) -> None:
        self.needed = True
        """Until the control's first event: one that is removed after that was removed on purpose."""

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Refuse to train without what was meant to steer."""
        trainer = calling_trainer(self)
        if not self.needed or trainer is None:
            return
        from klamp.integrations.trl_control import KLControl

        if not any(isinstance(c, KLControl) for c in trainer.callback_handler.callbacks):
            raise ConfigError(
                "a KLControl was made for this trainer and never added to it, so nothing would hold KL. Add it: "
                "trainer.add_callback(control), or leave the trainer out and pass callbacks=[KLControl(target=..., "
                "per=...)] to it."
            )


def remind(trainer: Trainer) -> Reminder:
    """The trainer's reminder; it is added where there is none."""
    found = next((c for c in trainer.callback_handler.callbacks if isinstance(c, Reminder)), None)
    if found is None:
        found = Reminder()
        trainer.add_callback(found)
    return found
