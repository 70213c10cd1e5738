"""Models of two layers and a batch of groups of different sizes, padded on both sides."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from klamp.sampling.rollout import Part

FIRST = 5
"""Columns of the prompts."""


def model(name: str, **settings: Any) -> Any:
    """A random model: gpt2 and llama in float64, mistral in float32."""
    torch.manual_seed(0)
    if name == "gpt2":
        drop = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config: Any = GPT2Config(n_layer=2, n_head=4, n_embd=32, vocab_size=40, n_positions=32, **drop, **settings)
        return GPT2LMHeadModel(config).double().eval()
    fields = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "initializer_range": 0.3}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2}
    if name == "mistral":
        return MistralForCausalLM(MistralConfig(vocab_size=40, **fields, **heads, **settings)).eval()
    return LlamaForCausalLM(LlamaConfig(vocab_size=40, **fields, **heads, **settings)).double().eval()


def part(columns: int = 7) -> Part:
    """Groups of four, two (padded on the left) and one, in no order; sequences that end early."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(1, 40, (7, FIRST + columns), generator=generator)
    attention = torch.ones_like(ids, dtype=torch.bool)
    for group in ([0, 2, 3, 6], [1, 5], [4]):
        ids[group, :FIRST] = ids[group[0], :FIRST].clone()
    attention[[1, 5], :2] = False
    ids[1, :2] = 7  # what stands in the padding does not matter
    attention[0, FIRST + 4 :] = False
    attention[5, FIRST + 1 :] = False
    return Part(torch.arange(7), slice(0, columns), ids, attention, attention[:, FIRST:].clone(), FIRST)
