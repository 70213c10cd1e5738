"""The card in a checkpoint: what is true of it, no path of the machine, and code that loads it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from klamp import __version__, models
from klamp.train.config import KLConfig, LoraConfig, OptimConfig, ResolvedConfig, RolloutConfig, TrainConfig
from klamp.train.loop import train_policy
from klamp.train.model_card import HERE, model_card

SMALL = {"steps": 1, "rollout": RolloutConfig(prompts=2, group_size=2, max_tokens=4), "lora": LoraConfig(rank=2)}


def made(**fields: Any) -> ResolvedConfig:
    """Of a model that need not exist: nothing is left out that would be looked up in it."""
    return TrainConfig(optim=OptimConfig(lr=1e-4), **SMALL, **fields).resolved()  # type: ignore[arg-type]


def split(card: str) -> tuple[dict[str, Any], str]:
    _, front, text = card.split("---\n", 2)
    return yaml.safe_load(front), text


@pytest.mark.parametrize("full", [False, True], ids=["lora", "full"])
def test_a_checkpoint_carries_a_card_that_is_filled_in_and_loads_it(tmp_path: Path, full: bool) -> None:
    def kindness(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        return [float(len(c)) for c in completions]

    train_policy(TrainConfig(run=str(tmp_path / "run"), full=full, **SMALL), rewards=[kindness], quiet=True)
    saved = tmp_path / "run" / "checkpoints" / "step-000001"
    front, text = split((saved / "README.md").read_text())
    tags = ["klamp", "grpo"] if full else ["klamp", "grpo", "lora"]
    library = "transformers" if full else "peft"
    assert front == {"library_name": library, "pipeline_tag": "text-generation", "tags": tags}
    for fact in (
        "| Base model | tiny |",
        "kindness |",
        "| KL target | 0.05 nats per token |",
        f"| klamp | {__version__} |",
    ):
        assert fact in text
    assert re.search(r"\| KL reached \| [\d.e-]+ nats per token, at step 1 \|", text)
    assert re.search(r"\| Reward reached \| [\d.]+, mean of step 1 \|", text)
    whole = (saved / "README.md").read_text()
    assert "More Information Needed" not in whole
    for path in (str(tmp_path), str(models.resolve("tiny")), str(Path.home()), str(Path.cwd())):
        assert path not in whole
    found = re.search(r"```python\n(.*?)```", text, re.S)
    assert found is not None
    names: dict[str, Any] = {}
    exec(found[1].replace(HERE, str(saved)), names)
    assert names["tokenizer"].decode(names["tokenizer"]("It was").input_ids).endswith("It was")
    assert sum(p.numel() for p in names["model"].parameters()) > 0
    assert any("lora_" in name for name, _ in names["model"].named_parameters()) is not full


def test_the_base_is_named_as_the_hub_knows_it_and_a_folder_by_its_name_alone(tmp_path: Path) -> None:
    hub, text = split(model_card(made(model="org/some-model"), 40, {"kl/steered": 0.0461}, ["vader"]))
    assert hub["base_model"] == "org/some-model"
    assert 'AutoModelForCausalLM.from_pretrained("org/some-model")' in text
    assert "| KL reached | 0.0461 nats per token, at step 40 |" in text
    folder = tmp_path / "someone" / "their-model"
    folder.mkdir(parents=True)
    config = made(model=str(folder), kl=KLConfig(reference=f"adapter:{folder}"))
    rewards = [f"model:{folder}", "rules:polite", f"{folder}/mine.py:f", "regex:a|b"]
    card = model_card(config, 40, {}, rewards)
    front, text = split(card)
    assert "base_model" not in front
    assert "someone" not in card
    assert "| Base model | their-model |" in text
    assert "| Reward | model:their-model, rules:polite, mine.py:f, regex:a\\|b |" in text
    assert "| Reference | adapter:their-model |" in text
    assert "KL reached" not in text, "what was not measured is not told"


def test_a_name_cannot_break_out_of_the_card() -> None:
    card = model_card(made(model="org/a: b\n---\n# Owned"), 1, {}, ["<script>alert(1)</script>"])
    front, text = split(card)
    assert front["library_name"] == "peft"
    assert "<script>" not in text
