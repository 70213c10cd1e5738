"""A whole GRPO step, TRL's and klamp's, on the same model, batch and lengths in one run.

    python benchmarks/train_step.py                       # tiny, 8 completions of 24 tokens: a CPU
    python benchmarks/train_step.py --model smollm2 --completions 128 --tokens 48   # a GPU
    python benchmarks/train_step.py --model smollm2 --random ...  # an architecture with random weights
    python benchmarks/train_step.py --shape 8b --completions 32 --tokens 256       # Llama-3.1-8B's sizes, on a GPU

With ``--shape`` (135m, 1b, 8b; random weights made on the device) it also prints the parts of a step, each beside the
least that it can take on an H200 (``benchmarks/shapes.py``). ``--profile`` adds the kernels of one step.

Prints seconds a step (median after warm-up), the ratio, what KL costs klamp, and peak memory on a GPU; beside them the
processors' time, threads added up, which a machine with other work to do can compare by (OMP_WAIT_POLICY=passive lets
waiting threads sleep). Both train a LoRA adapter of rank 16 on all linear layers with one update a batch; neither uses
vLLM. Generation runs to the last token in both when the weights are random, so the work is the same; with trained
weights either may end early.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import re
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import shapes
from klamp import models
from klamp.models import shared_prompts
from klamp.sampling.rollout import part
from klamp.train import update as update_module
from klamp.train.config import KLConfig, LoraConfig, OptimConfig, RolloutConfig, TrainConfig
from klamp.train.loop import Trainer

GROUP = 8
NEAR_RATE, NEAR_STEPS = 1e-3, 6
"""A learning rate, and steps before the clock starts, with which KL reaches its limit of 0.055."""


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
    full = getattr(args, "full", False)
    config = TrainConfig(
        model=args.model,
        prompts=str(prompts),
        run=tempfile.mkdtemp() + "/run",
        steps=10_000,
        save_every=10_000,
        # TRL takes a prompt that is text as it is; with the chat template klamp's would be four times as long.
        rollout=RolloutConfig(prompts=args.completions // GROUP, group_size=GROUP, max_tokens=args.tokens, chat=False),
        optim=OptimConfig(
            name="adamw8bit" if full else "adamw",
            lr=args.lr,
            micro_batch=getattr(args, "micro_batch", 0),
            checkpointing=getattr(args, "checkpointing", False),
        ),
        lora=LoraConfig(rank=16, alpha=32),
        full=full,
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
        metrics = update(trainer, step, rollout)
        c = now()
        busy = time.process_time() - busy
        for name, seconds in (("step", c - a), ("sample", b - a), ("update", c - b), ("cpu", busy)):
            laps[name].append(seconds)
        if args.verbose:
            clamp = {k.rpartition("/")[2]: f"{v:.3g}" for k, v in metrics.items() if "clamp" in k or k == "kl/steered"}
            print(f"  step {step}: sample {b - a:.3f} update {c - b:.3f} {clamp}", flush=True)
    found = {name: statistics.median(v[args.warmup :]) for name, v in laps.items()}
    found["memory"] = peak()
    found |= parts_of(trainer, step + 1, args)
    if args.profile:
        profile(trainer, step + 10)
    found["kl cost"] = kl_cost(trainer, rollout, args)
    return found


def update(trainer: Trainer, step: int, rollout: Any) -> dict[str, float]:
    """What follows sampling in a step."""
    scored = trainer.scorer(rollout.prompts, rollout.completions, rollout.columns)
    metrics = trainer.learner.step(step, rollout, scored).metrics
    trainer.sampler.refresh()
    return metrics


PARTS = ("reference", "forward", "backward", "optimiser", "clamp", "merge")
"""Of an update: the reference's states, the policy's loss, its gradient, AdamW, the clamp with what it measures, and
the sampler's new weights. The rest is metrics and what lies between."""


