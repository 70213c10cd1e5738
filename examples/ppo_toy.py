"""PPO with its KL in the reward and held at a target, on a toy: value head, GAE, clipped losses, several epochs.

    python examples/ppo_toy.py              # a few seconds on one core

The model is a GRU over 12 letters with random weights, which are its reference. It is rewarded for runs of the
alphabet. k1 of the policy that sampled is subtracted from every token's reward before the advantages are made, as in
Ziegler et al. (2019), and ``Hold`` finds the price that keeps KL at 0.1 nats per token.

Shapes: B sequences, T tokens. The end token counts; what follows it does not.
"""

from __future__ import annotations

import argparse
import copy

import torch
from torch import Tensor, nn

import klamp
from klamp.objectives import gae, policy_loss, value_loss, whiten

VOCABULARY, LENGTH, END, BATCH = 12, 16, 0, 128
TARGET, EPOCHS, MINIBATCHES = 0.1, 3, 2


class ToyLM(nn.Module):
    """Next-token logits and a value of the state before each token, from a GRU."""

    def __init__(self, hidden: int = 48) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY + 1, hidden)  # the last row starts a sequence
        self.gru = nn.GRU(hidden, hidden, batch_first=True)
        self.head = nn.Linear(hidden, VOCABULARY)
        self.value = nn.Linear(hidden, 1)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """(logits [B, T, V], values [B, T]) of every token given those before it."""
        start = torch.full_like(tokens[:, :1], VOCABULARY)
        states, _ = self.gru(self.embed(torch.cat([start, tokens[:, :-1]], 1)))
        return self.head(states), self.value(states).squeeze(-1)

    @torch.no_grad()
    def sample(self, count: int) -> tuple[Tensor, Tensor]:
        """Tokens [B, T] and the mask: True up to the first END, and at it."""
        token, memory, drawn = torch.full((count, 1), VOCABULARY), None, []
        for _ in range(LENGTH):
            state, memory = self.gru(self.embed(token), memory)
            token = torch.multinomial(self.head(state[:, -1]).softmax(-1), 1)
            drawn.append(token)
        tokens = torch.cat(drawn, 1)
        ended = (tokens == END).cumsum(-1)
        return tokens, (ended == 0) | ((ended == 1) & (tokens == END))


def token_logp(logits: Tensor, tokens: Tensor) -> Tensor:
    """log π of the tokens, [B, T]."""
    return logits.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def reward(tokens: Tensor, mask: Tensor) -> Tensor:
    """[B, T]: 1 wherever a letter follows the one before it in the alphabet."""
    follows = (tokens[:, 1:] == tokens[:, :-1] + 1) & mask[:, 1:]
    return torch.cat([torch.zeros_like(follows[:, :1]), follows], 1).float()


def update(policy: ToyLM, optimiser: torch.optim.Optimizer, batch: dict[str, Tensor]) -> None:
    """PPO's epochs over one batch: clipped policy loss and clipped value loss, per counted token."""
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(batch["tokens"])).chunk(MINIBATCHES):
            part = {name: x[rows] for name, x in batch.items()}
            logits, values = policy(part["tokens"])
            logp = token_logp(logits, part["tokens"])
            task = policy_loss(logp, part["logp"], part["advantages"], clip=(0.2, 0.2))
            fit = value_loss(values, part["values"], part["returns"], clip=0.2)
            optimiser.zero_grad()
            klamp.mean(task + 0.5 * fit, part["mask"]).backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimiser.step()


def run(steps: int = 80, seed: int = 0, *, show: bool = True) -> list[tuple[float, float]]:
    """Train; returns (reward per sequence, KL per token) of every step."""
    torch.manual_seed(seed)
    policy = ToyLM()
    reference = copy.deepcopy(policy).requires_grad_(False)
    optimiser = torch.optim.Adam(policy.parameters(), lr=2e-3)
    control = klamp.Control(klamp.Hold(target=TARGET, per="token")).init(spread=1.0, length=LENGTH / 2, n=BATCH)
    history = []
    for step in range(1, steps + 1):
        tokens, mask = policy.sample(BATCH)
        rewards = reward(tokens, mask)
        with torch.no_grad():
            (logits, values), (ref_logits, _) = policy(tokens), reference(tokens)
            logp, ref_logp = token_logp(logits, tokens), token_logp(ref_logits, tokens)
        kl = klamp.mean(klamp.exact(logits, ref_logits), mask, per="token").item()
        control = control.before_update(kl, n=BATCH)
        priced = klamp.in_reward(rewards, klamp.k1(logp, ref_logp), control.beta, mask)
        advantages, returns = gae(priced, values, mask, gamma=1.0, lam=0.95)
        batch = {"tokens": tokens, "mask": mask, "logp": logp, "values": values, "returns": returns}
        update(policy, optimiser, batch | {"advantages": whiten(advantages, mask)})
        control = control.after_update()
        history.append((rewards.sum(-1).mean().item(), kl))
        if show and (step % 10 == 0 or step == 1):
            print(f"step {step:3d}  reward {history[-1][0]:.3f}  KL {kl:.4f}  beta {control.beta:.4f}")
    return history


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=80)
    history = run(parser.parse_args().steps)
    later = history[len(history) // 2 :]
    print(f"second half: KL {sum(kl for _, kl in later) / len(later):.4f} for a target of {TARGET}")


if __name__ == "__main__":
    main()
