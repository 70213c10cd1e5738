"""How a reference is computed: the LoRA-off base, a second adapter in the same model, or a second model.

One class a way, behind one protocol. The reference's identity (what it is and the hash of its weights) goes into every
checkpoint and is checked at resume: a reference never re-anchors silently.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from klamp.clamp_scalers import interpolate
from klamp.distributed import digest, put, settle
from klamp.errors import ConfigError
from klamp.kernels import head_of
from klamp.models.lora import check_adapter, check_folder, is_plain, load_adapted
from klamp.models.policy import Policy, ReferenceStates
from klamp.references import AdapterPath, Base, CheckpointStep, Ema, FrozenModel, Periodic, ReferenceSpec, StepLag
from klamp.references.spec import newest_before, step_folder
from klamp.sampling.merged_model import ADAPTER
from klamp.sampling.rollout import Part

REFERENCE = "klamp_reference"
"""Name of the reference's adapter inside the peft model; never saved."""


class Reference(Protocol):
    """What the learner needs of a reference."""

    spec: ReferenceSpec

    def states(self, part: Part) -> ReferenceStates:
        """The reference's states for a part, without gradient."""
        ...

    def origin(self) -> Mapping[str, Tensor] | None:
        """Weights the clamp may scale the policy's displacement from; None: it backtracks the step instead."""
        ...

    def after_step(self, step: int) -> bool:
        """Move on after ``step``, where this reference moves, and give back what a step borrowed; whether it moved."""
        ...

    def identity(self) -> dict[str, Any]:
        """What it is, with a hash of its weights; the same before and after a resume."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """Weights that exist nowhere else and must be saved with a checkpoint."""
        ...

    def load(self, tensors: Mapping[str, Tensor], step: int) -> None:
        """Continue at ``step`` with :meth:`tensors`."""
        ...

    def shard(self, prepare: Callable[[nn.Module], object]) -> None:
        """Spread its own weights over the processes as the policy's are, by ``prepare``, or refuse."""
        ...


class AdapterOff:
    """The base model under the adapter: no second model, no second adapter."""

    def __init__(self, policy: Policy, forward: Any, spec: ReferenceSpec) -> None:
        self.policy, self.forward, self.spec = policy, forward, spec
        self.hashed: tuple[tuple[int, ...], str] = ((), "")

    @torch.no_grad()
    def states(self, part: Part) -> ReferenceStates:
        with self.policy.without_adapter():
            return ReferenceStates(self.forward(part).hidden)

    def origin(self) -> Mapping[str, Tensor] | None:
        return None

    def after_step(self, step: int) -> bool:
        return False

    def identity(self) -> dict[str, Any]:
        frozen = {n: p for n, p in self.policy.model.named_parameters() if "lora_" not in n}
        # torch counts the writes to a tensor; a base that nobody wrote to need not be hashed at every checkpoint.
        versions = tuple(p._version for p in frozen.values())
        if self.hashed[0] != versions:
            self.hashed = (versions, digest(frozen))
        return {"reference": str(self.spec), "weights": self.hashed[1]}

    def tensors(self) -> dict[str, Tensor]:
        return {}

    def load(self, tensors: Mapping[str, Tensor], step: int) -> None:
        pass

    def shard(self, prepare: Callable[[nn.Module], object]) -> None:
        pass  # it is the policy's own model


