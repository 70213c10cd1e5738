"""``KlampGRPOTrainer``: TRL's GRPOTrainer with klamp's KL term in the place of its own.

TRL's loss is left to compute everything but the KL: it runs with beta 0, and the KL term, reduced as TRL reduces its
per-token loss, is added. The reduction is linear in the per-token loss, so the sum is TRL's loss where the estimator
is TRL's (``weighted_k3`` in the loss). Shapes: B completions, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from trl.trainer.grpo_trainer import GRPOTrainer

from klamp.errors import ConfigError
from klamp.estimators import named
from klamp.integrations.trl.tokens import (
    Inputs,
    Trainer,
    completion_states,
    counted,
    exact_kl,
    head_of,
    policy_of,
    reduce,
    reference_states,
    why_no_exact,
)
from klamp.masked import select, sum_count
from klamp.placements import check, in_advantage, sequence_exact


class KlampGRPOTrainer(GRPOTrainer):
    """GRPOTrainer whose KL term descends KL(π‖ref): by default the exact KL with the true gradient of the sequence's.

    The ``kl`` metric is the token mean of the estimator. Everything else is TRL's.

    Args:
        *args: as in ``GRPOTrainer``.
        estimator: what is priced: ``"exact"``, ``"k1"``, ``"k2"``, ``"weighted_k3"``, ...
        placement: where: ``"sequence_exact"``, ``"in_advantage"`` or ``"in_loss"``.
        allow_biased: accept a pair that does not descend KL(π‖ref).
        max_weight: as in :func:`klamp.sequence_exact`.
        baseline: as in :func:`klamp.sequence_exact`.
        **kwargs: as in ``GRPOTrainer``.
    """

    def __init__(
        self,
        *args: Any,
        estimator: str = "exact",
        placement: str = "sequence_exact",
        allow_biased: bool = False,
        max_weight: float | None = 2.0,
        baseline: Literal["position"] | None = "position",
        **kwargs: Any,
    ) -> None:
        pair = check(estimator, placement, allow_biased=allow_biased)
        if pair.placement == "in_reward":
            raise ConfigError(
                "placement='in_reward' needs a reward for each token, and GRPO has one for each completion, which it "
                "normalises in its group. Use placement='sequence_exact': the same gradient, with less noise."
            )
        super().__init__(*args, **kwargs)
        self.kl_estimator, self.kl_placement = pair.estimator, pair.placement
        self.kl_max_weight, self.kl_baseline = max_weight, baseline
        self._policy_logps: Tensor | None = None
        why = why_no_exact(self) if pair.estimator == "exact" and self.beta != 0.0 else None
        if why is not None:
            raise ConfigError(f"estimator='exact' cannot be had: {why}. Use estimator='weighted_k3' with 'in_loss'.")

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        out = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        self._policy_logps = out[0]
        return out

    def _compute_loss(self, model: Any, inputs: Inputs) -> Tensor:
        if self.beta == 0.0:
            loss: Tensor = super()._compute_loss(model, inputs)  # type: ignore[no-untyped-call]
            return loss
        beta = self.beta
        with self._watched() as seen, self._unpriced():
            loss = super()._compute_loss(model, inputs)  # type: ignore[no-untyped-call]
        logp, self._policy_logps = self._policy_logps, None
        assert logp is not None
        kl = self._kl(logp, seen, inputs)
        _log_kl(self, kl, inputs)
        return loss + _reduced(self, self._term(kl, beta, logp, inputs), inputs)

    @contextmanager
    def _unpriced(self) -> Iterator[None]:
        """TRL's own KL term switched off."""
        beta, self.beta = self.beta, 0.0
        try:
            yield
        finally:
            self.beta = beta

    @contextmanager
    def _watched(self) -> Iterator[dict[str, Any]]:
        """The backbone's keyword arguments and last hidden states in TRL's own forward of the policy."""
        seen: dict[str, Any] = {}

        def remember(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            seen.update(forward=kwargs, states=output.last_hidden_state)

        if self.kl_estimator != "exact":
            yield seen
            return
        handle = head_of(policy_of(self)).backbone.register_forward_hook(remember, with_kwargs=True)
        try:
            yield seen
        finally:
            handle.remove()

    def _kl(self, logp: Tensor, seen: dict[str, Any], inputs: Inputs) -> Tensor:
        """[B, T] the estimator's KL, differentiable in the policy, 0 outside the mask."""
        mask = counted(inputs)
        if self.kl_estimator == "exact":
            states = completion_states(seen["states"], inputs)
            reference = reference_states(self, seen["forward"], inputs)
            return exact_kl(self, states, head_of(policy_of(self)), reference, inputs)
        ref = select(inputs["ref_per_token_logps"], mask)
        old = select(self._old(logp, inputs), mask)
        return named(self.kl_estimator)(select(logp, mask), ref, old_logp=old)

    def _term(self, kl: Tensor, beta: float, logp: Tensor, inputs: Inputs) -> Tensor:
        """[B, T] what is added to the loss of each token: beta times the KL, or the ratio times its advantage."""
        mask = counted(inputs)
        if self.kl_placement == "in_loss":
            return beta * kl
        old = self._old(logp, inputs)
        ratio = (select(logp, mask) - select(old, mask)).exp()
        if self.kl_placement == "in_advantage":
            return -ratio * in_advantage(torch.zeros_like(ratio.detach()), kl, beta, mask)
        parts = sequence_exact(
            kl, beta, mask, logp=logp, old_logp=old, max_weight=self.kl_max_weight, baseline=self.kl_baseline
        )
        return parts.local - ratio * parts.advantage

    def _old(self, logp: Tensor, inputs: Inputs) -> Tensor:
        """The sampler's log-probs; the policy's own where TRL keeps none because they are the same."""
        old: Tensor | None = inputs.get("old_per_token_logps")
        return logp.detach() if old is None else old


def _reduced(trainer: Trainer, term: Tensor, inputs: Inputs) -> Tensor:
    """The sum over tokens that TRL takes of its per-token loss, by ``loss_type``."""
    mask, kind = counted(inputs), trainer.loss_type
    term, training = select(term, mask), trainer.model.training
    parts: float = trainer.current_gradient_accumulation_steps if training else 1.0
    if kind in ("grpo", "sapo"):
        return (term.sum(-1) / mask.sum(-1).clamp(min=1)).mean() / parts
    if kind == "bnpo":
        return term.sum() / mask.sum().clamp(min=1) / parts
    if kind == "luspo":
        return term.sum(-1).mean() / parts
    if kind == "dr_grpo":
        return term.sum() / float(term.size(0) * trainer.max_completion_length) / parts
    # dapo, cispo, vespo: the tokens of the whole generated batch, brought down to one optimiser step
    count: Tensor = inputs["num_items_in_batch"].clamp(min=1.0) / trainer.accelerator.num_processes
    share = parts / trainer.args.steps_per_generation if training else 1.0
    return term.sum() / (count * share)


def _log_kl(trainer: Trainer, kl: Tensor, inputs: Inputs) -> None:
    """TRL's ``kl`` metric: the mean over counted tokens, over all processes."""
    total, count = reduce(trainer, [list(sum_count(kl.detach(), counted(inputs)))])[0]
    trainer._metrics["train" if trainer.model.training else "eval"]["kl"].append(total / max(count, 1.0))
