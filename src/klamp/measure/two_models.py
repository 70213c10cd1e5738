"""Two models to compare: a policy and a reference, in one model's memory where one is an adapter of the other.

Each is a folder, a Hub id, a built-in name, the folder of a LoRA adapter, or the folder of a run, which stands for its
newest checkpoint. A run knows its base, its prompts, and how its completions were sampled, so one name is enough.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from klamp import models
from klamp.chat import Prompt
from klamp.config_io import from_yaml
from klamp.errors import ConfigError, shown
from klamp.kernels import head_of
from klamp.models.lora import check_folder, is_plain, load_adapted
from klamp.models.policy import Policy, ReferenceStates
from klamp.prompts import load_prompts
from klamp.references.spec import folder_of, saved_steps
from klamp.sampling.merged_model import ADAPTER
from klamp.sampling.rollout import Part
from klamp.train.config import TrainConfig

REFERENCE = "klamp_reference"


@dataclass(frozen=True)
class Pair:
    """Both models behind functions of a part."""

    policy: Policy
    tokenizer: Any
    reference: Callable[[Part], ReferenceStates]
    shared: bool
    """Both live in one model's memory."""
    adapter_off: bool = False
    """The policy is the base under the reference's adapter."""

    @property
    def device(self) -> torch.device:
        """Where both are."""
        return next(self.policy.model.parameters()).device

    @torch.no_grad()
    def policy_states(self, part: Part) -> ReferenceStates:
        """The policy's states for a part."""
        with self.policy.without_adapter() if self.adapter_off else contextlib.nullcontext():
            return self.policy.as_reference(part)


def load_pair(
    policy: str, reference: str, *, temperature: float, device: str, dtype: str, trust_remote_code: bool = False
) -> Pair:
    """Load both, sharing one base model where the names allow it; refuses two that do not speak the same tokens."""
    names = {"policy": _described(policy), "reference": _described(reference)}
    bases = {side: base for side, (base, _) in names.items()}
    adapters = {side: adapter for side, (_, adapter) in names.items()}
    tokenizers = {side: _tokenizer(base, adapters[side], trust_remote_code) for side, base in bases.items()}
    same_tokens(tokenizers["policy"], tokenizers["reference"], policy, reference)

    def load(name: str) -> Any:
        chosen = None if dtype == "auto" else getattr(torch, dtype)
        return models.load_model(name, dtype=chosen, device=device, trust_remote_code=trust_remote_code)

    model = load(bases["policy"])
    shared = bases["policy"] == bases["reference"] and all(map(_switches, adapters.values()))
    if not any(adapters.values()) or not shared:
        model = _with_adapter(model, adapters["policy"])
        main = Policy(model, value_head=False, temperature=temperature, lora=adapters["policy"] is not None)
        if shared:
            return Pair(main, tokenizers["policy"], _itself(main), True)
        other = _with_adapter(load(bases["reference"]), adapters["reference"])
        same_vocabulary(model, other)
        side = Policy(other.eval(), value_head=False, temperature=temperature, lora=False)
        return Pair(main, tokenizers["policy"], _itself(side), False)
    model = _with_adapter(model, adapters["policy"] or adapters["reference"])
    main = Policy(model, value_head=False, temperature=temperature, lora=True)
    if adapters["policy"] is None:
        return Pair(main, tokenizers["policy"], _itself(main), True, adapter_off=True)
    return Pair(main, tokenizers["policy"], _other_adapter(main, adapters["reference"]), True)


def _switches(adapter: Path | None) -> bool:
    """Whether the base is found under an adapter by switching it off; another kind gets a model of its own."""
    if adapter is None:
        return True
    found = check_folder(adapter, f"adapter {str(adapter)!r}")
    return is_plain(found) and not found.get("modules_to_save")


def _other_adapter(main: Policy, adapter: Path | None) -> Callable[[Part], ReferenceStates]:
    """The reference inside the policy's own model: its base, or its second adapter."""
    model: Any = main.model
    if adapter is not None:
        model.load_adapter(str(adapter), adapter_name=REFERENCE, is_trainable=False)
        model.set_adapter(ADAPTER)
        main.find_layers()

    @torch.no_grad()
    def states(part: Part) -> ReferenceStates:
        with main.without_adapter() if adapter is None else main.with_adapter(REFERENCE):
            return main.as_reference(part)

    return states


def _itself(side: Policy) -> Callable[[Part], ReferenceStates]:
    @torch.no_grad()
    def states(part: Part) -> ReferenceStates:
        return side.as_reference(part)

    return states


def _described(name: str) -> tuple[str, Path | None]:
    """(base model, adapter folder or None) of what a name stands for."""
    if not models.is_adapter(name):
        return models.resolve(name), None
    folder = Path(name)
    base = check_folder(folder, f"adapter {name!r}").get("base_model_name_or_path")
    if not base:
        raise ConfigError(f"adapter {name!r} does not say which model it is for (base_model_name_or_path).")
    return models.resolve(str(base)), folder


