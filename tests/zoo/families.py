"""Small random models of many families, made on the fly: two layers or four, windows of eight tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

WORDS = 61
WINDOW = 8
SMALL: dict[str, Any] = {
    "vocab_size": WORDS + 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "sliding_window": WINDOW,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
"""What every configuration takes of these, under its own names."""


FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
BOTH = [SLIDING, FULL]
MLA: dict[str, Any] = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen2 with a window": {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1},
    "qwen3": {},
    "qwen2_moe": {},
    "qwen3_moe": {},
    "mistral": {},
    "ministral": {},
    "mixtral": {},
    "gemma": {},
    "gemma2": {},
    "gemma3_text": {"layer_types": BOTH},
    "gemma3n_text": {
        "layer_types": [SLIDING, FULL, SLIDING, FULL],
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "intermediate_size": [48] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 64,
        "laurel_rank": 4,
    },
    "gemma4_text": {
        "head_dim": 8,
        "layer_types": BOTH * 2,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "global_head_dim": 8,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 64,
    },
    "gpt_oss": {"layer_types": BOTH},
    "phi": {},
    "phi3": {},
    "gpt_neox": {},
    "gpt2": {},
    "gptj": {"rotary_dim": 4},
    "codegen": {"rotary_dim": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8, "num_layers": 2},
    "gpt_bigcode": {},
    "opt": {"activation_function": "gelu"},  # a ReLU on its edge has one slope in one order of sums, one in another
    "opt with a projection": {"model_type": "opt", "word_embed_proj_dim": 16},
    "bloom": {},
    "mpt": {},
    "falcon": {},
    "falcon with ALiBi": {"model_type": "falcon", "alibi": True},
    "stablelm": {},
    "granite": {},
    "granitemoe": {},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], **MAMBA},
    "cohere": {},
    "cohere2": {"layer_types": BOTH},
    "olmo": {},
    "olmo2": {},
    "olmo3": {"layer_types": BOTH},
    "smollm3": {},
    "glm": {},
    "glm4": {},
    "starcoder2": {},
    "nemotron": {},
    "exaone4": {"layer_types": BOTH},
    "ernie4_5": {},
    "hunyuan_v1_dense": {},
    "seed_oss": {},
    "apertus": {},
    "arcee": {},
    "helium": {},
    "persimmon": {},
    "xglm": {},
    "biogpt": {},
    "ctrl": {},
    "modernbert-decoder": {},
    "nanochat": {},
    "doge": {"keep_window_size": 6},
    "llama4_text": {"attention_chunk_size": 8},
    "deepseek_v3": {**MLA, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "head_dim": 8},
    "minicpm3": {**MLA, "head_dim": 8, "dim_model_base": 32},
    "olmoe": {},
    "jetmoe": {},
    "minimax_m2": {},
    "qwen3_next": {"layer_types": [LINEAR, FULL], **DELTA},
    "qwen3_5_text": {"layer_types": [LINEAR, FULL], **DELTA},
    "qwen3_5_moe_text": {"layer_types": [LINEAR, FULL], **DELTA},
    "lfm2": {"layer_types": ["conv", FULL]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4},
    "bamba": {"attn_layer_indices": [1], **MAMBA},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 64},
    "zamba2": {
        "layer_types": ["mamba", "hybrid"],
        "num_mem_blocks": 1,
        "hybrid_layer_ids": [1],
        "mamba_d_state": 8,
        "mamba_ngroups": 1,
        "mamba_headdim": 16,
        "n_mamba_heads": 4,
        "adapter_rank": 4,
    },
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 1,
    },
    "olmo_hybrid": {},
    "recurrent_gemma": {"attention_window_size": 8},
    "mamba": {},
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1},
    "falcon_mamba": {},
    "rwkv": {"attention_hidden_size": 32},
    "xlstm": {},
    "bert": {},
    "roberta": {},
    "minimax": {},
    "openai-gpt": {},
    "cpmant": {},
    "bart": {},
    "bert as a decoder": {"model_type": "bert", "is_decoder": True},
}
"""Families by name with what they need besides; ``model_type`` where a name is not its own."""


def _takes(config: Any, name: str) -> bool:
    """Whether a configuration has this setting, and not as something it works out itself."""
    try:
        return hasattr(config, name) and not isinstance(getattr(type(config), name, None), property)
    except Exception:  # one that differs between layers
        return False


def build(model_type: str, **own: Any) -> Any:
    """A random model of a family with ``own`` settings besides :data:`SMALL`, every parameter moved off its start."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    known = AutoConfig.for_model(model_type)
    text = known.get_text_config()
    small = {k: v for k, v in SMALL.items() if _takes(text, k)} | own
    config = AutoConfig.for_model(text.model_type, **small)
    state = torch.get_rng_state()
    torch.manual_seed(0)
    try:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for p in model.parameters():
                # Norms stay near 1 and matrices become wide enough for attention to choose among tokens.
                p.add_(torch.randn_like(p), alpha=0.15 if p.dim() > 1 else 0.1)
    finally:
        torch.set_rng_state(state)
    return model


def write(folder: Path, name: str) -> str:
    """The model of a family in ``folder``."""
    build(**{"model_type": name, **FAMILIES[name]}).save_pretrained(folder)
    return str(folder)
