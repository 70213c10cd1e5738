"""Decoding: prompts that several sequences share are filled in once, and the sampler follows the policy."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from klamp.sampling.caches import DynamicSteps, StaticSteps, layout
from small_batch import FIRST, model, part


def test_the_layout_finds_what_is_the_same() -> None:
    piece = part()
    rows, which, place, tails = layout(piece.ids[:, : piece.first], piece.attention[:, : piece.first])
    assert len(rows) == 3
    assert tails == 4
    groups = {tuple((which == p).nonzero().flatten().tolist()) for p in range(3)}
    assert groups == {(0, 2, 3, 6), (1, 5), (4,)}
    assert place.tolist() == [0, 0, 1, 2, 0, 1, 3]


@pytest.mark.parametrize("settings", [{}, {"sliding_window": 3}, {"sliding_window": 3, "attn_implementation": "eager"}])
def test_prompts_filled_in_once_are_prompts_filled_in_each(settings: Any) -> None:
    made, piece = model("mistral", **({"sliding_window": None} | settings)), part()  # also under eager attention
    ids, attention = piece.ids[:, :FIRST], piece.attention[:, :FIRST]
    logits = []
    with torch.no_grad():
        for steps in (StaticSteps(made, len(ids), FIRST + 3), DynamicSteps(made)):
            filled = steps.prefill(ids, attention)
            logits.append(torch.stack([filled, *(steps.step(torch.arange(7) + k) for k in (3, 4))]))
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-4)


def test_the_sampler_follows_the_policy_through_merged_weights(
    tmp_path: Any, words_model: str, words_prompts: str
) -> None:
    from klamp.train.config import LoraConfig, RolloutConfig, TrainConfig
    from klamp.train.loop import Trainer

    config = TrainConfig(
        model=words_model,
        prompts=words_prompts,
        run=str(tmp_path / "run"),
        device="cpu",
        rollout=RolloutConfig(prompts=3, group_size=4, max_tokens=6),
        lora=LoraConfig(rank=4, alpha=8.0),
    )
    made = Trainer(config, rewards=[lambda prompts, completions, **_: [0.0] * len(prompts)], quiet=True)
    with torch.no_grad():
        for p in made.learner.policy.trainable().values():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)), alpha=0.2)
    made.sampler.refresh()
    rollout = made.sample(1)
    look = made.learner.look(rollout, made.learner.reference_states(rollout))
    torch.testing.assert_close(rollout.sampler_logp[rollout.mask], look.logp[rollout.mask], rtol=1e-4, atol=1e-4)
    assert bool((look.kl[rollout.mask] > 0).any()), "the adapter does something"