def _tokenizer(base: str, adapter: Path | None, trust_remote_code: bool) -> Any:
    return models.load_tokenizer(base, trust_remote_code=trust_remote_code)


def _with_adapter(model: Any, adapter: Path | None) -> Any:
    if adapter is None:
        return model
    return load_adapted(model, adapter)


def same_tokens(ours: Any, theirs: Any, policy: str, reference: str) -> None:
    """Refuse tokenizers that differ, saying in what: a KL compares distributions over the same tokens."""
    a, b = ours.get_vocab(), theirs.get_vocab()
    if a == b:
        return
    if len(a) != len(b):
        what = f"{len(a)} and {len(b)} tokens"
    else:
        token = next(t for t in a if b.get(t) != a[t])
        what = f"token {token!r} is {a[token]} in one and {b.get(token, 'missing')} in the other"
    raise ConfigError(
        f"policy {policy!r} and reference {reference!r} have different tokenizers ({what}). A KL compares "
        "distributions over the same tokens; choose models of one family."
    )


def same_vocabulary(model: Any, other: Any) -> None:
    """Refuse heads of different width."""
    heads = [head_of(m) for m in (model, other)]
    sizes = [m.config.vocab_size if h is None else len(h.weight) for m, h in zip((model, other), heads, strict=True)]
    if sizes[0] != sizes[1]:
        raise ConfigError(f"the policy's head has {sizes[0]} tokens, the reference's {sizes[1]}. Choose one family.")


@dataclass(frozen=True)
class Sides:
    """Both models and the prompts, with what a run says about the rest."""

    policy: str
    reference: str
    prompts: list[Prompt]
    run: TrainConfig | None = None
    """Of the run that one of the models belongs to."""

    def out(self) -> Path:
        """The usual folder of this measurement, named by its models."""
        return Path("runs/measure") / f"{_slug(short(self.policy))}-from-{_slug(short(self.reference))}"


def sides(policy: str | None, reference: str | None, prompts: str | Sequence[Prompt] | None) -> Sides:
    """Both models and the prompts; what is left out is taken from the run that the other one belongs to."""
    if policy is None:
        raise ConfigError("policy is missing. Name a run, or two models: klamp measure runs/train, klamp measure A B.")
    found = _run_of(policy) or (None if reference is None else _run_of(reference))
    run = None if found is None else from_yaml(TrainConfig, found / "config.yaml").resolved()
    if reference is None:
        reference = _base(policy, run)
    return Sides(_model(policy), _model(reference), _prompts(prompts, policy, found, run), run)


def short(name: str) -> str:
    """A model's name for a headline: ``train step 100`` for a checkpoint of a run, the last part of any other path."""
    path = Path(name)
    step = re.fullmatch(r"step-(\d+)", path.name)
    if step and path.parent.name == "checkpoints":
        return f"{path.parent.parent.name} step {int(step[1])}"
    return (path.name or name)[:60]


def _run_of(name: str) -> Path | None:
    """The folder of the run that ``name`` is, or is a checkpoint of."""
    try:
        path = Path(name)
        folders = [path, path.parent.parent] if path.parent.name == "checkpoints" else [path]
        return next((f for f in folders if path.is_dir() and (f / "config.yaml").is_file()), None)
    except (OSError, ValueError):  # too long, a NUL in it
        return None


def _model(name: str) -> str:
    """The newest checkpoint of a run's folder; any other name as it is."""
    folder = _run_of(name)
    if folder is None or folder != Path(name) or (folder / "config.json").is_file():
        return models.canonical(name)
    steps = saved_steps(folder)
    if not steps:
        raise ConfigError(f"run {name!r} has no checkpoint yet. Wait for its first one, or lower its save_every.")
    return str(folder_of(folder, steps[-1]))


def _base(policy: str, run: TrainConfig | None) -> str:
    if run is not None:
        return run.model
    if models.is_adapter(policy):
        from klamp.models.lora import check_folder

        base = check_folder(Path(policy), f"adapter {policy!r}").get("base_model_name_or_path")
        if base:
            return str(base)
    raise ConfigError(
        f"reference is missing: what is {shown(policy)} to be compared with? klamp measure {policy} REFERENCE. A "
        "run or a LoRA adapter alone is compared with its base."
    )


def _prompts(
    given: str | Sequence[Prompt] | None, policy: str, folder: Path | None, run: TrainConfig | None
) -> list[Prompt]:
    if given is not None and not isinstance(given, str):
        return list(given)
    if given is None and run is not None:
        if run.prompts is not None and not Path(run.prompts).is_file():
            raise ConfigError(
                f"run {str(folder)!r} was trained on the prompts {run.prompts!r}, which is not a file here. Run klamp "
                "in the folder that it was started in, or give --prompts."
            )
        return load_prompts(run.prompts, run.model).given
    return load_prompts(given, policy).given


def _slug(name: str) -> str:
    return re.sub(r"[^\w.]+", "-", name).strip("-.")[:80] or "model"
