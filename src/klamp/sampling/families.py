"""Which models may decode by the static cache, which decode by transformers' own, and which cannot be sampled from.

A family is in :data:`FAST` because ``tests/zoo`` has compared its sampler, log-probs, KL and gradients with plain
transformers, below and beyond its window. A family that is not there, a new one for instance, decodes by transformers'
own cache and is tried on a few tokens before anything is sampled.
"""

from __future__ import annotations

import inspect
from typing import Any

from klamp.errors import ConfigError
from klamp.sampling.caches import attention_of

FAST = frozenset(
    {
        "apertus", "arcee", "cohere", "cohere2", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text",
        "gemma3n_text", "gemma4_text", "glm", "glm4", "gpt2", "gpt_neox", "gpt_oss", "granite", "helium",
        "hunyuan_v1_dense", "llama", "ministral", "mistral", "mixtral", "nemotron", "olmo", "olmo2", "olmo3", "phi",
        "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "stablelm", "starcoder2",
    }
)  # fmt: skip
"""``model_type`` of the text models whose decoding by the static cache is known to be right."""
EAGER_WINDOWS = ("gemma2", "gpt_oss")
"""Those that have eager attention only, and take a mask for each kind of layer."""


def is_fast(model: Any) -> bool:
    """Whether the static cache is known to be right for this model as it is configured."""
    from transformers.cache_utils import StaticCache, StaticLayer, StaticSlidingWindowLayer

    config = model.config
    if config.model_type not in FAST or attention_of(model) not in ("sdpa", "eager"):
        return False
    layers: Any = StaticCache(config=config, max_cache_len=1).layers
    windows = any(type(layer) is StaticSlidingWindowLayer for layer in layers)
    if windows and attention_of(model) == "eager" and config.model_type not in EAGER_WINDOWS:
        return False
    return all(type(layer) in (StaticLayer, StaticSlidingWindowLayer) for layer in layers)


def check_sampled(model: Any) -> None:
    """Refuse a model whose decoding state neither cache can hold, in one line that says why."""
    config, name = model.config, type(model).__name__
    # The decoder of such a model, loaded alone, says that it is none.
    if getattr(config, "is_encoder_decoder", False) or getattr(type(config)(), "is_encoder_decoder", False):
        raise ConfigError(f"{name} is an encoder-decoder: klamp trains causal models.")
    if "past_key_values" not in inspect.signature(type(model).forward).parameters:
        raise ConfigError(
            f"{name} cannot be sampled from: it keeps its state in another cache than past_key_values. "
            "Choose a model with attention layers."
        )
    if config.model_type == "falcon" and config.alibi and attention_of(model) == "sdpa":
        raise ConfigError(
            f"{name} with ALiBi: transformers' SDPA adds its biases otherwise than the model was trained with. "
            "Choose a Falcon with rotary positions."
        )
