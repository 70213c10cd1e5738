"""Which models the kernels may take the head of: those whose forward is ``backbone → linear → (scale, soft-cap)``.

Everything is read off the module, transformers is not imported. A head that is anything else (LoRA on it, a quantised
or sharded weight, hooks, a model that transforms the logits or the states further) takes the full-logits path, which is
here too: :func:`token_stats_from_logits`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from klamp.errors import ConfigError
from klamp.kernels.types import Ops, RowStats, Scaling, Sheet, TokenStats, Upstream, check_tokens, counted, lowest

# Config attributes by which a released architecture does more than `lm_head(norm(h))` in a way not read below:
# MiniCPM divides the states, Falcon-H1 and others of the mup family multiply the logits, T5 rescales tied states.
MORE_THAN_A_HEAD = (
    "dim_model_base",
    "lm_head_multiplier",
    "mup_width_multiplier",
    "output_multiplier",
    "logits_to_bias",
)
SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""What Gemma, RecurrentGemma and xLSTM call the height of ``cap · tanh(z / cap)``."""


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """What ``token_stats`` and ``policy_loss`` need of a model: the last linear map and what happens to its output."""

    weight: Tensor
    """[V, H]; requires_grad says whether it trains. Read it anew each step where a framework may replace it."""
    bias: Tensor | None
    softcap: float | None
    logit_scale: float
    backbone: nn.Module
    """The module whose ``last_hidden_state`` the head is applied to."""

    def options(self) -> dict[str, Any]:
        """The keyword arguments of the kernels that belong to the head."""
        return {"bias": self.bias, "softcap": self.softcap, "logit_scale": self.logit_scale}

    def logits(self, hidden: Tensor) -> Tensor:
        """``softcap · tanh(logit_scale · (h Wᵀ + b) / softcap)`` in float32 or wider, with its graph.

        Args:
            hidden: last hidden states [..., H].

        Returns:
            Logits [..., V].
        """
        z = nn.functional.linear(hidden.to(self.weight.dtype), self.weight, self.bias)
        z = z.to(torch.promote_types(z.dtype, torch.float32)) * self.logit_scale
        return z if self.softcap is None else self.softcap * torch.tanh(z / self.softcap)


def head_of(model: nn.Module, probe: Tensor | None = None) -> HeadSpec | None:
    """The head of a causal language model, or None where its full logits must be used (:func:`why_full_logits`).

    Args:
        model: a transformers model, or a peft model around one.
        probe: token ids [B, T] on which to run the model once and compare its logits with the head's. This is the
            test for architectures whose forward pass cannot be read from attributes.

    Returns:
        The head with its bias, soft cap and scale, or None.
    """
    found = _inspect(model)
    if isinstance(found, str) or probe is None:
        return None if isinstance(found, str) else found
    return found if _agrees(model, found, probe) else None


def why_full_logits(model: nn.Module) -> str | None:
    """The reason why :func:`head_of` returns None for a model.

    Args:
        model: a transformers model, or a peft model around one.

    Returns:
        One sentence, or None where there is a head.
    """
    found = _inspect(model)
    return found if isinstance(found, str) else None


def matches(spec: HeadSpec, hidden: Tensor, logits: Tensor) -> bool:
    """Whether the head, applied to ``hidden`` [..., H], gives ``logits`` [..., V] up to the rounding of their dtype.

    Args:
        spec: the head.
        hidden: last hidden states [..., H].
        logits: what the model made of them, [..., V].

    Returns:
        True where they agree.
    """
    with torch.no_grad():
        x = spec.logits(hidden)
        # Four roundings (product, scale, cap, output) and a different order of summation.
        slack = 8 * torch.finfo(torch.promote_types(logits.dtype, hidden.dtype)).eps
        slack = max(slack, 8 * torch.finfo(logits.dtype).eps)
        return bool((x - logits.float()).abs().amax() <= slack * logits.float().abs().amax().clamp(min=1))


def _inspect(model: nn.Module) -> HeadSpec | str:
    inner = _without_adapters(model)
    if isinstance(inner, str):
        return inner
    head = getattr(inner, "lm_head", None)
    backbone = getattr(inner, getattr(inner, "base_model_prefix", "") or "model", None)
    if head is None or not isinstance(backbone, nn.Module) or backbone is inner:
        return f"{type(inner).__name__} has no lm_head over a backbone"
    refused = _not_linear(head)
    if refused is not None:
        return refused
    config = _text_config(inner)
    for name in MORE_THAN_A_HEAD:
        if getattr(config, name, None) not in (None, 1, 1.0):
            return f"config.{name}={getattr(config, name)!r} changes the logits in a way the kernels do not know"
    if getattr(config, "is_encoder_decoder", False):
        return "encoder-decoder models may rescale the states before the head"
    scale = getattr(inner, "logit_scale", None) or 1.0  # not the config's: MPT has one there that is not used
    divide = getattr(config, "logits_scaling", None) or 1.0
    softcap = next((c for name in SOFTCAPS if (c := getattr(config, name, None)) is not None), None)
    if not all(isinstance(x, int | float) for x in (scale, divide)):
        return "the logit scale is a tensor, not a number"
    return HeadSpec(head.weight, head.bias, None if softcap is None else float(softcap), scale / divide, backbone)


def _without_adapters(model: nn.Module) -> nn.Module | str:
    """The transformers model inside a peft model; adapters that add tokens to the input are refused."""
    if not hasattr(model, "peft_config"):
        return model
    configs: dict[str, Any] = getattr(model, "peft_config", {})
    for name, config in configs.items():
        if getattr(config, "is_prompt_learning", False):
            return f"adapter {name!r} adds virtual tokens to the input"
    unwrap = getattr(model, "get_base_model", None)
    return unwrap() if callable(unwrap) else model


