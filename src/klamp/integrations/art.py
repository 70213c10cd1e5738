"""KlampBackend: stock ART (``openpipe-art``) trains through klamp, on this machine, with KL measured, priced and held.

::

    import art
    from klamp.integrations.art import KlampBackend

    backend = KlampBackend(controller=klamp.Hold(target=0.05, per="token"))
    model = art.TrainableModel(name="agent", project="demo", base_model="smollm2")
    await model.register(backend)          # an OpenAI endpoint for the model being trained
    groups = await art.gather_trajectory_groups(...)
    result = await backend.train(model, groups, learning_rate=1e-5)

It has the methods of ``art.Backend``, 0.5.18 to 0.5.23, and ART's meaning of every argument that it takes: advantages,
weights, CISPO, LoRA rank 8 and a gradient clipped at 0.1.
"""

from __future__ import annotations

import contextlib
import math
import os
import warnings
from collections.abc import AsyncIterator, Iterable, Mapping
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from klamp.chat import is_choice
from klamp.controllers import Controller
from klamp.errors import ConfigError, needing
from klamp.local_backend import Choice, LocalBackend, Message, TrainableModel
from klamp.serve.engine import split_step

with needing("klamp.integrations.art", "serve"):
    import fastapi  # noqa: F401  # the endpoint is what ART's client talks to

from art import LocalTrainResult

LORA = {"r": 8, "lora_alpha": 16}
"""What ART makes where ``peft_args`` says nothing."""
ART_TRAIN: dict[str, Any] = {"advantages": "art_scaled", "loss_fn": "cispo", "max_grad_norm": 0.1}
"""ART's defaults that are not klamp's."""
NAMES = {
    "loss/train": "loss/policy",
    "loss/grad_norm": "train/grad_norm",
    "loss/entropy": "policy/entropy",
    "loss/kl_policy_ref": "kl/ref/k1",
}
"""Metrics that ART's users look for, by klamp's names."""
KNOWN = ("peft_args", "chat_template", "chat_template_path", "chat_template_kwargs")


def _mend_masks() -> None:
    """Take back the patch of transformers' masks that ``import art`` makes, where it is for another transformers.

    ART 0.5.18 passes on the arguments of transformers 5.2; with a newer one no model runs after the import.
    """
    try:
        from art.transformers import patches
        from transformers import masking_utils
    except ImportError:  # an ART without the patch
        return
    original = getattr(patches, "_preprocess_mask_arguments", None)
    now = masking_utils._preprocess_mask_arguments
    if original is not None and list(signature(now).parameters) != list(signature(original).parameters):
        masking_utils._preprocess_mask_arguments = original


_mend_masks()


class KlampBackend:
    """A backend for stock ART. ``controller`` sets the price of every step that names no ``kl_penalty_coef``."""

    def __init__(
        self,
        path: str | os.PathLike[str] = ".art",
        *,
        controller: Controller | None = None,
        device: str = "auto",
        in_process: bool = True,
        **train: Any,
    ) -> None:
        """``train`` are further defaults of :meth:`train`, such as ``kl_limit``; ``in_process`` is ART's, and true."""
        del in_process
        self.local = LocalBackend(Path(path) / "klamp", device=device)
        self.controller, self.defaults = controller, {**ART_TRAIN, **train}
        self.leases: list[tuple[TrainableModel, int]] = []

    async def __aenter__(self) -> KlampBackend:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Let go of every model and close the endpoint; what was trained is on disk."""
        await self.local.close()

    async def register(self, model: Any) -> None:
        """Load a trainable model at its newest step; a prompted one has nothing to load."""
        if not getattr(model, "trainable", False):
            return
        own = _own(model)
        await self.local.register(own)
        template = _template(model)
        if template is not None:
            await self.local._open(own).call(lambda worker: worker.encoder.use_template(template))

    async def train(
        self,
        model: Any,
        trajectory_groups: Iterable[Any],
        *,
        save_checkpoint: bool = True,
        optimizer_save_interval: int = 5,
        final_training_step: int | None = None,
        **arguments: Any,
    ) -> LocalTrainResult:
        """One step, as :meth:`klamp.local_backend.LocalBackend.train` has it, with ART's defaults. Logs nothing.

        klamp saves every step with its optimiser, whatever interval ART's PipelineTrainer names; as in ART,
        ``save_checkpoint=False`` only leaves the path out of the result.
        """
        del optimizer_save_interval, final_training_step
        settings = {**self.defaults, **arguments}
        priced = settings.keys() & {"kl_penalty_coef", "controller"}
        if not priced and self.controller is not None:
            settings["controller"] = self.controller
        elif not priced:
            settings["kl_penalty_coef"] = 0.0
        own = _own(model)
        groups = [_group(group, str(model.name)) for group in trajectory_groups]
        result = await self.local.train(own, groups, **settings)
        named = {theirs: result.metrics[ours] for theirs, ours in NAMES.items() if ours in result.metrics}
        # The trajectories' own metrics are logged by ART, from the trajectories.
        step = {name: value for name, value in result.metrics.items() if not name.startswith("trajectory/")}
        path = result.checkpoint_path if save_checkpoint else None
        return LocalTrainResult(step=result.step, metrics={**step, **named}, checkpoint_path=path)

    @contextlib.asynccontextmanager
    async def exact_adapter_lease(self, model: Any, step: int) -> AsyncIterator[None]:
        """A saved step that is served by name, and not deleted, for as long as the context lasts."""
        own = _own(model)
        if step not in self.local.saved_steps(own):
            raise ConfigError(f"step {step} of {model.name} is not saved: {self.local.saved_steps(own)}.")
        lease = (own, step)
        self.leases.append(lease)
        try:
            yield
        finally:
            self.leases.remove(lease)

    adapter_lease = exact_adapter_lease

    # -- what ART calls ---------------------------------------------------------------------------------------------

    def _model_inference_name(self, model: Any, step: int | None = None) -> str:
        if not getattr(model, "trainable", False):
            return str(getattr(model, "inference_model_name", None) or model.name)
        return str(model.name) if step is None else f"{model.name}@{step}"

    async def _get_step(self, model: Any) -> int:
        return await self.local.get_step(_own(model))

    async def _delete_checkpoint_files(self, model: Any, steps_to_keep: list[int]) -> None:
        own = _own(model)
        leased = [step for leased, step in self.leases if leased == own]
        await self.local.delete_checkpoints(own, keep=[*steps_to_keep, *leased])

    async def _prepare_backend_for_training(self, model: Any, config: Any = None) -> tuple[str, str]:
        server = dict((config or {}).get("server_args") or {})
        host, port, key = self.local.place
        self.local.place = (server.get("host", host), server.get("port", port), server.get("api_key", key))
        return await self.local.endpoint(_own(model), name=str(model.name))

    def _train_sft(
        self, model: Any, trajectories: Iterable[Any], config: Any, dev_config: Any, verbose: bool = False
    ) -> Any:
        raise ConfigError(
            "KlampBackend does not train_sft: klamp trains by reinforcement. Fine-tune with ART's own backend or TRL "
            "first, and give the result as base_model."
        )


def _own(model: Any) -> TrainableModel:
    """klamp's model for one of ART's: the same names, ART's LoRA."""
    if not getattr(model, "trainable", False):
        raise ConfigError(f"{model.name!r} is not a TrainableModel. Only those are trained.")
    internal = dict(getattr(model, "_internal_config", None) or {})
    ignored = sorted(k for k, v in internal.items() if k not in KNOWN and v)
    if ignored:
        warnings.warn(
            f"_internal_config has {', '.join(ignored)}, which are of ART's engines. klamp trains without them.",
            stacklevel=3,
        )
    lora = {**LORA, **dict(getattr(model, "lora_config", None) or {}), **dict(internal.get("peft_args") or {})}
    alpha = float(lora.get("lora_alpha", lora.get("alpha", LORA["lora_alpha"])))
    rank = int(lora.get("r", lora.get("rank", LORA["r"])))
    # ART 0.5.23: checkpoints belong to a run, which has a name of its own; clients ask for the model's name.
    name = str(getattr(model, "run_name", None) or model.name)
    return TrainableModel(
        name=name, project=str(model.project), base_model=str(model.base_model), lora_rank=rank, lora_alpha=alpha
    )


