"""Two models to compare: a policy and a reference, in one model's memory where one is an adapter of the other.

Each is a folder, a Hub id, a built-in name, or the folder of a LoRA adapter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from klamp import models
from klamp.errors import ConfigError
from klamp.kernels import head_of
from klamp.models.policy import Policy, ReferenceStates
from klamp.references.folders import check_folder, is_plain, load_adapted
from klamp.sampling.batch import Part
from klamp.sampling.merged_model import ADAPTER

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
