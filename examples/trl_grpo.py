# %% [markdown]
# # GRPO in TRL with LoRA, and its KL held at a target
#
# The built-in model learns to write kind reviews. Everything but the line marked `klamp` is an ordinary TRL script.
#
#     pip install 'klamp[trl]'
#     python examples/trl_grpo.py                # two or three minutes on a CPU
#     STEPS=3 python examples/trl_grpo.py        # a short look

# %%
from __future__ import annotations

import os
import tempfile

from datasets import Dataset
from peft import LoraConfig
from transformers import PrinterCallback
from trl import GRPOConfig, GRPOTrainer
from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

from klamp import models
from klamp.integrations.trl import KLControl

STEPS = int(os.environ.get("STEPS", "40"))

# %% [markdown]
# ## Reward
#
# VADER rates the sentiment of a text from -1 to 1. Replace it by your own reward function.

# %%
vader = SentimentIntensityAnalyzer()


def kindness(completions: list[str], **_: object) -> list[float]:
    """VADER's compound sentiment of each completion, from -1 to 1."""
    return [vader.polarity_scores(text)["compound"] for text in completions]


# %% [markdown]
# ## Trainer
#
# `beta` may be any value above 0. `KLControl` replaces it after the first step by the one that brings the KL to 0.05
# nats per token. With LoRA it also clamps the KL at 1.1 times the target.

# %%
scratch = tempfile.TemporaryDirectory()
trainer = GRPOTrainer(
    models.load_model("tiny"),  # or the name of a model on the Hub
    reward_funcs=kindness,
    args=GRPOConfig(
        output_dir=scratch.name,
        per_device_train_batch_size=64,
        num_generations=8,
        max_completion_length=32,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        beta=0.04,
        max_steps=STEPS,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        bf16=False,
        disable_tqdm=True,
    ),
    train_dataset=Dataset.from_dict({"prompt": models.prompts("tiny")}),
    processing_class=models.load_tokenizer("tiny"),
    peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
    callbacks=[KLControl(target=0.05, per="token")],  # klamp
)
trainer.remove_callback(PrinterCallback)

# %% [markdown]
# ## Train
#
# `klamp/kl` is the KL that is steered, `klamp/beta` the coefficient, and `klamp/effort` what the clamp undid.

# %%
trainer.train()
print("step  reward      kl    beta  effort")
for row in trainer.state.log_history:
    if "klamp/kl" in row:
        figures = [row[k] for k in ("reward", "klamp/kl", "klamp/beta", "klamp/effort")]
        print(f"{row['step']:4d}" + "".join(f"{x:8.3f}" for x in figures))

# %%
scratch.cleanup()
