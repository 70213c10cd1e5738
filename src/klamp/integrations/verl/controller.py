"""``Hold`` as verl's controller of the KL penalty in the reward: ``algorithm.kl_ctrl.type: klamp``.

verl (0.9) makes its controller by ``core_algos.get_kl_controller(config.algorithm.kl_ctrl)``, reads its ``value``,
calls ``update(current_kl=, n_steps=)`` once a step and forgets it at a checkpoint. :func:`install` answers the type
``klamp`` there, measures KL in the unit of the target on the batch that is priced, and keeps the controller's state in
verl's own checkpoint folders. The plugin :mod:`klamp.integrations.verl.plugin` calls it whenever verl is imported.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor

from klamp import __version__
from klamp.advantages import alike
from klamp.control import Control
from klamp.controllers import Controller, Hold, State
from klamp.errors import ConfigError, unknown, writing
from klamp.estimators import named
from klamp.masked import Unit, check_unit, mean

logger = logging.getLogger("klamp.verl")

FILE = "klamp_kl_ctrl.json"
"""The controller's state, in the folder ``global_step_N`` of verl's checkpoint."""
DEFAULT_COEF = 0.001
"""verl's default of ``kl_coef``, which cannot be told from a value that nobody gave."""
TAIL = 5.0
"""Log-ratio beyond which k2 and k3 go on linearly, as in klamp's trainer."""
MEASURES = ("k1", "k2", "k3")
TRAINERS = {"verl.trainer.ppo.ray_trainer": "RayPPOTrainer", "verl.trainer.ppo.v1.trainer_base": "PPOTrainer"}
"""The classes that write and read verl's checkpoints."""
ASYNCHRONOUS = "verl.experimental.fully_async_policy.fully_async_trainer"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """``algorithm.kl_ctrl`` with ``type: klamp``."""

    target: float
    """KL to hold, in nats per ``per``. Where it is not given, verl's ``target_kl``, which is per sequence_mean."""
    per: Unit
    """Unit of the target."""
    estimator: str
    """What KL is measured by, on the sampled tokens: k1, k2 or k3."""
    kl_coef: float
    """The first price. At verl's default of 0.001 the first batch's spread of rewards sets it instead."""

    @property
    def given(self) -> float | None:
        """The first price, where somebody gave one."""
        return None if self.kl_coef == DEFAULT_COEF else self.kl_coef

    @classmethod
    def read(cls, kl_ctrl: Any) -> Settings:
        """The settings in verl's config node, checked.

        Args:
            kl_ctrl: verl's node ``algorithm.kl_ctrl``.

        Returns:
            The settings. Those that are missing or wrong are a :class:`klamp.ConfigError`.
        """
        names = ("type", "kl_coef", "horizon", "target_kl", "target", "per", "estimator")
        given = [str(k) for k in kl_ctrl if k != "_target_"] if isinstance(kl_ctrl, Mapping) else []
        for key in given:
            if key not in names:
                raise unknown("algorithm.kl_ctrl: field", key, names)
        target, per = getattr(kl_ctrl, "target", None), getattr(kl_ctrl, "per", None)
        if target is None and per is None:
            target, per = getattr(kl_ctrl, "target_kl", None), "sequence_mean"
        unit = check_unit("algorithm.kl_ctrl.per", per)
        if target is None:
            raise ConfigError(f"algorithm.kl_ctrl.target is missing. Give the KL to hold, in nats per {unit}.")
        estimator = getattr(kl_ctrl, "estimator", None) or "k3"
        if estimator not in MEASURES:
            raise unknown("algorithm.kl_ctrl.estimator", estimator, MEASURES)
        coef = getattr(kl_ctrl, "kl_coef", None)
        return cls(target=target, per=unit, estimator=estimator, kl_coef=DEFAULT_COEF if coef is None else coef)


