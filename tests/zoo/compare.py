"""One family: trained two steps by klamp's own trainer, then compared with plain transformers, sequence by sequence."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from families import WORDS, write
from torch import Tensor

from klamp import models
from klamp.errors import ConfigError
from small_model import tokenizer, vocabulary

PROMPTS = ["w1 w2 w3 w4 w5 w6", "w7", "w8 w9 w10", "w11 w12"]
"""Ragged, so that padding is at work in every batch."""
TEMPERATURE = 0.9


BOUND = 1e-5
"""Nats, float32: log-probs of size 5 from logits of size 10, some tens of sums in another order."""
BOUNDS = {"KL": 2e-6}


@dataclass
class Found:
    """How far klamp is from plain transformers, in nats; the gradient relative to its norm."""

    way: str
    """static, dynamic or refused: how the family's completions are decoded."""
    figures: dict[str, float] = field(default_factory=dict)
    why: str = ""
    """Why it is refused."""

    def wrong(self) -> dict[str, float]:
        """The figures beyond their bounds."""
        return {k: v for k, v in self.figures.items() if not v <= BOUNDS.get(k, BOUND)}


def looked_at(name: str, place: Path, *, full: bool) -> Found:
    """A family trained and compared in ``place``, or its refusal."""
    folder = write(place / "model", name)
    try:
        return compared(trained(folder, place / "run", full=full), folder)
    except ConfigError as error:
        return Found("refused", why=str(error))


def trained(folder: str, run: Path, *, full: bool, **settings: Any) -> Any:
    """A trainer after two steps on ``folder``'s model."""
    from klamp.train.config import LoraConfig, OptimConfig, RolloutConfig, TrainConfig
    from klamp.train.loop import Trainer

    prompts = run.parent / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS) + "\n")
    config = TrainConfig(
        model=folder,
        prompts=str(prompts),
        run=str(run),
        device="cpu",
        full=full,
        steps=2,
        rollout=RolloutConfig(prompts=4, group_size=2, max_tokens=12, temperature=TEMPERATURE),
        optim=OptimConfig(lr=1e-3 if full else 1e-2),
        lora=LoraConfig(rank=4, alpha=8.0),
    )
    with own_words():
        trainer = Trainer(replace(config, **settings), rewards=[_reward], quiet=True)
    trainer.run()
    return trainer


@contextlib.contextmanager
def own_words() -> Iterator[None]:
    """One tokenizer for all families; transformers would make another kind for some of them."""
    before, words = models.load_tokenizer, tokenizer(vocabulary(WORDS))
    models.load_tokenizer = lambda *_, **__: words
    try:
        yield
    finally:
        models.load_tokenizer = before


def _reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(c.split()))) + 0.1 * (i % 3) for i, c in enumerate(completions)]


def compared(trainer: Any, folder: str) -> Found:
    """Sampler, learner, KL, reference and gradient of a fresh batch against the model as transformers runs it."""
    learner = trainer.learner
    trainer.sampler.refresh()
    rollout = trainer.sample(3)
    look = learner.look(rollout, learner.reference_states(rollout))
    mask = rollout.mask
    weights = torch.randn(2, *mask.shape, generator=torch.Generator().manual_seed(3))
    policy, base = truth(trainer, folder), original(folder)
    names = [n for n, p in learner.policy.model.named_parameters() if p.requires_grad]
    ours = _gradient(learner, rollout, weights, names)
    logp, ref_logp, kl, theirs = _plain(policy, base, rollout, weights, names)
    figures = {
        "sampler": _far(rollout.sampler_logp, logp, mask),
        "log-prob": _far(look.logp, logp, mask),
        "reference": _far(look.ref_logp, ref_logp, mask),
        "KL": _far(look.kl, kl, mask),
        "gradient": float((ours - theirs).norm() / theirs.norm()),
    }
    if figures["gradient"] > BOUND and at_a_corner(policy, rollout):
        # Rounding decides on which side of a ReLU's corner a state lies, and with it the gradient: look in float64.
        for model in (learner.policy.model, policy, base):
            model.double()
        ours = _gradient(learner, rollout, weights.double(), names)
        theirs = _plain(policy, base, rollout, weights.double(), names)[3]
        figures["gradient"] = float((ours - theirs).norm() / theirs.norm())
    assert float(kl[mask].mean()) > 1e-5, "two steps moved the policy off its reference"
    return Found("static" if trainer.sampler.merged.fast else "dynamic", figures)


