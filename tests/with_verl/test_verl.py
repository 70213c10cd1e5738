"""klamp in the real verl on a CPU: ``make test-verl`` runs this in an environment of its own."""

from __future__ import annotations

import json
import logging
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("verl", reason="verl lives in an environment of its own: make test-verl")

from small_trainer import KLAMP, Actor, SmallTrainer, config, namespace, rollout
from verl.trainer.ppo import core_algos, ray_trainer
from verl.utils.config import omega_conf_to_dataclass, validate_config

import klamp
from klamp.integrations.verl import FILE, HoldKLController


@pytest.fixture(autouse=True)
def heard(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING, "klamp.verl")
    return caplog


def kl_per_unit(data: object, per: str) -> float:
    batch = data.batch
    kl = klamp.k3(batch["old_log_probs"], batch["ref_log_prob"], tail=5.0)
    return float(klamp.mean(kl, batch["response_mask"], per=per))


def test_verls_own_command_line_makes_hold(tmp_path: Path, heard: pytest.LogCaptureFixture) -> None:
    made = core_algos.get_kl_controller(config(tmp_path, *KLAMP).algorithm.kl_ctrl)
    assert isinstance(made, HoldKLController)
    assert (made.controller.target, made.controller.per) == (0.05, "token")
    assert "klamp is ACTIVE: Hold steers the KL penalty in the reward to 0.05 nats per token by k3" in heard.text


