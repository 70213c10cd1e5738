"""The card of a checkpoint: README.md with what was trained, by what, how far it went and how to load it.

It holds what is true and nothing else: no paths of the machine that trained it, and no field left to fill in.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from klamp import __version__, models
from klamp.train.config import ResolvedConfig

HERE = "path/to/this/folder"
"""Stands in the card for wherever the checkpoint will be."""


def model_card(config: ResolvedConfig, step: int, metrics: Mapping[str, Any], rewards: Sequence[str] = ()) -> str:
    """README.md of the checkpoint of ``step``: front matter as the Hub reads it, and a page of Markdown.

    Args:
        config: The configuration of the run.
        step: The step that was saved.
        metrics: The step's metrics; empty where there are none.
        rewards: Names of the reward functions; empty where klamp does not know them.
    """
    import yaml

    hub, name = base_of(config.model)
    kind = "full" if config.full else "lora"
    front: dict[str, Any] = {
        **({"base_model": hub} if hub else {}),
        "library_name": "transformers" if config.full else "peft",
        "pipeline_tag": "text-generation",
        "tags": ["klamp", config.algorithm.name, *([] if config.full else [kind])],
    }
    what = f"{name}, fine-tuned" if config.full else f"A LoRA adapter of {name}, trained"
    parts = [
        f"---\n{yaml.safe_dump(front, sort_keys=False, allow_unicode=True)}---",
        f"# {name}, step {step} of a klamp run",
        f"{what} with {config.algorithm.name.upper()} under KL control by klamp {__version__}.",
        _table(_facts(config, name, step, metrics, rewards)),
        f"## How to load it\n\n```python\n{_loading(config, hub, name)}\n```",
        "`trainer.json` and `optimizer.safetensors` are for resuming the run; inference does not need them.",
    ]
    return "\n\n".join(parts) + "\n"


def base_of(model: str) -> tuple[str | None, str]:
    """(id on the Hub or None, name to show) of the base model."""
    if model in models.BUILTIN:
        source = Path(models.resolve(model)) / "source.json"
        try:
            found = json.loads(source.read_text(encoding="utf-8")).get("hub")
        except (OSError, ValueError, AttributeError):
            found = None
        return (found if isinstance(found, str) else None), model
    name = " ".join(unplaced(model).split())
    return (model if name == model and "/" in model else None), name


def unplaced(name: str) -> str:
    """A path as its last part, so that nobody's folders are published; any other name as it is."""
    local = name.startswith(("/", "~", "./", "../")) or Path(name).exists()
    return Path(name).name if local else name


def _facts(
    config: ResolvedConfig, name: str, step: int, metrics: Mapping[str, Any], rewards: Sequence[str]
) -> dict[str, str]:
    kl, per = config.kl, config.kl.unit.replace("_", " ")
    kind, colon, where = kl.reference.partition(":")
    facts = {
        "Base model": name,
        "Algorithm": config.algorithm.name.upper(),
        "Reward": ", ".join(_reward(r) for r in rewards),
        "KL target": "" if kl.goal is None else f"{kl.goal:g} nats per {per}",
        "KL reached": _number(metrics, "kl/steered", f" nats per {per}, at step {step}"),
        "Reward reached": _number(metrics, "reward/mean", f", mean of step {step}"),
        "Reference": f"{kind}{colon}{unplaced(where)}",
        "Price of KL": f"{kl.controller}, {kl.estimator} in {kl.placement}",
        "Learning rate": f"{config.optim.lr:g}",
        "Seed": str(config.seed),
        "klamp": __version__,
    }
    return {k: v for k, v in facts.items() if v}


def _reward(name: str) -> str:
    """The name of a reward; ``model:FOLDER`` and ``FOLDER/file.py:function`` without where they are."""
    head, colon, tail = name.partition(":")
    return f"{unplaced(head)}{colon}{unplaced(tail) if head == 'model' else tail}"


def _number(metrics: Mapping[str, Any], key: str, unit: str) -> str:
    value = metrics.get(key)
    return f"{value:.4g}{unit}" if isinstance(value, int | float) else ""


def _table(facts: Mapping[str, str]) -> str:
    rows = [f"| {name} | {_cell(value)} |" for name, value in facts.items()]
    return "\n".join(["| | |", "| --- | --- |", *rows])


def _cell(text: str) -> str:
    """Text that stays inside its cell."""
    return " ".join(text.split()).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")


def _loading(config: ResolvedConfig, hub: str | None, name: str) -> str:
    """Python that loads the checkpoint."""
    if config.full:
        return (
            "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
            f'model = AutoModelForCausalLM.from_pretrained("{HERE}")\n'
            f'tokenizer = AutoTokenizer.from_pretrained("{HERE}")'
        )
    first, load = "from transformers import AutoModelForCausalLM, AutoTokenizer", "AutoModelForCausalLM.from_pretrained"
    if config.model in models.BUILTIN and hub is None:
        first, load = "from klamp.models import load_model\nfrom transformers import AutoTokenizer", "load_model"
    return (
        f"from peft import PeftModel\n{first}\n\n"
        f"base = {load}({json.dumps(hub or name)})\n"
        f'model = PeftModel.from_pretrained(base, "{HERE}")\n'
        f'tokenizer = AutoTokenizer.from_pretrained("{HERE}")'
    )
