"""LocalBackend: train on trajectories of your own making, shaped like ART's, with the price of KL in the advantage.

::

    backend = LocalBackend(path="runs/local")
    model = TrainableModel(name="agent", project="demo", base_model="smollm2")
    choices = await backend.sample(model, [{"role": "user", "content": "yes, no or maybe?"}], n=8)
    group = TrajectoryGroup(Trajectory([question, c], reward=worth(c.message.content)) for c in choices)
    result = await backend.train(model, [group], learning_rate=1e-4, controller=klamp.Hold(0.05, per="token"))

``docs/local-backend.md`` has the whole of it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import re
import threading
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from klamp import models
from klamp.controllers import Controller
from klamp.errors import ConfigError, KlampError, needing, require_number
from klamp.references import ReferenceSpec

with needing("klamp.local_backend", "train"):
    from klamp.local.arguments import COEFFICIENT, Arguments, Place, refuse_unknown
    from klamp.local.gather import gather_trajectory_groups
    from klamp.local.trajectories import Choice, Message, Trajectory, TrajectoryGroup
    from klamp.local.worker import Request, TrainResult, Worker
    from klamp.train.anchors import saved_steps
    from klamp.train.config import LoraConfig

__all__ = [
    "Choice",
    "LocalBackend",
    "Message",
    "TrainResult",
    "TrainableModel",
    "Trajectory",
    "TrajectoryGroup",
    "gather_trajectory_groups",
]

NAME = re.compile(r"\w[\w.+ -]{0,99}")
T = TypeVar("T")
Settings = tuple[int, float]
"""Longest answer and temperature: requests that share them are drawn in one batch."""
Asked = tuple[Request, "asyncio.Future[list[Choice]]"]


@dataclass(frozen=True)
class TrainableModel:
    """A model that is trained under a name: a LoRA adapter on ``base_model``, in the folder ``project/name``."""

    name: str
    project: str
    base_model: str
    """A folder, a Hub id, or a built-in name."""
    lora_rank: int = 16
    lora_alpha: float = 32.0
    seed: int = 0
    """Of the adapter's first weights and of what is sampled."""

    def __post_init__(self) -> None:
        _check_name("name", self.name)
        _check_name("project", self.project)

    async def register(self, backend: LocalBackend) -> None:
        """Load the model, at its newest checkpoint; ``train`` and ``sample`` do it when it was not done."""
        await backend.register(self)