class SecondAdapter:
    """Another adapter of the same base: a folder, a saved step, or one that follows the policy."""

    def __init__(self, policy: Policy, forward: Any, spec: ReferenceSpec, run: Path) -> None:
        self.policy, self.forward, self.spec, self.run = policy, forward, spec, run
        self.base = AdapterOff(policy, forward, spec)
        self.loaded: Path | None = None
        self.follows = isinstance(spec, Ema | Periodic)
        model: Any = policy.model
        if isinstance(spec, AdapterPath):
            self._load_folder(Path(spec.path))
        elif isinstance(spec, CheckpointStep):
            self._load_folder(step_folder(run, spec.step))
        elif self.follows:
            with _keeping_trainable(policy):
                model.add_adapter(REFERENCE, copy.deepcopy(model.peft_config[ADAPTER]))
            self._copy_policy()

    @torch.no_grad()
    def states(self, part: Part) -> ReferenceStates:
        if self.loaded is None and not self.follows:
            return self.base.states(part)
        with self.policy.with_adapter(REFERENCE):
            return ReferenceStates(self.forward(part).hidden)

    def origin(self) -> Mapping[str, Tensor] | None:
        return None

    @torch.no_grad()
    def after_step(self, step: int) -> bool:
        if isinstance(self.spec, Ema):
            for ours, theirs in self._pairs():
                ours.lerp_(theirs, 1 - self.spec.decay)
            return True
        if isinstance(self.spec, Periodic) and step % self.spec.every == 0:
            self._copy_policy()
            return True
        return isinstance(self.spec, StepLag) and self._follow_checkpoints(step)

    def identity(self) -> dict[str, Any]:
        if self.loaded is None and not self.follows:
            return self.base.identity()
        own = {n: p for n, p in self.policy.model.named_parameters() if f".{REFERENCE}." in n}
        return {"reference": str(self.spec), "weights": digest(own)}

    def tensors(self) -> dict[str, Tensor]:
        if not self.follows:
            return {}
        return {n: p.detach().clone() for n, p in self.policy.model.named_parameters() if f".{REFERENCE}." in n}

    def load(self, tensors: Mapping[str, Tensor], step: int) -> None:
        if isinstance(self.spec, StepLag):
            self._follow_checkpoints(step)
        if self.follows:
            own = dict(self.policy.model.named_parameters())
            for name, value in tensors.items():
                put(own[name], value)

    def shard(self, prepare: Callable[[nn.Module], object]) -> None:
        if isinstance(self.spec, StepLag):
            raise ConfigError(
                f"‹kl.reference› {self.spec} loads another adapter as it goes, which a model sharded by FSDP2 cannot "
                "take. Use base, step:N, adapter:PATH, ema:DECAY or periodic:N, or train without FSDP."
            )

    def _follow_checkpoints(self, step: int) -> bool:
        """Load the step that is now the newest at least ``lag`` back; whether it is another than before."""
        assert isinstance(self.spec, StepLag)
        found = newest_before(self.run, step - self.spec.lag)
        if found == self.loaded:
            return False
        self._load_folder(found)
        return True

    def _load_folder(self, folder: Path | None) -> None:
        """The adapter in ``folder`` (None: the base) in place of the one before it, which is unloaded."""
        model: Any = self.policy.model
        with _keeping_trainable(self.policy):
            if REFERENCE in model.peft_config:
                model.delete_adapter(REFERENCE)
            if folder is not None:
                check_adapter(folder, model)
                model.load_adapter(str(folder), adapter_name=REFERENCE, is_trainable=False)
                model.set_adapter(ADAPTER)
        self.policy.find_layers()
        self.loaded = folder

    def _copy_policy(self) -> None:
        for ours, theirs in self._pairs():
            ours.data.copy_(theirs.data)

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        own = dict(self.policy.model.named_parameters())
        for name, p in own.items():
            if f".{REFERENCE}." in name:
                yield p, own[name.replace(f".{REFERENCE}.", f".{ADAPTER}.")]


class SecondModel:
    """A model of its own: the frozen start of a full fine-tune, another model, a saved step, or a moving average."""

    def __init__(self, policy: Policy, model: nn.Module, spec: ReferenceSpec, run: Path, *, on_cpu: bool) -> None:
        self.policy, self.spec, self.run, self.on_cpu = policy, spec, run, on_cpu
        self.device = next(policy.model.parameters()).device
        self.loaded: Path | None = None
        self.weights: Mapping[str, Tensor] = dict(model.named_parameters())
        for p in model.parameters():
            p.requires_grad_(False)
        self.side = Policy(model.eval(), value_head=False, temperature=policy.temperature, lora=False)
        if on_cpu:
            self.side.to("cpu")
        if isinstance(spec, CheckpointStep) and spec.step > 0:
            self._load_step(step_folder(run, spec.step))

    @torch.no_grad()
    def states(self, part: Part) -> ReferenceStates:
        if self.on_cpu:
            self.side.to(self.device)
        return self.side.as_reference(part)

    def origin(self) -> Mapping[str, Tensor] | None:
        fixed = isinstance(self.spec, Base) or (isinstance(self.spec, CheckpointStep) and self.spec.step == 0)
        return self.weights if fixed else None

    @torch.no_grad()
    def after_step(self, step: int) -> bool:
        if self.on_cpu:
            self.side.to("cpu")
        settle(self.side)
        if isinstance(self.spec, Ema):
            for place, (ours, theirs) in enumerate(self._pairs()):
                if ours.dtype == torch.bfloat16:  # to the nearest, a mean as slow as this would stand still
                    interpolate(ours, theirs, self.spec.decay, (step, place))
                else:
                    ours.lerp_(theirs.to(ours.device, ours.dtype), 1 - self.spec.decay)
            return True
        if isinstance(self.spec, Periodic) and step % self.spec.every == 0:
            for ours, theirs in self._pairs():
                ours.copy_(theirs)
            return True
        return isinstance(self.spec, StepLag) and self._follow_checkpoints(step)

    def identity(self) -> dict[str, Any]:
        settle(self.side)
        return {"reference": str(self.spec), "weights": digest(dict(self.side.model.named_parameters()))}

    def tensors(self) -> dict[str, Tensor]:
        if not isinstance(self.spec, Ema | Periodic):
            return {}
        settle(self.side)
        return {n: p.detach().clone() for n, p in self.side.model.named_parameters()}

    def load(self, tensors: Mapping[str, Tensor], step: int) -> None:
        if isinstance(self.spec, StepLag):
            self._follow_checkpoints(step)
        own = dict(self.side.model.named_parameters())
        for name, value in tensors.items():
            put(own[name], value)

    def shard(self, prepare: Callable[[nn.Module], object]) -> None:
        if self.on_cpu:
            raise ConfigError(
                "‹kl.reference_on_cpu› moves a whole model in and out, which FSDP2 does not allow. Leave it off: under "
                "FSDP2 the reference is sharded like the policy."
            )
        self.side.sharded = True
        prepare(self.side)
        self.weights = dict(self.side.model.named_parameters())

    def _follow_checkpoints(self, step: int) -> bool:
        """Load the step that is now the newest at least ``lag`` back; whether it is another than before."""
        assert isinstance(self.spec, StepLag)
        found = newest_before(self.run, step - self.spec.lag)
        if found is None or found == self.loaded:
            return False
        self._load_step(found)
        return True

    def _load_step(self, folder: Path) -> None:
        from klamp.models import load_model

        weights = dict(load_model(str(folder), dtype=next(self.side.parameters()).dtype).named_parameters())
        for name, p in self.side.model.named_parameters():
            put(p, weights[name])
        self.loaded = folder

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        theirs = dict(self.policy.model.named_parameters())
        for name, p in self.side.model.named_parameters():
            yield p, theirs[name]


