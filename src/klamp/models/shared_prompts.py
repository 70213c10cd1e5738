"""The states before each token; a prompt that several sequences share is computed once where that pays.

With causal attention the states of a prompt do not depend on what follows it. So sequences with the same prompt are
laid out as one row, the prompt and then their tails, each token seeing the prompt and its own tail:

    prompt a1 a2 a3 b1 b2 b3        b2 sees prompt b1 b2

One pass, the same numbers and gradients, fewer tokens. Scores are computed for pairs that do not see each other too,
so this is for tails that are short beside the width of the model; and PyTorch's fastest attention takes no mask, so it
is for long prompts of wide models. A narrow one waits for Python and not for arithmetic.

Shapes: n sequences, P distinct prompts, ``first`` columns of prompt, c columns of tokens, G tails a prompt at most,
w = c - 1 columns of a tail (the last token predicts nothing), H hidden.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from klamp.models.training_layers import is_wide
from klamp.sampling.caches import Layout, accepted, layout, plain_cache, positions_of, sees
from klamp.sampling.families import FAST
from klamp.sampling.rollout import Part

SAVED = 0.25
"""Share of a part's tokens that must be saved for the other layout to pay."""
ALIGNED = 8
"""Numbers of a mask whose rows SDPA takes as they are; others it copies in every layer."""
TRIED = 4
"""Sequences on which the two layouts are compared before the short one is used."""


class Backbone:
    """Last hidden states of a part; remembers whether the model was seen to give the same ones in both layouts."""

    def __init__(self) -> None:
        self.agreed: bool | None = None
        """None until it was tried, on the first part with something to share."""

    def __call__(self, backbone: nn.Module, part: Part, *, share: bool) -> Tensor:
        """[n, c, H] states before each token of ``part``; ``share`` allows the other layout."""
        if share and self.agreed is not False and part.ids.numel() and possible(backbone, part):
            found = layout(part.ids[:, : part.first], part.attention[:, : part.first])
            if worthwhile(part, found, backbone.config):
                if self.agreed is None:
                    self.agreed = agrees(backbone, part)
                if self.agreed:
                    return states_shared(backbone, part, found)
        return states_whole(backbone, part)


def possible(backbone: Any, part: Part) -> bool:
    """Whether the layout may change and can pay: a wide model under SDPA, nothing random, prompts that are long."""
    config = backbone.config
    random = backbone.training and any(getattr(config, k, 0) for k in ("attention_dropout", "attn_pdrop"))
    long = part.first >= SAVED * part.ids.shape[1]
    return long and is_wide(backbone) and not random and config._attn_implementation == "sdpa"


def dtype_of(backbone: nn.Module) -> torch.dtype:
    """The dtype of a model's weights."""
    return next(backbone.parameters()).dtype


def worthwhile(part: Part, found: Layout, config: Any) -> bool:
    """Whether the tokens saved outweigh scores between tails that do not see each other.

    A layer's linear maps take about 12 H² products a token, its scores and their use 2 H a pair.
    """
    n, length = part.ids.shape
    width = length - 1 - part.first
    saved = 1 - len(found.rows) * (part.first + found.tails * width) / (n * max(length - 1, 1))
    outweighs = (found.tails - 1) * width <= 6 * saved * config.get_text_config().hidden_size
    return width >= 0 and saved >= SAVED and outweighs  # a part may have no column of tokens at all


def inputs_of(model: Any, part: Part) -> dict[str, Tensor]:
    """What a model is called with: ids, mask, and positions that do not count padding, where it takes them."""
    attention = part.attention.long()
    found = {"input_ids": part.ids, "attention_mask": attention}
    return found | accepted(model, position_ids=positions_of(attention))


def states_whole(backbone: nn.Module, part: Part) -> Tensor:
    """[n, c, H] states before each token, every sequence from its beginning."""
    found: Tensor = backbone(**inputs_of(backbone, part), use_cache=False).last_hidden_state
    return found[:, part.first - 1 : part.ids.shape[1] - 1]


def states_shared(backbone: nn.Module, part: Part, found: Layout) -> Tensor:
    """[n, c, H] states before each token, sequences of the same prompt in one row."""
    first, end = part.first, part.ids.shape[1] - 1
    at = found.which * found.tails + found.place

    def rows(x: Tensor) -> Tensor:
        """[P, first + G w] of [n, L]; places that no sequence takes stay 0."""
        tails = x.new_zeros(len(found.rows) * found.tails, end - first).index_copy(0, at, x[:, first:end])
        return torch.cat([x[found.rows, :first], tails.view(len(found.rows), -1)], 1)

    inputs = {name: rows(x) for name, x in inputs_of(backbone, part).items()}
    real = inputs["attention_mask"].bool()[:, None, None, :]
    inputs["attention_mask"] = added(sees(first, found.tails, end - first, real), dtype_of(backbone))
    states = backbone(**inputs, use_cache=False).last_hidden_state
    before: Tensor = states[:, first - 1].index_select(0, found.which)[:, None]
    shape = (len(found.rows) * found.tails, end - first, states.shape[-1])
    tails = states[:, first:].reshape(shape).index_select(0, at)
    return torch.cat([before, tails], 1)


def added(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """What SDPA adds to its scores. Of booleans it would make these numbers in every layer, forwards and backwards."""
    width = seen.shape[-1]
    wide = -width % ALIGNED + width
    found = torch.zeros(*seen.shape[:-1], wide, dtype=dtype, device=seen.device)[..., :width]
    return found.masked_fill_(~seen, -torch.inf)


@torch.no_grad()
def agrees(backbone: Any, part: Part) -> bool:
    """Whether the model gives the same states in both layouts on a few sequences, up to rounding.

    One that has its own way with masks or positions is off by the size of the states themselves, or refuses. A family
    that is not known is not tried: it may be the same here and another on longer sequences.
    """
    if backbone.config.model_type not in FAST or plain_cache(backbone.config) is None:
        return False
    few = replace(part, **{k: getattr(part, k)[:TRIED] for k in ("rows", "ids", "attention", "mask")})
    one = states_whole(backbone, few)[few.mask]
    try:
        other = states_shared(backbone, few, layout(few.ids[:, : few.first], few.attention[:, : few.first]))[few.mask]
    except (IndexError, RuntimeError, TypeError, ValueError):
        return False
    rounding = 1e-3 if one.dtype in (torch.float32, torch.float64) else 5e-2
    return bool((one - other).abs().max() <= rounding * one.abs().max()) if len(one) else True
