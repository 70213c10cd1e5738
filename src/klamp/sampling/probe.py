"""A model that is not in :data:`~klamp.sampling.families.FAST`, tried on a few tokens before it is sampled from.

Its logits one token at a time, for prompts of different lengths side by side, must be those of its forward pass over
each sequence alone: otherwise completions would be drawn from another distribution than the one that is trained.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from klamp.errors import ConfigError
from klamp.sampling.caches import DynamicSteps

PROMPTS = (6, 2)
"""Tokens of the two prompts tried; the shorter one is padded."""
STEPS = 6
"""Tokens after the prompts, or as many as pass a window of at most :data:`FARTHEST`."""
FARTHEST = 64
BOUND = {torch.float32: 1e-3, torch.float64: 1e-6}
"""Nats by which rounding alone may move a log-prob: float32 sums of some thousand terms in another order."""
COARSE = 0.5
"""The same in bfloat16, whose 8 bits are rounded in every layer. A wrong way is off by nats."""


@torch.no_grad()
def check_decoding(model: Any) -> None:
    """Refuse a model that cannot be sampled from token by token, in one line that says why."""
    name, bound = type(model).__name__, BOUND.get(next(model.parameters()).dtype, COARSE)
    ids = _ids(model)
    starts = [PROMPTS[0] - p for p in PROMPTS]
    try:
        # From the prompt's last token on.
        alone = [_whole(model, row[s:])[PROMPTS[0] - s - 1 :] for row, s in zip(ids, starts, strict=True)]
        shorter = [_whole(model, row[s:-1])[PROMPTS[0] - s - 1 :] for row, s in zip(ids, starts, strict=True)]
        far = max(_apart(a[:-1], b) for a, b in zip(alone, shorter, strict=True))
        if far > bound:
            raise ConfigError(
                f"{name} is not a causal model: a token's log-prob changes by {far:.2g} nats with what follows it. "
                "klamp trains causal models."
            )
        stepped = _stepped(model, ids, starts)
        far = max(_apart(a, b) for a, b in zip(alone, stepped.unbind(1), strict=True))
    except ConfigError:
        raise
    except Exception as error:  # other people's code fails in ways of its own
        said = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"{name} cannot be sampled from: transformers' cache fails with {type(error).__name__}: {said}."
        ) from error
    if far > bound:
        raise ConfigError(
            f"{name} cannot be sampled from: one token at a time its log-probs are {far:.2g} nats from those of its "
            "forward pass over the same tokens, padding or its state is not seen. Choose another model."
        )


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


def _apart(a: Tensor, b: Tensor) -> float:
    """The largest difference between log-probs of likely tokens; not a number counts as far."""
    far = torch.where(a > -20, (a - b).abs(), torch.zeros_like(a)).max()
    return float(far.nan_to_num(torch.inf))