def make_reference(
    policy: Policy,
    forward: Any,
    spec: ReferenceSpec,
    run: Path,
    *,
    on_cpu: bool = False,
    trust_remote_code: bool = False,
) -> Reference:
    """The reference that ``spec`` names, for this policy. ``forward`` runs the policy as the launcher wrapped it."""
    if isinstance(spec, FrozenModel):
        return SecondModel(policy, _other_model(policy, spec.model, trust_remote_code), spec, run, on_cpu=on_cpu)
    if isinstance(spec, AdapterPath) and not policy.lora:
        raise ConfigError(f"‹kl.reference› {spec} is an adapter, and full=true trains without one. Use model:FOLDER.")
    if not policy.lora:
        return SecondModel(policy, copy.deepcopy(policy.model), spec, run, on_cpu=on_cpu)
    if isinstance(spec, AdapterPath) and not is_plain(check_folder(Path(spec.path))):
        return SecondModel(policy, _adapted(policy, Path(spec.path), trust_remote_code), spec, run, on_cpu=on_cpu)
    if isinstance(spec, Base) or (isinstance(spec, CheckpointStep) and spec.step == 0):
        return AdapterOff(policy, forward, spec)
    return SecondAdapter(policy, forward, spec, run)


def check_reference(spec: ReferenceSpec, run: Path, model: str, *, full: bool, trust_remote_code: bool = False) -> None:
    """Refuse a reference that is not there or speaks other tokens, before any weights are loaded."""
    if isinstance(spec, AdapterPath):
        if full:
            raise ConfigError(
                f"‹kl.reference› {spec} is an adapter, and full=true trains without one. Use model:FOLDER."
            )
        check_folder(Path(spec.path))
    elif isinstance(spec, CheckpointStep) and spec.step > 0:
        step_folder(run, spec.step)
    elif isinstance(spec, FrozenModel):
        _check_tokens(model, spec.model, trust_remote_code)


def _check_tokens(model: str, reference: str, trust: bool) -> None:
    """A KL compares the same tokens: the two vocabularies must be one."""
    from klamp.models import load_tokenizer

    ours, theirs = (load_tokenizer(name, trust).get_vocab() for name in (model, reference))
    different = [t for t in ours.keys() | theirs.keys() if ours.get(t) != theirs.get(t)]
    if different:
        first = min(different)
        raise ConfigError(
            f"‹kl.reference› model:{reference} has another tokenizer than {model!r}: {len(different)} tokens differ, "
            f"{first!r} is {theirs.get(first)} there and {ours.get(first)} here. Choose a reference of the same family."
        )


def _other_model(policy: Policy, name: str, trust: bool) -> nn.Module:
    from klamp.models import load_model

    p = next(policy.model.parameters())
    model: nn.Module = load_model(name, dtype=p.dtype, device=str(p.device), trust_remote_code=trust)
    ours, theirs = _vocabulary(policy.model), _vocabulary(model)
    if ours != theirs:
        raise ConfigError(
            f"‹kl.reference› model:{name} has a vocabulary of {theirs} tokens, the policy {ours}; a KL compares the "
            "same tokens. Choose a reference of the same family."
        )
    return model


def _adapted(policy: Policy, folder: Path, trust: bool) -> nn.Module:
    """The base, once more, with an adapter that cannot be switched inside the policy's model."""
    from klamp.models import load_model

    model: Any = policy.model
    check_adapter(folder, model)
    p = next(model.parameters())
    name = model.peft_config[ADAPTER].base_model_name_or_path
    base = load_model(name, dtype=p.dtype, device=str(p.device), trust_remote_code=trust)
    adapted: nn.Module = load_adapted(base, folder)
    return adapted


def _vocabulary(model: nn.Module) -> int:
    head = head_of(model)
    return int(head.weight.shape[0]) if head is not None else int(model.config.vocab_size)  # type: ignore[union-attr, arg-type]


@contextlib.contextmanager
def _keeping_trainable(policy: Policy) -> Iterator[None]:
    """peft switches requires_grad as adapters come and go; put it back as it was."""
    before = {n: p.requires_grad for n, p in policy.model.named_parameters()}
    try:
        yield
    finally:
        for n, p in policy.model.named_parameters():
            p.requires_grad_(before.get(n, False))
