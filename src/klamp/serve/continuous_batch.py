"""Sequences that are decoded together: rows join and leave between any two steps.

The cache is transformers' own, prompts are padded on the left, and positions do not count padding, so a row's
log-probs do not depend on who shares its batch. Rows of a model whose layers all keep every key and value are joined
into one batch; of any other model (sliding windows, recurrent states) each arrival stays a batch of its own.

Shapes: n rows, L columns of the cache so far, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from klamp.sampling.caches import accepted
from klamp.sampling.sampler import nucleus


class Row(Protocol):
    """A sequence as the batch sees it."""

    prompt: list[int]
    temperature: float
    """0: the likeliest token."""
    top_p: float
    top_logprobs: int

    def uniform(self) -> float:
        """The next random number of this row, whoever shares its batch."""
        ...

    def take(self, token: int, logp: float, top: list[tuple[int, float]]) -> bool:
        """Keep a token; whether the row goes on."""
        ...


class Batch:
    """Rows of one model with their cache."""

    def __init__(self, model: Any, rows: Sequence[Row], pad: int) -> None:
        """Computes the prompts; rows with the same prompt are computed once."""
        from transformers.cache_utils import DynamicCache, DynamicLayer

        self.model, self.rows, self.pad = model, list(rows), pad
        self.cache: Any = DynamicCache(config=model.config)
        device = next(model.parameters()).device
        self.selects = all(hasattr(layer, "batch_select_indices") for layer in self.cache.layers)
        """Whether rows can be taken out of the cache; where not, a row that has ended is computed on and not read."""
        prompts = [tuple(r.prompt) for r in rows]
        distinct = list(dict.fromkeys(prompts)) if self.selects else prompts
        width = max(map(len, distinct))
        ids = torch.tensor([[pad] * (width - len(p)) + list(p) for p in distinct], device=device)
        attention = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in distinct], device=device)
        logits = self._forward(ids, attention, (attention.cumsum(-1) - 1).clamp(min=0))
        if self.selects:
            which = torch.tensor([distinct.index(p) for p in prompts], device=device)
            self.cache.batch_select_indices(which)
            attention, logits = attention[which], logits[which]
        self.attention, self.logits = attention, logits
        self.places = list(range(len(rows)))
        """Where each row stands in the tensors."""
        self.joins = all(type(layer) is DynamicLayer for layer in self.cache.layers)
        """Whether rows of another batch can be put beside these."""

    @torch.no_grad()
    def step(self) -> None:
        """One token for every row; rows that have ended are gone afterwards."""
        tokens, logp, tops = self._draw()
        going = [
            i for i, row in enumerate(self.rows) if row.take(int(tokens[i]), float(logp[i]), tops[i] if tops else [])
        ]
        self.keep(going)
        if self.rows:
            token = torch.full((len(self.attention), 1), self.pad)
            token[self.places, 0] = tokens[going]
            token = token.to(self.attention.device)
            self.attention = torch.cat([self.attention, torch.ones_like(token)], 1)
            self.logits = self._forward(token, self.attention, self.attention.sum(1, keepdim=True) - 1)

    def keep(self, rows: list[int]) -> None:
        """Leave out all other rows, and the columns that were padding for all that stay."""
        if len(rows) == len(self.rows):
            return
        self.rows = [self.rows[i] for i in rows]
        self.places = [self.places[i] for i in rows]
        if not rows or not self.selects:
            return
        index = torch.tensor(self.places, device=self.attention.device)
        self.places = list(range(len(rows)))
        self.cache.batch_select_indices(index)
        self.attention, self.logits = self.attention[index], self.logits[index]
        unused = int(self.attention.any(0).int().argmax())
        if self.joins and unused:
            self.attention = self.attention[:, unused:]
            for layer in self.cache.layers:
                layer.keys, layer.values = layer.keys[:, :, unused:], layer.values[:, :, unused:]

    def join(self, other: Batch) -> None:
        """Take in the rows of another batch of the same model; both must be able to."""
        width = max(self.attention.shape[1], other.attention.shape[1])
        self.attention = torch.cat([_widen(b.attention, width, -1) for b in (self, other)])
        self.logits = torch.cat([self.logits, other.logits])
        for ours, theirs in zip(self.cache.layers, other.cache.layers, strict=True):
            ours.keys = torch.cat([_widen(layer.keys, width, -2) for layer in (ours, theirs)])
            ours.values = torch.cat([_widen(layer.values, width, -2) for layer in (ours, theirs)])
        self.places += [len(self.rows) + i for i in other.places]
        self.rows += other.rows

    @torch.no_grad()
    def _forward(self, ids: Tensor, attention: Tensor, positions: Tensor) -> Tensor:
        options = accepted(self.model, position_ids=positions, logits_to_keep=1)
        cached: dict[str, Any] = {"past_key_values": self.cache, "use_cache": True}
        out = self.model(input_ids=ids, attention_mask=attention, **cached, **options)
        return out.logits[:, -1].float()  # type: ignore[no-any-return]

    def _draw(self) -> tuple[Tensor, Tensor, list[list[tuple[int, float]]] | None]:
        """A token a row, its log-prob under the distribution it was drawn from, and the likeliest where asked for."""
        logits = self.logits[self.places]
        temperature = torch.tensor([r.temperature for r in self.rows], device=logits.device)
        greedy = temperature == 0
        logp = (logits / torch.where(greedy, torch.ones_like(temperature), temperature)[:, None]).log_softmax(-1)
        for top_p in {r.top_p for r in self.rows if r.top_p < 1}:
            mine = torch.tensor([r.top_p == top_p for r in self.rows], device=logp.device)
            logp = torch.where(mine[:, None], nucleus(logp, top_p), logp)
        uniform = torch.tensor([r.uniform() for r in self.rows], dtype=torch.float64, device=logp.device)
        total = logp.double().exp().cumsum(-1)
        drawn = torch.searchsorted(total, uniform[:, None] * total[:, -1:], right=True).squeeze(1)
        # Rounding may lead beyond the last token that can be drawn.
        last = logp.shape[-1] - 1 - torch.isfinite(logp).flip(-1).int().argmax(-1)
        token = torch.where(greedy, logp.argmax(-1), torch.minimum(drawn, last))
        chosen = logp.gather(1, token[:, None]).squeeze(1)
        return token.cpu(), chosen.cpu(), self._tops(logp)

    def _tops(self, logp: Tensor) -> list[list[tuple[int, float]]] | None:
        most = max(r.top_logprobs for r in self.rows)
        if not most:
            return None
        values, ids = logp.topk(min(most, logp.shape[-1]))
        pairs = [list(zip(i, v, strict=True)) for i, v in zip(ids.tolist(), values.tolist(), strict=True)]
        return [
            [(t, v) for t, v in p[: r.top_logprobs] if v > -math.inf] for p, r in zip(pairs, self.rows, strict=True)
        ]


def _widen(x: Tensor, width: int, dim: int) -> Tensor:
    """``x`` with zeros on the left of ``dim`` up to ``width``."""
    missing = width - x.shape[dim]
    return torch.nn.functional.pad(x, (missing, 0) if dim == -1 else (0, 0, missing, 0))
