"""GRPO with its KL held, in one file: what ``klamp train`` does, without its care for resuming, ranks and speed.

    python examples/grpo.py        # the built-in model learns to write kinder reviews; a minute or two on one core

A step: sample a few completions of each prompt, reward them, compare each with the others of its prompt (that is
GRPO), push their tokens up or down, and charge ``beta`` for every nat that the policy moves away from the model it
started as. ``Hold`` finds the beta that keeps the KL at its target; the clamp takes back what an update overdid.
tests/equivalence/test_examples.py holds this file to ``klamp/train``: the same batches give the same weights.

Shapes: N = prompts x group sequences, C completion tokens, V vocabulary.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

import klamp
from klamp import models
from klamp.objectives import group_advantages, policy_loss
from klamp.placements import future_by_position
from klamp.train.rewards import vader

Reward = Callable[[list[str], list[str]], Sequence[float]]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to train and how far it may go."""

    model: str = "tiny"
    prompts: Sequence[str] = field(default_factory=lambda: models.prompts("tiny"))
    reward: Reward = vader
    steps: int = 20
    prompts_per_step: int = 4
    group: int = 8
    tokens: int = 24
    lr: float = 1e-3
    rank: int = 16
    target: float = 0.05  # nats per token
    seed: int = 0


@dataclass(frozen=True)
class Batch:
    """Sampled sequences and their rewards."""

    ids: Tensor  # [N, L]: prompts padded on the left, completions on the right
    attention: Tensor  # [N, L]
    mask: Tensor  # [N, C]: True for a completion's tokens, its end token among them
    rewards: Tensor  # [N]

    @property
    def tokens(self) -> Tensor:
        return self.ids[:, -self.mask.shape[1] :]


