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
from klamp.distributed import digest
from klamp.models import training_layers
from klamp.sampling import decoding_modules
from klamp.train.config import AlgorithmConfig, KLConfig, OptimConfig, RolloutConfig, TrainConfig
from klamp.train.loop import Trainer

pytestmark = pytest.mark.gpu


def length(prompts: list[str], completions: list[str]) -> list[float]:
    """A reward without a package: longer is better."""
    return [len(c) / 100 for c in completions]


def config(run: Path, **fields: object) -> TrainConfig:
    settings: dict[str, object] = {
        "run": str(run),
        "steps": 4,
        "save_every": 2,
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
    small = RolloutConfig(prompts=2, group_size=2, max_tokens=8)
    trainer = Trainer(config(tmp_path / "run", steps=100, save_every=100, rollout=small), rewards=[length], quiet=True)

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


def in_a_process(what: str, *args: object, launcher: tuple[str, ...] = (), **env: str) -> str:
    """Call a function of this file in a fresh process: settings that only a fresh one can take."""
    script = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
    script += f"import test_trainer; test_trainer.{what}(*sys.argv[1:])\n"
    file = Path(str(args[0])).parent / f"{what}.py"
    file.write_text(script)
    command = [sys.executable, *launcher, str(file), *map(str, args)]
    out = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=240, check=False)
    assert out.returncode == 0, out.stdout[-2000:] + out.stderr[-4000:]
    return out.stdout


def straight_and_resumed(folder: str, algorithm: str) -> None:
    """Four steps at once; two steps, and two more from the checkpoint."""
    kind = AlgorithmConfig(name=algorithm)  # type: ignore[arg-type]
    for run, steps, resume in (("straight", 4, False), ("broken", 2, False), ("broken", 4, True)):
        settings = config(Path(folder) / run, steps=steps, resume=resume, deterministic=True, algorithm=kind)
        Trainer(settings, rewards=[length], quiet=True).run()


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_resumed_equals_straight_to_the_bit(tmp_path: Path, algorithm: str) -> None:
    in_a_process("straight_and_resumed", tmp_path, algorithm, CUBLAS_WORKSPACE_CONFIG=":4096:8")
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    assert rows(straight) == rows(broken)
    ours, theirs = (run / "checkpoints" / "step-000004" / "adapter_model.safetensors" for run in (straight, broken))
    assert ours.read_bytes() == theirs.read_bytes()


def test_the_clamp_holds_at_an_absurd_learning_rate(tmp_path: Path) -> None:
    settings = config(tmp_path / "run", steps=8, optim=OptimConfig(lr=0.05), kl=KLConfig(target=0.05, per="token"))
    Trainer(settings, rewards=[length], quiet=True).run()
    for row in rows(tmp_path / "run"):
        assert row["kl/clamp/after"] <= row["kl/clamp/limit"] * (1 + 1e-6)


FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}


def sharded(folder: str, full: str) -> None:
    """Two steps under FSDP2, and two more from the checkpoint; end_training ends NCCL, which the second run needs."""
    for steps, resume in ((2, False), (4, True)):
        settings = config(Path(folder) / "sharded", steps=steps, resume=resume, full=full == "full")
        trainer = Trainer(settings, rewards=[length], quiet=True)
        assert trainer.learner.sharded
        trainer.accelerator.end_training = lambda: None
        trainer.run()


@pytest.mark.parametrize("full", ["lora", "full"])
def test_fsdp2_in_one_process_is_the_same_training(tmp_path: Path, full: str) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1")
    in_a_process("sharded", tmp_path, full, launcher=launcher, **FSDP)
    Trainer(config(tmp_path / "plain", steps=1, full=full == "full"), rewards=[length], quiet=True).run()
    ours, plain = rows(tmp_path / "sharded"), rows(tmp_path / "plain")
    assert [row["step"] for row in ours] == [1, 2, 3, 4]
    # The first step draws with the same numbers; bfloat16 sums in another order, and a tie may fall the other way. One
    # of 16 completions that goes on differently is a sixteenth of the gradient, and of a mean of lengths in hundreds.
    assert ours[0]["reward/mean"] == pytest.approx(plain[0]["reward/mean"], abs=0.02)
    assert ours[0]["train/grad_norm"] == pytest.approx(plain[0]["train/grad_norm"], rel=0.1)
    assert all(row["kl/clamp/after"] <= max(row["kl/clamp/limit"], row["kl/steered"]) * (1 + 1e-6) for row in ours)
    goes_on = config(tmp_path / "sharded", steps=5, resume=True, full=full == "full")
    Trainer(goes_on, rewards=[length], quiet=True).run()
    assert len(rows(tmp_path / "sharded")) == 5, "one process without FSDP goes on from its checkpoint"


def test_the_lean_lora_is_pefts_under_autocast() -> None:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model = models.load_model("tiny", dtype=torch.bfloat16, device="cuda")
    model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.02)
    ids = torch.arange(3, 35, device="cuda").view(2, 16)

    def outcome() -> list[torch.Tensor]:
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(input_ids=ids).logits
        return [logits.detach(), *torch.autograd.grad(logits.float().square().mean(), trained)]

    trained = [p for p in model.parameters() if p.requires_grad]
    before = outcome()
    training_layers.fast_lora(model)
    for ours, theirs in zip(outcome(), before, strict=True):
        # The same products rounded at the same places; s·y + x is rounded once where peft rounds twice.
        assert float((ours - theirs).norm() / theirs.norm()) < 0.01


def test_the_lean_norm_is_within_bfloat16_of_transformers() -> None:
    model = models.load_model("tiny", dtype=torch.bfloat16, device="cuda")
    norm = next(m for m in model.modules() if type(m).__name__ in decoding_modules.NORMS)
    x = torch.randn(64, norm.weight.shape[0], device="cuda", dtype=torch.bfloat16, requires_grad=True)
    own = norm(x)
    theirs = [own.detach(), *torch.autograd.grad(own.float().square().sum(), [x, norm.weight])]
    quick = decoding_modules.NormForward(norm)(x)
    ours = [quick.detach(), *torch.autograd.grad(quick.float().square().sum(), [x, norm.weight])]
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype
        assert float((a.float() - b.float()).norm() / b.float().norm()) < 0.01  # one rounding in place of two


def test_no_step_keeps_memory(tmp_path: Path) -> None:
    trainer = Trainer(config(tmp_path / "run"), rewards=[length], quiet=True)
    held = []
    for step in range(1, 7):
        rollout = trainer.sample(step)
        trainer.learner.step(step, rollout, trainer.scorer(rollout.prompts, rollout.completions, rollout.columns))
        trainer.sampler.refresh()
        del rollout
        held.append(torch.cuda.memory_allocated())
    assert held[-1] - held[2] < 1 << 20, held
