"""The learning rate, batch, completion length and steps that are usual for a model: one table for train and compare.

A run that leaves these out takes them from here. ``tiny`` and ``smollm2`` enter the band around the default target of
0.05 nats per token within 20 steps or so. Another model takes the learning rate by its width:

    lr = 5e-4 · (576 / hidden size)^(3/4)      with LoRA; a tenth of it where every weight trains

The exponent is that of the two built-in models, 128 and 576 wide, and gives the 1e-4 to 2e-4 that are usual for LoRA at
widths of 2,000 to 5,000. A rate that is too high costs reward but not KL: the price and the clamp hold that.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Usual:
    """What a run takes where nothing else is given."""

    lr: float
    """Learning rate of a LoRA adapter."""
    prompts: int
    """Prompts per step."""
    group_size: int
    """Completions of each."""
    max_tokens: int
    """Longest completion, in tokens."""
    steps: int
    """Steps of a run."""


SMALL = Usual(lr=5e-4, prompts=4, group_size=8, max_tokens=24, steps=60)
"""SmolLM2-135M: a step takes seconds on a CPU."""
USUAL = {"tiny": replace(SMALL, lr=1.5e-3), "smollm2": SMALL, "smollm2-q4": SMALL}
"""By built-in name."""
OWN = Usual(lr=1e-4, prompts=8, group_size=8, max_tokens=128, steps=100)
"""Any other model: room for an answer of a few sentences. The rate is for one whose width is not known."""

WIDTH = 576
"""Hidden size of SmolLM2-135M, where ``SMALL.lr`` was measured."""
POWER = 0.75
"""From 128 wide at 1.5e-3 to 576 wide at 5e-4 is a power of 0.73."""
FULL = 0.1
"""Share of the adapter's rate where every weight trains; LoRA takes about ten times the rate of full fine-tuning."""


def usual(model: str, *, full: bool = False, trust_remote_code: bool = False) -> Usual:
    """What is usual for ``model``; one that is not built in has its configuration read, not its weights."""
    found = USUAL.get(model)
    if found is None:
        width = hidden_size(model, trust_remote_code=trust_remote_code)
        found = OWN if width is None else replace(OWN, lr=rate(width))
    return replace(found, lr=float(f"{found.lr * FULL:.3g}")) if full else found


def rate(width: int) -> float:
    """The learning rate of an adapter on a model ``width`` wide, to two digits."""
    return float(f"{SMALL.lr * (WIDTH / width) ** POWER:.2g}")


def hidden_size(model: str, *, trust_remote_code: bool = False) -> int | None:
    """The width of the model's hidden states, from its configuration alone; None where it names none."""
    from klamp import models

    width = getattr(models.load_config(model, trust_remote_code=trust_remote_code), "hidden_size", None)
    return width if isinstance(width, int) and width > 0 else None
