"""The decoding loop: prefill, then one token at a time.

Log-probs are those of the distribution sampled from: logits divided by the temperature, cut by top-p where that is
below 1, normalised in float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from klamp.kernels import backend
from klamp.sampling.caches import DynamicSteps, StaticSteps

SLOTS = 4
"""Shapes whose cache and graph are kept."""
ASKED = 8
"""Tokens between two questions on a GPU whether all sequences have ended."""


class Drawn(NamedTuple):
    """Completions [n, c]: tokens, their log-probs, which of them count, and which sequences ended by themselves."""

    tokens: Tensor
    logp: Tensor
    mask: Tensor
    ended: Tensor


class Over:
    """Whether every sequence has ended: known at once on a CPU, and on a GPU without waiting for it.

    There it is asked every :data:`ASKED` tokens, and the answer is taken when it is asked again: by then the device
    has long given it, and has the tokens in between to work on.
    """

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.answer = torch.ones((), dtype=torch.bool, pin_memory=self.cuda)
        self.given: Any = None

    def __call__(self, t: int, live: Tensor) -> bool:
        """After token ``t``, with the sequences that are ``live``."""
        if not self.cuda:
            return not bool(live.any())
        if t % ASKED != ASKED - 1:
            return False
        if self.given is not None:
            self.given.synchronize()
            if not bool(self.answer):
                return True
        self.answer.copy_(live.any(), non_blocking=True)
        self.given = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.given.record()
        return False


class Decoder:
    """Samples from a plain causal LM. ``fast`` keeps a static cache and a graph between calls of the same shape."""

    def __init__(
        self, model: Any, temperature: float, top_p: float, end: tuple[int, ...], pad: int, *, fast: bool
    ) -> None:
        self.model, self.temperature, self.top_p, self.pad, self.fast = model, temperature, top_p, pad, fast
        device = next(model.parameters()).device
        self.end = torch.tensor(end, device=device)
        self.slots: dict[tuple[int, int, int], StaticSteps] = {}

    def run(self, ids: Tensor, attention: Tensor, length: int, generator: torch.Generator) -> Drawn:
        """At most ``length`` tokens after each prompt; stops as soon as every sequence has ended."""
        rows, prompt = ids.shape
        steps = self._steps(rows, prompt, length)
        logits = steps.prefill(ids, attention)
        tokens, logps, alive = [], [], []
        live = torch.ones(rows, dtype=torch.bool, device=ids.device)
        over = Over(ids.device)
        for t in range(length):
            token, logp = self.draw(logits, generator)
            token = torch.where(live, token, self.pad)
            tokens.append(token)
            logps.append(torch.where(live, logp, torch.zeros_like(logp)))
            alive.append(live)
            live = live & ~torch.isin(token, self.end)
            if t + 1 == length or over(t, live):
                break
            logits = steps.step(token, live)
        mask = torch.stack(alive, 1)
        return Drawn(torch.stack(tokens, 1), torch.stack(logps, 1), mask, ~live)

    def draw(self, logits: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """One token a row and its log-prob under the distribution it was drawn from."""
        if self.top_p == 1 and logits.is_cuda and backend(logits.device) == "fused":
            from klamp.kernels.triton_draw import draw

            return draw(logits, self.temperature, generator)
        logp = (logits.float() / self.temperature).log_softmax(-1)
        if self.top_p < 1:
            logp = nucleus(logp, self.top_p)
        if logp.device.type == "cuda":
            token = race(logp, generator)
            return token.squeeze(1), logp.gather(1, token).squeeze(1)
        # The inverse of the cumulative distribution: one random number a row, where multinomial takes one a token.
        total = logp.double().exp().cumsum(-1)
        uniform = torch.rand(len(logp), 1, dtype=torch.float64, device=logp.device, generator=generator)
        token = torch.searchsorted(total, uniform * total[:, -1:], right=True).clamp(max=logp.shape[-1] - 1)
        return token.squeeze(1), logp.gather(1, token).squeeze(1)

    def _steps(self, rows: int, prompt: int, length: int) -> DynamicSteps | StaticSteps:
        if not self.fast:
            return DynamicSteps(self.model)
        key = (rows, prompt, length)
        if key not in self.slots:
            # A few shapes at a time: each holds a cache, and on a GPU a graph.
            while len(self.slots) >= SLOTS:
                del self.slots[next(iter(self.slots))]
            self.slots[key] = StaticSteps(self.model, rows, prompt + length)
        return self.slots[key]


def race(logp: Tensor, generator: torch.Generator) -> Tensor:
    """``argmax_a logp_a - log E_a`` [n, 1] with E exponential: token a with probability ``exp(logp_a)``.

    Of independent clocks with rates p_a, a rings first with probability p_a. Where random numbers are cheap this is
    two passes over the row; the cumulative distribution needs five, in float64.
    """
    clock = torch.empty_like(logp).exponential_(generator=generator)
    return (logp - clock.clamp_(min=torch.finfo(logp.dtype).tiny).log_()).argmax(-1, keepdim=True)


def nucleus(logp: Tensor, top_p: float) -> Tensor:
    """``logp`` cut to the smallest set of tokens whose probability reaches ``top_p``, normalised again."""
    ordered, index = logp.sort(-1, descending=True)
    before = ordered.exp().cumsum(-1) - ordered.exp()
    cut = torch.where(before < top_p, ordered, torch.full_like(ordered, -torch.inf))
    return torch.full_like(logp, -torch.inf).scatter(-1, index, cut).log_softmax(-1)
