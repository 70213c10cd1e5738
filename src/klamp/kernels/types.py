"""What a kernel is asked to do, checked once: rows of hidden states, heads, tokens, and the terms of a loss.

Shapes: N rows (tokens, flattened), n of them counted, H hidden, V vocabulary. Row i of ``hidden`` predicts
``tokens[i]``: shifting is the caller's. Rows outside the mask are never read: they cost nothing and may hold anything.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, get_args

import torch
from torch import Tensor

from klamp.errors import ConfigError, require_number
from klamp.kernels.chunking import Plan, Tiles
from klamp.masked import as_mask

Form = Literal["k2", "k3", "weighted_k3", "exact", "sequence_exact"]
FORMS: tuple[str, ...] = get_args(Form)
Number = float | Tensor


class TokenStats(NamedTuple):
    """Per token, in nats, float32 or wider, in the shape of ``tokens``; 0 outside the mask."""

    logp: Tensor
    """log π(token)."""
    ref_logp: Tensor | None
    """log ref(token); constant. None without a reference."""
    kl: Tensor | None
    """KL(π‖ref) over the whole vocabulary, never negative. None unless the reference's hidden states were given."""
    entropy: Tensor
    """−Σ π log π over the whole vocabulary."""


class RowStats(NamedTuple):
    """The same for the n counted rows, with the two normalisers that a backward pass needs again."""

    logp: Tensor
    ref_logp: Tensor | None
    kl: Tensor | None
    entropy: Tensor
    lse: Tensor
    ref_lse: Tensor | None

    def for_backward(self) -> RowStats:
        """The same memory without a graph. Outputs kept on a context would hold it, and it them: never freed."""
        return RowStats(*(None if x is None else x.detach() for x in self))  # type: ignore[arg-type]

    def returned(self, ctx: Any) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        """(logp, kl, entropy, ref_logp) as an autograd function returns them: the last without a gradient."""
        ctx.set_materialize_grads(False)
        if self.ref_logp is not None:
            ctx.mark_non_differentiable(self.ref_logp)
        return self.logp, self.kl, self.entropy, self.ref_logp


class Upstream(NamedTuple):
    """dL/dlogp, dL/dkl and dL/dentropy of n rows; None where the loss does not use the quantity."""

    logp: Tensor | None
    kl: Tensor | None
    entropy: Tensor | None


@dataclass(frozen=True, slots=True)
class Scaling:
    """``z = softcap · tanh(logit_scale · x / softcap) / temperature``, x the product with the head; None: no tanh."""

    temperature: float = 1.0
    softcap: float | None = None
    logit_scale: float = 1.0

    def __post_init__(self) -> None:
        way_out = "1.0 leaves the logits alone."
        require_number("temperature", self.temperature, above=0, way_out=way_out)
        if self.softcap is not None:
            require_number("softcap", self.softcap, above=0, way_out="None means no soft-capping.")
        require_number("logit_scale", self.logit_scale, above=0, way_out=way_out)

    @property
    def plain(self) -> bool:
        """True where z is x itself."""
        return self.softcap is None and self.logit_scale == self.temperature


@dataclass(frozen=True, slots=True)
class Side:
    """One model's last step: ``x = hidden · headᵀ + bias``. hidden [N, H], head [V, H], bias [V]."""

    hidden: Tensor
    head: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Work:
    """Counted rows of a policy and, where given, of its reference. ``index`` is None where every row counts."""

    policy: Side
    reference: Side | None
    tokens: Tensor
    index: Tensor | None
    scaling: Scaling
    shape: tuple[int, ...]

    def rows(self, x: Tensor, start: int, stop: int) -> Tensor:
        """Counted rows ``start:stop`` of x [N, ...]."""
        return cut(x, start, stop) if self.index is None else x.index_select(0, cut(self.index, start, stop))

    def compact(self, x: Tensor) -> Tensor:
        """A per-token tensor of the caller's shape, as n counted rows."""
        return compact(x, self.index)

    def spread(self, rows: Tensor) -> Tensor:
        """n counted rows back in the caller's shape, 0 elsewhere."""
        if self.index is None:
            return rows if rows.shape == self.shape else rows.view(self.shape)
        out = rows.new_zeros(math.prod(self.shape))
        return out.index_copy_(0, self.index, rows).view(self.shape)


