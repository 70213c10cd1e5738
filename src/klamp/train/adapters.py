"""Folders of LoRA adapters, looked at before anything in them is loaded: safetensors, LoRA, the right base."""

from __future__ import annotations

import json
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


def check_adapter(folder: Path, model: Any) -> None:
    """:func:`check_folder`, and refuse an adapter that was made for another base."""
    base = check_folder(folder).get("base_model_name_or_path")
    own = model.peft_config[ADAPTER].base_model_name_or_path
    if base and own and Path(str(base)).name != Path(own).name:
        raise ConfigError(f"kl.reference: the adapter in {str(folder)!r} was made for {base!r}, the policy is {own!r}.")


def _beside(folder: Path) -> str:
    try:
        beside = sorted(p.parent.name for p in folder.parent.glob("*/adapter_config.json"))
    except (OSError, ValueError):
        return ""
    return f" Adapters in {str(folder.parent)!r}: {', '.join(beside)}." if beside else ""
