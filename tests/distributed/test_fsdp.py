"""FSDP2 = one process, on a CPU with gloo: the same update, one price, one scale, one checkpoint that anybody reads.

The processes are started by torchrun on this very file with the environment that ``accelerate launch`` sets for
``fsdp_version: 2``. Weights lie in shards; sampler, clamp, references and checkpoints see them whole.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parent))  # torchrun starts this file by its path

from test_ranks import apart, make_config, two_steps  # noqa: F401 (a fixture)

from klamp.config_io import from_yaml, to_yaml
from klamp.distributed import whole
from klamp.train.config import TrainConfig
from klamp.train.loop import Trainer
from klamp.train.run_folder import read_jsonl

FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "CUDA_VISIBLE_DEVICES": "",
}
CASES: dict[str, dict[str, Any]] = {
    "lora": {},
    "full": {"full": True},
    "micro": {"optim": {"lr": 1e-2, "micro_batch": 1}},
    "ppo": {"algorithm": {"name": "ppo"}},
    "lora-ema": {"kl": {"reference": "ema:0.9"}},
    "full-periodic": {"full": True, "kl": {"reference": "periodic:1"}},
    "full-lag": {"full": True, "kl": {"reference": "lag:1"}},
    "lora-model": {"kl": {"reference": "model:its-own"}},
}
RUNS: dict[str, dict[str, Any]] = {
    # Learning rates at which the clamp has to work.
    "run-lora": {"optim": {"lr": 0.2}},
    "run-full": {"full": True, "optim": {"lr": 0.02}},
    "run-ppo-ema": {"algorithm": {"name": "ppo"}, "kl": {"reference": "ema:0.9"}, "optim": {"lr": 0.1}},
}


def one_step(config: TrainConfig) -> dict[str, Any]:
    made = Trainer(config, rewards=[lambda prompts, completions: [0.0] * len(completions)], quiet=True)
    found: dict[str, Any] = {"before": weights(made), "metrics": two_steps(made), "weights": weights(made)}
    made.sampler.refresh()
    return found | {"sampler": sampled(made), "sharded": made.learner.sharded}


def weights(made: Trainer) -> list[float]:
    made.learner.settle()
    found = [whole(p.detach()).flatten() for p in made.learner.policy.trainable().values()]
    return torch.cat(found).tolist()  # type: ignore[no-any-return]


def sampled(made: Trainer) -> list[float]:
    """What the sampler's weights say of a sequence."""
    with torch.no_grad():
        return made.sampler.model(input_ids=torch.arange(3, 9)[None]).logits.flatten().tolist()  # type: ignore[no-any-return]


def work(folder: Path, names: list[str]) -> None:
    """What one process does: every case or run it is told to."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name in names:
        config = from_yaml(TrainConfig, folder / f"{name}.yaml")
        if name in CASES:
            found[name] = one_step(config)
        else:
            made = Trainer(config, quiet=True)
            made.accelerator.end_training = lambda: None  # it ends the process group, which the next run needs
            made.run()
            found[name] = {"weights": weights(made), "state": made.learner.control.to_dict()}
    (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(found))


def launch(folder: Path, names: list[str], *, processes: int, **env: str) -> list[dict[str, Any]]:
    """Run ``names`` under torchrun; what each process found."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    settings = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"} | FSDP | env
    out = subprocess.run(
        [*command, __file__, str(folder), *names],
        env=settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
    )
    assert out.returncode == 0, out.stdout[-4000:]
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(processes)]


def alone(config: TrainConfig) -> dict[str, Any]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return one_step(config)
    finally:
        torch.set_num_threads(before)


def agree(ours: dict[str, Any], theirs: dict[str, Any], bound: float) -> None:
    assert apart(ours, theirs) <= bound
    a, b = torch.tensor(ours["sampler"]), torch.tensor(theirs["sampler"])
    assert float((a - b).norm() / a.norm()) <= bound
    for step in range(2):
        assert theirs["metrics"][step] == pytest.approx(ours["metrics"][step], rel=1e-4, abs=1e-6)


def compared(make_config: Any, folder: Path, names: list[str], processes: int, **env: str) -> None:  # noqa: F811
    def made(name: str, run: str) -> TrainConfig:
        config: TrainConfig = make_config(run=str(folder / run), **CASES[name])
        if config.kl.reference == "model:its-own":  # another model beside the policy: here the one it started as
            return replace(config, kl=replace(config.kl, reference=f"model:{config.model}"))
        return config

    for name in names:
        (folder / f"{name}.yaml").write_text(to_yaml(made(name, name)))
    ranks = launch(folder, names, processes=processes, **env)
    for name in names:
        assert ranks[0][name]["sharded"], "FSDP2 was on"
        for rank in ranks[1:]:
            assert rank[name] == ranks[0][name], "every rank sees the same weights and metrics"
        agree(alone(made(name, f"{name}-alone")), ranks[0][name], 1e-5)