def at_a_corner(model: Any, rollout: Any) -> bool:
    """Whether a ReLU of the model is given a number within rounding of 0, where its slope jumps."""
    least: list[float] = []
    relus = [m for m in model.modules() if isinstance(m, torch.nn.ReLU)]
    hooks = [m.register_forward_hook(lambda _, x, __: least.append(float(x[0].abs().min()))) for m in relus]
    with torch.no_grad():
        for row in range(len(rollout)):
            model(input_ids=rollout.ids[row][rollout.attention[row].bool()][None], use_cache=False)
    for hook in hooks:
        hook.remove()
    return min(least, default=1.0) < 1e-7


def original(folder: str) -> Any:
    """The model as transformers loads it, with eager attention."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def truth(trainer: Any, folder: str) -> Any:
    """The same with the trained weights, by name."""
    model, trained = original(folder), trainer.learner.policy.model
    if trainer.learner.policy.lora:
        from peft import get_peft_model

        model = get_peft_model(model, trained.peft_config["default"]).eval()
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, p in trained.named_parameters():
            own[name].copy_(p)
    return model


def _plain(policy: Any, base: Any, rollout: Any, weights: Tensor, names: list[str]) -> tuple[Tensor, ...]:
    """Log-probs of policy and base, exact KL and the gradient of their weighted sum, each sequence alone, unpadded."""
    logp, ref_logp, kl = (torch.zeros(rollout.mask.shape, dtype=weights.dtype) for _ in range(3))
    loss = torch.zeros((), dtype=weights.dtype)
    for row in range(len(rollout)):
        real, count = rollout.attention[row].bool(), int(rollout.mask[row].sum())
        ids = rollout.ids[row][real][None]
        before = slice(ids.shape[1] - count - 1, ids.shape[1] - 1)
        own = (policy(input_ids=ids, use_cache=False).logits[0, before].to(weights.dtype) / TEMPERATURE).log_softmax(-1)
        with torch.no_grad():
            ref = (base(input_ids=ids, use_cache=False).logits[0, before].to(weights.dtype) / TEMPERATURE).log_softmax(
                -1
            )
        tokens = ids[0, -count:, None]
        far = (own.exp() * (own - ref)).sum(-1)
        picked = own.gather(1, tokens).squeeze(1)
        loss = loss + (weights[0, row, :count] * picked + weights[1, row, :count] * far).sum()
        logp[row, :count], kl[row, :count] = picked.detach(), far.detach()
        ref_logp[row, :count] = ref.gather(1, tokens).squeeze(1)
    parameters = dict(policy.named_parameters())
    for name in names:
        parameters[name].requires_grad_(True)
    return logp, ref_logp, kl, _flat(loss, [parameters[n] for n in names])


def _gradient(learner: Any, rollout: Any, weights: Tensor, names: list[str]) -> Tensor:
    from klamp.sampling.rollout import part

    piece = part(rollout, torch.arange(len(rollout)))
    states = learner.policy(piece).hidden
    stats = learner.policy.stats(piece, states, learner.reference.states(piece))
    masked = [torch.where(piece.mask, w[:, : piece.mask.shape[1]], 0.0) for w in weights]
    parameters = dict(learner.policy.model.named_parameters())
    return _flat((masked[0] * stats.logp + masked[1] * stats.kl).sum(), [parameters[n] for n in names])


def _flat(loss: Tensor, parameters: list[Tensor]) -> Tensor:
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return torch.cat(
        [torch.zeros(p.numel()) if g is None else g.flatten() for g, p in zip(found, parameters, strict=True)]
    )


def _far(ours: Tensor, theirs: Tensor, mask: Tensor) -> float:
    return float((ours - theirs)[mask].abs().max())
