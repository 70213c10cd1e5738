"""The correction for a sampler that is not quite the policy: its settings, and the weights of a part's tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from klamp import trust
from klamp.errors import ConfigError, require_number, unknown

USUAL_LIMIT = 2.0
"""The largest weight, or ratio either way: what TRL, verl, SkyRL and NeMo-RL truncate at."""


@dataclass(frozen=True, kw_only=True)
class CorrectionConfig:
    """What is done about tokens on which the sampler and the trainer disagree; w = e^(logp - sampler_logp)."""

    kind: Literal["auto", "none", "truncate", "mask_ratio", "mask_tv", "mask_kl"] = "auto"
    """truncate: weigh each token by min(w, limit). mask_*: leave out tokens beyond limit, measured by the ratio, the
    total variation or the KL of the token against all others. auto: truncate for a server's completions, else none."""
    limit: float | None = None
    """truncate and mask_ratio: 2 if not given. mask_tv and mask_kl: a divergence, to be given."""
    per: Literal["token", "sequence"] = "token"
    """truncate: the weight of a token, or of its whole sequence."""
    side: Literal["both", "away"] = "both"
    """mask_*: every token beyond the limit, or only those whose update would widen the gap."""
    pays: bool = True
    """A token that is left out of the policy loss still pays its KL."""

    def __post_init__(self) -> None:
        kinds = ("auto", "none", "truncate", "mask_ratio", "mask_tv", "mask_kl")
        if self.kind not in kinds:
            raise unknown("algorithm.correction.kind", self.kind, kinds)
        if self.limit is None and self.kind in ("mask_tv", "mask_kl"):
            raise ConfigError(
                f"‹algorithm.correction.limit› is missing for ‹algorithm.correction.kind={self.kind}›. It is the "
                "largest divergence that stays; there is no usual one."
            )
        if self.limit is not None:
            above = 1 if self.kind == "mask_ratio" else 0
            require_number("algorithm.correction.limit", self.limit, above=above, way_out="Leave it out for 2.")


class Corrected(NamedTuple):
    """What a part's tokens count for in the policy loss, [n, c] each, without gradient."""

    weights: Tensor
    stays: Tensor
    """Tokens that are not left out."""
    truncated: Tensor
    """Tokens whose weight was cut."""


def correct(
    config: CorrectionConfig, logp: Tensor, sampler_logp: Tensor, counted: Tensor, advantages: Tensor
) -> Corrected:
    """Weights and mask for tokens with the trainer's ``logp`` before the update and the sampler's ``sampler_logp``."""
    limit = USUAL_LIMIT if config.limit is None else config.limit
    nothing = torch.zeros_like(counted)
    if config.kind == "truncate":
        w = trust.weights(logp, sampler_logp, counted)
        cut = trust.truncate(w, limit, per=config.per, keep=counted)
        whole = trust.truncate(w, torch.finfo(w.dtype).max, per=config.per, keep=counted)
        return Corrected(cut, counted, counted & (whole > limit))
    kind: dict[str, trust.Kind] = {"mask_ratio": "ratio", "mask_tv": "tv", "mask_kl": "kl"}
    stays = trust.mask(
        logp, sampler_logp, counted, kind=kind[config.kind], limit=limit, side=config.side, advantages=advantages
    )
    return Corrected(trust.weights(logp, sampler_logp, stays), stays, nothing)