def parts_of(trainer: Trainer, step: int, args: argparse.Namespace) -> dict[str, float]:
    """Median seconds of the parts of an update, in steps of their own: waiting for the device between them costs."""
    learner, sampler = trainer.learner, trainer.sampler
    places: dict[str, tuple[Any, str]] = {
        "reference": (learner.reference, "states"),
        "forward": (update_module, "_loss"),
        "backward": (trainer.accelerator, "backward"),
        "optimiser": (update_module, "_apply"),
        "clamp": (learner, "_after_update"),
        "merge": (sampler, "refresh"),
    }
    took: dict[str, list[float]] = {name: [] for name in places}

    def timed(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any, **named: Any) -> Any:
            begun = now()
            found = work(*given, **named)
            took[name].append(now() - begun)
            return found

        return run

    with contextlib.ExitStack() as stack:
        for name, (owner, attribute) in places.items():
            patched = timed(name, getattr(owner, attribute))
            stack.enter_context(mock.patch.object(owner, attribute, patched))
        for s in range(step, step + max(2, args.steps // 2)):
            update(trainer, s, trainer.sample(s))
    return {name: statistics.median(v) if v else 0.0 for name, v in took.items()}


def profile(trainer: Trainer, step: int) -> None:
    """The kernels that take most of one sampling and of one update."""
    print(" sampling")
    rollout = kernels(lambda: trainer.sample(step))
    print(" update")
    kernels(lambda: update(trainer, step, rollout))


KERNELS = {
    "products with 16 or 32 rows or columns: LoRA's first, and its gradients": r"(nvjet|gemm).*_(8|16|32)x|_\d+x32_",
    "attention": "sdpa|flash|fmha|_attend",
    "products": "nvjet|gemm|cutlass|cublas",
    "norms": "norm",
    "kernels over the logits": "_row_stats|_jacobians|_combine|_policy|_race|_finish",
    "silu, rotation, and their gradients": "_gated|_rotate",
    "copies": "(?i)memcpy|memset|copy",
    "everything else": "",
}
"""Kinds of kernels by what their names hold; the first that fits."""


def kernels(work: Callable[[], Any], most: int = 22) -> Any:
    """What ``work`` returns; the kernels that took most of it are printed."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    with profiler(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        begun = now()
        found = work()
        print(f"  under the profiler: {now() - begun:.3f} s")
    rows: dict[str, list[float]] = {}
    for event in seen.events() or ():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            row = rows.setdefault(event.name[:110], [0.0, 0])
            row[0] += event.self_device_time_total / 1e3
            row[1] += 1
    total = sum(v[0] for v in rows.values())
    print(f"  kernels: {total:.1f} ms, {sum(v[1] for v in rows.values()):.0f} of them")
    groups: dict[str, list[float]] = {}
    for name, (ms, count) in rows.items():
        group = groups.setdefault(next(g for g, known in KERNELS.items() if re.search(known, name)), [0.0, 0])
        group[0], group[1] = group[0] + ms, group[1] + count
    for name, (ms, count) in sorted(groups.items(), key=lambda g: -g[1][0]):
        print(f"  {ms:9.2f} ms {ms / total:6.1%} {count:7.0f} x  {name}")
    for name, (ms, count) in sorted(rows.items(), key=lambda r: -r[1][0])[:most]:
        print(f"  {ms:9.2f} ms {ms / total:6.1%} {count:7.0f} x {1e3 * ms / count:8.1f} us  {name}", flush=True)
    return found


def kl_cost(trainer: Trainer, rollout: Any, args: argparse.Namespace) -> float:
    """Seconds that the reference's forward pass and the KL in the head take of a step.

    The head by the kernels: where the step keeps log-probs instead, it takes less.
    """
    learner = trainer.learner
    rollout = rollout.to(learner.device)
    piece = part(rollout, torch.arange(len(rollout), device=learner.device))
    with learner.autocast(), torch.no_grad():
        reference = median_of(lambda: learner.reference.states(piece), args)
        anchor = learner.reference.states(piece)
        hidden = learner.module(piece).hidden

    def head(with_reference: bool) -> Callable[[], None]:
        def run() -> None:
            leaf = hidden.detach().requires_grad_()
            with learner.autocast():
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
    parser.add_argument("--shape", choices=shapes.SHAPES, help="sizes of a model with random weights")
    parser.add_argument("--prompt", type=int, default=12, help="tokens of a prompt, with --shape")
    parser.add_argument("--micro-batch", type=int, default=0, help="sequences a forward pass; 0: all")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--whole", action="store_true", help="compute a prompt for each of its completions")
    parser.add_argument("--full", action="store_true", help="train every weight, with torchao's 8-bit AdamW")
    parser.add_argument("--profile", action="store_true", help="print the kernels of a step")
    parser.add_argument("--verbose", action="store_true", help="print each step")
    parser.add_argument("--rows", default="clamp,price", help="of clamp, near (the same at its limit) and price")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    with contextlib.ExitStack() as stack:
        if args.shape:
            stack.enter_context(shapes.random_models())
        if args.whole:
            stack.enter_context(mock.patch.object(shared_prompts, "possible", return_value=False))
        compare(args)


def compare(args: argparse.Namespace) -> None:
    """Measure what was asked for, and print the table."""
    label = args.shape or args.model
    if args.shape:
        args.model, prompts = shapes.make(args.shape), shapes.prompts(64, args.prompt)
    else:
        if args.random:
            args.model = random_weights(models.resolve(args.model))
        builtin = models.prompts(label)[:64] if label in models.BUILTIN else None
        prompts = builtin or [f"Write a one-sentence review of thing number {i}." for i in range(64)]
    file = shapes.write_prompts(prompts)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    drawn = " (random weights)" if args.random or args.shape else ""
    print(f"{label}{drawn}, {args.completions} x {args.tokens} tokens, {device}", flush=True)
    ways = {
        "clamp": ("klamp, price and clamp", KLConfig()),
        "near": ("klamp, at its limit", KLConfig()),
        "price": ("klamp, price only", KLConfig(clamp=False)),
    }
    rows = {}
    for way in args.rows.split(","):
        name, kl = ways[way]
        own = argparse.Namespace(**vars(args))
        if way == "near":
            own.lr, own.warmup = NEAR_RATE, args.warmup + NEAR_STEPS
        rows[name] = klamp_steps(own, file, kl)
        if args.shape:
            beside_limits(args, name, rows[name])
    if not args.no_trl and not args.shape:
        rows["TRL GRPOTrainer"] = trl_steps(args, prompts)
    base = rows.get("TRL GRPOTrainer", {"step": float("nan"), "cpu": float("nan")})
    print(f"{'':<26}{'s/step':>8}{'sample':>8}{'update':>8}{'KL':>7}{'TRL/it':>8}{'cpu s':>8}{'TRL/it':>8}{'GiB':>7}")
    for name, row in rows.items():
        share = f"{row['kl cost'] / row['step']:>6.1%} " if "kl cost" in row else f"{'':>7}"
        parts = f"{row['sample']:>8.3f}{row['update']:>8.3f}" if "sample" in row else f"{'':>16}"
        ratios = f"{base['step'] / row['step']:>8.2f}{row['cpu']:>8.3f}{base['cpu'] / row['cpu']:>8.2f}"
        print(f"{name:<26}{row['step']:>8.3f}{parts}{share}{ratios}{row['memory']:>7.2f}")
    print("KL: share of the step taken by the reference's forward pass and by the exact KL in the head.")


def beside_limits(args: argparse.Namespace, name: str, row: dict[str, float]) -> None:
    """A step's parts, and the least that sampling and update can take."""
    shape = shapes.SHAPES[args.shape]
    sizes = (args.completions, args.prompt, args.tokens)
    sampling, training = shape.sampling(*sizes), shape.update(*sizes)
    print(f"{name}: {args.completions * args.tokens / row['step']:.0f} tokens a second")
    for what, limit in (("step", sampling + training), ("sample", sampling), ("update", training)):
        print(f"  {what:<10}{row[what]:8.3f} s, limit {limit:6.3f}: {row[what] / limit:5.2f} of it")
    for what in PARTS:
        print(f"  {what:<10}{row[what]:8.3f} s, {row[what] / row['step']:6.1%} of the step", flush=True)


if __name__ == "__main__":
    main()
