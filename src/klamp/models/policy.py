"""The model being trained: a transformers causal LM with a LoRA adapter or with every weight, and PPO's value head.

``forward`` gives the states that predict the counted tokens; :meth:`Policy.stats` turns policy and reference states
into log-probs, exact KL and entropy through :mod:`klamp.kernels`. A model whose head is more than a linear map takes
the full-logits path, with the same numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from klamp.errors import ConfigError
from klamp.kernels import HeadSpec, TokenStats, head_of, token_stats, token_stats_from_logits
from klamp.models import training_layers
from klamp.models.no_gradient_layers import measured_layers
from klamp.models.shared_prompts import Backbone, inputs_of
from klamp.sampling.decoding_modules import fast_norms, lora_layers
from klamp.sampling.merged_model import ADAPTER
from klamp.sampling.rollout import Part


class States(NamedTuple):
    """What a model says of the counted positions of a part."""

    hidden: Tensor
    """[n, c, H] last hidden states, or [n, c, V] logits where the head is not a linear map."""
    values: Tensor | None = None
    """[n, c] PPO's value of the state before each token."""


class ReferenceStates(NamedTuple):
    """The reference's states for a part, and the head they go through."""

    states: Tensor
    head: HeadSpec | None = None
    """None: the policy's own, or there is none to go through (``logits``)."""
    logits: bool = False
    """Whether the states are another model's logits."""


class Policy(nn.Module):
    """A causal LM with its head taken off, and PPO's value head beside it. All forward passes go through here."""

    def __init__(self, model: nn.Module, *, value_head: bool, temperature: float, lora: bool) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.lora = lora
        self.note = ""
        """What a user should know about the adapter's place, in a sentence."""
        self.sharded = False
        """Whether FSDP2 holds the weights."""
        self.layers: list[Any] = []
        """The LoRA layers."""
        self.states_of = Backbone()
        self.narrow: dict[int, tuple[Tensor, Tensor]] = {}
        """Memory for their matrices in half precision."""
        self.find_layers()
        self.linear_head, width = probe_head(model)
        """Whether the head was seen to be a linear map, with a scale and a soft cap at most."""
        self.value: nn.Linear | None = None
        if value_head:
            self.value = nn.Linear(width, 1, device=next(model.parameters()).device, dtype=torch.float32)
            nn.init.zeros_(self.value.weight)
            nn.init.zeros_(self.value.bias)

    def find_layers(self) -> None:
        """Look for LoRA layers again: an adapter that is loaded later may bring some."""
        if self.lora:
            training_layers.fast_lora(self.model)
            self.layers = lora_layers(self.model)
            alive = {id(p) for p in self.model.parameters()}
            self.narrow = {p: pair for p, pair in self.narrow.items() if p in alive}
        if next(self.model.parameters()).device.type == "cuda":  # a CPU gains nothing, and its runs stay as recorded
            fast_norms(self.model)
            if training_layers.is_wide(self.model):
                training_layers.fast_mlp_and_attention(self.model)
            measured_layers(self.model)

    @property
    def _no_split_modules(self) -> Any:
        """The layers that a launcher shards one by one: what transformers names them."""
        return getattr(self.model, "_no_split_modules", None)

    @property
    def head(self) -> HeadSpec | None:
        """The head, read anew: a framework may have replaced its weight. None: logits are the model's own business."""
        return head_of(self.model) if self.linear_head else None

    def forward(self, part: Part, *, values: bool = False) -> States:
        """States before each token of ``part``; ``values`` asks for the value head too."""
        head = self.head
        if head is None:
            inputs = inputs_of(inner_of(self.model), part)
            out = self.model(**inputs, use_cache=False, output_hidden_states=values)
            before = slice(part.first - 1, part.ids.shape[1] - 1)
            hidden, last = out.logits[:, before], out.hidden_states[-1][:, before] if values else None
        else:
            fast = part.ids.is_cuda and not self.sharded
            quick = fast and not torch.is_grad_enabled()
            with training_layers.narrowed(self.layers, self.narrow) if quick else contextlib.nullcontext():
                # On a CPU every sequence is computed whole: sharing prompts saves less there than a fifth of a step.
                hidden = last = self.states_of(head.backbone, part, share=fast)
        if self.sharded:
            hidden = hidden.clone()  # FSDP2 hooks what a forward pass returns, and a view would lose the hook
        if not values or self.value is None or last is None:
            return States(hidden)
        return States(hidden, self.value(last.float()).squeeze(-1))

    def as_reference(self, part: Part) -> ReferenceStates:
        """This model's states as another's reference: with its own head, or as logits."""
        hidden = self(part).hidden  # first: FSDP2 gathers a sharded head in the forward pass
        head = self.head
        return ReferenceStates(hidden, head, logits=head is None)

    def stats(
        self,
        part: Part,
        states: Tensor,
        reference: ReferenceStates | None,
        gradient_of: tuple[str, ...] = ("logp", "kl"),
    ) -> TokenStats:
        """Log-probs, exact KL and entropy of the tokens of ``part`` at the sampling temperature.

        ``gradient_of`` names those that a loss will use (:func:`klamp.kernels.token_stats`).
        """
        return score(self.head, states, part, reference, self.temperature, gradient_of)

    @contextlib.contextmanager
    def without_adapter(self) -> Iterator[None]:
        """The base model: LoRA switched off, on again afterwards whatever happens."""
        model: Any = self.model
        with (
            training_layers.adapter(self.layers, None) if training_layers.only_lora(model) else model.disable_adapter()
        ):
            yield

    @contextlib.contextmanager
    def with_adapter(self, name: str) -> Iterator[None]:
        """Another adapter of the same base in place of the trained one."""
        model: Any = self.model
        if training_layers.only_lora(model):
            with training_layers.adapter(self.layers, name):
                yield
            return
        trained = [p for p in self.model.parameters() if p.requires_grad]
        model.set_adapter(name)
        try:
            yield
        finally:
            model.set_adapter(ADAPTER)
            for p in self.model.parameters():
                p.requires_grad_(False)
            for p in trained:
                p.requires_grad_(True)

    def trainable(self) -> dict[str, nn.Parameter]:
        """The parameters that train, by name."""
        return {name: p for name, p in self.named_parameters() if p.requires_grad}