class HoldKLController:
    """A :class:`klamp.Control` of ``Hold`` with verl's contract: ``value``, ``update(current_kl=, n_steps=)``.

    Inside verl's ``apply_kl_penalty`` it measures KL itself, in its own unit (:meth:`observe`). Called directly,
    ``update`` takes a KL in the unit of the target.
    """

    __slots__ = ("control", "measured", "settings", "signal", "spread", "told")

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.control = Control(Hold(settings.target, settings.per, init_beta=settings.kl_coef)).init()
        self.told = False
        """Whether a batch has told the spread of its rewards, which the price is in units of from then on."""
        self.measured: float | None = None
        self.spread: float | None = None
        self.signal = 1.0

    @property
    def controller(self) -> Controller:
        """The law of the price."""
        return self.control.controller

    @property
    def state(self) -> State:
        """The controller's state."""
        assert self.control.state.price is not None, "it is made with a price"
        return self.control.state.price

    @property
    def value(self) -> float:
        """The current beta."""
        return self.control.beta

    def observe(self, data: Any) -> None:
        """Look at a batch of verl's before its penalty is applied: measure KL, and find the first price.

        Args:
            data: verl's ``DataProto`` with log-probs, reference log-probs and scores.
        """
        logp, ref_logp, mask = (data.batch[k] for k in ("old_log_probs", "ref_log_prob", "response_mask"))
        kl = named(self.settings.estimator)(logp.float(), ref_logp.float(), tail=TAIL)
        self.measured = float(mean(kl, mask, per=self.settings.per))
        self.spread, self.signal = _spread(data)
        if not self.told and self.spread > 0:
            length = float(mask.sum(-1).float().mean())
            hold = Hold(self.settings.target, self.settings.per, init_beta=self.settings.given)
            self.control = Control(hold).init(spread=self.spread, length=length, signal=self.signal)
            self.told = True
            logger.warning(
                "klamp: rewards spread by %.4g in a prompt; the first price is %.4g", self.spread, self.value
            )

    def update(self, current: Any = None, n_steps: float = 1, *, current_kl: Any = None) -> None:
        """Observe a KL, or the one just measured where :meth:`observe` saw the batch.

        Args:
            current: the KL of the step.
            n_steps: sequences behind it.
            current_kl: verl's name for ``current``; give one of the two.
        """
        if self.measured is None:
            if (current is None) == (current_kl is None):
                raise ConfigError(f"update takes one KL, got {current!r} and current_kl={current_kl!r}. Pass either.")
            kl, spread = current_kl if current is None else current, None
        else:
            kl, spread = self.measured, self.spread
        self.control = self.control.before_update(kl, spread, int(n_steps), signal=self.signal).after_update()
        self.measured = None

    def state_dict(self) -> dict[str, Any]:
        """The controller's state as plain JSON values."""
        return self.state.to_dict()

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`.

        Args:
            saved: what :meth:`state_dict` returned.
        """
        self.control = self.control.from_dict({**self.control.to_dict(), "controller": saved})

    def save(self, folder: Path, step: int) -> None:
        """Write the state into the folder of verl's checkpoint.

        Args:
            folder: ``global_step_N`` of verl's checkpoints.
            step: its number.
        """
        settings = {"target": self.settings.target, "per": self.settings.per}
        saved = {"klamp": __version__, "global_step": step, **settings, "told": self.told, "state": self.state_dict()}
        with writing(folder / FILE, "resume from the checkpoint before"):
            folder.mkdir(parents=True, exist_ok=True)
            aside = folder / f".{FILE}.tmp"
            aside.write_text(json.dumps(saved, indent=1, allow_nan=False), encoding="utf-8")
            aside.replace(folder / FILE)

    def load(self, folder: Path, step: int) -> None:
        """Go on from the state in the folder of verl's checkpoint; where there is none, start anew and say so.

        Args:
            folder: ``global_step_N`` of verl's checkpoints.
            step: its number.
        """
        file = folder / FILE
        if not file.is_file():
            logger.warning(
                "klamp: %s has no %s, so the controller STARTS ANEW at step %d with the price %.4g",
                *(folder, FILE, step, self.value),
            )
            return
        try:
            saved = json.loads(file.read_text(encoding="utf-8"))
            found, told, was = saved["global_step"], bool(saved["told"]), (saved["target"], saved["per"])
            if found != step:
                raise ConfigError(f"it is of step {found!r}, not of {step}")
            self.load_state_dict(saved["state"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{str(file)!r} cannot be read: {error}. Delete it to start the controller anew."
            ) from None
        self.told = told
        logger.warning("klamp: the controller goes on from step %d with the price %.4g", step, self.value)
        if was != (self.settings.target, self.settings.per):
            logger.warning("klamp: its target was %s nats per %s and is %s per %s from here on", *was, *self._aim())

    def _aim(self) -> tuple[float, str]:
        return self.settings.target, self.settings.per


def _spread(data: Any) -> tuple[float, float]:
    """RMS spread of the sequences' scores within a prompt, or over the batch where no prompt has two; and the share of
    their degrees of freedom that is in prompts whose scores differ."""
    scores: Tensor = data.batch["token_level_scores"].double().sum(-1)
    uids = data.non_tensor_batch.get("uid")
    groups: dict[Any, list[int]] = {}
    for i in range(len(scores)):
        groups.setdefault(i if uids is None else str(uids[i]), []).append(i)
    several = [scores[rows] for rows in groups.values() if len(rows) > 1] or [scores]
    freedom = sum(len(x) - 1 for x in several)
    told = [x for x in several if len(x) > 1 and not alike(x[None], torch.ones_like(x[None], dtype=torch.bool))]
    spread = math.sqrt(sum(float((x - x.mean()).square().sum()) for x in told) / freedom) if told else 0.0
    return (spread, sum(len(x) - 1 for x in told) / freedom) if 0 < spread < math.inf else (0.0, 1.0)


def _is_klamps(kl_ctrl: object) -> TypeGuard[HoldKLController]:
    """Whether a controller that verl holds is this one, and not verl's own."""
    return isinstance(kl_ctrl, HoldKLController)


def install() -> None:
    """Answer ``algorithm.kl_ctrl.type: klamp`` in this process. Calling it again changes nothing."""
    from verl.trainer import config
    from verl.trainer.config import algorithm
    from verl.trainer.ppo import core_algos
    from verl.utils import config as checks

    if hasattr(core_algos.get_kl_controller, "klamp"):
        return
    core_algos.get_kl_controller = _answering(core_algos.get_kl_controller)
    checks.validate_config = _checking(checks.validate_config)
    config.KLControlConfig = algorithm.KLControlConfig = _with_fields(algorithm.KLControlConfig)


def _with_fields(base: type) -> type:
    """verl's dataclass with klamp's fields, so that its config can be made into objects."""
    new = [(n, Any, dataclasses.field(default=None)) for n in ("target", "per", "estimator")]
    made = dataclasses.make_dataclass(base.__name__, new, bases=(base,))
    made.__module__, made.__doc__ = base.__module__, base.__doc__
    return made


def _answering(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """``get_kl_controller`` with the type ``klamp``."""

    @functools.wraps(original)
    def get_kl_controller(kl_ctrl: Any) -> Any:
        if kl_ctrl.type != "klamp":
            logger.warning(
                "klamp is NOT ACTIVE: algorithm.kl_ctrl.type is %r, and verl's own controller sets the price",
                kl_ctrl.type,
            )
            return original(kl_ctrl)
        settings = Settings.read(kl_ctrl)
        controller = HoldKLController(settings)
        _hook_trainers()
        price = "set by the first batch" if settings.given is None else f"{settings.given:g}"
        logger.warning(
            "klamp is ACTIVE: Hold steers the KL penalty in the reward to %g nats per %s by %s; first price %s",
            *(settings.target, settings.per, settings.estimator, price),
        )
        return controller

    get_kl_controller.klamp = True  # type: ignore[attr-defined]
    return get_kl_controller


def _checking(original: Callable[..., None]) -> Callable[..., None]:
    """``validate_config``, which refuses ``type: klamp`` where verl would never make a controller."""

    @functools.wraps(original)
    def validate_config(config: Any, *args: Any, **named: Any) -> None:
        algorithm = config.algorithm
        if algorithm.kl_ctrl.type == "klamp":
            if not algorithm.use_kl_in_reward:
                raise ConfigError(
                    "algorithm.kl_ctrl.type is klamp and algorithm.use_kl_in_reward is False, so nothing would be "
                    "steered: verl's KL loss has a constant coefficient. Set algorithm.use_kl_in_reward=True."
                )
            Settings.read(algorithm.kl_ctrl)
        original(config, *args, **named)

    return validate_config


def _hook_trainers() -> None:
    """Reach the trainers that are imported by now, whose constructor asked for the controller."""
    for name, cls in TRAINERS.items():
        trainer = getattr(sys.modules.get(name), cls, None)
        if trainer is not None and not hasattr(trainer._save_checkpoint, "klamp"):
            trainer._save_checkpoint = _saving(trainer._save_checkpoint)
            trainer._load_checkpoint = _loading(trainer._load_checkpoint)
    source = sys.modules.get("verl.trainer.ppo.ray_trainer")
    original = getattr(source, "apply_kl_penalty", None)
    if original is not None and not hasattr(original, "klamp"):
        replaced = _measuring(original)
        for module in list(sys.modules.values()):  # other trainers of verl import it by name
            if getattr(module, "__dict__", {}).get("apply_kl_penalty") is original:
                module.apply_kl_penalty = replaced  # type: ignore[attr-defined]
    if ASYNCHRONOUS in sys.modules:
        logger.warning(
            "klamp: verl's fully asynchronous trainer writes checkpoints of its own, WITHOUT the controller's state"
        )


def _measuring(original: Callable[..., Any]) -> Callable[..., Any]:
    """``apply_kl_penalty`` that shows klamp's controller the batch, and logs what it saw."""

    @functools.wraps(original)
    def apply_kl_penalty(data: Any, kl_ctrl: Any, *args: Any, **named: Any) -> Any:
        if not _is_klamps(kl_ctrl):
            return original(data, kl_ctrl, *args, **named)
        with torch.no_grad():
            kl_ctrl.observe(data)
        seen = {"klamp/kl": kl_ctrl.measured, "klamp/target": kl_ctrl.settings.target}
        data, metrics = original(data, kl_ctrl, *args, **named)
        return data, {**metrics, **seen}

    apply_kl_penalty.klamp = True  # type: ignore[attr-defined]
    return apply_kl_penalty


def _saving(original: Callable[..., Any]) -> Callable[..., Any]:
    """``_save_checkpoint`` with the controller's state, written before verl names the checkpoint its latest."""

    @functools.wraps(original)
    def _save_checkpoint(self: Any, *args: Any, **named: Any) -> Any:
        control = getattr(self, "kl_ctrl_in_reward", None)
        if _is_klamps(control):
            control.save(
                Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}", self.global_steps
            )
        return original(self, *args, **named)

    _save_checkpoint.klamp = True  # type: ignore[attr-defined]
    return _save_checkpoint


def _loading(original: Callable[..., Any]) -> Callable[..., Any]:
    """``_load_checkpoint`` that goes on with the controller of the step it resumes from."""

    @functools.wraps(original)
    def _load_checkpoint(self: Any, *args: Any, **named: Any) -> Any:
        done = original(self, *args, **named)
        control, step, trainer = getattr(self, "kl_ctrl_in_reward", None), self.global_steps, self.config.trainer
        if _is_klamps(control) and step > 0 and trainer.resume_mode != "disable":
            by_path = trainer.resume_mode == "resume_path"
            folder = Path(trainer.resume_from_path if by_path else trainer.default_local_dir)
            control.load(folder if by_path else folder / f"global_step_{step}", step)
        return done

    return _load_checkpoint
