"""Other systems' names for a setting are answered with klamp's, as flags, in YAML and in a sweep."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from klamp import ConfigError
from klamp.cli import main
from klamp.compat.foreign_settings import FOREIGN, foreign
from klamp.config_io import fields_of, from_dict, from_yaml
from klamp.train.config import TrainConfig

FIELDS = {name for name, _ in fields_of(TrainConfig)}


@pytest.mark.parametrize("name", FOREIGN)
def test_an_answer_names_fields_that_exist(name: str) -> None:
    dotted = set(re.findall(r"[a-z]+\.[a-z_]+(?==|\b)", FOREIGN[name].here))
    assert dotted <= FIELDS
    assert dotted or FOREIGN[name].here.strip("‹›") in FIELDS or FOREIGN[name].note


@pytest.mark.parametrize("name", FOREIGN)
def test_no_field_of_klamps_own_is_refused(name: str) -> None:
    assert name not in FIELDS


@pytest.mark.parametrize(
    ("flags", "answer"),
    [
        (["--kl.init_kl_coef", "0.1"], "--kl.beta"),
        (["--kl.init-kl-coef=0.1"], "--kl.beta"),
        (["--num_generations", "8", "--optim.lr", "1e-3"], "--rollout.group-size"),
        (["--method.target", "6"], "--kl.target with --kl.per"),
        (["--kl_penalty_coef", "0.1"], "--kl.beta with --kl.controller fixed, --kl.placement in_advantage"),
        (["--algorithm.kl_ctrl.target_kl=0.1"], "--kl.target with --kl.per sequence_mean"),
        (["--max-completion-length", "64"], "--rollout.max-tokens"),
        (["--ppo_epochs", "4"], "--algorithm.epochs"),
        (["algorithm.kl_ctrl.kl_coef=0.1"], "--kl.beta"),
        (["+actor_rollout_ref.rollout.n=8"], "--rollout.group-size"),
    ],
)
def test_as_a_flag(flags: list[str], answer: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *flags]) == 2
    said = capsys.readouterr().err
    assert flags[0].partition("=")[0] + " is a setting of" in said
    assert answer in said
    assert said.count("\n") == 1


def test_a_flag_of_klamps_own_beside_an_unknown_one_is_not_taken_for_a_foreign_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """``lr`` and ``beta`` are others' names too; with their sections they are klamp's."""
    with pytest.raises(SystemExit):
        main(["train", "--optim.lr", "1", "--kl.beta", "1", "--nonsense", "1"])
    assert "Unrecognized options: --nonsense" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kl:\n  init_kl_coef: 0.1\n", "kl.init_kl_coef is a setting of ROLL and trlx. In klamp it is kl.beta."),
        ("num_generations: 8\n", "num_generations is a setting of TRL. In klamp it is rollout.group_size."),
        ("method:\n  target: 6\n", "method.target is a setting of trlx and OpenRLHF. In klamp it is kl.target"),
        ("actor_rollout_ref:\n  actor:\n    kl_loss_coef: 1\n", "actor_rollout_ref.actor.kl_loss_coef is a setting"),
        ("algorithm:\n  kl_ctrl:\n    type: fixed\n", "algorithm.kl_ctrl is a setting of verl"),
        ("loss_agg_mode: token-mean\n", "klamp has no such setting. klamp's losses are means over counted tokens"),
    ],
)
def test_in_yaml(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(said)):
        from_yaml(TrainConfig, tmp_path / "run.yaml")


def test_in_a_sweep_and_a_name_that_is_nobodys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "--over", "init_kl_coef=0.1,0.2"]) == 2
    assert "In klamp it is kl.beta" in capsys.readouterr().err
    assert foreign("nonsense") is None
    with pytest.raises(ConfigError, match=r"Did you mean 'kl\.target'"):
        from_dict(TrainConfig, {"kl": {"targt": 1}})
