"""Folders that a reference is read from: the saved steps of a run, and LoRA adapters.

An adapter is looked at before anything in it is loaded: safetensors, LoRA, the right base.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from klamp.errors import ConfigError, shown
from klamp.sampling.merged_model import ADAPTER


def check_folder(folder: Path, what: str = "kl.reference") -> dict[str, Any]:
    """The adapter's configuration; refuses a folder that is not there, naming those beside it, or is not safe."""
    try:
        there = folder.is_dir()
    except (OSError, ValueError):  # a name too long, or with a NUL in it
        there = False
    if not there:
        raise ConfigError(f"{what}: there is no folder {shown(str(folder))}.{_beside(folder)}")
    if not (folder / "adapter_config.json").is_file():
        raise ConfigError(f"{what}: no adapter in {str(folder)!r} (adapter_config.json is missing).")
    if not (folder / "adapter_model.safetensors").is_file():
        raise ConfigError(f"{what}: {str(folder)!r} has no adapter_model.safetensors; pickled ones are refused.")
    try:
        found = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{what}: adapter_config.json of {str(folder)!r} cannot be read: {error}.") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{what}: adapter_config.json of {str(folder)!r} must hold an object.")
    if found.get("peft_type") != "LORA":
        raise ConfigError(f"{what}: {str(folder)!r} is a {shown(found.get('peft_type'))} adapter; klamp loads LORA.")
    if found.get("megatron_config"):  # peft would import whatever module megatron_core names
        raise ConfigError(f"{what}: {str(folder)!r} asks for code of its own (megatron_config): refused.")
    return found


UNPLAIN = (
    "use_dora",
    "lora_bias",
    "layer_replication",
    "trainable_token_indices",
    "target_parameters",
    "alora_invocation_tokens",
)
"""Settings by which an adapter is more than two matrices a layer."""
BASE_UNTOUCHED = (True, False, "gaussian", "orthogonal", "eva")
"""Ways to start an adapter that leave the base's weights as they are; PiSSA, OLoRA, CorDA and LoftQ change them."""


def is_plain(found: Mapping[str, Any]) -> bool:
    """Whether an adapter is LoRA matrices and nothing besides, so that switching it off leaves the base itself.

    A bias that was trained along, replicated layers or a start that changes the base stay when the adapter is off.
    """
    plain = found.get("bias", "none") == "none" and found.get("init_lora_weights", True) in BASE_UNTOUCHED
    return plain and not any(found.get(name) for name in UNPLAIN)


def load_adapted(model: Any, folder: Path, name: str = ADAPTER) -> Any:
    """``model`` with the adapter in ``folder`` on it, as peft loads it; an adapter of another base is refused."""
    from peft import PeftModel

    try:
        return PeftModel.from_pretrained(model, str(folder), adapter_name=name, is_trainable=False).eval()
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError, OSError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"adapter {str(folder)!r} was not made for this base model: {first}") from None


def check_adapter(folder: Path, model: Any) -> None:
    """:func:`check_folder`, and refuse an adapter that was made for another base."""
    base = check_folder(folder).get("base_model_name_or_path")
    own = model.peft_config[ADAPTER].base_model_name_or_path
    if base and own and Path(str(base)).name != Path(own).name:
        raise ConfigError(
            f"‹kl.reference›: the adapter in {str(folder)!r} was made for {base!r}, the policy is {own!r}."
        )


def _beside(folder: Path) -> str:
    try:
        beside = sorted(p.parent.name for p in folder.parent.glob("*/adapter_config.json"))
    except (OSError, ValueError):
        return ""
    return f" Adapters in {str(folder.parent)!r}: {', '.join(beside)}." if beside else ""


def folder_of(run: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return run / "checkpoints" / f"step-{step:06d}"


def step_folder(run: Path, step: int) -> Path:
    """The checkpoint folder of a step, or the error that lists those there are."""
    folder = folder_of(run, step)
    if not folder.is_dir():
        there = ", ".join(str(s) for s in saved_steps(run)) or "none"
        raise ConfigError(f"‹kl.reference› step:{step} is not saved in {str(run)!r}. Saved steps: {there}.")
    return folder


def saved_steps(run: Path) -> list[int]:
    """Steps with a checkpoint folder, oldest first."""
    folders = (run / "checkpoints").glob("step-*") if (run / "checkpoints").is_dir() else []
    return sorted(int(f.name[5:]) for f in folders if f.name[5:].isdigit())


def newest_before(run: Path, step: int) -> Path | None:
    """The newest checkpoint at or before ``step``; None when that is the base."""
    found = [s for s in saved_steps(run) if 0 < s <= step]
    return folder_of(run, found[-1]) if found else None
