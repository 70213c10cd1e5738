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


def build(model_type: str, **own: Any) -> Any:
    """A random model of a family with ``own`` settings besides :data:`SMALL`, every parameter moved off its start."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    known = AutoConfig.for_model(model_type)
    text = known.get_text_config()
    small = {
        k: v for k, v in SMALL.items() if hasattr(text, k) and not isinstance(getattr(type(text), k, None), property)
    } | own
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


def write(folder: Path, model_type: str, **own: Any) -> str:
    """The model and a tokenizer of :data:`WORDS` words in ``folder``."""
    from small_model import tokenizer, vocabulary

    build(model_type, **own).save_pretrained(folder)
    tokenizer(vocabulary(WORDS)).save_pretrained(folder)
    return str(folder)