def _template(model: Any) -> str | None:
    internal = dict(getattr(model, "_internal_config", None) or {})
    if internal.get("chat_template_path"):
        return Path(internal["chat_template_path"]).read_text(encoding="utf-8")
    return internal.get("chat_template")


def _group(group: Any, name: str) -> Any:
    """A group whose trajectories have their captured exchanges with the model ``name`` as choices."""
    trajectories = [_trajectory(t, name) for t in group.trajectories]
    return SimpleNamespace(trajectories=trajectories, exceptions=list(getattr(group, "exceptions", ())))


def _trajectory(trajectory: Any, name: str) -> Any:
    """ART 0.5.23 captures what a rollout's clients say and hear; such a trajectory has nothing else."""
    captured = getattr(trajectory, "exchanges", None)
    if not captured:
        return trajectory
    everything = [*captured.chat_completions, *captured.completions, *captured.responses, *captured.messages]
    # A judge or a helper that was asked on the way is another model, whose words are not trained on.
    own = [e for e in everything if f"/{split_step(str(e.model))[0]}".endswith(f"/{name}")]
    if not own:
        asked = ", ".join(sorted({str(e.model) for e in everything}))
        raise ConfigError(
            f"a captured trajectory has no exchange with {name!r}, only with {asked}. Ask for "
            "model.get_inference_name() in the rollout."
        )
    said = [
        _choice(choice, exchange.request)
        for exchange in sorted(own, key=lambda exchange: exchange.start_time)
        for choice in exchange.response.choices
    ]
    return SimpleNamespace(messages_and_choices=said, reward=trajectory.reward, metrics=trajectory.metrics)


def _choice(choice: Any, request: Mapping[str, Any]) -> Choice:
    """A captured choice, of a chat or of a text, whole or put together from a stream."""
    ids, prompt = (getattr(choice, name, None) for name in ("token_ids", "prompt_token_ids"))
    if ids is None or prompt is None:
        raise ConfigError(
            "a captured exchange came without its tokens. Ask the endpoint of model.openai_client(), or another "
            "server with return_token_ids."
        )
    chat = is_choice(choice)
    entries = getattr(choice.logprobs, "content" if chat else "token_logprobs", None)
    logp = [math.nan] * len(ids) if entries is None else [e.logprob if chat else e for e in entries]
    return Choice(
        message=Message("assistant", choice.message.content if chat else choice.text),
        finish_reason="length" if choice.finish_reason == "length" else "stop",
        token_ids=tuple(ids),
        logp=tuple(logp),
        prompt_token_ids=tuple(prompt),
        temperature=getattr(choice, "temperature", None) or request.get("temperature") or 1.0,
        step=getattr(choice, "step", None),
    )
