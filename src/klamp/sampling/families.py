"""Which models may decode by the static cache, which decode by transformers' own, and which cannot be sampled from.

A family is in :data:`FAST` because ``tests/zoo`` has compared its sampler, log-probs, KL and gradients with plain
transformers, below and beyond its window. A family that is not there, a new one for instance, decodes by transformers'
own cache and is tried on a few tokens before anything is sampled.

A model that is not in :data:`~klamp.sampling.families.FAST`, tried on a few tokens before it is sampled from.

Its logits one token at a time, for prompts of different lengths side by side, must be those of its forward pass over
each sequence alone: otherwise completions would be drawn from another distribution than the one that is trained.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from klamp.errors import ConfigError
from klamp.sampling.caches import DynamicSteps, accepted, attention_of, positions_of

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


PROMPTS = (6, 2)
"""Tokens of the two prompts tried; the shorter one is padded."""
STEPS = 6
"""Tokens after the prompts, or as many as pass a window of at most :data:`FARTHEST`."""
FARTHEST = 64
COARSE = 0.5
"""Nats by which rounding may move a log-prob in bfloat16, whose 8 bits are rounded in every layer. A wrong way is off
by more on some token."""
FINE = 1e-3
"""The same in float32, of logits of size 20 behind some tens of layers."""
NOISE = 30
"""Times that stepping may differ more than a padded batch does from a sequence alone, in float32. A state that one of
the two ways treats otherwise, if slightly, is off by more: 70 times where Nemotron-H's step clamps one number less."""
LEAST = 2e-5
"""Nats below which two ways are the same, however small the noise."""


def check_decoding(model: Any) -> None:
    """Refuse a model that cannot be sampled from token by token, in one line that says why."""
    name = type(model).__name__
    try:
        refused = _tried(model)
    except Exception as error:  # other people's code fails in ways of its own
        said = " ".join(str(error).split())[:200]
        refused = f"cannot be sampled from: transformers' cache fails with {type(error).__name__}: {said}"
    if refused is not None:
        raise ConfigError(f"{name} {refused}. Choose another model.")


@torch.no_grad()
def _tried(model: Any) -> str | None:
    """Why the model is refused; None where all ways to a log-prob agree."""
    ids, starts = _ids(model), [PROMPTS[0] - p for p in PROMPTS]
    wide = next(model.parameters()).dtype in (torch.float32, torch.float64)
    alone, shorter = ([_whole(model, row[s:end]) for row, s in zip(ids, starts, strict=True)] for end in (None, -1))
    far = max(_apart(a[:-1], b) for a, b in zip(alone, shorter, strict=True))
    if far > (FINE if wide else COARSE):
        return f"is not a causal model: a token's log-prob changes by {far:.2g} nats with what follows it"
    behind = [a[PROMPTS[0] - s - 1 :] for a, s in zip(alone, starts, strict=True)]  # from the prompt's last token on
    noise = max(map(_apart, behind, _batched(model, ids, starts).unbind(1)))
    if noise > (FINE if wide else COARSE):
        return f"does not see which tokens are padding: a padded sequence is {noise:.2g} nats from the same one alone"
    far = max(map(_apart, behind, _stepped(model, ids, starts).unbind(1)))
    if far > (max(LEAST, NOISE * noise) if wide else COARSE):
        why = "one token at a time its log-probs are"
        return f"cannot be sampled from: {why} {far:.2g} nats from those of its forward pass over the same tokens"
    return None


def _ids(model: Any) -> Tensor:
    """[2, L] random tokens; the longest window that is not too long is passed."""
    config = model.config.get_text_config()
    windows = [getattr(config, k, None) for k in ("sliding_window", "attention_chunk_size", "attention_window_size")]
    near = [w for w in windows if isinstance(w, int) and 0 < w <= FARTHEST]
    length = PROMPTS[0] + max([STEPS, *(w + 2 for w in near)])
    context = getattr(config, "max_position_embeddings", None)
    length = min(length, context) if isinstance(context, int) and context > PROMPTS[0] + 1 else length
    embedded = model.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    found = torch.randint(min(3, embedded - 1), embedded, (len(PROMPTS), length), generator=generator)
    return found.to(next(model.parameters()).device)


def _whole(model: Any, row: Tensor) -> Tensor:
    """[T, V] log-probs after each token of one sequence alone."""
    found: Tensor = model(input_ids=row[None], use_cache=False).logits[0]
    return found.float().log_softmax(-1)


def _stepped(model: Any, ids: Tensor, starts: list[int]) -> Tensor:
    """[T, 2, V] log-probs after the prompts and after each token behind them, as the sampler finds them."""
    prompt = PROMPTS[0]
    columns = torch.arange(prompt, device=ids.device)
    attention = torch.stack([columns >= s for s in starts])
    steps = DynamicSteps(model)
    logits = [steps.prefill(ids[:, :prompt], attention)]
    logits += [steps.step(ids[:, t]) for t in range(prompt, ids.shape[1])]
    return torch.stack(logits).float().log_softmax(-1)


def _batched(model: Any, ids: Tensor, starts: list[int]) -> Tensor:
    """[T, 2, V] the same from one forward pass over both sequences, the shorter one padded."""
    attention = torch.arange(ids.shape[1], device=ids.device) >= torch.tensor(starts, device=ids.device)[:, None]
    options = accepted(model, position_ids=positions_of(attention))
    logits = model(input_ids=ids, attention_mask=attention.long(), use_cache=False, **options).logits
    found: Tensor = logits[:, PROMPTS[0] - 1 :].transpose(0, 1)
    return found.float().log_softmax(-1)


def _apart(a: Tensor, b: Tensor) -> float:
    """The largest difference between log-probs of likely tokens; not a number counts as far."""
    far = torch.where(a > -20, (a - b).abs(), torch.zeros_like(a)).max()
    return float(far.nan_to_num(torch.inf))