class LocalBackend:
    """Trains and samples on this machine. Each model has a thread of its own, so the event loop stays free."""

    def __init__(self, path: str | os.PathLike[str] = "runs/local", *, device: str = "auto", keep: int = 0) -> None:
        self.path = Path(path)
        self.device = device
        self.keep = int(require_number("LocalBackend.keep", keep, at_least=0, way_out="0 keeps every checkpoint."))
        self._opened: dict[Path, _Opened] = {}

    async def __aenter__(self) -> LocalBackend:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def register(self, model: Any) -> None:
        """Load ``model`` from its newest checkpoint; a new one is saved as step 0, the base."""
        await self._open(model).call(lambda _: None)

    async def get_step(self, model: Any) -> int:
        """Steps done."""
        return await self._open(model).call(lambda worker: worker.step)

    def saved_steps(self, model: Any) -> list[int]:
        """Steps that have a checkpoint, oldest first: those that may be named as the reference."""
        return saved_steps(self.folder(model))

    def folder(self, model: Any) -> Path:
        """Where everything of ``model`` lies. No name and no link leads out of the backend's path."""
        _check_name("name", model.name)
        _check_name("project", model.project)
        root = self.path.expanduser().resolve()
        folder = root / str(model.project) / str(model.name)
        for place in (folder, folder / "checkpoints"):
            if not place.resolve().is_relative_to(root):
                raise ConfigError(
                    f"{str(place)!r} leads out of the backend's path {str(root)!r}, to {str(place.resolve())!r}. "
                    "Remove the link, or choose another name."
                )
        return folder

    async def train(
        self,
        model: Any,
        trajectory_groups: Iterable[Any],
        *,
        learning_rate: float = 5e-6,
        kl_penalty_coef: float = COEFFICIENT,
        kl_penalty_reference_step: int | None = None,
        kl_ref_adapter_path: str | os.PathLike[str] | None = None,
        kl_penalty_source: Literal["current_learner", "sample"] = "current_learner",
        kl_penalty_step_lag: int | None = None,
        controller: Controller | None = None,
        reference: ReferenceSpec | str | None = None,
        kl_limit: float | None = None,
        clamp: bool = True,
        advantages: Literal["art", "art_scaled", "klamp"] = "art",
        scale_rewards: bool = True,
        normalize_advantages: bool = True,
        loss_fn: Literal["ppo", "cispo"] = "ppo",
        epsilon: float | None = None,
        epsilon_high: float | None = None,
        max_grad_norm: float = 1.0,
        micro_batch: int = 0,
        temperature: float | None = None,
        verbose: bool = False,
        **unknown: Any,
    ) -> TrainResult:
        """One optimiser step with ``A_t + price · (mean of k1 over all counted tokens of the step - k1_t)``, saved.

        The price is ``kl_penalty_coef`` (standard deviations of advantage per nat; 0 measures only), or ``controller``
        sets it. KL is to the base, or to the one reference that is named: ``kl_penalty_reference_step`` (0 is the
        base), ``kl_ref_adapter_path``, ``kl_penalty_step_lag`` (the newest saved step at least that far back), or
        ``reference``, a typed value such as ``klamp.references.Ema(0.99)``. ``kl_penalty_source="sample"`` takes k1 of
        the log-probs recorded with the tokens. ``kl_limit`` is the KL that the clamp holds (default: 1.1 times the
        controller's target), ``clamp=False`` turns it off. ``advantages`` says how a group's rewards
        become advantages and how tokens weigh: ``"art"`` as ART does it, ``"art_scaled"`` with ART's last division too,
        ``"klamp"`` as ``klamp train``. ``scale_rewards`` (or ART's other name, ``normalize_advantages``) divides by the
        group's standard deviation. ``micro_batch`` sequences go through the model at once: memory, not the result.
        Other arguments of ART's are taken at ART's defaults.
        """
        refuse_unknown(unknown)
        arguments = Arguments(
            learning_rate=learning_rate,
            kl_penalty_coef=kl_penalty_coef,
            kl_penalty_reference_step=kl_penalty_reference_step,
            kl_ref_adapter_path=kl_ref_adapter_path,
            kl_penalty_source=kl_penalty_source,
            kl_penalty_step_lag=kl_penalty_step_lag,
            controller=controller,
            reference=reference,
            kl_limit=kl_limit,
            clamp=clamp,
            advantages=advantages,
            scale_rewards=scale_rewards,
            normalize_advantages=normalize_advantages,
            loss_fn=loss_fn,
            epsilon=epsilon,
            epsilon_high=epsilon_high,
            max_grad_norm=max_grad_norm,
            micro_batch=micro_batch,
            temperature=temperature,
        )
        groups = list(trajectory_groups)
        result = await self._open(model).train(lambda worker: worker.train(groups, arguments))
        if verbose:
            print(result.summary)
        return result

    async def sample(
        self,
        model: Any,
        messages: Sequence[Any],
        *,
        n: int = 1,
        max_tokens: int = 64,
        temperature: float = 1.0,
        tools: list[Any] | None = None,
    ) -> list[Choice]:
        """``n`` answers of the model as it is now, with the tokens they were drawn in and those tokens' log-probs.

        ``messages`` are dictionaries; a choice among them stands for its own tokens. Calls that wait at the same time
        with the same settings are drawn in one batch.
        """
        for name, count in (("n", n), ("max_tokens", max_tokens)):
            require_number(name, count, at_least=1, way_out="It is a count.")
        require_number("temperature", temperature, above=0, way_out="1.0 samples the model itself.")
        request = Request(list(messages), int(n), tools)
        return await self._open(model).sample(request, (int(max_tokens), float(temperature)))

    async def close(self) -> None:
        """Let go of every model; what was trained is on disk."""
        for opened in self._opened.values():
            await asyncio.to_thread(opened.thread.shutdown)
        self._opened.clear()

    def _open(self, model: Any) -> _Opened:
        folder = self.folder(model)
        own = (
            model if isinstance(model, TrainableModel) else TrainableModel(model.name, model.project, model.base_model)
        )
        if folder not in self._opened:
            models.resolve(own.base_model)
            self._opened[folder] = _Opened(own, folder, self.device, self.keep)
        opened = self._opened[folder]
        if opened.model != own:
            raise ConfigError(f"{own.project}/{own.name} is open as {opened.model}, not {own}. Choose another name.")
        return opened


