"""Drawing tokens: the distribution sampled from is the one whose log-probs come back."""

from __future__ import annotations

import math

import torch

from klamp.sampling.sampler import nucleus, race

DRAWS = 200_000


def test_the_race_draws_the_distribution() -> None:
    logp = torch.tensor([0.5, 0.3, 0.15, 0.049, 0.001, 0.0]).log()
    drawn = race(logp.repeat(DRAWS, 1), torch.Generator().manual_seed(0))
    shares = torch.bincount(drawn.flatten(), minlength=6) / DRAWS
    # Four standard deviations of a share that is estimated from so many draws.
    bound = 4 * (logp.exp() * (1 - logp.exp()) / DRAWS).sqrt()
    assert bool(((shares - logp.exp()).abs() <= bound).all()), shares
    assert float(shares[5]) == 0.0, "what has no probability never wins"


def test_the_race_is_reproducible_and_respects_the_nucleus() -> None:
    logp = torch.randn(64, 50, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    cut = nucleus(logp, 0.7)
    one, two = (race(cut, torch.Generator().manual_seed(2)) for _ in range(2))
    assert torch.equal(one, two)
    assert bool((cut.gather(1, one) > -math.inf).all())
