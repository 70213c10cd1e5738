"""GRPO in TRL with its KL held at 0.05 nats per token: the built-in model learns to write kind reviews.

    pip install "klamp[trl]"
    python examples/trl_grpo.py            # two or three minutes on a CPU; --steps 3 to look on

Everything but the line marked klamp is an ordinary TRL script.
"""

from __future__ import annotations

import argparse
import tempfile

from datasets import Dataset
from peft import LoraConfig
from transformers import PrinterCallback
from trl import GRPOConfig, GRPOTrainer
from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

from klamp import models
from klamp.integrations.trl import KLControl

vader = SentimentIntensityAnalyzer()


def kindness(completions: list[str], **_: object) -> list[float]:
    """VADER's compound sentiment of each completion, from -1 to 1."""
    return [vader.polarity_scores(text)["compound"] for text in completions]


def main(steps: int, folder: str) -> None:
    """Train, then print one line a step."""
    args = GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=64,
        num_generations=8,
        max_completion_length=32,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        beta=0.04,  # any price above 0: KLControl finds the right one
        max_steps=steps,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        bf16=False,
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        models.load_model("tiny"),
        reward_funcs=kindness,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": models.prompts("tiny")}),
        processing_class=models.load_tokenizer("tiny"),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
        callbacks=[KLControl(target=0.05, per="token")],  # klamp
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    print("step  reward      kl    beta  effort")
    for row in trainer.state.log_history:
        if "klamp/kl" in row:
            figures = [row[k] for k in ("reward", "klamp/kl", "klamp/beta", "klamp/effort")]
            print(f"{row['step']:4d}" + "".join(f"{x:8.3f}" for x in figures))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    with tempfile.TemporaryDirectory() as scratch:
        main(parser.parse_args().steps, scratch)
