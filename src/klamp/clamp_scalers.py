"""What the clamp scales: the displacement of a model's weights, by a factor, in place.

Of a LoRA from its base (:func:`lora_scaler`), of a whole model from a frozen copy, or of a model from its weights
before the step (:func:`weights_scaler`, with :func:`snapshot`). :func:`klamp.clamp.clamp` chooses the factor.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from klamp.errors import ConfigError, require_number

Scaler = Callable[[float], None]
"""Multiplies a displacement by a factor, in place. Factors compound: 0.5 and then 1.2 leaves 0.6 of it."""


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
    so that the displacement is right on the mean, also after several factors. The same calls on the same weights round
    alike, on every process.

    Args:
        model: the model being trained.
        origin: where the displacement starts, by parameter name.

    Returns:
        A function of ``s`` for :func:`klamp.clamp.clamp`.
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

    calls = itertools.count()

    @torch.no_grad()
    def scale(s: float) -> None:
        s, call = _check_factor(s), next(calls)
        for place, (_, p, start) in enumerate(pairs):
            if start is not None and s != 1.0:
                interpolate(p, start, s, (call, place))

    return scale


CHUNK = 1 << 26
"""Numbers of a bfloat16 tensor that are scaled at a time: a quarter of a GiB in float32."""


def interpolate(p: Tensor, start: Tensor, s: float, draw: tuple[int, int]) -> None:
    """``p <- start + s (p - start)``; exactly ``start`` at 0. Each ``draw`` rounds bfloat16 in its own way."""
    start = start.to(p.device)
    if s == 0.0:
        p.copy_(start)
        return
    if type(p.data) is Tensor and p.dtype == torch.bfloat16 and p.dim():
        rows = max(1, CHUNK * len(p) // max(p.numel(), 1))
        # By the weights too: a weight that one halving rounded up is not rounded up by the next, or in the next step.
        seed = hash((s, *draw, int(p.detach().view(torch.int16).sum())))
        generator = torch.Generator(p.device).manual_seed(seed & (1 << 63) - 1)
        for part, begin in zip(torch.split(p, rows), torch.split(start, rows), strict=True):
            exact = begin.to(torch.float32, copy=True)  # an origin in float32 stays as it is
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
        A function of ``s`` for :func:`klamp.clamp.clamp`.
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
