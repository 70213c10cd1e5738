"""Resuming by the run's own configuration: what may change beside it, what may not, and what is written down."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from klamp.cli import main
from klamp.config_io import from_yaml, to_yaml
from klamp.controllers import HoldState
from klamp.errors import ConfigError
from klamp.train import loop
from klamp.train.config import KLConfig, LoraConfig, OptimConfig, RewardConfig, RolloutConfig, TrainConfig
from klamp.train.loop import train_policy
from klamp.train.run_folder import RunFolder

LENGTH = RewardConfig(functions=("length:4",))


def metrics_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def events_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def made(words_model: str, words_prompts: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two steps."""
    folder = tmp_path_factory.mktemp("made") / "run"
    rollout = RolloutConfig(prompts=2, group_size=4, max_tokens=6)
    parts = {"rollout": rollout, "optim": OptimConfig(lr=1e-2), "lora": LoraConfig(rank=4), "reward": LENGTH}
    where = {"model": words_model, "prompts": words_prompts, "run": str(folder), "device": "cpu"}
    train_policy(TrainConfig(steps=2, save_every=1, **where, **parts), quiet=True)  # type: ignore[arg-type]
    return folder


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    """The same, in a folder of the test's own: a run may be moved."""
    return Path(shutil.copytree(made, tmp_path / "run"))


