"""LoRA adapters: which layers get one, and what stays as it is."""

from __future__ import annotations

from typing import Any

from torch import nn

from klamp.errors import ConfigError
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