@torch.no_grad()
def sample(model: Any, tokenizer: Any, texts: Sequence[str], settings: Settings) -> Batch:
    """``group`` completions of every text, from the policy as it is, and what the reward says of them."""
    encoded = models.encode_prompts(tokenizer, [t for t in texts for _ in range(settings.group)])
    prompts = tokenizer.pad({"input_ids": encoded}, padding_side="left", return_tensors="pt")
    ids = model.generate(
        **prompts, max_new_tokens=settings.tokens, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    completions = ids[:, prompts["input_ids"].shape[1] :]
    ends = (completions == tokenizer.eos_token_id).cumsum(-1)
    mask = (ends == 0) | ((ends == 1) & (completions == tokenizer.eos_token_id))
    rows = [c[m].tolist() for c, m in zip(completions, mask, strict=True)]
    answers = tokenizer.batch_decode(rows, skip_special_tokens=True)
    rewards = torch.tensor(settings.reward([t for t in texts for _ in range(settings.group)], answers))
    return Batch(ids, torch.cat([prompts["attention_mask"], mask.long()], 1), mask, rewards)


def logits(model: Any, batch: Batch) -> Tensor:
    """[N, C, V]: what the model says before each completion token."""
    positions = (batch.attention.cumsum(-1) - 1).clamp(min=0)
    out = model(input_ids=batch.ids, attention_mask=batch.attention, position_ids=positions)
    return out.logits[:, -batch.mask.shape[1] - 1 : -1].float()


def reference_logits(model: Any, batch: Batch) -> Tensor:
    """The same of the model that training started from: the adapter switched off, no second model."""
    with torch.no_grad(), model.disable_adapter():
        return logits(model, batch)


def loss_and_kl(
    model: Any, batch: Batch, reference: Tensor, beta: float, group: int, future: Tensor
) -> tuple[Tensor, Tensor]:
    """GRPO's loss plus beta times the gradient of the sequences' KL, per counted token; and the KL of each token.

    ``future`` is the KL to come after each position as the step before had it: less that, the price has half the noise.
    """
    policy = logits(model, batch)
    logp = policy.log_softmax(-1).gather(-1, batch.tokens.unsqueeze(-1)).squeeze(-1)
    kl = klamp.exact(policy, reference)
    expected = torch.nn.functional.pad(future, (0, kl.shape[1]))[: kl.shape[1]].expand_as(kl)
    price = klamp.sequence_exact(kl, beta, batch.mask, baseline=expected)
    advantages = group_advantages(batch.rewards, group)[:, None].expand_as(logp)
    task = policy_loss(logp, logp.detach(), advantages, unclipped=price.advantage)
    return klamp.mean(task + price.local, batch.mask), kl.detach()


@torch.no_grad()
def measure(model: Any, batch: Batch, reference: Tensor) -> float:
    """KL(policy ‖ reference) in nats per token on this batch."""
    return klamp.mean(klamp.exact(logits(model, batch), reference), batch.mask, per="token").item()


def spread_of(batch: Batch, group: int) -> tuple[float, float]:
    """What the price competes with: the RMS of the advantages within a prompt; and the share of prompts with any."""
    advantages = group_advantages(batch.rewards, group).view(-1, group)
    return advantages.square().mean().sqrt().item(), advantages.ne(0).any(1).float().mean().item()


def noise_of(token_kl: Tensor, mask: Tensor, group: int) -> float:
    """The standard error of the batch's KL over the KL; completions of one prompt are alike, so over its prompts."""
    kl = torch.where(mask, token_kl.detach(), 0.0).double().view(-1, group * mask.shape[1]).sum(1)
    tokens = mask.double().view(-1, group * mask.shape[1]).sum(1)
    mean = kl.sum() / tokens.sum()
    if not mean > 0 or len(kl) < 2:
        return 0.0
    error = ((kl - mean * tokens).square().sum() * len(kl) / (len(kl) - 1)).sqrt() / tokens.sum()
    return min((error / mean).item(), 1.0)


def run(settings: Settings, watch: Callable[[int, Any, Batch, dict[str, float]], None] | None = None) -> Any:
    """Train and return the model; ``watch`` hears of every step."""
    torch.manual_seed(settings.seed)
    tokenizer = models.load_tokenizer(settings.model)
    lora = LoraConfig(r=settings.rank, lora_alpha=2 * settings.rank, target_modules="all-linear", task_type="CAUSAL_LM")
    model: Any = get_peft_model(models.load_model(settings.model, device="cpu"), lora)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=settings.lr, weight_decay=0.0)
    undo = klamp.lora_scaler(model)
    control = klamp.Control(klamp.Hold(target=settings.target, per="token"), clamp=True)
    future = torch.zeros(0)
    for step in range(1, settings.steps + 1):
        count = settings.prompts_per_step
        texts = [settings.prompts[i % len(settings.prompts)] for i in range((step - 1) * count, step * count)]
        batch = sample(model, tokenizer, texts, settings)
        spread, signal = spread_of(batch, settings.group)
        if not control.started:
            length = batch.mask.sum(-1).float().mean().item()
            control = control.init(spread=spread, length=length, signal=signal)
        reference = reference_logits(model, batch)
        loss, token_kl = loss_and_kl(model, batch, reference, control.beta, settings.group, future)
        to_come, number = future_by_position(token_kl, batch.mask)
        future = (to_come / number.clamp(min=1)).float()
        kl = klamp.mean(token_kl, batch.mask, per="token").item()
        figures = {"loss": loss.item(), "kl": kl, "beta": control.beta, "reward": batch.rewards.mean().item()}
        noise = noise_of(token_kl, batch.mask, settings.group)
        control = control.before_update(kl, spread, len(batch.ids), signal=signal, noise=noise)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimiser.step()
        optimiser.zero_grad()
        control = control.after_update(lambda b=batch, r=reference: measure(model, b, r), undo)
        if watch:
            watch(step, model, batch, figures | {"effort": control.clamped.effort})
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--target", type=float, default=0.05, help="nats per token")
    args = parser.parse_args()

    def show(step: int, _: Any, __: Batch, figures: dict[str, float]) -> None:
        print(f"step {step:3d}  " + "  ".join(f"{name} {value:.4f}" for name, value in figures.items()), flush=True)

    run(Settings(steps=args.steps, target=args.target), show)


if __name__ == "__main__":
    main()
