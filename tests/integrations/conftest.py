"""A random model small enough to train inside TRL in a second or two, and the trainers made of it."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# TRL needs Python 3.11 and is an extra: `make test-lowest` has none.
collect_ignore_glob = [] if importlib.util.find_spec("trl") else ["test_trl_*.py"]

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

WORDS = 61
PROMPTS = [" ".join(f"w{(7 * i + j) % WORDS}" for j in range(1 + i % 3)) for i in range(64)]


def make_model(folder: Path) -> str:
    """The small model, twice as wide and over 64 words."""
    from small_model import vocabulary, write_model

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    spread = {"max_position_embeddings": 64, "initializer_range": 0.2}
    return write_model(folder, words=vocabulary(WORDS), **sizes, **spread)


def reward(completions: list[str], **_: Any) -> list[float]:
    """The share of a completion's words in the first half of the vocabulary: easy to raise."""
    words = [c.split() for c in completions]
    return [sum(int(w[1:]) < 30 for w in ws if w[1:].isdigit()) / max(1, len(ws)) for ws in words]


def make_trainer(model: str, out: Path | str, *, kind: str = "GRPO", lora: Any = True, **settings: Any) -> Any:
    """A TRL trainer on the random model: 8 completions of 8 tokens a step in two groups unless told otherwise."""
    import trl
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import PrinterCallback

    extra = {k: settings.pop(k) for k in ("trainer_class", "trainer_kwargs", "policy", "reward_funcs") if k in settings}
    defaults: dict[str, Any] = {
        "output_dir": str(out),
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 8,
        "learning_rate": 3e-2,
        "lr_scheduler_type": "constant",
        "beta": 0.1,
        "max_steps": 3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "seed": 3,
    }
    args = getattr(trl, f"{kind}Config")(**(defaults | settings))
    if lora is True:
        lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    made = extra.get("trainer_class", getattr(trl, f"{kind}Trainer"))(
        extra.get("policy", model),
        reward_funcs=extra.get("reward_funcs", reward),
        args=args,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        peft_config=lora or None,
        **extra.get("trainer_kwargs", {}),
    )
    made.remove_callback(PrinterCallback)
    return made


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def trainer(model_folder: str, tmp_path: Path) -> Callable[..., Any]:
    """``trainer(kind="GRPO", lora=True, **GRPOConfig fields)``."""

    def make(**settings: Any) -> Any:
        return make_trainer(model_folder, settings.pop("out", tmp_path / "out"), **settings)

    return make
