# %% [markdown]
# # How far did my fine-tune move?
#
# This script measures the exact KL between a fine-tuned model and the model it was made from: how large it is,
# whether it is more than rounding, and on which tokens the two models differ.
#
#     pip install 'klamp[train]'
#     python examples/measure_finetune.py                                # a small fine-tune, made on the spot
#     python examples/measure_finetune.py MY_MODEL BASE_MODEL            # yours: folders, Hub ids or LoRA adapters
#
# It takes about half a minute on one CPU core.

# %%
from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model

import klamp
from klamp import models

PROMPTS = models.prompts("tiny")[:64]  # replace by prompts like those your model will see
OUT = Path(tempfile.mkdtemp())

# %% [markdown]
# ## A model to measure
#
# Skip this cell if you have one. Here a LoRA adapter learns to continue every prompt in the same way.


# %%
def small_finetune(folder: Path, steps: int = 12) -> Path:
    """A LoRA adapter of the built-in model, trained to answer "was excellent." for a few steps."""
    torch.manual_seed(0)
    tokenizer = models.load_tokenizer("tiny")
    lora = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(models.load_model("tiny"), lora)
    batch = tokenizer([f"{p} was excellent." for p in PROMPTS[:16]], return_tensors="pt", padding=True)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    optimiser = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)
    for _ in range(steps):
        model(**batch, labels=labels).loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    model.save_pretrained(folder)
    return folder


if len(sys.argv) > 2:
    policy, reference = sys.argv[1], sys.argv[2]
else:
    policy, reference = str(small_finetune(OUT / "adapter")), "tiny"

# %% [markdown]
# ## Measure
#
# Completions are sampled from the fine-tuned model. At every position the KL is summed over the whole vocabulary. The
# interval is a 95 % confidence interval over prompts.

# %%
found = klamp.measure_kl(policy, reference, PROMPTS, max_tokens=24)

print(f"KL per token     {found.kl.mean:.4f}   95 % interval {found.kl.low:.4f} to {found.kl.high:.4f}")
print(f"KL per sequence  {found.kl_per_sequence.mean:.3f}")
print(f"rounding alone   {found.noise_floor.mean:.1e}")
if found.below_floor:
    print("The difference is within rounding: the models answer alike on these prompts.")

# %% [markdown]
# As a rule of thumb, 0.01 to 0.03 nats per token is a light touch, 0.05 to 0.10 moderate, and more than 0.20 is far.
#
# ## Where do they differ?
#
# Most of the KL usually sits on few tokens.

# %%
print("\nthe tokens with the largest KL")
for token in found.top_tokens[:5]:
    print(f"{token['kl']:8.3f}  {token['token']!r} after {token['before']!r}")

# %% [markdown]
# The page shows every completion with each token shaded by its KL. Hover over a token to see what each model would have
# put there.

# %%
found.to_html(OUT / "measure.html")
print(f"\npage: {OUT / 'measure.html'}")