def _not_linear(head: nn.Module) -> str | None:
    """Why ``head`` is not simply ``x Wᵀ + b`` with whole weights; None where it is."""
    if type(head) is not nn.Linear:
        return f"lm_head is a {type(head).__module__}.{type(head).__qualname__}, not a plain Linear"
    if head._forward_hooks or head._forward_pre_hooks or hasattr(head, "_hf_hook"):
        return "lm_head has forward hooks"
    if nn.utils.parametrize.is_parametrized(head):
        return "lm_head is parametrised"
    weight = head.weight
    if type(weight).__name__ == "DTensor" or hasattr(weight, "ds_id"):
        return "lm_head is sharded"
    if weight.dim() != 2 or weight.device.type == "meta" or not weight.is_floating_point():
        return f"lm_head.weight is {weight.dtype} {tuple(weight.shape)} on {weight.device}"
    return None


def _text_config(model: nn.Module) -> Any:
    """The configuration of the language part, where a model has several."""
    config = getattr(model, "config", None)
    get = getattr(config, "get_text_config", None)
    return get() if callable(get) else config


def _agrees(model: nn.Module, spec: HeadSpec, probe: Tensor) -> bool:
    """Whether the model's own logits on ``probe`` are the head's; run in evaluation mode, training mode restored."""
    training = [m for m in model.modules() if m.training]
    model.eval()
    try:
        with torch.no_grad():
            hidden = spec.backbone(input_ids=probe)[0]
            return matches(spec, hidden, model(input_ids=probe).logits)
    finally:
        for module in training:
            module.training = True


# Rows copied at a time: enough to fill a GPU, few enough to be nothing beside the logits.
CHUNK = 256


def token_stats_from_logits(
    ops: Ops,
    logits: Tensor,
    tokens: Tensor,
    *,
    ref_logits: Tensor | None,
    ref_logp: Tensor | None,
    mask: Tensor | None,
    temperature: float,
) -> TokenStats:
    """logp, ref_logp, exact kl and entropy, differentiable in the logits."""
    if ref_logits is not None and ref_logp is not None:
        raise ConfigError("ref_logits and ref_logp were both given; the second follows from the first. Give one.")
    for name, x in (("logits", logits), ("ref_logits", ref_logits)):
        if x is not None and (not x.is_floating_point() or tuple(x.shape) != (*tokens.shape, logits.shape[-1])):
            raise ConfigError(
                f"{name} must be floating point and [*tokens.shape, V] with tokens {tuple(tokens.shape)}, got "
                f"{x.dtype} {tuple(x.shape)}. Drop the last position's logits and the first token."
            )
    flat = logits.reshape(-1, logits.shape[-1])
    ref = None if ref_logits is None else ref_logits.detach().reshape(-1, logits.shape[-1])
    index = counted(mask, tokens)
    index = torch.arange(flat.shape[0], device=flat.device) if index is None else index
    kept = tokens.reshape(-1).index_select(0, index).long()
    check_tokens(kept, flat.shape[1])
    rows = FromLogits.apply(flat, ref, kept, index, Scaling(temperature), ops)  # type: ignore[no-untyped-call]

    def spread(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.new_zeros(tokens.numel()).index_copy(0, index, x).view(tokens.shape)

    logp, kl, entropy, own = (spread(x) for x in rows)
    assert logp is not None
    assert entropy is not None
    if ref_logp is not None:
        own = spread(ref_logp.detach().reshape(-1).index_select(0, index).to(logp.dtype))
    return TokenStats(logp, own, kl, entropy)


class FromLogits(torch.autograd.Function):
    """logits [N, V] → rows' (logp, kl, entropy, ref_logp), differentiable in the first three."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, ref: Tensor | None, tokens: Tensor, index: Tensor, scaling: Scaling, ops: Ops
    ) -> Any:
        n = tokens.shape[0]
        wide = torch.promote_types(logits.dtype, torch.float32)
        out = Sheet(logits.new_zeros(9, n, dtype=wide), ref is not None)
        for a in range(0, n, CHUNK):
            b = min(n, a + CHUNK)
            z, zr = _pick(logits, ref, index[a:b])
            ops.statistics(z, zr, tokens[a:b], scaling, out.columns(a, b))
        stats = out.stats()
        ctx.save_for_backward(logits, ref, tokens, index)
        ctx.stats, ctx.scaling, ctx.ops = stats.for_backward(), scaling, ops
        return stats.returned(ctx)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, logp: Tensor | None, kl: Tensor | None, entropy: Tensor | None, _: Any) -> Any:
        logits, ref, tokens, index = ctx.saved_tensors
        grad = torch.zeros_like(logits)
        ref = None if kl is None else ref
        if not (logp is None and kl is None and entropy is None):
            for a in range(0, tokens.shape[0], CHUNK):
                b = min(tokens.shape[0], a + CHUNK)
                z, zr = _pick(logits, ref, index[a:b])
                up = Upstream(*(None if x is None else x[a:b].contiguous() for x in (logp, kl, entropy)))
                stats = RowStats(*(None if x is None else x[a:b] for x in ctx.stats))  # type: ignore[arg-type]
                ctx.ops.gradient(z, zr, tokens[a:b], stats, up, ctx.scaling)
                grad.index_copy_(0, index[a:b], z)
        return grad, None, None, None, None, None


def _pick(logits: Tensor, ref: Tensor | None, rows: Tensor) -> tuple[Tensor, Tensor | None]:
    """Copies of some rows, in one dtype and finite: the kernels write over what they are given."""
    low = lowest(logits.dtype)
    z = logits.index_select(0, rows).clamp_(min=low)
    return z, None if ref is None else ref.index_select(0, rows).to(z.dtype).clamp_(min=low)
