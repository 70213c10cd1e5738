"""What is usual for a model stands in one place, for train, compare and sweep alike."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from klamp import models
from klamp.config_io import from_yaml, to_dict, to_yaml
from klamp.experiments import compare
from klamp.experiments.compare import CompareConfig
from klamp.experiments.folder import Folder
from klamp.experiments.sweep import SweepConfig, plan
from klamp.models.defaults import OWN, USUAL, rate
from klamp.train.config import AlgorithmConfig, OptimConfig, RolloutConfig, TrainConfig


def batch(config: TrainConfig) -> tuple[float, ...]:
    rollout = config.rollout
    return (config.optim.lr, rollout.prompts, rollout.group_size, rollout.max_tokens)


@pytest.mark.parametrize("model", models.BUILTIN)
def test_train_compare_and_sweep_take_the_same(model: str, tmp_path: Path) -> None:
    usual = USUAL[model]
    trained = TrainConfig(model=model).resolved()
    compared = CompareConfig(model=model).resolved().train_config(compare.named_arm("hold", 0.04), 0, tmp_path)
    swept = plan(SweepConfig(over=("kl.beta=0.1",), model=model), Folder(tmp_path))[0][2]
    expected = (usual.lr, usual.prompts, usual.group_size, usual.max_tokens)
    assert batch(trained) == batch(compared) == batch(swept) == expected
    assert trained.steps == compared.steps == usual.steps


def test_what_is_given_stays() -> None:
    config = TrainConfig(steps=7, optim=OptimConfig(lr=3e-3), rollout=RolloutConfig(max_tokens=9)).resolved()
    assert (config.steps, config.optim.lr, config.rollout.max_tokens) == (7, 3e-3, 9)
    assert config.rollout.prompts == USUAL["tiny"].prompts
    chosen = CompareConfig(steps=7, group_size=3).resolved()
    assert (chosen.steps, chosen.group_size, chosen.max_tokens) == (7, 3, USUAL["tiny"].max_tokens)


def test_another_model_goes_by_its_width(words_model: str) -> None:
    config = TrainConfig(model=words_model).resolved()
    assert json.loads((Path(words_model) / "config.json").read_text())["hidden_size"] == 16
    assert config.optim.lr == rate(16) == 7.3e-3
    assert (config.steps, config.rollout.max_tokens) == (OWN.steps, OWN.max_tokens)
    assert replace(config, model="tiny").resolved() == replace(config, model="tiny"), "written down once"


def test_the_rule_meets_the_built_in_models_and_what_is_usual_for_lora() -> None:
    assert rate(576) == USUAL["smollm2"].lr
    assert rate(128) == USUAL["tiny"].lr
    assert 1e-4 <= rate(4096) < rate(2048) <= 2e-4


def test_every_weight_takes_a_tenth() -> None:
    assert TrainConfig(full=True).resolved().optim.lr == pytest.approx(USUAL["tiny"].lr / 10)


def test_left_out_it_is_written_resolved_and_read_back_the_same(tmp_path: Path) -> None:
    config = TrainConfig().resolved()
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(config))
    assert "lr: 0.0015" in file.read_text()
    assert to_dict(from_yaml(TrainConfig, file)) == to_dict(config)


def test_minibatches_are_checked_against_the_batch_that_is_taken(words_model: str) -> None:
    many = AlgorithmConfig(minibatches=48)
    assert TrainConfig(model=words_model, algorithm=many).resolved().rollout.prompts == 8
    with pytest.raises(ValueError, match="48 is more than the 32 completions"):
        TrainConfig(algorithm=many).resolved()
