"""How the cost of a GRPO step grows with its tokens and with the model: tokens a second, sampling and update.

    python benchmarks/growth.py --json growth.json                 # 135M, 1B and 8B, 64 to 2048 tokens: a GPU
    python benchmarks/growth.py --plot growth.png growth.json      # the figure of docs/performance.md

32 completions of 4 prompts, LoRA of rank 16, price and clamp, random weights. A forward pass of the update takes at
most 16,384 tokens. One step before the clock starts.
"""

from __future__ import annotations

import argparse
import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import shapes
from klamp.train.config import KLConfig
from train_step import forget, klamp_trainer, now, peak, update

LENGTHS = (64, 256, 1024, 2048)
COMPLETIONS, PROMPT, PASS = 32, 12, 16_384


def measure(name: str, lengths: tuple[int, ...], steps: int) -> list[dict[str, Any]]:
    """A row for each length."""
    forget()
    given = argparse.Namespace(model=shapes.make(name), completions=COMPLETIONS, tokens=max(lengths), lr=5e-5)
    trainer = klamp_trainer(given, shapes.write_prompts(shapes.prompts(64, PROMPT)), KLConfig())
    rows, step = [], 0
    for tokens in lengths:
        trainer.sampler.config = replace(trainer.sampler.config, max_tokens=tokens)
        config = trainer.learner.config
        micro = max(1, PASS // (PROMPT + tokens))
        trainer.learner.config = replace(config, optim=replace(config.optim, micro_batch=min(micro, COMPLETIONS)))
        trainer.sampler.decoder.slots.clear()
        forget()
        laps = []
        for _ in range(1 + steps):
            step += 1
            a = now()
            rollout = trainer.sample(step)
            b = now()
            update(trainer, step, rollout)
            laps.append((b - a, now() - b))
        sample, train = (min(each) for each in zip(*laps[1:], strict=True))
        sizes = (COMPLETIONS, PROMPT, tokens)
        limits = shapes.SHAPES[name].sampling(*sizes), shapes.SHAPES[name].update(*sizes)
        rows.append({"shape": name, "tokens": tokens, "sample": sample, "update": train, "gib": peak()})
        rows[-1] |= {"rate": COMPLETIONS * tokens / (sample + train), "limits": limits}
        print(
            f"{name:>5} {COMPLETIONS} x {tokens:5}: {sample + train:7.3f} s a step, sampling {sample:7.3f} "
            f"({sample / limits[0]:5.2f} of its limit), update {train:6.3f} ({train / limits[1]:5.2f}), "
            f"{rows[-1]['rate']:7.0f} tokens a second, {rows[-1]['gib']:5.1f} GiB",
            flush=True,
        )
    return rows


def plot(found: list[dict[str, Any]], target: Path) -> None:
    """Tokens a second over tokens a completion, and the share of the step that is sampling."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), constrained_layout=True)
    for name, colour in (("135m", "#0072B2"), ("1b", "#009E73"), ("8b", "#D55E00")):
        rows = [row for row in found if row["shape"] == name]
        x = [row["tokens"] for row in rows]
        left.plot(x, [row["rate"] for row in rows], "o-", color=colour, label=name.upper())
        bound = [COMPLETIONS * row["tokens"] / sum(row["limits"]) for row in rows]
        left.plot(x, bound, ":", color=colour)
        right.plot(x, [row["sample"] / (row["sample"] + row["update"]) for row in rows], "o-", color=colour)
    left.set(xscale="log", yscale="log", xlabel="tokens a completion", ylabel="tokens a second (dotted: limit)")
    right.set(xscale="log", ylim=(0, 1), xlabel="tokens a completion", ylabel="share of the step that is sampling")
    for axes in (left, right):
        axes.set_xticks(LENGTHS, [str(n) for n in LENGTHS])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    left.legend()
    figure.savefig(target, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="135m,1b,8b")
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)))
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", nargs=2, type=Path, metavar=("FIGURE", "JSON"))
    args = parser.parse_args()
    if args.plot:
        plot(json.loads(args.plot[1].read_text()), args.plot[0])
        return
    warnings.filterwarnings("ignore")
    found: list[dict[str, Any]] = []
    with shapes.random_models():
        for name in args.shapes.split(","):
            found += measure(name, tuple(int(n) for n in args.lengths.split(",")), args.steps)
            if args.json:
                args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
