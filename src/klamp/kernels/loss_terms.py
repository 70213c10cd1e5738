"""What a loss is asked to be: its form, its price and its bounds, checked once and put beside the rows."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from klamp.errors import ConfigError, require_number, unknown
from klamp.kernels.types import FORMS, Form, Number, Terms, Work


class Asked(NamedTuple):
    """A loss as its caller asked for it, checked. ``knobs`` are beta and the two clips."""

    form: Form | None
    knobs: tuple[Number, Number, Number]
    tail: float | None
    per_token: dict[str, Tensor]

    def terms(self, work: Work, *, once: bool) -> Terms:
        """Brought to the counted rows and to the device: a few small copies, which the first product need not await."""
        wide = torch.promote_types(work.policy.hidden.dtype, torch.float32)

        def rows(name: str) -> Tensor | None:
            x = self.per_token.get(name)
            return None if x is None else work.compact(x).to(wide).contiguous()

        advantages = rows("advantages")
        assert advantages is not None
        return Terms(
            self.form,
            stack_knobs(self.knobs, wide, work.policy.hidden.device),
            self.tail,
            advantages,
            rows("old_logp"),
            rows("ref_logp"),
            rows("kl_weights"),
            rows("unclipped_advantages"),
            once,
        )


def ask(
    work: Work,
    form: Form | None,
    knobs: tuple[Number, Number, Number],
    tail: float | None,
    per_token: dict[str, Tensor | None],
) -> Asked:
    """The loss asked for; refuses unknown forms, missing references and shapes that differ from tokens."""
    if form is not None and form not in FORMS:
        raise unknown("form", form, FORMS)
    given = {name: x for name, x in per_token.items() if x is not None}
    for name, x in given.items():
        if x.shape != work.shape:
            raise ConfigError(f"{name} must be {work.shape} like tokens, got {tuple(x.shape)}. Nothing is broadcast.")
    if form in ("exact", "sequence_exact") and work.reference is None:
        raise ConfigError(f"form={form!r} needs ref_hidden, got None. With ref_logp alone use form='weighted_k3'.")
    if form is not None and work.reference is None and "ref_logp" not in given:
        raise ConfigError(f"form={form!r} needs a reference. Give ref_hidden or ref_logp, or form=None for no KL term.")
    if tail is not None:
        require_number("tail", tail, above=0, way_out="It is a log-ratio, 5.0 in the trainer; None is the formula.")
    return Asked(form, knobs, tail, given)


def stack_knobs(knobs: tuple[Number, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers and one-element tensors as one device tensor, without waiting for the device."""
    if not any(isinstance(k, Tensor) for k in knobs):
        # From ordinary memory CUDA takes its copy before it returns: nobody waits, and the source may go.
        return torch.tensor(knobs, dtype=dtype).to(device, non_blocking=True)

    def one(k: Number) -> Tensor:
        if isinstance(k, Tensor):
            return k.detach().to(device, dtype, non_blocking=True).reshape(())
        return torch.full((), k, dtype=dtype, device=device)

    return torch.stack([one(k) for k in knobs])
