# %% [markdown]
# # KL control in a policy-gradient loop of your own
#
#     pip install klamp
#     python examples/own_loop.py          # a few seconds on one CPU thread
#
# The model is a toy: a GRU over 12 letters whose random initial weights are its reference. The KL is real: it is summed
# over the vocabulary at every position, priced with the gradient of the sequence's KL, and held at 0.1 nats per token.
# Replace `ToyLM` and `reward` by yours. Everything that says `klamp` stays.

# %%
from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

import klamp

VOCABULARY, LENGTH, END, BATCH, STEPS = 12, 12, 0, 96, 160
TARGET = 0.1


# %% [markdown]
# ## A policy that can be sampled


# %%
class ToyLM(nn.Module):
    """Next-token logits from a GRU."""

    def __init__(self, hidden: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY + 1, hidden)  # the last row starts a sequence
        self.gru = nn.GRU(hidden, hidden, batch_first=True)
        self.head = nn.Linear(hidden, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [B, T, V] of every token given those before it."""
        start = torch.full_like(tokens[:, :1], VOCABULARY)
        states, _ = self.gru(self.embed(torch.cat([start, tokens[:, :-1]], 1)))
        return self.head(states)

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


# %% [markdown]
# ## A reward


# %%
def reward(tokens: Tensor, mask: Tensor) -> Tensor:
    """How often a letter follows the one before it in the alphabet; [B]."""
    follows = (tokens[:, 1:] == tokens[:, :-1] + 1) & mask[:, 1:]
    return follows.float().sum(-1)


# %% [markdown]
# ## The loss, with the price of KL
#
# `sequence_exact` splits the price into two parts. `local` goes into the loss, `advantage` onto the advantages after
# they are normalised.


# %%
def policy_loss(policy: ToyLM, reference: ToyLM, batch: tuple[Tensor, Tensor, Tensor], beta: float) -> Tensor:
    """REINFORCE with normalised rewards, plus the two halves of the gradient of the sequence's KL."""
    tokens, mask, rewards = batch
    logits = policy(tokens)
    with torch.no_grad():
        ref_logits = reference(tokens)
    price = klamp.sequence_exact(klamp.exact(logits, ref_logits), beta, mask, objective="score", baseline="position")
    advantages = ((rewards - rewards.mean()) / (rewards.std() + 1e-6)).unsqueeze(-1) + price.advantage
    logp = logits.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return klamp.mean(price.local - advantages * logp, mask)


# %% [markdown]
# ## Measuring KL


# %%
@torch.no_grad()
def measure(policy: ToyLM, reference: ToyLM, tokens: Tensor, mask: Tensor) -> float:
    """KL(policy ‖ reference) in nats per token, exact at every prefix of these samples."""
    return klamp.mean(klamp.exact(policy(tokens), reference(tokens)), mask, per="token").item()


# %% [markdown]
# ## The loop
#
# Sample, measure, update, clamp, steer, record.


# %%
def main() -> None:
    torch.manual_seed(0)
    policy = ToyLM()
    reference = copy.deepcopy(policy).requires_grad_(False)
    optimiser = torch.optim.Adam(policy.parameters(), lr=3e-3)
    hold = klamp.Hold(target=TARGET, per="token")
    monitor = klamp.Monitor(target=TARGET, per="token", bounds=hold.bounds, window=STEPS // 2)
    length = policy.sample(BATCH)[1].sum().item() / BATCH  # mean number of tokens: the first price depends on it
    control = klamp.Control(hold, clamp=True, monitor=monitor).init(spread=1.0, length=length)
    undo = klamp.weights_scaler(policy, dict(reference.named_parameters()))
    print(f"{'step':>5} {'reward':>7} {'kl':>7} {'beta':>7} {'effort':>7}")
    for step in range(STEPS):
        tokens, mask = policy.sample(BATCH)
        rewards = reward(tokens, mask)
        kl = measure(policy, reference, tokens, mask)
        control = control.before_update(kl, n=BATCH)
        loss = policy_loss(policy, reference, (tokens, mask, rewards), control.beta)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        control = control.after_update(lambda t=tokens, m=mask: measure(policy, reference, t, m), undo)
        effort = control.clamped.effort
        if step % 10 == 0 or step == STEPS - 1:
            print(f"{step:5d} {rewards.mean():7.3f} {kl:7.4f} {control.beta:7.4f} {effort:7.4f}")
    seen = control.seen
    print(f"second half: KL {seen.mean():.4f} for a target of {TARGET}, in band {seen.in_band:.0%} of the steps")


if __name__ == "__main__":
    main()
