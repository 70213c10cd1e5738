"""What klamp reads of a TRL step: the micro-batches' tokens, the last hidden states, KL on them as the weights stand.

Shapes: B completions of T tokens in a micro-batch; hidden [B, T, H], row t the state that predicts token t.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from trl.trainer.utils import use_adapter

from klamp import kernels
from klamp.errors import ConfigError
from klamp.estimators import k3
from klamp.masked import Unit, sum_count

Trainer = Any
"""A trl.GRPOTrainer or trl.RLOOTrainer. Neither types the attributes that are read here."""
Inputs = Mapping[str, Any]

# What TRL's `_compute_loss` hands on to its forward beside the ids, for models that see images.
IMAGES = (
    "pixel_values",
    "image_grid_thw",
    "num_images",
    "pixel_attention_mask",
    "spatial_shapes",
    "num_tiles",
    "image_sizes",
    "token_type_ids",
    "mm_token_type_ids",
    "image_position_ids",
)


def counted(inputs: Inputs) -> Tensor:
    """[B, T], True where TRL counts a token: completions, without padding and without tool output."""
    mask: Tensor = inputs["completion_mask"].bool()
    return mask if "tool_mask" not in inputs else mask & inputs["tool_mask"].bool()


def squared_advantage(inputs: Inputs) -> Tensor:
    """[B], the mean over its tokens where a completion has an advantage for each."""
    squares: Tensor = inputs["advantages"].float().square()
    return squares.reshape(len(squares), -1).mean(1)


ROUNDED = 1e-2
"""Up to this advantage a completion may be rewarded as its group is where TRL divides by a standard deviation: it adds
1e-4 to that, so the rounding of the mean of equal rewards of 10 leaves as much."""
UNDIVIDED = 1e-5
"""The same where TRL does not divide, as a share of the largest advantage of the step."""
TIED = 1e-3
"""By so much may advantages of a whole group differ where TRL divides: equal rewards have equal ones, and sums near 1
that are equal on paper differ by 6e-8."""


def with_signal(trainer: Trainer, batches: Sequence[Inputs]) -> list[Tensor]:
    """[B] of each micro-batch, True for completions with counted tokens in groups whose rewards differ.

    TRL shuffles groups over a step's micro-batches, and the prompt tells which are one. Those of which all completions
    are here have a signal if their advantages differ; TRL gives 0 to a completion without a reward. Of others, and
    where there are images, which the prompt does not name, or advantages of tokens, a completion shows it by an
    advantage beyond rounding.
    """
    advantages = [_advantage(inputs) for inputs in batches]
    trained = [counted(inputs).any(1) for inputs in batches]
    least = _rounding(trainer, max(float(each.abs().max()) for each in advantages))
    if any("pixel_values" in inputs for inputs in batches):
        return [(a.abs() > least) & counts for a, counts in zip(advantages, trained, strict=True)]
    prompts = [_prompts(inputs) for inputs in batches]
    groups: dict[tuple[int, ...], list[float]] = {}
    for names, found in zip(prompts, advantages, strict=True):
        for name, advantage in zip(names, found.tolist(), strict=True):
            groups.setdefault(name, []).append(advantage)
    whole = trainer.num_generations if all(inputs["advantages"].dim() == 1 for inputs in batches) else 0
    tied = min(least, TIED) if _divides(trainer) else least

    def differ(group: list[float]) -> bool:
        if len(group) != whole:
            return max(map(abs, group)) > least
        rewarded = [advantage for advantage in group if advantage]
        return bool(rewarded) and max(rewarded) - min(rewarded) > tied

    told = {name for name, group in groups.items() if differ(group)}
    return [
        each & torch.tensor([name in told for name in names], device=each.device)
        for each, names in zip(trained, prompts, strict=True)
    ]


def _advantage(inputs: Inputs) -> Tensor:
    """[B], of a completion; the one that is farthest from 0 where each token has its own."""
    each: Tensor = inputs["advantages"].float()
    each = each.reshape(len(each), -1)
    return each.gather(1, each.abs().argmax(1, keepdim=True)).squeeze(1)


def _rounding(trainer: Trainer, largest: float) -> float:
    """The largest advantage that may be the rounding of equal rewards; this process has one as large as ``largest``."""
    args = trainer.args
    largest = float(trainer.accelerator.gather(torch.tensor([largest], device=args.device)).max())
    if not _divides(trainer):
        return UNDIVIDED * largest
    # In a batch one outlier makes small advantages of all others. Rounding is far below them then.
    outlier = getattr(args, "scale_rewards", "none") == "batch" and largest > ROUNDED
    return ROUNDED / 10 if outlier else ROUNDED


def _divides(trainer: Trainer) -> bool:
    """Whether TRL divides the rewards' distance from their mean by a standard deviation."""
    args = trainer.args
    several = getattr(args, "multi_objective_aggregation", None) == "normalize_then_sum"
    return several or getattr(args, "scale_rewards", "none") in ("group", "batch")


