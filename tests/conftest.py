"""A random model small enough that a training step takes milliseconds, and runs made of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
collect_ignore = [] if find_spec("openai") and find_spec("fastapi") else ["serve"]
"""The endpoint's tests need klamp[serve] and the client."""
sys.path.insert(0, str(Path(__file__).parent))  # so that tests import ``unbroken`` and others under any import mode


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kills", type=int, default=10, help="how often tests/faults kills a run; `make faults`: 50")
    parser.addoption("--fault-seed", type=int, default=None, help="seed of the random moments in tests/faults")


def words_reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """The share of a completion's words in the first half of the vocabulary: easy to raise."""
    words = [c.split() for c in completions]
    return [sum(int(w[1:]) < 14 for w in ws if w[1:].isdigit()) / max(1, len(ws)) for ws in words]


@pytest.fixture(scope="session")
def words_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The small model's folder."""
    from small_model import write_model

    return write_model(tmp_path_factory.mktemp("words"))


@pytest.fixture(scope="session")
def words_prompts(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Prompts of one to three words, so that padding is always at work."""
    from small_model import WORDS

    file = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    lines = [" ".join(f"w{(7 * i + j) % WORDS}" for j in range(1 + i % 3)) for i in range(12)]
    file.write_text("\n".join(lines) + "\n")
    return str(file)


@pytest.fixture
def config(words_model: str, words_prompts: str, tmp_path: Path) -> Callable[..., Any]:
    """``config(steps=3, kl={...}, algorithm={...})``: a TrainConfig on the small model, 8 completions of 6 tokens."""
    from klamp.train.config import AlgorithmConfig, KLConfig, LoraConfig, OptimConfig, RolloutConfig, TrainConfig

    def make(**settings: Any) -> TrainConfig:
        parts = {
            "kl": KLConfig(**settings.pop("kl", {})),
            "rollout": RolloutConfig(
                **({"prompts": 2, "group_size": 4, "max_tokens": 6} | settings.pop("rollout", {}))
            ),
            "algorithm": AlgorithmConfig(**settings.pop("algorithm", {})),
            "optim": OptimConfig(**({"lr": 1e-2} | settings.pop("optim", {}))),
            "lora": LoraConfig(rank=4, alpha=8.0),
        }
        defaults = {"model": words_model, "prompts": words_prompts, "run": str(tmp_path / "run"), "steps": 3}
        return TrainConfig(**(defaults | parts | {"device": "cpu"} | settings))

    return make


@pytest.fixture
def trainer(config: Callable[..., Any]) -> Callable[..., Any]:
    """``trainer(**config's)``: a Trainer with the words reward; the run folder is per test."""
    from klamp.train.loop import Trainer

    def make(rewards: Any = words_reward, **settings: Any) -> Any:
        functions = rewards if isinstance(rewards, list) or rewards is None else [rewards]
        return Trainer(config(**settings), rewards=functions, quiet=True)

    return make


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Sums of floats in one order: results to the bit."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def moved(learner: Any, size: float = 0.3, seed: int = 5) -> None:
    """Displace every trained weight, so that the policy is away from its reference."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in learner.policy.model.parameters():
            if p.requires_grad:
                p.add_(torch.randn(p.shape, generator=generator), alpha=size)


@pytest.fixture
def displace() -> Callable[..., None]:
    return moved


@pytest.fixture
def with_run() -> Callable[..., Any]:
    """The same configuration in another folder."""
    return lambda config, run, **other: replace(config, run=str(run), **other)
