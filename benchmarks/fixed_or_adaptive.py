"""When does a constant price do, and when does it pay to adapt? Real policy gradients on a small language, four cases.

    python benchmarks/fixed_or_adaptive.py            # two minutes on one free core
    python benchmarks/fixed_or_adaptive.py --seeds 2  # one

The policy is a table of logits over 16 words, trained by GRPO (16 prompts of 8 completions of 12 words, Adam) with k1
in the reward; KL is exact. In the first case nothing changes. In the others something does: half way through the reward
is worth three times as much, or other words are rewarded; or the learning rate falls to a tenth by a cosine. The best
constant is found for each case by bisection on two seeds of its own, which is what choosing it costs in practice.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

import klamp

WORDS, LENGTH, PROMPTS, GROUP, STEPS, TARGET = 16, 12, 16, 8, 160, 0.05
LOWEST, HIGHEST, HALVINGS, SEARCHED = 0.01, 1.0, 6, (100, 101)  # 6 halvings of two decades leave 7 % of price


@dataclass(frozen=True)
class Case:
    """What is rewarded and how fast is learned, step by step."""

    name: str
    worth: Callable[[int], float] = lambda step: 1.0
    other_words: Callable[[int], bool] = lambda step: False
    rate: Callable[[int], float] = lambda step: 0.03


def late(step: int) -> bool:
    """The second half."""
    return step >= STEPS // 2


CASES = [
    Case("nothing changes"),
    Case("the reward's scale, × 3", worth=lambda step: 3.0 if late(step) else 1.0),
    Case("what is rewarded", other_words=late),
    Case("the learning rate, cosine to a tenth", rate=lambda s: 0.003 + 0.0135 * (1 + math.cos(math.pi * s / STEPS))),
]


class Language:
    """A policy and its reference: the next word's logits after each word."""

    def __init__(self, seed: int) -> None:
        self.draw = torch.Generator().manual_seed(seed)
        self.reference = torch.randn(WORDS, WORDS, generator=self.draw)
        self.logits = self.reference.clone().requires_grad_()
        self.adam = torch.optim.Adam([self.logits])

    def sample(self) -> tuple[Tensor, Tensor]:
        """(words before, words): [B, T] each."""
        p, words = torch.softmax(self.logits.detach(), -1), [torch.arange(PROMPTS).repeat_interleave(GROUP) % WORDS]
        for _ in range(LENGTH):
            words.append(torch.multinomial(p[words[-1]], 1, generator=self.draw)[:, 0])
        all_words = torch.stack(words, 1)
        return all_words[:, :-1], all_words[:, 1:]

    def step(self, before: Tensor, words: Tensor, scores: Tensor, beta: float, rate: float) -> None:
        """One GRPO step on ``scores − beta · k1``, summed over a completion, the reward's spread left as it is."""
        logp = torch.log_softmax(self.logits, -1)[before, words]
        k1 = (logp - torch.log_softmax(self.reference, -1)[before, words]).detach()
        rewards = (scores - beta * k1.sum(1)).view(PROMPTS, GROUP)
        advantages = (rewards - rewards.mean(1, keepdim=True)).view(-1, 1)
        self.adam.param_groups[0]["lr"] = rate
        self.adam.zero_grad()
        (-(advantages * logp).sum() / words.numel()).backward()
        self.adam.step()


def train(case: Case, seed: int, make: Callable[[float], klamp.Control]) -> tuple[list[float], list[float]]:
    """(KL per token in targets, reward per word) of every step under the controller that ``make(spread)`` gives."""
    language, control, kls, rewards = Language(seed), None, [], []
    for step in range(STEPS):
        before, words = language.sample()
        good = (words >= WORDS // 2) if case.other_words(step) else (words < WORDS // 2)
        share = good.double().mean(1)
        scores = case.worth(step) * share
        spread = float(scores.view(PROMPTS, GROUP).std(1).square().mean().sqrt())
        control = control or make(spread)
        with torch.no_grad():
            kl = klamp.exact(language.logits[before], language.reference[before]).mean()
        language.step(before, words, scores, control.beta, case.rate(step))
        control = control.before_update(float(kl), spread, len(words)).after_update()
        kls.append(float(kl) / TARGET)
        rewards.append(float(share.mean()))
    return kls, rewards


def fixed(beta: float) -> Callable[[float], klamp.Control]:
    """A constant price."""
    return lambda spread: klamp.Control(klamp.Fixed(beta)).init()


def ziegler(spread: float) -> klamp.Control:
    """The usual controller, from ROLL's first price, with its usual horizon."""
    return klamp.Control(klamp.Ziegler(TARGET, per="token", init_beta=0.2)).init()


def hold(spread: float) -> klamp.Control:
    """Hold from its feed-forward; it hears the spread of every batch's rewards."""
    return klamp.Control(klamp.Hold(TARGET, per="token")).init(spread=spread, length=LENGTH)


def in_band(kls: list[float]) -> float:
    """Share of the steps within 20 % of the target, from the first one that is; 0 where none is."""
    first = next((i for i, kl in enumerate(kls) if abs(kl - 1) <= 0.2), None)
    return 0.0 if first is None else fmean(abs(kl - 1) <= 0.2 for kl in kls[first:])


def best_constant(case: Case) -> float:
    """The price under which KL has the target as its mean from step 40 on, by bisection."""
    low, high = math.log(LOWEST), math.log(HIGHEST)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        kl = fmean(fmean(train(case, seed, fixed(math.exp(middle)))[0][40:]) for seed in SEARCHED)
        low, high = (middle, high) if kl > 1 else (low, middle)
    return math.exp((low + high) / 2)


def row(case: Case, seeds: range, make: Callable[[float], klamp.Control]) -> str:
    """The cells of one price in one case."""
    results = [train(case, seed, make) for seed in seeds]
    cells = (
        f"{100 * fmean(in_band(kls) for kls, _ in results):.0f} %",
        f"{max(max(kls) for kls, _ in results):.2f} ×",
        f"{fmean(fmean(kls[-20:]) for kls, _ in results):.2f} ×",
        f"{fmean(fmean(r[-20:]) for _, r in results):.3f}",
    )
    return " | ".join(cells)


def main() -> None:
    """Print the table."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--seeds", type=int, default=5, help="runs of each row")
    seeds = range(arguments.parse_args().seeds)
    torch.set_num_threads(1)
    unchanged = best_constant(CASES[0])
    print("| what changes | price | in band | highest KL | last KL | reward, last 20 steps |")
    print("|---|---|---|---|---|---|", flush=True)
    for case in CASES:
        arms = {f"constant {unchanged:.2g}, best where nothing changes": fixed(unchanged)}
        if case is not CASES[0]:
            best = best_constant(case)
            arms[f"constant {best:.2g}, best for this case"] = fixed(best)
        arms |= {"constant 0.2": fixed(0.2), "Ziegler from 0.2, horizon 10,000": ziegler, "Hold": hold}
        for name, make in arms.items():
            print(f"| {case.name} | {name} | {row(case, seeds, make)} |", flush=True)


if __name__ == "__main__":
    main()
