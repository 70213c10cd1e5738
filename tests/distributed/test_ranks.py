"""1 rank = 2 ranks, on a CPU with gloo: the same update of the same samples, one price, one scale, one stop.

The two processes are started by torchrun on this very file. Two optimiser steps on recorded rollouts must move the
weights as one process moves them, but for the order of float32 sums; through a run every rank holds the same beta and
the same weights to the bit.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from klamp.config_io import from_yaml, to_yaml
from klamp.sampling.rollout import Rollout, collate
from klamp.train.config import TrainConfig
from klamp.train.loop import Trainer
from klamp.train.run_folder import read_jsonl

CASES = {
    "grpo": {},
    "grpo-far": {"kl": {"target": 1.0, "per": "token"}},
    "grpo-full": {"full": True},
    "grpo-micro": {"optim": {"lr": 1e-2, "micro_batch": 1}},
    "grpo-in-advantage": {"kl": {"estimator": "k1", "placement": "in_advantage"}},
    "ppo": {"algorithm": {"name": "ppo"}},
}

EPS = 100.0
"""Of Adam in the cases. The gradient is clipped at a norm of 1, so that the step is linear in it to a hundredth."""
MOVE = 0.05
"""Length of a step on a gradient of norm 1: KL after the first is some 1e-3 nats a token, enough for a price."""


def recorded(rank: int, ranks: int) -> tuple[Rollout, torch.Tensor]:
    """Four groups of four sequences of different lengths with their rewards, shared out by whole groups.

    The rewards of the first group are equal, so one process sees more groups with a signal than the other.
    """
    g = torch.Generator().manual_seed(7)
    sequences, counted, rewards = [], [], []
    for n in range(16):
        prompt, length = 1 + n // 4 % 3, int(torch.randint(1, 8, (1,), generator=g))
        sequences.append(torch.randint(3, 32, (prompt + length,), generator=g).tolist())
        counted.append([t >= prompt for t in range(prompt + length)])
        rewards.append(float(torch.rand(1, generator=g)) if n >= 4 else 0.7)
    share = 16 // ranks
    mine = slice(rank * share, (rank + 1) * share)
    logps = [[float("nan")] * len(s) for s in sequences[mine]]
    return collate(sequences[mine], counted[mine], logps, pad=0, group_size=4), torch.tensor(rewards[mine])


def two_steps(made: Trainer) -> list[dict[str, float]]:
    """Metrics of two optimiser steps on the recorded samples; the second starts away from the reference.

    Adam's first step is the sign of each gradient. Where a gradient is zero but for rounding, the order of a sum
    decides that sign, and two right answers differ by a whole step. With an eps far above every gradient Adam's step is
    ``lr * momentum / eps``: it differs by no more than the gradients do, which are what processes share.
    """
    from klamp.train.rewards import Scored

    for group in made.learner.optimizer.param_groups:
        group |= {"eps": EPS, "initial_lr": MOVE * EPS}
    rollout, rewards = recorded(made.accelerator.process_index, made.accelerator.num_processes)
    scored = Scored(rewards, torch.ones(len(rewards), dtype=torch.bool), {})
    return [made.learner.step(step, rollout, scored).metrics for step in (1, 2)]


def one_step(config: TrainConfig) -> dict[str, Any]:
    made = Trainer(config, rewards=[lambda prompts, completions: [0.0] * len(completions)], quiet=True)
    before = weights(made)
    return {"metrics": two_steps(made), "beta": made.learner.control.beta, "before": before, "weights": weights(made)}


def weights(made: Trainer) -> list[float]:
    return torch.cat([p.detach().flatten() for p in made.learner.policy.trainable().values()]).tolist()


def apart(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    """``|their movement - our movement| / |our movement|`` of all trained weights; rounding alone is near 1e-6."""
    before, a, b = (torch.tensor(x, dtype=torch.float64) for x in (ours["before"], ours["weights"], theirs["weights"]))
    return float((a - b).norm() / (a - before).norm())


def work(folder: Path) -> None:
    """What one of the two processes does."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name in CASES:
        found[name] = one_step(from_yaml(TrainConfig, folder / f"{name}.yaml"))
    if (folder / "run.yaml").is_file():
        betas: list[float] = []

        def watch(step: int, made: Trainer) -> dict[str, float]:
            betas.append(made.learner.control.beta)
            return {}

        made = Trainer(from_yaml(TrainConfig, folder / "run.yaml"), quiet=True, watch=watch)
        made.run()
        found["run"] = {"betas": betas, "weights": weights(made), "state": made.learner.control.to_dict()}
    (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(found))


def launch(*args: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__, *args]
    env = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.fixture(scope="module")