def test_a_run_is_resumed_by_its_own_configuration_with_the_changes_that_it_may_take(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--steps", "4", "--kl.target", "0.2", "--kl.per", "token", "--optim.lr", "2e-3", "--save-every", "3"]
    assert main(["train", "--resume", str(run), *given]) == 0
    assert "resuming after step 2" in (said := capsys.readouterr().err)
    assert "kl.target 0.2 (was 0.05)" in said
    rows = metrics_of(run)
    assert [r["step"] for r in rows] == [1, 2, 3, 4]
    assert [r["kl/target"] for r in rows] == [0.05, 0.05, 0.2, 0.2]
    assert [r["train/lr"] for r in rows] == [1e-2, 1e-2, 2e-3, 2e-3]
    changes = {"steps": [2, 4], "kl.target": [0.05, 0.2], "optim.lr": [0.01, 0.002], "save_every": [1, 3]}
    assert events_of(run) == [{"step": 2, "event": "resumed", "changes": changes}]
    saved = from_yaml(TrainConfig, run / "config.yaml")
    assert (saved.steps, saved.kl.target, saved.optim.lr, saved.rollout.max_tokens) == (4, 0.2, 2e-3, 6)


@pytest.mark.parametrize(("law", "said"), [(HoldState.law, False), (HoldState.law + 1, True)])
def test_a_run_says_when_hold_follows_another_law_than_the_one_it_was_saved_under(
    run: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, law: int, said: bool
) -> None:
    monkeypatch.setattr(HoldState, "law", law)
    assert main(["train", "--resume", str(run), "--steps", "3"]) == 0
    assert ("continues from the saved price" in caplog.text) == said


def of_an_earlier_law(run: Path, fields: dict[str, float]) -> None:
    """Give the newest checkpoint a state of Hold as an earlier version wrote it, with a manifest that fits."""
    folder = run / "checkpoints" / "step-000002"
    file, manifest = folder / "trainer.json", folder / "manifest.json"
    state = json.loads(file.read_text())
    state["steering"]["controller"] = {"kind": "HoldState", "beta": 0.31, "updates": 2, "skipped": 0, **fields}
    file.write_text(json.dumps(state))
    sums = json.loads(manifest.read_text())
    sums["sha256"]["trainer.json"] = hashlib.sha256(file.read_bytes()).hexdigest()
    manifest.write_text(json.dumps(sums))


EARLIER = {
    "first": ("centre", "felt", "level", "surprise"),
    "no told": ("climbed", "direct", "felt", "free", "inert", "lean", "moved", "noise", "odds", "paid", "touched"),
    "told": ("climbed", "direct", "felt", "free", "inert", "lean", "moved", "noise", "odds", "paid", "told"),
}


@pytest.mark.parametrize("version", EARLIER)
def test_a_hold_of_an_earlier_law_is_refused_and_the_way_that_is_named_goes_on(
    run: Path, version: str, capsys: pytest.CaptureFixture[str]
) -> None:
    of_an_earlier_law(run, dict.fromkeys(EARLIER[version], 0.0))
    assert main(["train", "--resume", str(run), "--steps", "4"]) == 2
    said = capsys.readouterr().err
    assert "of an earlier law of Hold" in said
    assert "Resume with --kl.beta 0.31 to go on from that price" in said
    assert said.count("\n") == 1
    assert main(["train", "--resume", str(run), "--steps", "4", "--kl.beta", "0.31"]) == 0
    assert "kl.beta 0.31 (was None)" in capsys.readouterr().err
    assert metrics_of(run)[2]["kl/beta"] == 0.31
    after = json.loads((run / "checkpoints/step-000004/trainer.json").read_text())["steering"]
    assert (after["controller"]["updates"], after["monitor"]["steps"]) == (2, 4), (
        "the price began anew, the rest went on"
    )


def test_a_change_is_not_lost_when_the_run_is_killed_before_it_saves_again(run: Path) -> None:
    before = json.loads((run / "checkpoints/step-000002/trainer.json").read_text())["steering"]["controller"]["beta"]
    kept = Path(shutil.copytree(run, run.parent / "kept"))
    more = ["--steps", "4", "--kl.target", "0.2", "--kl.per", "token", "--save-every", "4"]
    assert main(["train", "--resume", str(run), *more]) == 0
    for saved in ("step-000004", "step-000002"):  # as it is after a kill in step 3
        shutil.rmtree(run / "checkpoints" / saved, ignore_errors=True)
    shutil.copytree(kept / "checkpoints" / "step-000002", run / "checkpoints" / "step-000002")
    first = metrics_of(run)[2]["kl/beta"]
    assert first == pytest.approx(before * math.sqrt(0.05 / 0.2), rel=1e-6)
    assert main(["train", "--resume", str(run)]) == 0
    assert metrics_of(run)[2]["kl/beta"] == first


def test_a_constant_price_without_a_target_is_not_resumed_as_hold_and_the_reason_is_the_controller(run: Path) -> None:
    folder = RunFolder(run)
    own = folder.own_config()
    constant = KLConfig(target=None, controller="fixed", beta=0.1)
    folder.write_config(replace(own, kl=constant).resolved())
    asked = TrainConfig(**{**vars(own), "resume": True, "kl": KLConfig()})
    with pytest.raises(
        ConfigError, match=r"kl\.controller is 'fixed' in run .* cannot become 'hold'.* Keep it at 'fixed'"
    ):
        folder.claim(asked)
    settled, changes = folder.claim(replace(asked, kl=replace(constant, target="auto")))
    assert (settled.kl.target, changes) == (None, {})
    folder.write_config(replace(own, kl=KLConfig(beta=0.1)).resolved())
    with pytest.raises(ConfigError, match=r"kl\.beta is 0\.1 in run .* cannot become None"):
        folder.claim(asked)


def test_a_new_target_keeps_the_price_near_what_holds_it(trainer: Any) -> None:
    first = trainer(steps=1, kl={"beta": 0.5})
    first.run()
    before = first.learner.control
    after = before.retarget(0.05, 0.2)
    assert after.beta == pytest.approx(before.beta * math.sqrt(0.05 / 0.2))
    assert not after.seen.window
    assert before.seen.window


def test_the_switch_beside_run_is_the_same(run: Path) -> None:
    assert main(["train", "--run", str(run), "--resume", "--steps", "3"]) == 0
    assert [r["step"] for r in metrics_of(run)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["--lora.rank", "2"], "--lora.rank is 4 in run"),
        (["--model", "tiny"], "--model is "),
        (["--kl.per", "sequence"], "--kl.per is 'token' in run"),
        (["--rollout.max-tokens", "5"], "--rollout.max-tokens is 6 in run"),
        (["--seed", "3"], "--seed is 0 in run"),
    ],
)
def test_what_may_not_change_is_refused_by_name(
    run: Path, given: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (run / "config.yaml").read_text()
    capsys.readouterr()
    assert main(["train", "--resume", str(run), *given]) == 2
    said = capsys.readouterr().err
    assert named in said
    assert "cannot become" in said
    assert said.count("\n") == 1
    assert (run / "config.yaml").read_text() == before
    assert not (run / "events.jsonl").exists()


def test_a_folder_without_a_finished_step_is_free(config: Any, trainer: Any) -> None:
    made = trainer(steps=1)
    folder = RunFolder(made.config.run)
    folder.path.mkdir()
    folder.write_config(made.config)  # as a run leaves it that fails in its first step
    for resume in (False, True):
        settled, changes = folder.claim(config(rollout={"max_tokens": 5}, resume=resume))
        assert (settled.rollout.max_tokens, changes) == (5, {})


def test_what_python_left_out_is_the_runs_own(run: Path) -> None:
    folder = RunFolder(run)
    own = folder.own_config()
    kept = TrainConfig(
        **{**vars(own), "resume": True, "steps": TrainConfig().steps, "optim": OptimConfig()}  # both left out
    )
    settled, changes = folder.claim(kept)
    assert (settled.steps, settled.optim.lr, changes) == (2, 1e-2, {})
    with pytest.raises(ConfigError, match="exists and has 2 steps"):
        folder.claim(own)


def test_resume_names_a_run(tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--resume", str(tmp_path / "nothing")]) == 2
    assert "there is no such folder" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main(["train", "--resume", str(tmp_path / "empty")]) == 2
    assert "no step is finished there" in capsys.readouterr().err
    assert main(["train", "--resume", str(run), "--run", str(tmp_path / "other")]) == 2
    assert "name two runs" in capsys.readouterr().err


@pytest.mark.slow
def test_ctrl_c_says_what_was_saved_and_how_to_go_on_and_an_alarm_is_printed_once(config: Any, tmp_path: Path) -> None:
    file = tmp_path / "made.yaml"
    file.write_text(to_yaml(config(steps=2000, reward=RewardConfig(functions=("regex:never",)), save_every=500)))
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "klamp", "train", "--config", str(file)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
    metrics = tmp_path / "run" / "metrics.jsonl"
    until = time.monotonic() + 120
    while not (metrics.is_file() and metrics.read_text().count("\n") >= 7) and time.monotonic() < until:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "stopping after this step" in said
    assert said.count("every completion has the same reward") == 1  # by the display, and not by logging once more
    last = len(metrics.read_text().splitlines())
    saved = tmp_path / "run" / "checkpoints" / f"step-{last:06d}"
    assert saved.is_dir()
    told = said.splitlines()[-1]
    assert (
        told
        == f"stopped after step {last}; step {last} is saved in {saved}. Go on: klamp train --resume {tmp_path}/run"
    )


@pytest.mark.parametrize(
    ("finished", "says"), [(False, "before its first step was finished"), (True, "after step 2; step 2")]
)
def test_ctrl_c_while_it_starts_is_one_line(
    run: Path, finished: bool, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(config: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "train_policy", interrupted)
    where = ["--resume", str(run)] if finished else ["--run", str(run.parent / "new")]
    with pytest.raises(SystemExit) as end:
        main(["train", *where])
    said = capsys.readouterr().err
    assert end.value.code == 130
    assert said.startswith(f"stopped {says}")
    assert said.count("\n") == 1
