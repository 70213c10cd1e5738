"""``klamp measure`` beside the plain way: transformers ``generate``, then two forward passes with whole logits.

    python benchmarks/measure.py                                        # tiny, a CPU
    python benchmarks/measure.py --model smollm2 --prompts 512 --tokens 64 --batch 512   # a GPU

The policy is the model with a LoRA adapter on all linear layers, the reference the model itself. Both ways sample and
score the same number of tokens; seconds are wall-clock after the models are loaded, memory is the peak beyond what
was allocated then (CUDA), or the growth of the resident set's peak (CPU). ``--random`` takes the architecture with
random weights, whose completions all run to the last token.
"""

from __future__ import annotations

import argparse
import gc
import resource
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from klamp import models
from klamp.measure.run import Settings, _Source
from klamp.measure.scoring import records
from klamp.measure.two_models import load_pair
from train_step import random_weights

CUDA = torch.cuda.is_available()


def tuned(model: str) -> str:
    """An adapter folder away from its base."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    policy = get_peft_model(models.load_model(model), lora)
    with torch.no_grad():
        for name, p in policy.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.01)
    folder = tempfile.mkdtemp()
    policy.save_pretrained(folder)
    return folder


def timed(work: Callable[[], Any]) -> tuple[float, float, Any]:
    """Seconds, peak extra GiB and result of ``work``."""
    gc.collect()
    before = 0
    if CUDA:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begun = time.perf_counter()
    result = work()
    if CUDA:
        torch.cuda.synchronize()
        extra = (torch.cuda.max_memory_allocated() - before) / 2**30
    else:
        extra = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident) / 2**20
    return time.perf_counter() - begun, extra, result


def klamp_way(args: argparse.Namespace, prompts: list[str]) -> Callable[[], float]:
    """Sampling and scoring as ``measure_kl`` does it, the noise floor left out as the plain way has none."""
    device = "cuda" if CUDA else "cpu"
    pair = load_pair(args.adapter, args.model, temperature=1.0, device=device, dtype="auto")
    settings = Settings(args.adapter, args.model, len(prompts), args.tokens, 1, 1.0, args.batch, 0, None, False)
    source = _Source(pair, settings, prompts, None)

    def run() -> float:
        kl, count = 0.0, 0
        for block in range(0, len(prompts), args.batch):
            for record in records(pair, source.rollout(block), block, 1, floor=False):
                kl += record["kl"]
                count += record["tokens"]
        return kl / count

    return run


def plain_way(args: argparse.Namespace, prompts: list[str]) -> Callable[[], float]:
    """``generate`` with the adapter, then both models' whole logits and the KL over the vocabulary."""
    from peft import PeftModel

    device = "cuda" if CUDA else "cpu"
    model = PeftModel.from_pretrained(models.load_model(args.model, device=device), args.adapter).eval()
    tokenizer = models.load_tokenizer(args.model)

    @torch.no_grad()
    def run() -> float:
        kl, count = 0.0, 0
        for start in range(0, len(prompts), args.batch):
            ids = models.encode_prompts(tokenizer, prompts[start : start + args.batch])
            batch = tokenizer.pad({"input_ids": ids}, return_tensors="pt").to(device)
            out = model.generate(**batch, max_new_tokens=args.tokens, do_sample=True, top_k=0)
            first = batch["input_ids"].shape[1]
            attention = torch.cat([batch["attention_mask"], (out[:, first:] != tokenizer.pad_token_id).long()], 1)
            logp = model(out, attention_mask=attention).logits[:, first - 1 : -1].float().log_softmax(-1)
            with model.disable_adapter():
                ref = model(out, attention_mask=attention).logits[:, first - 1 : -1].float().log_softmax(-1)
            per_token = (logp.exp() * (logp - ref)).sum(-1)
            mask = attention[:, first:].bool()
            kl += float(per_token[mask].sum())
            count += int(mask.sum())
        return kl / count

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--random", action="store_true", help="random weights of the model's architecture")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--batch", type=int, default=64)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    label = args.model
    if args.random:
        args.model = random_weights(models.resolve(args.model))
    args.adapter = tuned(args.model)
    texts = models.prompts(label) if label in models.BUILTIN else ["Write a one-sentence review of a park."]
    prompts = [texts[i % len(texts)] for i in range(args.prompts)]
    device = torch.cuda.get_device_name() if CUDA else f"CPU, {torch.get_num_threads()} threads"
    print(f"{Path(label).name}, {args.prompts} prompts x {args.tokens} tokens in batches of {args.batch}, {device}")
    rows = {}
    for name, way in (("klamp measure", klamp_way), ("generate and two forwards", plain_way)):
        run = way(args, prompts)
        run_once = timed(run)  # the first run pays for compilation and capture, in both
        rows[name] = min(run_once, timed(run), key=lambda r: r[0])[0], max(run_once[1], 0.0), run_once[2]
        del run
    base = rows["generate and two forwards"]
    print(f"{'':<28}{'seconds':>9}{'extra GiB':>11}{'KL':>10}{'faster':>8}{'memory':>8}")
    for name, (seconds, extra, kl) in rows.items():
        print(f"{name:<28}{seconds:>9.2f}{extra:>11.3f}{kl:>10.4f}{base[0] / seconds:>8.2f}{extra / base[1]:>8.2f}")


if __name__ == "__main__":
    main()
