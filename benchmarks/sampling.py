"""Time to sample a batch, for families of one size: the static cache against transformers' own.

    python benchmarks/sampling.py                               # a CPU: 8 completions of 32 tokens, 6 layers of 256
    python benchmarks/sampling.py --hidden 1024 --layers 24 --rows 128 --tokens 128      # a GPU, in bfloat16
    python benchmarks/sampling.py --shape 8b             # a LoRA's sampler beside the least it can take, on an H200

Weights are random and completions run to the last token, so every family does the same number of steps. ``--plain``
adds transformers' own cache for each, which is what a family outside the static cache takes. On a CPU it is the
processor's time, on a GPU the wall clock's.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from typing import Any

import torch

import shapes
from klamp.sampling.merged_model import MergedModel
from klamp.sampling.sampler import Decoder
from train_step import kernels

PROMPT = 24
FAMILIES = ("llama", "mistral", "gemma2", "gemma3_text", "qwen3", "gpt_oss")


class Whole:
    """A policy that trains every weight: nothing to merge."""

    lora = False

    def __init__(self, model: Any) -> None:
        self.model = model


def build(family: str, args: argparse.Namespace) -> Any:
    """A random model; the window is shorter than the completions."""
    from transformers import AutoConfig, AutoModelForCausalLM

    heads = args.hidden // 64
    settings: dict[str, Any] = {
        "vocab_size": args.vocabulary,
        "hidden_size": args.hidden,
        "intermediate_size": 3 * args.hidden,
        "num_hidden_layers": args.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 4 if heads % 4 == 0 else heads // 3 if heads % 3 == 0 else heads,
        "head_dim": 64,
        "sliding_window": PROMPT,
        "max_position_embeddings": 4096,
        "layer_types": ["sliding_attention" if i % 6 != 5 else "full_attention" for i in range(args.layers)],
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
    }
    known = AutoConfig.for_model(family)
    if family in ("llama", "qwen3"):
        settings.pop("layer_types"), settings.pop("sliding_window")
    config = AutoConfig.for_model(family, **{k: v for k, v in settings.items() if hasattr(known, k)})
    torch.manual_seed(0)
    with torch.device(args.device):
        half = torch.bfloat16 if args.device == "cuda" else torch.float32
        return AutoModelForCausalLM.from_config(config, dtype=half).eval()


@torch.no_grad()
def seconds(decoder: Decoder, args: argparse.Namespace) -> float:
    """Median over the rounds after the first two, in which graphs are captured."""
    generator = torch.Generator(args.device).manual_seed(0)
    ids = torch.randint(3, args.vocabulary, (args.rows, PROMPT), device=args.device)
    attention = torch.ones_like(ids, dtype=torch.bool)
    attention[::2, : PROMPT // 3] = False
    laps = []
    for _ in range(args.rounds + 2):
        began = now(args)
        decoder.run(ids, attention, args.tokens, generator)
        laps.append(now(args) - began)
    return statistics.median(laps[2:])


def now(args: argparse.Namespace) -> float:
    if args.device == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()  # other work on the machine does not count


@torch.no_grad()
def beside_limits(name: str, only: str, *, profile: bool) -> None:
    """Seconds for 32 and 128 sequences of 256 and 1024 tokens after prompts of 12 and 512, eight to a prompt."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    from klamp.models.policy import Policy

    shape = shapes.SHAPES[name]
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(shapes.make(name)), dtype=torch.bfloat16)
    adapted = get_peft_model(model.eval(), LoraConfig(r=16, target_modules="all-linear"))
    merged = MergedModel(Policy(adapted, value_head=False, temperature=1.0, lora=True))
    for rows, tokens, prompt in itertools.product((32, 128), (256, 1024), (12, 512)):
        if only and f"{rows}x{tokens}" not in only.split(","):
            continue
        took, limit = cell(merged, shape, rows, tokens, prompt, profile), shape.sampling(rows, prompt, tokens)
        print(
            f"{name} {rows:4} x {tokens:5} after {prompt:4}: {took:7.3f} s, limit {limit:6.3f}: {took / limit:5.2f}",
            flush=True,
        )
        torch.cuda.empty_cache()


def cell(merged: MergedModel, shape: shapes.Shape, rows: int, tokens: int, prompt: int, profile: bool) -> float:
    """Seconds to sample once, after the graph was captured."""
    decoder = Decoder(merged.model, 1.0, 1.0, (), 0, fast=True)
    ids = torch.randint(3, shape.vocabulary, (rows // 8, prompt), device="cuda").repeat_interleave(8, 0)
    attention, generator = torch.ones_like(ids, dtype=torch.bool), torch.Generator("cuda").manual_seed(0)
    steps = decoder._steps(rows, prompt, tokens)
    decoder.draw(steps.prefill(ids, attention), generator)
    steps.step(ids[:, 0])  # the graph is captured
    if profile:
        kernels(lambda: decoder.run(ids, attention, tokens, generator))
    torch.cuda.synchronize()
    began = time.perf_counter()
    decoder.run(ids, attention, tokens, generator)
    torch.cuda.synchronize()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (
        ("hidden", 256),
        ("layers", 6),
        ("rows", 8),
        ("tokens", 32),
        ("vocabulary", 4096),
        ("rounds", 5),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--plain", action="store_true", help="time transformers' own cache too")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", choices=shapes.SHAPES, help="sizes of a Llama, beside the least it can take")
    parser.add_argument("--only", default="", help="with --shape: completions x tokens, such as 128x256,32x256")
    parser.add_argument("--profile", action="store_true", help="with --shape: print the kernels")
    args = parser.parse_args()
    if args.shape:
        beside_limits(args.shape, args.only, profile=args.profile)
        return
    first = None
    for family in args.families.split(","):
        merged = MergedModel(Whole(build(family, args)))
        took = seconds(Decoder(merged.model, 1.0, 1.0, (), 0, fast=merged.fast), args)
        first = first or took
        way = "static" if merged.fast else "plain"
        line = f"{family:12} {way:6} {took * 1e3:9.1f} ms  {took / first:5.2f} of the first"
        if args.plain and merged.fast:
            other = Decoder(merged.model, 1.0, 1.0, (), 0, fast=False)
            line += f"  transformers' own cache {seconds(other, args) * 1e3:9.1f} ms"
        print(line, flush=True)
        del merged
        if args.device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
