"""LoRA adapters: which layers get one, and those in a folder.

A folder is looked at before anything in it is loaded: safetensors, LoRA, the right base.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from klamp.errors import ConfigError, shown
from klamp.sampling.merged_model import ADAPTER

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts")
"""What configurations call the number of a layer's experts."""
MIXERS = ("attn", "attention", "mixer", "mamba", "conv")
"""Parts of the names of modules that mix tokens: attention, and what takes its place."""


def has_experts(config: Any) -> bool:
    """Whether the model is a mixture of experts."""
    text = config.get_text_config()
    return any(isinstance(n := getattr(text, name, None), int) and n > 1 for name in EXPERTS)


def lora_targets(model: nn.Module, given: str) -> Any:
    """The modules that get an adapter: the names given, or all linear maps, with experts those of attention alone.

    The experts' weights are one tensor a layer and each sees few tokens; routers decide which. Both stay as they are.
    """
    if given != "all-linear":
        return [t.strip() for t in given.split(",") if t.strip()]
    head, experts = model.get_output_embeddings(), has_experts(model.config)  # type: ignore[operator]
    linear = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head}
    # Mamba's fused kernels read the weight of out_proj and would pass by its adapter.
    fused = {n for n in linear if n.endswith(".out_proj") and _state_space(model.get_submodule(n.rpartition(".")[0]))}
    if not experts and not fused:
        return given
    mixing = {n for n in linear if any(part in piece for piece in n.split(".")[:-1] for part in MIXERS)}
    chosen = (mixing if experts and mixing else set(linear)) - fused
    return sorted(chosen)


def left_out_by_lora(model: nn.Module) -> str:
    """Which linear maps an adapter on all of them is on, where that is not all: a mixture of experts, Mamba."""
    adapted: Any = model
    settings = adapted.peft_config[ADAPTER]
    if settings.target_modules == "all-linear" or not has_experts(adapted.config):
        return ""
    names = sorted({name.rpartition(".")[2] for name in adapted.targeted_module_names})
    return (
        f"a mixture of experts: LoRA is on {', '.join(names)}; experts and routers stay as they are. "
        "lora.targets chooses other layers."
    )


def _state_space(module: nn.Module) -> bool:
    """Whether a module is Mamba's mixer, by the names of its parameters."""
    return hasattr(module, "A_log") and hasattr(module, "D")


def add_lora(model: nn.Module, *, rank: int, alpha: float, targets: str) -> nn.Module:
    """A LoRA adapter without dropout on the chosen layers, in float32 whatever the base is."""
    from peft import LoraConfig, TaskType, get_peft_model

    if hasattr(model, "peft_config"):
        raise ConfigError("the model already has an adapter. Name its base as model and the adapter as ‹kl.reference›.")
    settings = LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=rank,
        lora_alpha=alpha,  # type: ignore[arg-type]
        lora_dropout=0.0,
        target_modules=lora_targets(model, targets),
        bias="none",
        fan_in_fan_out=any(type(m).__name__ == "Conv1D" for m in model.modules()),  # GPT-2 keeps its weights transposed
    )
    try:
        return get_peft_model(model, settings, adapter_name=ADAPTER)
    except ValueError as error:
        raise ConfigError(f"‹lora.targets› {targets!r} does not fit this model: {error}") from None


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
