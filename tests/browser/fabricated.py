"""A comparison as `klamp compare` leaves it on disk, made up: numbers follow formulas, completions are hostile."""

from __future__ import annotations

import json
import math
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

from klamp.config_io import to_yaml
from klamp.experiments import compare
from klamp.experiments.compare import CompareConfig, ResolvedComparison, run_folder
from klamp.experiments.folder import FORMAT, Folder

HOSTILE = [
    "<script>document.title='owned'</script>",
    "<img src=x onerror=\"document.title='owned'\">",
    "</script><script>document.title='owned'</script>",
    "<!--",
    "\u202egnirts desrever\u202c",
    "\x00\x07\x1b[31m",
    "שלום עולם",
    "👩‍👩‍👧 🎉",
    "&lt;b&gt; &amp; {{data}} ${1}",
    "\u2028\u2029\ud800",
    "\u2067\u2066\u061c\ufeff\x9b",
    "مرحبا بالعالم",
    "</p></article></main><style>*{display:none}</style>",
    "\"' onmouseover=\"document.title='owned'",
]
"""What a model could say to a page that trusted it."""

PLAIN = [
    "was",
    "a",
    "great",
    "day",
    ",",
    "I",
    "love",
    "the",
    "wonderful",
    "food",
    "and",
    "the",
    "friendly",
    "staff",
    ".",
]


def comparison(
    root: Path, *, seeds: int = 3, steps: int = 60, hostile: bool = False, oracle: bool = False
) -> ResolvedComparison:
    """Write a finished comparison under ``root`` and return its settings."""
    config = CompareConfig(seeds=seeds, steps=steps, oracle=oracle).resolved()
    folder = Folder(root)
    folder.runs.mkdir(parents=True)
    settings = {"format": FORMAT, "kind": "compare", **asdict(config)}
    folder.settings.write_text(json.dumps(settings))
    reference = {
        "perplexity": {"heldout": 9.1, "reference": 5.9},
        "length": 20.0,
        "samples": [],
        "probes": [_probe(prompt, hostile, 0.0, n) for n, prompt in enumerate(_prompts(hostile))],
    }
    folder.reference.write_text(json.dumps(reference))
    chosen = compare.parse_arms(config.arms, config.static_beta)
    if oracle:
        betas = [
            *compare.coarse_constants(0.05, 20.0),
            *compare.fine_constants(compare.coarse_constants(0.05, 20.0)[3]),
        ]
        chosen += [compare.constant_arm(b) for b in betas]
    for arm in chosen:
        for seed in range(seeds):
            _run(folder, config, arm, seed, hostile)
    return config


def run(folder: Path, kls: list[float], target: float = 0.05) -> Path:
    """A run as `klamp train` leaves it on disk, with KL as given."""
    folder.mkdir(parents=True)
    settings = f"model: tiny\nseed: 0\nsteps: {len(kls)}\nrollout: {{prompts: 4, group_size: 8}}\n"
    (folder / "config.yaml").write_text(f"{settings}reward: {{functions: [vader]}}\nkl: {{per: token, clamp: true}}\n")
    values = {"kl/beta": 0.4, "kl/target": target, "reward/mean": 0.3, "policy/entropy": 1.8}
    _lines(folder / "metrics.jsonl", [{"step": n + 1, "kl/steered": kl, **values} for n, kl in enumerate(kls)])
    said = {"reward": 0.5, "tokens": [" a", " good", " day"], "kl": [0.0, 0.5, 2.0]}
    steps = sorted({1, len(kls)})
    _lines(folder / "samples.jsonl", [{"step": n, "prompt": f"Today {k}", **said} for n in steps for k in range(4)])
    return folder


def _run(folder: Folder, config: ResolvedComparison, arm: compare.Arm, seed: int, hostile: bool) -> None:
    path = run_folder(folder, arm, seed)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.yaml").write_text(to_yaml(config.train_config(arm, seed, path)))
    noise = random.Random(f"{arm.name} {seed}")
    rows = [_row(arm, step, config.steps, noise) for step in range(1, config.steps + 1)]
    _lines(path / "metrics.jsonl", rows)
    ratio = rows[-1]["kl/steered"] / 0.05
    prompts = _prompts(hostile)
    _lines(
        path / "probes.jsonl",
        [
            {"step": step, **_probe(prompt, hostile, 0.05 * ratio * step / config.steps, n + seed)}
            for step in (config.steps // 3, config.steps)
            for n, prompt in enumerate(prompts)
        ],
    )
    if arm.name == "static":
        message = f"KL is high {HOSTILE[0] if hostile else ''}. Raise beta."
        _lines(path / "alarms.jsonl", [{"kind": "drifting", "step": 22, "message": message, "figures": {}}])


def _row(arm: compare.Arm, step: int, steps: int, noise: random.Random) -> dict[str, Any]:
    settles = {"static": 2.5, "ziegler": 0.35, "exponential": 0.9, "hold-price": 0.053, "hold": 0.05}
    beta = float(arm.kl.get("beta") or 0.4)
    end = settles.get(arm.name, 0.05 * (0.33 / beta) ** 2)
    pace = 25 if end > 0.2 else 6
    kl = end * (1 - math.exp(-step / pace)) ** 2 * math.exp(noise.gauss(0, 0.04 if arm.name == "hold" else 0.09))
    reward = min(0.99, 0.22 + 1.1 * math.sqrt(kl) * math.exp(-0.3 * kl) + 0.1 * kl) + noise.gauss(0, 0.05)
    row = {
        "step": step,
        "kl/ref/exact": kl,
        "kl/steered": kl,
        "kl/beta": beta * (1 + (0.02 * step if "hold" in arm.name else 0.0)),
        "kl/target": 0.05,
        "kl/in_band": float(abs(kl / 0.05 - 1) <= 0.2),
        "reward/mean": reward,
        "policy/entropy": 1.8 - 0.4 * kl,
        "length/mean": 20.0,
    }
    if step % 5 == 0 or step == steps:
        row |= {
            "heldout/perplexity": 9.1 * math.exp(0.8 * kl),
            "heldout/perplexity_reference": 5.9 * math.exp(0.6 * kl),
        }
    return row


def _prompts(hostile: bool) -> list[str]:
    plain = ["The coffee at this café", "This phone", "The view from the balcony"]
    return [*plain, HOSTILE[0], HOSTILE[4]] if hostile else plain


def _probe(prompt: str, hostile: bool, kl: float, number: int) -> dict[str, Any]:
    noise = random.Random(number)
    tokens = [f" {w}" for w in PLAIN] + (HOSTILE if hostile else [])
    return {"prompt": prompt, "tokens": tokens, "kl": [round(kl * noise.expovariate(1.0), 5) for _ in tokens]}


def _lines(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