@dataclass(frozen=True, slots=True)
class Terms:
    """The loss of a counted token: ``-min(r A, clip(r) A) - r A' + beta · w · K``, r = π/μ, K the chosen KL form.

    ``knobs`` is [beta, lower clip, upper clip] on the device: they steer without a recompilation.
    """

    form: Form | None
    knobs: Tensor
    tail: float | None
    advantages: Tensor
    old_logp: Tensor | None
    ref_logp: Tensor | None
    kl_weights: Tensor | None
    unclipped: Tensor | None
    once: bool = False
    """Whether one product reads the gradient of the logits: then no cache need keep it."""

    def rows(self, start: int, stop: int) -> Terms:
        if start == 0 and stop == self.advantages.shape[0]:
            return self

        def part(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[start:stop]

        return Terms(
            self.form,
            self.knobs,
            self.tail,
            self.advantages[start:stop],
            part(self.old_logp),
            part(self.ref_logp),
            part(self.kl_weights),
            part(self.unclipped),
            self.once,
        )


@dataclass(frozen=True, slots=True)
class Sheet:
    """What is found out about n rows, a line each: :class:`RowStats`, their loss, and two lines for a kernel's own use.

    One tensor [9, n], zero at the start, of which every chunk fills in its columns: nothing is put together afterwards.
    """

    lines: Tensor
    has_ref: bool

    def columns(self, start: int, stop: int) -> Sheet:
        if start == 0 and stop == self.lines.shape[1]:
            return self
        return Sheet(self.lines[:, start:stop], self.has_ref)

    def stats(self) -> RowStats:
        x = self.lines
        if not self.has_ref:
            return RowStats(x[0], None, None, x[1], x[2], None)
        return RowStats(x[0], x[3], x[4], x[1], x[2], x[5])

    @property
    def loss(self) -> Tensor:
        return self.lines[6]

    def write(self, stats: RowStats, loss: Tensor | None = None) -> None:
        """Fill in these columns."""
        for line, x in zip(self.stats(), stats, strict=True):
            if line is not None and x is not None:
                line.copy_(x)
        if loss is not None:
            self.loss.copy_(loss)


def sheet(work: Work) -> Sheet:
    """An empty sheet for the counted rows."""
    hidden = work.policy.hidden
    wide = torch.promote_types(hidden.dtype, torch.float32)
    return Sheet(hidden.new_zeros(9, work.tokens.shape[0], dtype=wide), work.reference is not None)


Logits = Tensor | Tiles
"""[rows, V]: a tensor, or tiles of one."""


class Ops(Protocol):
    """What the eager and the fused kernels each provide. Logits are [rows, V]; both buffers may be overwritten.

    Only a kernel whose plan has a lead meets :class:`~klamp.kernels.chunking.Tiles` in place of a tensor.
    """

    def plan(self, work: Work, *, trains_head: bool) -> Plan: ...

    def rows_at_a_time(self, work: Work, slots: int) -> int: ...

    def width(self, vocabulary: int) -> int: ...

    def jacobians(
        self,
        z: Tensor,
        ref: Tensor | None,
        into: list[Tensor],
        names: tuple[str, ...],
        tokens: Tensor,
        scaling: Scaling,
        out: Sheet,
    ) -> None: ...

    def combine(
        self, vectors: Tensor, weights: list[Tensor | None], chunk: int, index: Tensor | None, out: Tensor
    ) -> None: ...

    def scale(self, source: Tensor, factor: Tensor, out: Tensor) -> None: ...

    def statistics(self, z: Any, ref: Tensor | None, tokens: Tensor, scaling: Scaling, out: Sheet) -> None: ...

    def gradient(
        self, z: Any, ref: Tensor | None, tokens: Tensor, stats: RowStats, up: Upstream, scaling: Scaling
    ) -> None: ...

    def loss_gradient(
        self, z: Any, ref: Tensor | None, tokens: Tensor, terms: Terms, scaling: Scaling, out: Sheet
    ) -> None: ...


def lowest(dtype: torch.dtype) -> float:
    """A logit that excludes its token in any row, and is finite with room to scale it."""
    return max(torch.finfo(dtype).min / 2, -1e18)


def cut(x: Tensor, start: int, stop: int) -> Tensor:
    """Rows ``start:stop`` of x; x itself where that is all of it, for a slice costs Python as much as an operation."""
    return x if start == 0 and stop == x.shape[0] else x[start:stop]


def compact(x: Tensor, index: Tensor | None) -> Tensor:
    """A per-token tensor as rows, those at ``index`` alone where it is given; a constant."""
    x = x.detach() if x.requires_grad else x
    flat = x if x.dim() == 1 else x.reshape(-1)
    return flat if index is None else flat.index_select(0, index)


def _usable(label: str, x: Tensor) -> None:
    """Refuse what is no floating-point tensor, or is one in parts."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise ConfigError(f"{label} must be a floating-point tensor, got {got}. Pass the head's weight [V, H].")
    if type(x).__name__ == "DTensor":
        raise ConfigError(
            f"{label} is a DTensor (sharded). Gather it with .full_tensor(), or run the model's own head and use "
            "token_stats_from_logits."
        )


def side(name: str, hidden: Tensor, head: Tensor, bias: Tensor | None) -> Side:
    """Hidden states as rows beside their head, refused by name where they do not fit."""
    prefix = "" if name == "policy" else "ref_"
    _usable(prefix + "hidden", hidden)
    _usable(prefix + "head", head)
    if head.dim() != 2 or head.shape[0] < 1 or head.shape[1] != hidden.shape[-1]:
        raise ConfigError(
            f"{prefix}head must be [V, {hidden.shape[-1]}] to go with {prefix}hidden {tuple(hidden.shape)}, "
            f"got {tuple(head.shape)}. Pass lm_head.weight, not its transpose."
        )
    if bias is not None and tuple(bias.shape) != (head.shape[0],):
        raise ConfigError(f"{prefix}bias must be [{head.shape[0]}], got {tuple(bias.shape)}. None means no bias.")
    return Side(hidden if hidden.dim() == 2 else hidden.reshape(-1, hidden.shape[-1]), head, bias)


def counted(mask: Tensor | None, tokens: Tensor) -> Tensor | None:
    """Indices of the counted rows; None where there is no mask, so that nothing waits for the device."""
    return None if mask is None else as_mask(mask, tokens).reshape(-1).nonzero().squeeze(1)


def prepare(policy: Side, reference: Side | None, tokens: Tensor, mask: Tensor | None, scaling: Scaling) -> Work:
    """The Work, with tokens compacted and checked."""
    if not isinstance(tokens, Tensor) or tokens.is_floating_point() or tokens.dtype == torch.bool:
        got = tokens.dtype if isinstance(tokens, Tensor) else type(tokens).__name__
        raise ConfigError(f"tokens must be an integer tensor of ids, got {got}. Pass the sampled token ids.")
    vocabulary = policy.head.shape[0]
    for name, s in (("hidden", policy), ("ref_hidden", reference)):
        if s is not None and s.hidden.shape[0] != tokens.numel():
            raise ConfigError(
                f"{name} has {s.hidden.shape[0]} rows for {tokens.numel()} tokens {tuple(tokens.shape)}. Row i must "
                "be the state that predicts tokens[i]: drop the last state and the first token."
            )
    if reference is not None and reference.head.shape[0] != vocabulary:
        raise ConfigError(
            f"ref_head has a vocabulary of {reference.head.shape[0]}, head of {vocabulary}; a KL needs one vocabulary. "
            "Cut both to the ids they share."
        )
    index = counted(mask, tokens)
    kept = compact(tokens, index)
    check_tokens(kept, vocabulary)
    # A column of a matrix is one-dimensional and still has gaps, of which a kernel knows nothing.
    return Work(policy, reference, kept.long().contiguous(), index, scaling, tuple(tokens.shape))


def check_tokens(tokens: Tensor, vocabulary: int) -> None:
    """Refuse ids outside the vocabulary on the CPU; on a device the kernels answer NaN rather than wait."""
    if tokens.is_cpu and tokens.numel():
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= vocabulary:
            raise ConfigError(
                f"tokens must be in 0..{vocabulary - 1} where the mask counts, got {low if low < 0 else high}. "
                "Mask padding and prompt out."
            )
