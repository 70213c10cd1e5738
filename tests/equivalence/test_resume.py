"""Straight = resumed: a run that was interrupted anywhere and resumed is the run that was not, to the bit.

Float32 on a CPU with one thread. Compared: every line of metrics.jsonl but its times, every line of samples.jsonl, and
every byte of the last checkpoint's weights, optimiser, reference and trainer state.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import unbroken
from klamp.config_io import from_yaml, to_yaml
from klamp.train.config import RewardConfig, TrainConfig
from klamp.train.loop import Trainer
from klamp.train.run_folder import read_jsonl
from unbroken import assert_same, resumed

STEPS = 7
KINDS = [("grpo", False), ("grpo", True), ("ppo", False), ("ppo", True)]
REWARD = RewardConfig(functions=("length:3", "regex:w1"))

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def settings(config: Callable[..., TrainConfig], tmp_path: Path) -> Callable[..., TrainConfig]:
    """Two epochs of two minibatches for PPO, a schedule, and a checkpoint every other step."""

    def make(name: str, full: bool, run: str, **other: Any) -> TrainConfig:
        several = {"epochs": 2, "minibatches": 2} if name == "ppo" else {}
        return config(
            run=str(tmp_path / run),
            steps=STEPS,
            save_every=2,
            sample_every=1,
            full=full,
            reward=REWARD,
            algorithm={"name": name, **several},
            optim={"lr": 2e-2, "schedule": "cosine", "warmup": 1},
            **other,
        )

    return make


class Interrupted(Exception):
    pass


def interrupt_at(step: int) -> Callable[[int, Trainer], dict[str, float]]:
    """A watcher that breaks the run in the middle of a step: after the update, before anything of it is written."""

    def watch(now: int, _: Trainer) -> dict[str, float]:
        if now == step:
            raise Interrupted
        return {}

    return watch


def left_by(run: str) -> dict[str, Any]:
    return unbroken.left_by(run, STEPS)


def assert_one_break_is_invisible(straight: Any, broken: Any) -> None:
    Trainer(straight, quiet=True).run()
    with pytest.raises(Interrupted):
        Trainer(broken, quiet=True, watch=interrupt_at(6)).run()
    Trainer(resumed(broken), quiet=True).run()
    assert_same(left_by(straight.run), left_by(broken.run))


@pytest.mark.parametrize(("name", "full"), KINDS)
def test_an_interrupted_run_goes_on_as_if_it_had_not_been(settings: Any, name: str, full: bool) -> None:
    straight, broken = settings(name, full, "straight"), settings(name, full, "broken")
    Trainer(straight, quiet=True).run()
    with pytest.raises(Interrupted):
        Trainer(broken, quiet=True, watch=interrupt_at(4)).run()
    with pytest.raises(Interrupted):
        Trainer(resumed(broken), quiet=True, watch=interrupt_at(6)).run()
    Trainer(resumed(broken), quiet=True).run()
    assert_same(left_by(straight.run), left_by(broken.run))


def test_far_from_the_limit_too_where_a_share_is_measured(settings: Any) -> None:
    kl = {"target": 5.0, "per": "token"}
    straight, broken = settings("grpo", False, "straight", kl=kl), settings("grpo", False, "broken", kl=kl)
    assert_one_break_is_invisible(straight, broken)
    shares = [row["kl/clamp/share"] for row in read_jsonl(Path(straight.run) / "metrics.jsonl")]
    assert shares == [0.5] * STEPS, "far below the limit a share says enough, at the first step too"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reference", "full"),
    [("ema:0.7", False), ("ema:0.7", True), ("lag:2", False), ("lag:2", True), ("periodic:3", False)],
)
def test_a_moving_reference_is_where_it_was(settings: Any, reference: str, full: bool) -> None:
    kl = {"reference": reference}
    straight, broken = settings("grpo", full, "straight", kl=kl), settings("grpo", full, "broken", kl=kl)
    assert_one_break_is_invisible(straight, broken)


def draws(prompts: list[str], completions: list[str]) -> list[float]:
    """A reward that asks every generator there is."""
    return [random.random() + numpy.random.rand() + torch.rand(()).item() for _ in completions]  # noqa: NPY002


def test_a_reward_that_draws_goes_on_drawing(settings: Any) -> None:
    straight, broken = settings("grpo", False, "straight"), settings("grpo", False, "broken")
    Trainer(straight, rewards=[draws], quiet=True).run()
    random.seed(99)  # what another process would have
    numpy.random.seed(99)  # noqa: NPY002
    torch.manual_seed(99)
    with pytest.raises(Interrupted):
        Trainer(broken, rewards=[draws], quiet=True, watch=interrupt_at(4)).run()
    Trainer(resumed(broken), rewards=[draws], quiet=True).run()
    assert_same(left_by(straight.run), left_by(broken.run))


def test_interrupted_before_its_first_checkpoint_a_run_begins_again(settings: Any) -> None:
    straight, broken = settings("grpo", False, "straight"), settings("grpo", False, "broken")
    Trainer(straight, quiet=True).run()
    with pytest.raises(Interrupted):
        Trainer(broken, quiet=True, watch=interrupt_at(2)).run()
    Trainer(resumed(broken), quiet=True).run()
    assert_same(left_by(straight.run), left_by(broken.run))


def start(config: TrainConfig, file: Path) -> subprocess.Popen[bytes]:
    """The run in a process of its own."""
    file.write_text(to_yaml(config))
    beside = str(Path(unbroken.__file__).parent)
    path = os.pathsep.join([beside, *filter(None, [os.environ.get("PYTHONPATH")])])  # what this process imports
    env = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": path}
    return subprocess.Popen([sys.executable, __file__, str(file)], env=env, stderr=subprocess.PIPE)


def kill_somewhere(process: subprocess.Popen[bytes], run: str, wait: float, lines: int) -> None:
    """SIGKILL once ``lines`` steps are written and a moment has passed."""
    metrics = Path(run) / "metrics.jsonl"
    while process.poll() is None and (not metrics.is_file() or metrics.read_bytes().count(b"\n") < lines):
        time.sleep(0.001)
    time.sleep(wait)
    process.send_signal(signal.SIGKILL)
    _, said = process.communicate()
    # -9: killed; 0: it was done before the kill came, which is a moment like any other.
    assert process.returncode in (-signal.SIGKILL, 0), said.decode()[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "full"), [("grpo", False)])
def test_killed_at_a_random_moment(settings: Any, tmp_path: Path, name: str, full: bool) -> None:
    straight, killed = settings(name, full, "straight"), settings(name, full, "killed")
    Trainer(straight, quiet=True).run()
    moment = random.Random(time.time_ns())
    kill_somewhere(
        start(killed, tmp_path / "c.yaml"), killed.run, moment.uniform(0, 0.1), moment.randrange(1, STEPS - 1)
    )
    Trainer(resumed(killed), quiet=True).run()
    assert_same(left_by(straight.run), left_by(killed.run))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "full"), KINDS)
def test_killed_again_and_again(settings: Any, tmp_path: Path, name: str, full: bool) -> None:
    straight, killed = settings(name, full, "straight"), settings(name, full, "killed")
    Trainer(straight, quiet=True).run()
    moment = random.Random(time.time_ns())
    for kill in range(4):
        process = start(resumed(killed) if kill else killed, tmp_path / "c.yaml")
        kill_somewhere(process, killed.run, moment.uniform(0, 0.3), min(1 + 2 * kill, STEPS - 1))
    Trainer(resumed(killed), quiet=True).run()
    assert_same(left_by(straight.run), left_by(killed.run))


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_leaves_with_the_usual_code(settings: Any, tmp_path: Path, number: int, code: int) -> None:
    asked = settings("grpo", False, "asked")
    from dataclasses import replace

    asked = replace(asked, steps=500, save_every=400)
    process = start(asked, tmp_path / "c.yaml")
    metrics = Path(asked.run) / "metrics.jsonl"
    while process.poll() is None and not metrics.is_file():
        time.sleep(0.01)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == code, said.decode()[-2000:]
    steps = [row["step"] for row in read_jsonl(metrics)]
    saved = sorted(p.name for p in (Path(asked.run) / "checkpoints").iterdir())
    assert saved == [f"step-{steps[-1]:06d}"], "the step it was at is saved, and nothing half written is left"


if __name__ == "__main__":
    torch.set_num_threads(1)
    Trainer(from_yaml(TrainConfig, sys.argv[1]), quiet=True).run()