@pytest.mark.slow
def test_two_shards_make_the_update_of_one_process(make_config: Any, tmp_path: Path) -> None:  # noqa: F811
    compared(make_config, tmp_path, ["lora", "full"], processes=2)


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "wrap"), [(1, "NO_WRAP"), (2, "TRANSFORMER_BASED_WRAP")])
def test_every_kind_of_update(make_config: Any, tmp_path: Path, processes: int, wrap: str) -> None:  # noqa: F811
    compared(make_config, tmp_path, list(CASES), processes, FSDP_AUTO_WRAP_POLICY=wrap)


@pytest.mark.slow
def test_a_run_under_the_clamp_is_resumed_to_the_bit(make_config: Any, tmp_path: Path) -> None:  # noqa: F811
    def write(kind: str, name: str, steps: int, *, resume: bool = False) -> str:
        fields = {"run": str(tmp_path / f"{kind}-{name}"), "steps": steps, "save_every": 2, "resume": resume}
        (tmp_path / f"{kind}-{name}.yaml").write_text(to_yaml(make_config(**fields, **RUNS[name])))
        return f"{kind}-{name}"

    begun = [write("straight", name, 4) for name in RUNS] + [write("broken", name, 2) for name in RUNS]
    one, two = launch(tmp_path, begun, processes=2)
    resumed = launch(tmp_path, [write("broken", name, 4, resume=True) for name in RUNS], processes=2)[0]
    for name in RUNS:
        straight, broken = f"straight-{name}", f"broken-{name}"
        assert one[straight] == two[straight], "price and weights are the same on both ranks"
        assert resumed[broken] == one[straight]
        ours, theirs = (timeless(tmp_path / run) for run in (straight, broken))
        assert ours == theirs
        assert sum(row["kl/clamp/effort"] for row in ours) > 0.1, "the clamp worked"
        # A step that starts above its limit (the average it is held to moves) ends no higher than it began.
        assert all(row["kl/clamp/after"] <= max(row["kl/clamp/limit"], row["kl/steered"]) * (1 + 1e-6) for row in ours)


@pytest.mark.slow
def test_a_checkpoint_of_shards_is_anybodys(make_config: Any, tmp_path: Path) -> None:  # noqa: F811
    """Plain peft and transformers load it, and one process without FSDP goes on from it."""
    from transformers import AutoModelForCausalLM

    for name in ("run-lora", "run-full"):
        config = make_config(run=str(tmp_path / name), steps=2, save_every=2, **RUNS[name])
        (tmp_path / f"{name}.yaml").write_text(to_yaml(config))
    ranks = launch(tmp_path, ["run-lora", "run-full"], processes=2)
    for name in ("run-lora", "run-full"):
        saved = tmp_path / name / "checkpoints" / "step-000002"
        assert not [f for f in saved.iterdir() if f.suffix not in (".json", ".safetensors", ".jinja", ".md")]
        made = Trainer(make_config(run=str(tmp_path / name), steps=3, resume=True, **RUNS[name]), quiet=True)
        made.run()
        assert [row["step"] for row in timeless(tmp_path / name)] == [1, 2, 3]
        file = "adapter_model.safetensors" if name == "run-lora" else "model.safetensors"
        count = sum(t.numel() for t in load_file(saved / file).values())
        assert count == len(ranks[0][name]["weights"])
    AutoModelForCausalLM.from_pretrained(tmp_path / "run-full" / "checkpoints" / "step-000002")


def test_a_reference_that_loads_adapters_is_refused_with_lora(trainer: Any) -> None:
    from klamp.errors import ConfigError

    with pytest.raises(ConfigError, match=r"lag:2 .* FSDP2"):
        trainer(kl={"reference": "lag:2"}).learner.reference.shard(None)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"FSDP_VERSION": "1"}, "fsdp_version: 2"),
        ({"LOCAL_RANK": ""}, "torchrun"),
        ({"FSDP_OFFLOAD_PARAMS": "true"}, "fsdp_offload_params"),
        ({"FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}, "fsdp_cpu_ram_efficient_loading"),
        ({"FSDP_ACTIVATION_CHECKPOINTING": "true"}, "fsdp_activation_checkpointing"),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, "Megatron"),
    ],
    ids=str,
)
def test_what_cannot_be_sharded_is_refused(make_config: Any, asked: dict[str, str], says: str) -> None:  # noqa: F811
    from klamp.errors import ConfigError
    from klamp.train.launch import check_launch

    environment = {k: v for k, v in (FSDP | {"LOCAL_RANK": "0"} | asked).items() if v}
    with pytest.raises(ConfigError, match=says):
        check_launch(environment, make_config(run="nowhere"), cpu=True)


def timeless(run: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in read_jsonl(run / "metrics.jsonl")]


if __name__ == "__main__":
    work(Path(sys.argv[1]), sys.argv[2:])
