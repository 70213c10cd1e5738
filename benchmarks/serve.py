"""The endpoint's engine: requests at once against one at a time, and beside transformers' continuous batching.

    python benchmarks/serve.py [MODEL] [--requests 64] [--tokens 48]

Prints seconds, tokens a second and the largest difference of a log-prob from a plain forward pass of each sequence
alone. Nothing but the engine is timed: no HTTP.
"""

from __future__ import annotations

import argparse
import logging
import time
from typing import Any

import torch

from klamp.serve.engine import Ask, Engine, Limits, Piece, Request
from klamp.serve.saved_models import SavedModels

WORDS = "The room at this hotel was clean and the waiter at the bar was kind to all of us"


@torch.no_grad()
def largest_gap(model: Any, found: list[tuple[list[int], list[int], list[float]]]) -> float:
    """Over all completions (prompt, tokens, log-probs): the largest |log-prob − that of the sequence alone|."""
    worst = 0.0
    for prompt, ids, logp in found:
        logits = model(torch.tensor([[*prompt, *ids]], device=model.device)).logits[0, len(prompt) - 1 : -1]
        alone = logits.float().log_softmax(-1).cpu().gather(1, torch.tensor(ids)[:, None]).squeeze(1)
        worst = max(worst, float((torch.tensor(logp) - alone).abs().max()))
    return worst


def by_engine(saved: SavedModels, prompts: list[str], tokens: int, batch: int) -> list[Any]:
    """Every request through one engine."""
    engine, found = Engine(saved, Limits(batch=batch, queue=10_000)), []
    for text in prompts:
        prompt = [int(i) for i in saved.tokenizer(text)["input_ids"]]

        def tell(news: Any, prompt: list[int] = prompt) -> None:
            if isinstance(news, Exception):
                raise news
            if isinstance(news, Piece):
                found.append((prompt, news.ids, news.logp))

        engine.submit(Request(Ask(model=saved.name, text=text, max_tokens=tokens), tell))
        if batch == 1:
            engine.run()
    engine.run()
    return found


def by_transformers(saved: SavedModels, prompts: list[str], tokens: int) -> list[Any]:
    """The same requests through ``ContinuousBatchingManager``."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model = saved.weights(saved.name).model
    encoded = [[int(i) for i in saved.tokenizer(t)["input_ids"]] for t in prompts]
    settings = GenerationConfig(
        do_sample=True,
        top_k=0,
        max_new_tokens=tokens,
        eos_token_id=saved.tokenizer.eos_token_id,
        pad_token_id=saved.tokenizer.pad_token_id,
    )
    with torch.no_grad():
        results = model.generate_batch(
            inputs=encoded,
            generation_config=settings,
            continuous_batching_config=ContinuousBatchingConfig(return_logprobs=True, num_blocks=256),
            progress_bar=False,
        )
    return [(list(r.prompt_ids), list(r.generated_tokens), list(r.logprobs)) for r in results.values()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="tiny")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=48)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    saved = SavedModels(args.model, "model", device=device, dtype="float32")
    words = WORDS.split()
    prompts = [" ".join(words[: 1 + i % len(words)]) for i in range(args.requests)]
    ways = {
        "at once": lambda: by_engine(saved, prompts, args.tokens, 64),
        "one at a time": lambda: by_engine(saved, prompts, args.tokens, 1),
        "transformers": lambda: by_transformers(saved, prompts, args.tokens),
    }
    print(f"{args.requests} requests, up to {args.tokens} tokens, {args.model} on {device}, float32")
    print(f"{'':16}{'seconds':>8}{'tokens/s':>10}{'largest gap':>13}")
    for name, way in ways.items():
        way()  # the first time compiles and allocates
        began = time.perf_counter()
        found = way()
        seconds = time.perf_counter() - began
        total = sum(len(ids) for _, ids, _ in found)
        gap = largest_gap(saved.weights(saved.name).model, found)
        print(f"{name:16}{seconds:8.2f}{total / seconds:10.0f}{gap:13.1e}")


if __name__ == "__main__":
    main()
