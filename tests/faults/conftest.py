"""Runs that can be broken, one that was not to compare them with, and random moments that can be repeated."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # so that the tests import ``nursery`` under any import mode

from nursery import COUNTED, Nursery

from klamp.config_io import to_yaml
from klamp.train.config import RewardConfig, TrainConfig

STEPS = 10


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if COUNTED:
        kinds = ", ".join(f"{kills} {what}" for what, kills in COUNTED.items())
        terminalreporter.write_line(f"{sum(COUNTED.values())} kills, each resumed: {kinds}")


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    made = Nursery()
    yield made
    made.close()


@pytest.fixture
def moments(request: pytest.FixtureRequest) -> random.Random:
    """Random moments; the seed is among what a failing test prints."""
    asked = request.config.getoption("--fault-seed")
    seed = time.time_ns() if asked is None else asked
    print(f"moments repeated (as far as a scheduler repeats itself) by --fault-seed {seed}")
    return random.Random(seed)


@pytest.fixture
def kills(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--kills"))


def settings(**changed: Any) -> dict[str, Any]:
    """Ten steps, a checkpoint every other one, rewards that need nothing."""
    defaults: dict[str, Any] = {
        "steps": STEPS,
        "save_every": 2,
        "sample_every": 1,
        "keep": 0,
        "reward": RewardConfig(functions=("length:3", "regex:w1")),
        "optim": {"lr": 2e-2, "schedule": "cosine", "warmup": 1},
    }
    return defaults | changed


@pytest.fixture
def write(config: Callable[..., TrainConfig], tmp_path: Path) -> Callable[..., Path]:
    """``write("broken", **settings)``: the YAML file of a run of ten steps in a folder of that name."""

    def make(run: str | Path, **changed: Any) -> Path:
        file = tmp_path / f"{Path(run).name}.yaml"
        file.write_text(to_yaml(config(run=str(tmp_path / run), **settings(**changed))))
        return file

    return make


MADE: dict[str, Path] = {}
"""Unbroken runs by their settings: made once, copied by the tests that break them."""


@pytest.fixture
def straight(nursery: Nursery, write: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``straight(**settings)``: the folder of a run that nothing happened to."""

    def make(**changed: Any) -> Path:
        key = repr(sorted(changed.items()))
        if key not in MADE:
            run = tmp_path_factory.mktemp("straight") / "run"
            child = nursery.klamp("train", "--config", write(run, **changed))
            assert child.wait() == 0, child.said
            MADE[key] = run
        return MADE[key]

    return make
