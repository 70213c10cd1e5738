"""The clamp: undo just enough of an update that KL stays under its limit, and say how much was undone.

Near the reference KL is quadratic in the displacement of the weights, so scaling the displacement by
``s = sqrt(limit / kl)`` brings KL to the limit. Farther out the curve bends; the driver :func:`clamp` measures again
and corrects by a secant in log-log, which is exact for any power law.

    result = clamp(measure_kl, lora_scaler(model), limit=0.055)      # after optimiser.step(), on the step's own tokens
    state = hold.update(state, kl, effort=result.effort)              # effort > 0: the price is too low

What is scaled is one of three displacements: of a LoRA from its base (:func:`lora_scaler`), of a whole model from a
frozen copy, or of a model from its weights before the step (:func:`weights_scaler`, with :func:`snapshot`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from klamp.errors import ConfigError, require_number
from klamp.gauge import Gauge as Gauge
from klamp.gauge import GaugeState as GaugeState
from klamp.gauge import check_limit

LIMIT = 1.1
"""The usual limit, in targets: readings of a KL that rests at its target scatter by less."""

Scaler = Callable[[float], None]
"""Multiplies a displacement by a factor, in place. Factors compound: 0.5 and then 1.2 leaves 0.6 of it."""


@dataclass(frozen=True)
class Clamped:
    """What one call of :func:`clamp` found and did."""

    kl_before: float
    """KL after the update, before any scaling."""
    kl_after: float
    """KL as last measured; under the limit when ``held``."""
    scale: float = 1.0
    """What is left of the displacement: 1 when nothing was scaled."""
    effort: float = 0.0
    """``-log(scale)``, what the price should have prevented; feed it to ``Hold.update``."""
    rounds: int = 0
    """Times the displacement was scaled."""
    held: bool = True
    """False when KL is still above the limit, or could not be measured."""


def scale_for(kl: float, limit: float, *, origin_kl: float = 0.0) -> float:
    """``min(1, (sqrt(limit) - sqrt(origin_kl)) / (sqrt(kl) - sqrt(origin_kl)))``: what brings KL to the limit.

    With the reference as origin (``origin_kl = 0``) it is ``min(1, sqrt(limit / kl))``. A KL at or below the limit,
    negative ones included, needs no scaling. A KL that is NaN or infinite has no answer and is a ConfigError.

    Args:
        kl: the KL measured after the update.
        limit: the limit, in the same unit.
        origin_kl: the KL where the displacement is zero.

    Returns:
        The factor for the displacement, from 0 to 1.
    """
    check_limit(limit)
    if not math.isfinite(kl):
        raise ConfigError(f"kl must be a finite number, got {kl!r}. Leave the weights alone and measure again.")
    if kl <= limit:
        return 1.0
    start = math.sqrt(max(origin_kl, 0.0))
    return max(math.sqrt(limit) - start, 0.0) / (math.sqrt(kl) - start)


def clamp(
    measure: Callable[[], float],
    scale: Scaler,
    limit: float,
    *,
    kl: float | None = None,
    rounds: int = 4,
    origin_kl: float = 0.0,
) -> Clamped:
    """Scale the displacement until KL is in ``[0.97 limit, limit]``; at most ``rounds`` scalings and measurements.

    The total scale never exceeds 1, so an update within the limit is left as it is, to the bit. A measurement that is
    NaN or infinite ends the search, at the last scale known to be good if there is one, with ``held=False``; at the
    first measurement nothing is scaled.

    Args:
        measure: returns the KL of the weights as they are, on the same tokens every time.
        scale: multiplies the displacement, such as :func:`lora_scaler` or :func:`weights_scaler`.
        limit: the limit, in the unit of ``measure``.
        kl: a measurement already taken after the update. None: ``measure()``.
        rounds: how often the displacement is scaled and measured at most.
        origin_kl: the KL where the displacement is zero, where that is not the reference (backtracking).

    Returns:
        The KL before and after, the scale, the effort, and whether the limit holds.
    """
    check_limit(limit)
    if rounds < 1:
        raise ConfigError(f"rounds must be >= 1, got {rounds!r}. Two suffice as a rule; the default is 4.")
    before = measure() if kl is None else kl
    if not math.isfinite(before) or before <= limit:
        return Clamped(before, before, held=math.isfinite(before))
    return _search(measure, scale, limit, before, rounds, max(origin_kl, 0.0))


def no_farther(measure: Callable[[], float], scale: Scaler, began: float, halvings: int = 4) -> Clamped:
    """Halve a step until KL is no higher than where it began; undo it when that does not do."""
    before = kl = measure()
    total, rounds = 1.0, 0
    while kl > began and rounds < halvings:
        scale(0.5)
        total, rounds, kl = total / 2, rounds + 1, measure()
    effort = rounds * math.log(2)
    if not kl <= began:  # also where it cannot be measured
        scale(0.0)
        total, kl = 0.0, began
    return Clamped(before, kl, total, effort, rounds, held=math.isfinite(before))


# Part of the limit that a clamped step may leave unused. Measuring again costs a forward pass, and 3 % of KL is 1.5 %
# of the displacement; aiming at the middle leaves room for an error of either sign.
_SLACK = 0.03


def _search(
    measure: Callable[[], float], scale: Scaler, limit: float, before: float, rounds: int, origin: float
) -> Clamped:
    """The rounds of :func:`clamp`: the square-root rule first, secants after, the best known scale at the end."""
    aim = limit * (1 - _SLACK / 2)
    low, high = (0.0, origin), (1.0, before)  # (scale, kl) known to be under and over the limit
    total, kl, used = 1.0, before, 0
    guess = scale_for(before, aim, origin_kl=origin)
    while used < rounds and not limit * (1 - _SLACK) <= kl <= limit:
        if guess == total:
            break  # the origin itself is over the limit: nothing is left to undo
        scale(guess / total)
        last, total = (total, kl), guess
        kl, used = measure(), used + 1
        if not math.isfinite(kl):
            break
        low, high = ((total, kl), high) if kl <= limit else (low, (total, kl))
        guess = _secant(last, (total, kl), aim, origin, low[0], high[0])
    if not kl <= limit and low[0] > 0:
        scale(low[0] / total)
        total, kl = low
    return Clamped(before, kl, total, -math.log(max(total, 1e-12)), used, held=kl <= limit)


def _secant(
    a: tuple[float, float], b: tuple[float, float], aim: float, origin: float, low: float, high: float
) -> float:
    """Where the line through two points of (log scale, log(kl - origin)) meets the aim, inside the bracket."""
    rise_a, rise_b, rise = a[1] - origin, b[1] - origin, aim - origin
    middle = (low + high) / 2
    if min(rise_a, rise_b, rise, a[0], b[0]) <= 0 or a[0] == b[0]:
        return middle if origin < aim else low
    slope = math.log(rise_a / rise_b) / math.log(a[0] / b[0])
    # KL rises with the displacement: linearly at the least where it starts from a slope, and hardly faster than s^8.
    # A slope outside is rounding, and its secant would leap.
    guess = b[0] * math.exp(math.log(rise / rise_b) / min(max(slope, 0.5), 8.0))
    return guess if low < guess < high else middle


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    """A detached copy of the trainable parameters by name: the origin that :func:`weights_scaler` returns to.

    Args:
        model: the model, before the step.

    Returns:
        Tensors by parameter name.
    """
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def weights_scaler(model: nn.Module, origin: Mapping[str, Tensor]) -> Scaler:
    """``p <- origin + s (p - origin)`` for every trainable parameter, in place.

    With a frozen reference's parameters it scales the displacement from the reference; with the weights saved before
    the step (:func:`snapshot`) it backtracks the step. ``s = 1`` changes no bit and ``s = 0`` restores the origin to
    the bit; in between the arithmetic is float32 or wider. The displacement of a bfloat16 weight is often a few units
    in its last place, of which a factor near 1 would leave all or none: such weights are rounded up or down at random,
    so that the displacement is right on the mean. The same ``s`` rounds alike, on every process.

    Args:
        model: the model being trained.
        origin: where the displacement starts, by parameter name.

    Returns:
        A function of ``s`` for :func:`clamp`.
    """
    pairs = [(name, p, origin.get(name)) for name, p in model.named_parameters() if p.requires_grad]
    missing = [name for name, _, start in pairs if start is None]
    if missing or not pairs:
        raise ConfigError(
            f"origin has no value for {len(missing)} of {len(pairs)} trainable parameters"
            f"{f' ({missing[0]} first)' if missing else ''}. Take it with snapshot(model) before the step, or pass "
            "dict(reference.named_parameters()) of a model with the same names."
        )
    for name, p, start in pairs:
        if start is not None and start.shape != p.shape:
            raise ConfigError(
                f"origin[{name!r}] has shape {tuple(start.shape)}, the parameter {tuple(p.shape)}. "
                "Origin and model must be the same architecture."
            )

    @torch.no_grad()
    def scale(s: float) -> None:
        s = _check_factor(s)
        for _, p, start in pairs:
            if start is not None and s != 1.0:
                _interpolate(p, start, s)

    return scale


CHUNK = 1 << 26
"""Numbers of a bfloat16 tensor that are scaled at a time: a quarter of a GiB in float32."""


def _interpolate(p: Tensor, start: Tensor, s: float) -> None:
    """``p <- start + s (p - start)``; exactly ``start`` at 0."""
    start = start.to(p.device)
    if s == 0.0:
        p.copy_(start)
        return
    if type(p.data) is Tensor and p.dtype == torch.bfloat16 and p.dim():
        rows = max(1, CHUNK * len(p) // max(p.numel(), 1))
        generator = torch.Generator(p.device).manual_seed(hash(s) & (1 << 63) - 1)
        for part, begin in zip(torch.split(p, rows), torch.split(start, rows), strict=True):
            exact = begin.float()
            part.copy_(_rounded(exact.add_(part.float().sub_(exact), alpha=s), generator))
        return
    wide = torch.promote_types(p.dtype, torch.float32)
    begin = start.to(wide)
    p.copy_(begin + s * (p.to(wide) - begin))


def _rounded(x: Tensor, generator: torch.Generator) -> Tensor:
    """``x`` [...] in float32 as bfloat16 numbers in float32, up or down with the probability that keeps its mean."""
    # A bfloat16 is the upper half of a float32, so a random lower half carries over as often as what is cut off says.
    noise = torch.randint(0, 1 << 16, x.shape, dtype=torch.int32, device=x.device, generator=generator)
    return (x.contiguous().view(torch.int32) + noise).bitwise_and_(-(1 << 16)).view(torch.float32)


def lora_scaler(model: nn.Module, adapter: str | None = None) -> Scaler:
    """``lora_B <- s lora_B`` for one adapter, in place: scales its displacement from the base model exactly.

    Trainable parameters that are not LoRA matrices (``modules_to_save``, DoRA's magnitudes) would stay displaced, so a
    model that has any is refused.

    Args:
        model: a peft model.
        adapter: the adapter's name. None: the active one, or the only one.

    Returns:
        A function of ``s`` for :func:`clamp`.
    """
    other = [n for n, p in model.named_parameters() if p.requires_grad and not _adapter_of(n, ("lora_A", "lora_B"))]
    if other:
        raise ConfigError(
            f"{other[0]} is trainable and is no LoRA matrix ({len(other)} such), so scaling lora_B cannot bring the "
            "model back to its base. Use weights_scaler(model, snapshot(model)) around the step instead."
        )
    found = {n: _adapter_of(n, ("lora_B",)) for n, _ in model.named_parameters()}
    name = adapter or _active(model, {a for a in found.values() if a})
    matrices: list[Tensor] = [p for n, p in model.named_parameters() if found[n] == name]
    if not matrices:
        raise ConfigError(
            f"adapter {name!r} has no lora_B in this model. Adapters with one: "
            f"{', '.join(sorted({a for a in found.values() if a})) or 'none'}. A full model takes weights_scaler."
        )

    @torch.no_grad()
    def scale(s: float) -> None:
        s = _check_factor(s)
        if s != 0.0:
            torch._foreach_mul_(matrices, s)
        else:
            torch._foreach_zero_(matrices)

    return scale


def _adapter_of(parameter: str, kinds: Iterable[str]) -> str:
    """The adapter's name in peft's ``...lora_B.<adapter>.weight`` (or ``lora_embedding_B.<adapter>``); '' if none."""
    parts = parameter.split(".")
    names = {k for kind in kinds for k in (kind, kind.replace("lora_", "lora_embedding_"))}
    return next((after for part, after in itertools.pairwise(parts) if part in names), "")


def _active(model: nn.Module, adapters: set[str]) -> str:
    """The only adapter, or the one the model names as active."""
    active = getattr(model, "active_adapter", None)  # peft's attribute; this module does without importing peft
    if isinstance(active, str) and active in adapters:
        return active
    if len(adapters) > 1:
        raise ConfigError(
            f"the model has {len(adapters)} adapters ({', '.join(sorted(adapters))}) and names none as active. "
            "Pass lora_scaler(model, adapter=...)."
        )
    return next(iter(adapters), "")


def _check_factor(s: float) -> float:
    return require_number("s", s, at_least=0, way_out="A scale is finite and not negative, so weights stay finite.")
