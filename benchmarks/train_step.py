"""A whole GRPO step, TRL's and klamp's, on the same model, batch and lengths in one run.

    python benchmarks/train_step.py                       # tiny, 8 completions of 24 tokens: a CPU
    python benchmarks/train_step.py --model smollm2 --completions 128 --tokens 48   # a GPU
    python benchmarks/train_step.py --model smollm2 --random ...  # an architecture with random weights

Prints seconds a step (median after warm-up), the ratio, what KL costs klamp, and peak memory on a GPU; beside them the
processors' time, threads added up, which a machine with other work to do can compare by (OMP_WAIT_POLICY=passive lets
waiting threads sleep). Both train a LoRA adapter of rank 16 on all linear layers with one update a batch; neither uses
vLLM. Generation runs to the last token in both when the weights are random, so the work is the same; with trained
weights either may end early.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from klamp import models
from klamp.train.batch import part
from klamp.train.config import KLConfig, LoraConfig, OptimConfig, RolloutConfig, TrainConfig
from klamp.train.loop import Trainer

GROUP = 8


def letters(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """A reward that costs nothing: the share of letters."""
    return [sum(c.isalpha() for c in text) / max(len(text), 1) for text in completions]


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def peak() -> float:
    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else float("nan")


def forget() -> None:
    import gc

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def klamp_trainer(args: argparse.Namespace, prompts: Path, kl: KLConfig) -> Trainer:
    config = TrainConfig(
        model=args.model,
        prompts=str(prompts),
        run=tempfile.mkdtemp() + "/run",
        steps=10_000,
        save_every=10_000,
        # TRL takes a prompt that is text as it is; with the chat template klamp's would be four times as long.
        rollout=RolloutConfig(prompts=args.completions // GROUP, group_size=GROUP, max_tokens=args.tokens, chat=False),
        optim=OptimConfig(lr=args.lr),
        lora=LoraConfig(rank=16, alpha=32),
        kl=kl,
    )
    return Trainer(config, rewards=[letters], quiet=True)


def klamp_steps(args: argparse.Namespace, prompts: Path, kl: KLConfig) -> dict[str, float]:
    """Median seconds of a step and of its parts."""
    forget()
    trainer = klamp_trainer(args, prompts, kl)
    laps: dict[str, list[float]] = {"step": [], "sample": [], "update": [], "cpu": []}
    for step in range(1, args.warmup + args.steps + 1):
        a, busy = now(), time.process_time()
        rollout = trainer.sample(step)
        b = now()
        scored = trainer.scorer(rollout.prompts, rollout.completions, rollout.columns)
        trainer.learner.step(step, rollout, scored)
        trainer.sampler.refresh()
        c = now()
        busy = time.process_time() - busy
        for name, seconds in (("step", c - a), ("sample", b - a), ("update", c - b), ("cpu", busy)):
            laps[name].append(seconds)
    found = {name: statistics.median(v[args.warmup :]) for name, v in laps.items()}
    found["memory"] = peak()
    found["kl cost"] = kl_cost(trainer, rollout, args)
    return found


def kl_cost(trainer: Trainer, rollout: Any, args: argparse.Namespace) -> float:
    """Seconds that the reference's forward pass and the KL in the head take of a step.

    The head by the kernels: where the step keeps log-probs instead, it takes less.
    """
    learner = trainer.learner
    rollout = rollout.to(learner.device)
    piece = part(rollout, torch.arange(len(rollout), device=learner.device))
    with learner._autocast(), torch.no_grad():
        reference = median_of(lambda: learner.reference.states(piece), args)
        anchor = learner.reference.states(piece)
        hidden = learner.module(piece).hidden

    def head(with_reference: bool) -> Callable[[], None]:
        def run() -> None:
            leaf = hidden.detach().requires_grad_()
            with learner._autocast():
                stats = learner.policy.stats(piece, leaf, anchor if with_reference else None)
            loss = stats.logp.sum() if stats.kl is None else stats.logp.sum() + stats.kl.sum()
            loss.backward()

        return run

    return reference + median_of(head(True), args) - median_of(head(False), args)


def median_of(work: Callable[[], Any], args: argparse.Namespace) -> float:
    times = []
    for _ in range(args.warmup + args.steps):
        begun = now()
        work()
        times.append(now() - begun)
    return statistics.median(times[args.warmup :])


def trl_steps(args: argparse.Namespace, prompts: list[str]) -> dict[str, float]:
    """Median seconds between optimiser steps of TRL's GRPOTrainer."""
    from datasets import Dataset
    from peft import LoraConfig as PeftLora
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    forget()
    stamps: list[tuple[float, float]] = []

    class Stamp(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            stamps.append((now(), time.process_time()))

    cuda = torch.cuda.is_available()
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=args.completions,
        num_generations=GROUP,
        max_completion_length=args.tokens,
        beta=0.1,
        max_steps=args.warmup + args.steps + 1,
        learning_rate=args.lr,
        bf16=cuda,
        use_cpu=not cuda,
        logging_steps=10_000,
        report_to=[],
        save_strategy="no",
        gradient_checkpointing=False,
        disable_tqdm=True,
        model_init_kwargs={"dtype": "bfloat16" if cuda else "float32"},
    )
    trainer = GRPOTrainer(
        models.resolve(args.model),
        letters,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": prompts * 16}),
        peft_config=PeftLora(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
        processing_class=models.load_tokenizer(args.model),
        callbacks=[Stamp()],
    )
    trainer.train()
    gaps = [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(stamps)][args.warmup :]
    step, busy = (statistics.median(each) for each in zip(*gaps, strict=True))
    return {"step": step, "cpu": busy, "memory": peak()}


def random_weights(folder: str) -> str:
    """A copy of a model folder with random weights of its architecture."""
    import shutil

    from transformers import AutoConfig, AutoModelForCausalLM

    target = tempfile.mkdtemp() + "/" + Path(folder).name
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*.safetensors"))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).to(torch.bfloat16).save_pretrained(target)
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--random", action="store_true", help="random weights of the model's architecture")
    parser.add_argument("--completions", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--lr", type=float, default=5e-5)
    parser.add_argument("--no-trl", action="store_true")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    label = args.model
    if args.random:
        args.model = random_weights(models.resolve(args.model))
    prompts = [f"Write a one-sentence review of thing number {i}." for i in range(64)]
    if label in models.BUILTIN:
        prompts = models.prompts(label)[:64]
    file = Path(tempfile.mkdtemp()) / "prompts.txt"
    file.write_text("\n".join(prompts))
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    print(f"{label}{' (random weights)' if args.random else ''}, {args.completions} x {args.tokens} tokens, {device}")
    rows = {
        "klamp, price and clamp": klamp_steps(args, file, KLConfig()),
        "klamp, price only": klamp_steps(args, file, KLConfig(clamp=False)),
    }
    if not args.no_trl:
        rows["TRL GRPOTrainer"] = trl_steps(args, prompts)
    base = rows.get("TRL GRPOTrainer", {"step": float("nan"), "cpu": float("nan")})
    print(f"{'':<26}{'s/step':>8}{'sample':>8}{'update':>8}{'KL':>7}{'TRL/it':>8}{'cpu s':>8}{'TRL/it':>8}{'GiB':>7}")
    for name, row in rows.items():
        share = f"{row['kl cost'] / row['step']:>6.1%} " if "kl cost" in row else f"{'':>7}"
        parts = f"{row['sample']:>8.3f}{row['update']:>8.3f}" if "sample" in row else f"{'':>16}"
        ratios = f"{base['step'] / row['step']:>8.2f}{row['cpu']:>8.3f}{base['cpu'] / row['cpu']:>8.2f}"
        print(f"{name:<26}{row['step']:>8.3f}{parts}{share}{ratios}{row['memory']:>7.2f}")
    print("KL: share of the step taken by the reference's forward pass and by the exact KL in the head.")


if __name__ == "__main__":
    main()