def score(
    head: HeadSpec | None,
    states: Tensor,
    part: Part,
    reference: ReferenceStates | None,
    temperature: float,
    gradient_of: tuple[str, ...] = ("logp", "kl"),
) -> TokenStats:
    """Log-probs, exact KL and entropy of the tokens of ``part`` from one model's states against another's."""
    given: dict[str, Any] = {"mask": part.mask, "temperature": temperature}
    if reference is None:
        if head is None:
            return token_stats_from_logits(states, part.tokens, **given)
        return token_stats(states, head.weight, part.tokens, gradient_of=gradient_of, **given, **head.options())
    other = head if reference.head is None and not reference.logits else reference.head
    if head is None or other is None or head.softcap != other.softcap:
        own, ref = (z if h is None else h.logits(z) for h, z in ((head, states), (other, reference.states)))
        return token_stats_from_logits(own, part.tokens, ref_logits=ref, **given)
    # One scale serves both sides of a kernel; what the reference's differs by goes into its states: s' h = s (s'/s) h.
    factor = other.logit_scale / head.logit_scale
    return token_stats(
        states,
        head.weight,
        part.tokens,
        ref_hidden=reference.states if factor == 1 else reference.states * factor,
        ref_head=None if other is head else other.weight,
        ref_bias=None if other is head else other.bias if factor == 1 or other.bias is None else other.bias * factor,
        gradient_of=gradient_of,
        **given,
        **head.options(),
    )


@torch.no_grad()
def probe_head(model: Any) -> tuple[bool, int]:
    """Whether the model's logits are those of the head that its attributes show, and the width of what it is put on.

    A model may do more with its logits than an attribute says, so it is run once on a few tokens.
    """
    embedded = model.get_input_embeddings().weight
    tokens = torch.arange(min(4, len(embedded)), device=embedded.device)[None]
    training = [m for m in model.modules() if m.training]
    model.eval()
    try:
        head = head_of(model, tokens)
        if head is not None:
            return True, int(head.weight.shape[1])
        return False, int(model(input_ids=tokens, output_hidden_states=True).hidden_states[-1].shape[-1])
    except (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        name, said = type(inner_of(model)).__name__, " ".join(str(error).split())[:200]
        raise ConfigError(f"{name} cannot be run on token ids alone: {type(error).__name__}: {said}") from error
    finally:
        for module in training:
            module.training = True


def inner_of(model: Any) -> Any:
    """The transformers model, without peft around it."""
    return model.get_base_model() if hasattr(model, "peft_config") else model


def recompute(model: Any) -> None:
    """Gradient checkpointing: what is inside a layer is computed again on the way back, so that it need not be kept."""
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise ConfigError(
            f"‹optim.checkpointing›: {type(model).__name__} does not support it. Lower ‹optim.micro_batch›."
        )
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for module in model.modules():
        # transformers asks whether the layer trains. Its children stay in evaluation: no noise, no dropout.
        if getattr(module, "gradient_checkpointing", False):
            module.training = True
