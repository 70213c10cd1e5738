"""A random model over a few words, small enough that a training step takes milliseconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

WORDS = 29
"""How many there are, w0 and so on, besides the special tokens."""


def vocabulary(words: int = WORDS) -> dict[str, int]:
    """Three special tokens, then w0, w1 and so on."""
    return {w: i for i, w in enumerate(["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(words))])}


def tokenizer(words: dict[str, int]) -> Any:
    """One token a word, padded on the left."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def write_model(folder: Path, *, words: dict[str, int] | None = None, seed: int = 0, **sizes: Any) -> str:
    """A two-layer Llama, its weights spread enough to have something to move, and its tokenizer; the folder's name."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    words = words or vocabulary()
    small = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 32,
        "initializer_range": 0.3,
    }
    special = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
    config = LlamaConfig(
        vocab_size=len(words), num_hidden_layers=2, tie_word_embeddings=False, **special, **(small | sizes)
    )
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    LlamaForCausalLM(config).save_pretrained(folder)
    torch.set_rng_state(state)
    tokenizer(words).save_pretrained(folder)
    return str(folder)
