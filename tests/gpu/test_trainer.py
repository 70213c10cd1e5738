"""The trainer on a GPU: captured sampling, an untouched base, resume to the bit, FSDP2 once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from klamp import models
from klamp.train.anchors import digest
from klamp.train.config import KLConfig, OptimConfig, RolloutConfig, TrainConfig
from klamp.train.loop import Trainer

pytestmark = pytest.mark.gpu


def length(prompts: list[str], completions: list[str]) -> list[float]:
    """A reward without a package: longer is better."""
    return [len(c) / 100 for c in completions]


def config(run: Path, **fields: object) -> TrainConfig:
    settings: dict[str, object] = {
        "run": str(run),
        "steps": 6,
        "save_every": 3,
        "rollout": RolloutConfig(prompts=4, group_size=4, max_tokens=16),
        "optim": OptimConfig(lr=1e-3),
    }
    return TrainConfig(**{**settings, **fields})  # type: ignore[arg-type]


def rows(run: Path) -> list[dict[str, float]]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.startswith("time/")} for line in lines]


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-4), ("bfloat16", 0.02)])
def test_captured_sampling_agrees_with_teacher_forcing(tmp_path: Path, dtype: str, bound: float) -> None:
    # float32 differs by the order of sums; bfloat16 merges the adapter, which rounds each weight to 8 bits.
    trainer = Trainer(config(tmp_path / "run", dtype=dtype), rewards=[length], quiet=True)
    gaps = []
    for step in range(1, 4):
        rollout = trainer.sample(step)
        scored = trainer.scorer(rollout.prompts, rollout.completions, rollout.columns)
        outcome = trainer.learner.step(step, rollout, scored)
        trainer.sampler.refresh()
        gaps.append(abs(outcome.metrics["kl/sampler/k1"]))
    assert max(gaps) < bound
    assert any(slot.graph is not None for slot in trainer.sampler.decoder.slots.values())


def test_the_base_is_untouched_after_100_steps(tmp_path: Path) -> None:
    trainer = Trainer(config(tmp_path / "run", steps=100, save_every=100), rewards=[length], quiet=True)

    def base() -> str:
        named = trainer.learner.policy.model.named_parameters()
        return digest({n: p for n, p in named if "lora_" not in n})

    before = base()
    trainer.run()
    assert base() == before
    assert before == digest_of_start(trainer)


def digest_of_start(trainer: Trainer) -> str:
    named = dict(trainer.learner.policy.model.named_parameters())
    fresh = dict(models.load_model("tiny", dtype=torch.bfloat16, device="cuda").named_parameters())
    return digest({n: fresh[plain(n)] for n in named if "lora_" not in n})


def plain(name: str) -> str:
    return name.removeprefix("base_model.model.").replace(".base_layer", "")


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_resumed_equals_straight_to_the_bit(tmp_path: Path, algorithm: str) -> None:
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from test_trainer import *\n"
        "from klamp.train.config import AlgorithmConfig\n"
        "steps, run, resume = int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4] == 'resume'\n"
        f"kind = AlgorithmConfig(name={algorithm!r})\n"
        "c = config(run, steps=steps, resume=resume, deterministic=True, algorithm=kind)\n"
        "Trainer(c, rewards=[length], quiet=True).run()\n"
    )
    env = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}

    def go(steps: int, run: Path, how: str) -> None:
        here = str(Path(__file__).parent)
        subprocess.run([sys.executable, "-c", script, here, str(steps), str(run), how], check=True, env=env)

    straight, broken = tmp_path / "straight", tmp_path / "broken"
    go(6, straight, "start")
    go(3, broken, "start")
    go(6, broken, "resume")
    assert rows(straight) == rows(broken)
    ours, theirs = (run / "checkpoints" / "step-000006" / "adapter_model.safetensors" for run in (straight, broken))
    assert ours.read_bytes() == theirs.read_bytes()


def test_the_clamp_holds_at_an_absurd_learning_rate(tmp_path: Path) -> None:
    settings = config(tmp_path / "run", steps=12, optim=OptimConfig(lr=0.05), kl=KLConfig(target=0.05))
    trainer = Trainer(settings, rewards=[length], quiet=True)
    trainer.run()
    for row in rows(tmp_path / "run"):
        assert row["kl/clamp/after"] <= row["kl/clamp/limit"] * (1 + 1e-6)
