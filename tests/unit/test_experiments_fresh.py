"""The fresh reading at the end of a comparison's runs: of the policy as it is, in the target's unit, to itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from klamp.experiments.job_process import fresh_kl
from klamp.train.config import KLConfig, RolloutConfig, TrainConfig
from klamp.train.loop import Trainer


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    config = TrainConfig(
        run=str(tmp_path_factory.mktemp("run") / "run"),
        steps=1,
        kl=KLConfig(target=0.05, per="token"),
        rollout=RolloutConfig(prompts=4, group_size=4, max_tokens=8),
    )
    return Trainer(config, quiet=True)


def test_it_reads_the_policy_in_the_targets_unit_and_leaves_the_run_as_it_was(trainer: Trainer) -> None:
    assert fresh_kl(trainer, 4)["kl/fresh"] == pytest.approx(0, abs=1e-6), "the reference to itself"
    weights = trainer.learner.policy.trainable()
    with torch.no_grad():
        for i, (name, weight) in enumerate(sorted(weights.items())):
            if "lora_B" in name:
                weight.normal_(0, 0.02, generator=torch.Generator().manual_seed(i))
    trainer.sampler.refresh(1)
    before = trainer.sample(1)
    found = fresh_kl(trainer, 32)
    assert found["kl/fresh"] > 1e-3
    assert 0 < found["kl/fresh_noise"] < 0.5
    assert fresh_kl(trainer, 32) == found
    assert trainer.sample(1).ids.equal(before.ids), "training draws what it would have drawn"
    assert fresh_kl(trainer, 128)["kl/fresh_noise"] < 0.8 * found["kl/fresh_noise"], "four times the samples: half"
    usual, made = trainer.config, {}
    for unit in ("sequence", "sequence_mean"):
        trainer.config = replace(usual, kl=replace(usual.kl, per=unit))
        made[unit] = fresh_kl(trainer, 32)["kl/fresh"]
    trainer.config = usual
    assert 1 < made["sequence"] / found["kl/fresh"] <= 8, "a sum over at most eight tokens"
    assert 0.5 < made["sequence_mean"] / found["kl/fresh"] < 2
