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
import importlib.util
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from klamp import models
from klamp.controllers import Controller
from klamp.errors import ConfigError, require_number
from klamp.local_backend.arguments import Arguments, refuse_unknown
from klamp.local_backend.completions import Request
from klamp.local_backend.open_models import OpenModel
from klamp.local_backend.trajectories import Choice
from klamp.local_backend.worker import TrainResult
from klamp.references import ReferenceSpec
from klamp.references.spec import saved_steps

if TYPE_CHECKING:
    from klamp.local_backend.open_models import Endpoint

NAME = re.compile(r"\w[\w.+ -]{0,99}")


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
    inference_base_url: str | None = field(default=None, init=False, compare=False)
    """Where an OpenAI client finds the model; set by ``register``."""
    inference_api_key: str | None = field(default=None, init=False, compare=False, repr=False)
    _backend: LocalBackend | None = field(default=None, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        _check_name("name", self.name)
        _check_name("project", self.project)

    async def register(self, backend: LocalBackend) -> None:
        """Load the model, at its newest checkpoint, and open the backend's endpoint for it (extra ``klamp[serve]``).

        ``train`` and ``sample`` load it when that was not done.

        Args:
            backend: where the model is trained and sampled.
        """
        await backend.register(self)
        object.__setattr__(self, "_backend", backend)
        if importlib.util.find_spec("fastapi") and importlib.util.find_spec("uvicorn"):
            url, key = await backend.endpoint(self)
            object.__setattr__(self, "inference_base_url", url)
            object.__setattr__(self, "inference_api_key", key)

    def openai_client(self) -> Any:
        """An ``openai.AsyncOpenAI`` for the endpoint. Its choices carry the tokens that ``train`` needs.

        Returns:
            The client. Close it, or use it as an ``async with`` block.
        """
        if self.inference_base_url is None:
            serve = "pip install 'klamp[serve]'" if self._backend is not None else "Call await model.register(backend)"
            raise ConfigError(f"{self.project}/{self.name} has no endpoint. {serve} first.")
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient

        # On this machine no proxy stands between; a batch of long answers may take minutes.
        http = DefaultAsyncHttpxClient(trust_env=False, timeout=1200)
        return AsyncOpenAI(base_url=self.inference_base_url, api_key=self.inference_api_key, http_client=http)

    def get_inference_name(self, step: int | None = None) -> str:
        """What a client asks for: the model as it is when it answers, or at a saved step.

        Args:
            step: a saved step; 0 is the base. None: the newest weights.

        Returns:
            The name for ``model=`` in a request.
        """
        return self.name if step is None else f"{self.name}@{step}"

    async def get_step(self) -> int:
        """Steps done.

        Returns:
            The number of the newest step; 0 before the first.
        """
        if self._backend is None:
            raise ConfigError(
                f"{self.project}/{self.name} is not registered. Call await model.register(backend) first."
            )
        return await self._backend.get_step(self)


class LocalBackend:
    """Trains and samples on this machine. Each model has a thread of its own, so the event loop stays free."""

    def __init__(
        self,
        path: str | os.PathLike[str] = "runs/local",
        *,
        device: str = "auto",
        keep: int = 0,
        host: str = "127.0.0.1",
        port: int = 0,
        api_key: str | None = None,
        url: str | None = None,
        served: str | None = None,
    ) -> None:
        """Settings for all models of this backend.

        Args:
            path: the folder under which models are kept.
            device: ``"auto"``, ``"cpu"``, ``"cuda"``, ...
            keep: how many checkpoints to keep per model; 0 keeps all.
            host, port, api_key: of the OpenAI endpoint. By default this machine only, a free port and a random key.
            url: a vLLM server that samples in place of klamp. It gets the adapter after every step.
            served: the name under which that server serves the base model.
        """
        self.server = None if url is None else (url, served)
        self.path = Path(path)
        self.place = (host, port, api_key)
        self.device = device
        self.keep = int(require_number("LocalBackend.keep", keep, at_least=0, way_out="0 keeps every checkpoint."))
        self._opened: dict[Path, OpenModel] = {}
        self._endpoint: Endpoint | None = None

    async def __aenter__(self) -> LocalBackend:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def register(self, model: Any) -> None:
        """Load ``model`` from its newest checkpoint; a new one is saved as step 0, the base.

        Args:
            model: the model, such as a :class:`TrainableModel`.
        """
        await self._open(model).call(lambda _: None)

    async def get_step(self, model: Any) -> int:
        """Steps done.

        Args:
            model: the model, such as a :class:`TrainableModel`.

        Returns:
            The number of the newest step; 0 before the first.
        """
        return await self._open(model).call(lambda worker: worker.step)

    async def endpoint(self, model: Any, *, name: str | None = None) -> tuple[str, str]:
        """The address and the key at which OpenAI clients find ``model`` by ``name``, its own unless given.

        It is loaded by then.

        Args:
            model: the model, such as a :class:`TrainableModel`.
            name: what clients call it. None: its own name.

        Returns:
            The address (``base_url``) and the key (``api_key``).
        """
        opened = self._open(model)
        opened.served_as = name or opened.served_as
        await opened.call(lambda _: None)
        if self._endpoint is None:
            from klamp.local_backend.open_models import Endpoint

            self._endpoint = Endpoint(*self.place)
        self._endpoint.add(opened)
        return self._endpoint.url, self._endpoint.key

    def saved_steps(self, model: Any) -> list[int]:
        """Steps that have a checkpoint, oldest first: those that may be named as the reference.

        Args:
            model: the model, such as a :class:`TrainableModel`.

        Returns:
            The numbers of the steps.
        """
        return saved_steps(self.folder(model))

    async def delete_checkpoints(self, model: Any, *, keep: Sequence[int] = ()) -> list[int]:
        """Delete the checkpoints of other steps than ``keep``; the newest and one that the reference needs stay.

        Args:
            model: the model, such as a :class:`TrainableModel`.
            keep: steps that stay.

        Returns:
            The steps that are left.
        """
        steps = [int(step) for step in keep]
        return await self._open(model).call(lambda worker: worker.delete_checkpoints(steps))

    def folder(self, model: Any) -> Path:
        """Where everything of ``model`` lies. No name and no link leads out of the backend's path.

        Args:
            model: the model, such as a :class:`TrainableModel`.

        Returns:
            The folder ``path/project/name``.
        """
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
        kl_penalty_coef: float | None = None,
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

        Args:
            model: the model, such as a :class:`TrainableModel`.
            trajectory_groups: groups of trajectories.
            learning_rate, max_grad_norm: of the step.
            kl_penalty_coef: the price, in standard deviations of advantage per nat; 0 measures only.
            controller: sets the price in place of ``kl_penalty_coef``.
            kl_penalty_reference_step, kl_ref_adapter_path, kl_penalty_step_lag, reference: at most one of these: a
                saved step (0 is the base), an adapter's folder, the newest saved step at least that far back, or a
                value such as ``klamp.references.Ema(0.99)``. None: the base.
            kl_penalty_source: ``"sample"`` takes k1 of the log-probs recorded with the tokens.
            kl_limit, clamp: the KL that the clamp holds (1.1 times the controller's target), and whether it does.
            advantages: rewards become advantages as in ART (``"art"``), with ART's last division too
                (``"art_scaled"``), or as in ``klamp train`` (``"klamp"``).
            scale_rewards, normalize_advantages: whether to divide by the group's standard deviation.
            loss_fn, epsilon, epsilon_high: PPO's or CISPO's loss, and the clip of its ratio.
            micro_batch: sequences per forward pass; 0: all. It changes memory, not the result.
            temperature: of choices that do not name theirs.
            verbose: print a line.
            **unknown: other arguments of ART's, accepted at ART's defaults.

        Returns:
            The step, its metrics, alarms and checkpoint.
        """
        given = locals()
        refuse_unknown(unknown)
        arguments = Arguments(**{f.name: given[f.name] for f in fields(Arguments)})
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

        Calls that wait at the same time with the same settings are sampled in one batch.

        Args:
            model: the model, such as a :class:`TrainableModel`.
            messages: dictionaries with role and content, and earlier choices, which stand for their own tokens.
            n: how many answers.
            max_tokens: longest answer.
            temperature: of the samples.
            tools: passed to the chat template.

        Returns:
            The answers.
        """
        for name, count in (("n", n), ("max_tokens", max_tokens)):
            require_number(name, count, at_least=1, way_out="It is a count.")
        require_number("temperature", temperature, above=0, way_out="1.0 samples the model itself.")
        request = Request(list(messages), int(n), tools)
        return await self._open(model).sample(request, (int(max_tokens), float(temperature)))

    async def close(self) -> None:
        """Let go of every model; what was trained is on disk."""
        for opened in self._opened.values():
            opened.refuse()
        if self._endpoint is not None:
            await asyncio.to_thread(self._endpoint.close)
            self._endpoint = None
        for opened in self._opened.values():
            await asyncio.to_thread(opened.thread.shutdown)
            if opened.worker is not None and opened.worker.completions.served is not None:
                opened.worker.completions.served.close()
        self._opened.clear()

    def _open(self, model: Any) -> OpenModel:
        folder = self.folder(model)
        own = (
            model if isinstance(model, TrainableModel) else TrainableModel(model.name, model.project, model.base_model)
        )
        if (base := models.canonical(own.base_model)) != own.base_model:
            own = replace(own, base_model=base)
        if folder not in self._opened:
            models.resolve(own.base_model)
            self._opened[folder] = OpenModel(own, folder, self.device, self.keep, self.server)
        opened = self._opened[folder]
        if opened.model != own:
            raise ConfigError(f"{own.project}/{own.name} is open as {opened.model}, not {own}. Choose another name.")
        return opened


def _check_name(field: str, name: object) -> None:
    if not isinstance(name, str) or not NAME.fullmatch(name) or ".." in name or name != name.strip():
        raise ConfigError(
            f"TrainableModel.{field} {name!r} is not a folder name. Use letters, digits, '-', '_', '.', '+' and "
            "spaces, at most 100."
        )