def make_config(words_model: str, words_prompts: str) -> Any:
    from klamp.train.config import AlgorithmConfig, KLConfig, LoraConfig, OptimConfig, RewardConfig, RolloutConfig

    def make(**settings: Any) -> TrainConfig:
        return TrainConfig(
            model=words_model,
            prompts=words_prompts,
            device="cpu",
            kl=KLConfig(**settings.pop("kl", {})),
            algorithm=AlgorithmConfig(**settings.pop("algorithm", {})),
            optim=OptimConfig(**settings.pop("optim", {"lr": 1e-2})),
            rollout=RolloutConfig(prompts=4, group_size=4, max_tokens=6),
            reward=RewardConfig(functions=("length:3",)),
            lora=LoraConfig(rank=4, alpha=8.0),
            **settings,
        )

    return make


@pytest.fixture(scope="module")
def both(make_config: Any, tmp_path_factory: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(one process, [each of two])."""
    folder = tmp_path_factory.mktemp("ranks")
    configs = {name: make_config(run=str(folder / name), **settings) for name, settings in CASES.items()}
    for name, config in configs.items():
        (folder / f"{name}.yaml").write_text(to_yaml(config))
    # A learning rate at which the clamp has to work.
    run = make_config(run=str(folder / "run"), steps=5, save_every=2, optim={"lr": 0.2})
    (folder / "run.yaml").write_text(to_yaml(run))
    process = launch(str(folder))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    alone = {name: one_step(config) for name, config in configs.items()}
    torch.set_num_threads(before)
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 0, said[-4000:]
    alone["folder"] = folder
    return alone, [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", CASES)
def test_two_processes_make_the_update_of_one(both: Any, name: str) -> None:
    alone, ranks = both
    assert ranks[0][name]["weights"] == ranks[1][name]["weights"], "the ranks hold different weights"
    assert apart(alone[name], ranks[0][name]) < 1e-5
    for step in range(2):
        ours, theirs = alone[name]["metrics"][step], ranks[0][name]["metrics"][step]
        assert ours.keys() == theirs.keys()
        assert theirs == pytest.approx(ours, rel=1e-4, abs=1e-6)
        assert theirs == ranks[1][name]["metrics"][step], "metrics are everybody's"
    assert alone[name]["metrics"][1]["kl/ref/exact"] > 5e-4
    assert alone[name]["metrics"][0]["policy/signal"] == (1.0 if name == "ppo" else 0.75)


def test_far_from_the_limit_two_processes_measure_the_share_of_one(both: Any) -> None:
    assert [m["kl/clamp/share"] for m in both[0]["grpo-far"]["metrics"]] == [0.25, 0.25]


def test_beta_is_the_same_number_on_every_rank_through_a_run(both: Any) -> None:
    one, two = (rank["run"] for rank in both[1])
    assert len(one["betas"]) == 5
    assert len(set(one["betas"])) > 1, "beta moved"
    assert one["betas"] == two["betas"]
    assert one["state"] == two["state"]


def test_the_clamp_scales_every_rank_alike(both: Any) -> None:
    one, two = (rank["run"] for rank in both[1])
    assert one["weights"] == two["weights"]
    rows = list(read_jsonl(both[0]["folder"] / "run" / "metrics.jsonl"))
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert sum(row["kl/clamp/effort"] for row in rows) > 0.1
    assert all(row["kl/clamp/after"] <= row["kl/clamp/limit"] * (1 + 1e-6) for row in rows)


def test_a_run_of_two_is_resumed_by_two(both: Any, make_config: Any) -> None:
    folder = both[0]["folder"]
    state = json.loads((folder / "run" / "checkpoints" / "step-000005" / "trainer.json").read_text())
    assert state["processes"] == 2
    assert len(state["random"]) == 2


@pytest.mark.slow
def test_a_signal_to_one_rank_stops_both_with_a_checkpoint(make_config: Any, tmp_path: Path) -> None:
    config = replace(make_config(run=str(tmp_path / "run")), steps=3000, save_every=2900)
    (tmp_path / "run.yaml").write_text(to_yaml(config))
    process = launch("until-told", str(tmp_path))
    metrics, pid = tmp_path / "run" / "metrics.jsonl", tmp_path / "pid-1"
    while process.poll() is None and not (metrics.is_file() and pid.is_file()):
        time.sleep(0.05)
    os.kill(int(pid.read_text()), signal.SIGTERM)
    said, _ = process.communicate(timeout=120)
    assert process.returncode != 0, "torchrun says that its processes left early"
    steps = [row["step"] for row in read_jsonl(metrics)]
    assert (tmp_path / "run" / "checkpoints" / f"step-{steps[-1]:06d}" / "manifest.json").is_file(), said[-3000:]


if __name__ == "__main__":
    if sys.argv[1] == "until-told":
        torch.set_num_threads(1)
        place = Path(sys.argv[2])
        (place / f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
        Trainer(from_yaml(TrainConfig, place / "run.yaml"), quiet=True).run()
    else:
        work(Path(sys.argv[1]))