class _Opened:
    """A model's thread, what waits for it, and whether it trains."""

    def __init__(self, model: TrainableModel, folder: Path, device: str, keep: int) -> None:
        self.model = model
        lora = LoraConfig(rank=model.lora_rank, alpha=model.lora_alpha)
        self.place = Place(
            base_model=model.base_model, folder=folder, lora=lora, seed=model.seed, device=device, keep=keep
        )
        self.thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix=f"klamp-{model.name}")
        self.training = threading.Lock()
        self.worker: Worker | None = None
        self.waiting: dict[Settings, list[Asked]] = {}
        self.drawing: set[asyncio.Future[None]] = set()
        self.loop: asyncio.AbstractEventLoop | None = None

    def call(self, job: Callable[[Worker], T]) -> Awaitable[T]:
        """Run ``job`` in the model's thread; what was asked for first is done first."""
        return asyncio.wrap_future(self.thread.submit(self._run, job))

    def train(self, job: Callable[[Worker], T]) -> Awaitable[T]:
        """The same for training, which only one may do at a time: a second call is refused, not queued."""
        if not self.training.acquire(blocking=False):
            raise KlampError(
                f"{self.model.project}/{self.model.name} is being trained. Wait for the train() that is running."
            )
        future = self.thread.submit(self._run, job)
        # Also when the caller stopped waiting: the thread trains on until its step is done.
        future.add_done_callback(lambda _: self.training.release())
        return asyncio.wrap_future(future)

    async def sample(self, request: Request, settings: Settings) -> list[Choice]:
        """The answer to a request, drawn together with those that other coroutines make before the loop comes round."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[list[Choice]] = loop.create_future()
        if not self.waiting or self.loop is not loop:
            self.loop, self.waiting = loop, {}
            loop.call_soon(self._start)
        self.waiting.setdefault(settings, []).append((request, answer))
        return await answer

    def _start(self) -> None:
        waiting, self.waiting = self.waiting, {}
        for settings, asked in waiting.items():
            task = asyncio.ensure_future(self._draw(settings, asked))
            self.drawing.add(task)
            task.add_done_callback(self.drawing.discard)

    async def _draw(self, settings: Settings, asked: list[Asked]) -> None:
        length, temperature = settings
        requests = [request for request, _ in asked]
        try:
            drawn = await self.call(lambda w: w.sample(requests, max_tokens=length, temperature=temperature))
        except Exception as error:
            drawn = [error] * len(asked)
        for (_, answer), choices in zip(asked, drawn, strict=True):
            if answer.done():  # somebody stopped waiting
                continue
            if isinstance(choices, Exception):
                answer.set_exception(choices)
            else:
                answer.set_result(choices)

    def _run(self, job: Callable[[Worker], T]) -> T:
        if self.worker is None:
            self.worker = Worker(self.place)
        return job(self.worker)


def _check_name(field: str, name: object) -> None:
    if not isinstance(name, str) or not NAME.fullmatch(name) or ".." in name or name != name.strip():
        raise ConfigError(
            f"TrainableModel.{field} {name!r} is not a folder name. Use letters, digits, '-', '_', '.', '+' and "
            "spaces, at most 100."
        )