def test_the_plugin_is_what_does_it() -> None:
    """With verl's plugins switched off verl knows no such type, as before."""
    code = (
        "from types import SimpleNamespace as S\nfrom verl.trainer.ppo.core_algos import get_kl_controller\n"
        "try: get_kl_controller(S(type='klamp', kl_coef=0.1, target_kl=0.1, horizon=1))\n"
        "except NotImplementedError: print('not known')"
    )
    env = {**os.environ, "VERL_USE_EXTERNAL_PLUGINS": "none"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.stdout.endswith("not known\n"), done.stderr


def test_a_plugin_that_fails_says_so(monkeypatch: pytest.MonkeyPatch, heard: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("klamp.integrations.verl.install", lambda: 1 / 0)
    sys.modules.pop("klamp.integrations.verl.plugin", None)
    with pytest.raises(ZeroDivisionError):
        __import__("klamp.integrations.verl.plugin")
    assert "klamp is NOT ACTIVE in verl" in heard.text


def test_the_config_becomes_verls_dataclass_and_travels(tmp_path: Path) -> None:
    algorithm = omega_conf_to_dataclass(config(tmp_path, *KLAMP).algorithm)
    assert (algorithm.kl_ctrl.target, algorithm.kl_ctrl.per, algorithm.kl_ctrl.kl_coef) == (0.05, "token", 0.001)
    again = pickle.loads(pickle.dumps(algorithm.kl_ctrl))
    assert core_algos.get_kl_controller(again).controller == core_algos.get_kl_controller(algorithm.kl_ctrl).controller


def test_without_a_target_of_its_own_verls_stands_in_verls_unit() -> None:
    made = core_algos.get_kl_controller(namespace(target_kl=0.07))
    assert (made.controller.target, made.controller.per) == (0.07, "sequence_mean")


@pytest.mark.parametrize("kind", ["fixed", "adaptive"])
def test_verls_own_types_are_as_they_were(kind: str, heard: pytest.LogCaptureFixture) -> None:
    made = core_algos.get_kl_controller(namespace(type=kind, kl_coef=0.2))
    plain = getattr(core_algos, f"{kind.title()}KLController")
    assert type(made) is plain
    assert f"klamp is NOT ACTIVE: algorithm.kl_ctrl.type is {kind!r}" in heard.text
    with pytest.raises(NotImplementedError):
        core_algos.get_kl_controller(namespace(type="pid"))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"target": 0.05}, r"kl_ctrl\.per"),
        ({"target": -1, "per": "token"}, "target must be > 0"),
        ({"target": 0.05, "per": "word"}, "'word'"),
        ({"target": 0.05, "per": "token", "estimator": "k4"}, "'k4'"),
        ({"per": "token"}, "target is missing"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(klamp.ConfigError, match=said):
        core_algos.get_kl_controller(namespace(**settings))


def test_a_misspelt_setting_is_refused_with_the_right_one(tmp_path: Path) -> None:
    with pytest.raises(klamp.ConfigError, match="Did you mean 'target'"):
        core_algos.get_kl_controller(config(tmp_path, *KLAMP, "+algorithm.kl_ctrl.tarjet=1").algorithm.kl_ctrl)


def test_a_type_that_verl_would_never_read_is_refused(tmp_path: Path) -> None:
    idle = config(tmp_path, *KLAMP, "algorithm.use_kl_in_reward=False")
    with pytest.raises(klamp.ConfigError, match="use_kl_in_reward=True"):
        validate_config(idle, use_reference_policy=False, use_critic=False)


@pytest.mark.parametrize("per", ["token", "sequence", "sequence_mean"])
def test_it_is_fed_the_kl_in_the_unit_of_its_target(per: str, tmp_path: Path) -> None:
    trainer = SmallTrainer(config(tmp_path, *KLAMP[:2], f"+algorithm.kl_ctrl.per={per}"))
    with torch.no_grad():
        trainer.actor_rollout_wg.logits[:, :4] += 0.5
    data = rollout(trainer.actor_rollout_wg, 1)
    fed: list[float] = []
    hold = type(trainer.kl_ctrl_in_reward.controller)
    plain = hold.update
    try:
        hold.update = lambda self, state, kl, *a, **k: (fed.append(kl), plain(self, state, kl, *a, **k))[1]
        _, metrics = ray_trainer.apply_kl_penalty(data, trainer.kl_ctrl_in_reward, "kl")
    finally:
        hold.update = plain
    assert fed == [metrics["klamp/kl"]] == [pytest.approx(kl_per_unit(data, per), rel=1e-6)]
    assert metrics["klamp/target"] == 0.05


def test_the_first_price_is_that_of_the_first_batch_and_is_charged_on_it(tmp_path: Path) -> None:
    trainer = SmallTrainer(config(tmp_path, *KLAMP))
    data = rollout(trainer.actor_rollout_wg, 1)
    scores = data.batch["token_level_scores"].sum(-1).view(-1, 8).double()
    spread = float(((scores - scores.mean(1, keepdim=True)).square().sum() / (7 * len(scores))).sqrt())
    length = float(data.batch["response_mask"].sum(-1).double().mean())
    first = klamp.Hold(0.05, per="token").init(spread=spread, length=length).beta
    data, metrics = ray_trainer.apply_kl_penalty(data, trainer.kl_ctrl_in_reward, "kl")
    assert metrics["actor/reward_kl_penalty_coeff"] == pytest.approx(first, rel=1e-6)
    kl = data.batch["old_log_probs"] - data.batch["ref_log_prob"]
    want = (
        data.batch["token_level_scores"] - metrics["actor/reward_kl_penalty_coeff"] * kl * data.batch["response_mask"]
    )
    assert torch.equal(data.batch["token_level_rewards"], want)


def test_a_first_price_that_was_given_is_charged_first() -> None:
    made = core_algos.get_kl_controller(namespace(kl_coef=0.3))
    made.observe(rollout(Actor(), 1))
    assert made.value == 0.3


def test_kl_is_held_at_its_target_where_verls_constant_lets_it_run(tmp_path: Path) -> None:
    def late(*overrides: str) -> float:
        trainer = SmallTrainer(config(tmp_path / str(len(overrides)), *overrides))
        trainer.fit(120)
        return sum(kl_per_unit(rollout(trainer.actor_rollout_wg, s), "token") for s in range(500, 505)) / 5

    assert late("algorithm.kl_ctrl.type=fixed") > 0.25
    # 20 %: the band within which KL counts as held.
    assert late(*KLAMP) == pytest.approx(0.05, rel=0.2)


def test_a_resumed_run_is_the_straight_run_to_the_bit(tmp_path: Path, heard: pytest.LogCaptureFixture) -> None:
    straight = SmallTrainer(config(tmp_path / "straight", *KLAMP)).fit(12)
    first = SmallTrainer(config(tmp_path / "cut", *KLAMP)).fit(8, save_freq=4)
    assert json.loads((tmp_path / "cut" / "global_step_4" / FILE).read_text())["global_step"] == 4
    rest = SmallTrainer(config(tmp_path / "cut", *KLAMP)).fit(12)
    assert [*first, *rest] == straight
    assert "goes on from step 8" in heard.text
    path = tmp_path / "cut" / "global_step_4"
    by_path = config(tmp_path, *KLAMP, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={path}")
    assert SmallTrainer(by_path).fit(12) == straight[4:]


def test_a_checkpoint_without_its_state_or_with_a_damaged_one_is_told(
    tmp_path: Path, heard: pytest.LogCaptureFixture
) -> None:
    SmallTrainer(config(tmp_path, *KLAMP)).fit(2, save_freq=2)
    file = tmp_path / "global_step_2" / FILE
    saved = json.loads(file.read_text())
    for damaged in ("{", "{}", json.dumps(saved | {"global_step": 7})):
        file.write_text(damaged)
        with pytest.raises(klamp.ConfigError, match=r"klamp_kl_ctrl\.json' cannot be read: .* Delete it"):
            SmallTrainer(config(tmp_path, *KLAMP)).fit(3)
    file.unlink()
    SmallTrainer(config(tmp_path, *KLAMP)).fit(3)
    assert "STARTS ANEW at step 2" in heard.text


def test_verls_newer_trainer_saves_and_resumes_too(tmp_path: Path) -> None:
    """The v1 trainer's own constructor, ``_save_checkpoint`` and ``_load_checkpoint``."""
    base = pytest.importorskip("verl.trainer.ppo.v1.trainer_base")

    class Newer(base.PPOTrainer):
        on_step_end = on_sample_end = lambda self: None

        def __init__(self) -> None:
            super().__init__(config(tmp_path, *KLAMP))
            self.actor_rollout_wg = Actor()
            loader = {"state_dict": lambda _: {}, "load_state_dict": lambda *_: None}
            self.train_dataloader = type("Loader", (), loader)()

    first, second = Newer(), Newer()
    assert base.apply_kl_penalty is ray_trainer.apply_kl_penalty
    first.global_steps = 3
    base.apply_kl_penalty(rollout(first.actor_rollout_wg, 1), first.kl_ctrl_in_reward, "kl")
    first._save_checkpoint()
    assert second.kl_ctrl_in_reward.state != first.kl_ctrl_in_reward.state
    second._load_checkpoint()
    assert second.global_steps == 3
    assert second.kl_ctrl_in_reward.state == first.kl_ctrl_in_reward.state