def _prompts(inputs: Inputs) -> list[tuple[int, ...]]:
    """The token ids of each prompt, without padding."""
    kept = zip(inputs["prompt_ids"], inputs["prompt_mask"].bool(), strict=True)
    return [tuple(ids[mask].tolist()) for ids, mask in kept]


def text_of(inputs: Inputs) -> dict[str, Tensor]:
    """Prompt and completion side by side, as TRL's own forward takes them."""
    return {
        "input_ids": torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
        "attention_mask": torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
    }


def completion_states(states: Tensor, inputs: Inputs) -> Tensor:
    """The states that predict the completion's tokens: one place before each of them."""
    return states[:, -inputs["completion_ids"].size(1) - 1 : -1]


def policy_of(trainer: Trainer) -> nn.Module:
    """The model that is trained, without DDP's wrapper around it."""
    model: nn.Module = trainer.accelerator.unwrap_model(trainer.model)
    return model


@contextmanager
def reference_of(trainer: Trainer) -> Iterator[nn.Module]:
    """TRL's reference: its frozen copy, the ``ref`` adapter it made of a given one, or the base with adapters off."""
    if trainer.ref_model is not None:
        yield trainer.accelerator.unwrap_model(trainer.ref_model)
        return
    model: Any = policy_of(trainer)
    with use_adapter(model, adapter_name="ref" if "ref" in model.peft_config else None):
        yield model


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Without gradient, dropout or checkpointing; every module's mode is put back as it was."""
    training = [m for m in model.modules() if m.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def why_no_exact(trainer: Trainer) -> str | None:
    """Why the exact KL cannot be had from this trainer's models, in words; None where it can."""
    reason = kernels.why_full_logits(policy_of(trainer))
    if reason is None and trainer.ref_model is not None:
        reason = kernels.why_full_logits(trainer.accelerator.unwrap_model(trainer.ref_model))
    return reason


def head_of(model: nn.Module) -> kernels.HeadSpec:
    """The head of a model that :func:`why_no_exact` passed. Read anew each time: frameworks replace weights."""
    spec = kernels.head_of(model)
    if spec is None:
        raise ConfigError(f"the exact KL needs the model's head, but {kernels.why_full_logits(model)}.")
    return spec


def reference_states(trainer: Trainer, forward: Mapping[str, Any], inputs: Inputs) -> tuple[Tensor, kernels.HeadSpec]:
    """Hidden states of the reference on the completion, from the backbone's own keyword arguments; and its head."""
    with reference_of(trainer) as model, evaluating(model), trainer.accelerator.autocast():
        spec = head_of(model)
        states: Tensor = spec.backbone(**forward).last_hidden_state
        return completion_states(states, inputs), spec


def exact_kl(
    trainer: Trainer, states: Tensor, head: kernels.HeadSpec, ref: tuple[Tensor, kernels.HeadSpec], inputs: Inputs
) -> Tensor:
    """[B, T] KL(π‖ref) over the vocabulary at TRL's temperature, differentiable in the policy; 0 outside the mask."""
    ref_states, ref_head = ref
    dtype = head.weight.dtype if getattr(trainer.args, "cast_lm_head_to_fp32", False) else states.dtype
    with trainer.accelerator.autocast():
        stats = kernels.token_stats(
            states.to(dtype),
            head.weight,
            inputs["completion_ids"],
            ref_hidden=ref_states.to(dtype),
            ref_head=ref_head.weight,
            ref_bias=ref_head.bias,
            mask=counted(inputs),
            temperature=trainer.temperature,
            **head.options(),
        )
    assert stats.kl is not None
    return stats.kl


def reduce(trainer: Trainer, rows: Sequence[Sequence[Tensor | float]]) -> list[list[float]]:
    """A small table of numbers, summed over all processes."""
    table = torch.tensor([[float(x) for x in row] for row in rows], dtype=torch.float32, device=trainer.args.device)
    total: Tensor = trainer.accelerator.reduce(table, reduction="sum")
    return [[float(x) for x in row] for row in total.tolist()]


class Recorder:
    """Remembers the inputs of a step's micro-batches, by standing in front of ``trainer._compute_loss``."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.batches: list[Inputs] = []

    def attach(self) -> None:
        """Stand in front; once."""
        if getattr(self.trainer._compute_loss, "__func__", None) is not Recorder._compute_loss:
            self.inner = self.trainer._compute_loss
            self.trainer._compute_loss = self._compute_loss

    def detach(self) -> None:
        """Leave the trainer as it was found, unless somebody else stands in front by now."""
        if self.trainer.__dict__.get("_compute_loss") == self._compute_loss:
            del self.trainer.__dict__["_compute_loss"]
            if self.inner != self.trainer._compute_loss:  # it was an instance's attribute before us
                self.trainer._compute_loss = self.inner
        self.batches = []

    def _compute_loss(self, model: Any, inputs: Inputs) -> Tensor:
        if self.trainer.model.training:
            self.batches.append(inputs)
        loss: Tensor = self.inner(model, inputs)
        return loss


class OwnKL:
    """KL(π‖ref) on a step's own tokens with the weights as they are, averaged over all processes.

    Exact over the vocabulary where the heads allow it and the model sees text only, k3 of the sampled tokens
    elsewhere. Each call is one forward of the policy; the reference's states are computed once a step.
    """

    def __init__(self, trainer: Trainer, per: Unit) -> None:
        self.trainer, self.per = trainer, per
        self.exact = why_no_exact(trainer) is None
        self.batches: Sequence[Inputs] = ()
        self._reference: dict[int, Any] = {}

    def on(self, batches: Sequence[Inputs]) -> OwnKL:
        """Measure on these micro-batches from now on."""
        self.batches, self._reference = batches, {}
        return self

    def __call__(self) -> float:
        """The KL of the weights as they are, in the unit ``per``; the same number on every process."""
        with evaluating(policy_of(self.trainer)):
            parts = [sum_count(self._tokens(i, b), counted(b), per=self.per) for i, b in enumerate(self.batches)]
        total = reduce(self.trainer, [[sum(float(s) for s, _ in parts), sum(float(n) for _, n in parts)]])[0]
        return total[0] / max(total[1], 1.0)

    def _tokens(self, index: int, inputs: Inputs) -> Tensor:
        if not self.exact or any(inputs.get(k) is not None for k in IMAGES):
            return self._sampled(index, inputs)
        forward = {**text_of(inputs), "use_cache": False}
        if index not in self._reference:
            self._reference[index] = reference_states(self.trainer, forward, inputs)
        spec = head_of(policy_of(self.trainer))
        with self.trainer.accelerator.autocast():
            states = completion_states(spec.backbone(**forward).last_hidden_state, inputs)
        return exact_kl(self.trainer, states, spec, self._reference[index], inputs)

    def _sampled(self, index: int, inputs: Inputs) -> Tensor:
        if index not in self._reference:
            given = inputs.get("ref_per_token_logps")
            if given is None:
                with reference_of(self.trainer) as model:
                    given = self._logps(model, inputs)
            self._reference[index] = given
        mask = counted(inputs)
        logp, ref = (
            torch.where(mask, x, 0.0) for x in (self._logps(self.trainer.model, inputs), self._reference[index])
        )
        return k3(logp, ref)

    def _logps(self, model: nn.Module, inputs: Inputs) -> Tensor:
        text = text_of(inputs)
        images = {k: inputs.get(k) for k in IMAGES}
        logps: Tensor = self.trainer._get_per_token_logps_and_entropies(
            model, text["input_ids"], text["attention_mask"], inputs["completion_ids"].size(1), **images
        )[0]
        return logps
