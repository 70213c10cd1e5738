"""Everything of TRL and transformers that klamp touches, as it was in TRL 1.16 (transformers 5.22).

When a newer TRL fails here, nothing else in this folder needs reading first: each entry says what klamp relies on and
what to look at again. When all of it passes and a run still misbehaves, compare ``_compute_loss`` and
``_generate_and_score_completions`` of the two versions by hand.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import trl
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import TrainerState
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.trainer.utils import use_adapter

PROBED = "1.16"
BOTH = (GRPOTrainer, RLOOTrainer)
SCORE = "_generate_and_score_completions"
EVENT = ["self", "args", "state", "control", "kwargs"]

# (class, method, its parameters, what klamp relies on)
METHODS = [
    *((c, "_compute_loss", ["self", "model", "inputs"], "klamp stands in front of it") for c in BOTH),
    *((c, "_prepare_inputs", ["self", "generation_batch"], "it fills _buffered_inputs, read for RLOO") for c in BOTH),
    (Trainer, "add_callback", ["self", "callback"], "how KLControl is added"),
    (TrainerCallback, "on_step_begin", EVENT, "before a step's first forward"),
    (
        TrainerCallback,
        "on_step_end",
        ["self", "args", "state", "control", "kwargs"],
        "after the update, before the log",
    ),
]

# (class, method, pattern in its source, what klamp relies on)
SOURCES = [
    (GRPOTrainer, "__init__", r"self\.beta = args\.beta", "the price is the attribute, not args.beta"),
    (GRPOTrainer, "__init__", r"if self\.beta == 0\.0:.*?self\.ref_model = None", "beta 0 makes no reference"),
    (GRPOTrainer, "_compute_loss", r"per_token_loss \+ self\.beta \* per_token_kl", "beta is read at every forward"),
    (
        GRPOTrainer,
        "_compute_loss",
        r'_metrics\[mode\]\["kl"\]\.append\(global_masked_mean',
        "a token mean",
    ),
    (
        GRPOTrainer,
        "_compute_loss",
        r"use_bias_correction_kl:\s+per_token_kl = per_token_kl \* coef_1",
        "weighted_k3",
    ),
    (
        GRPOTrainer,
        "_compute_loss",
        r'in \["grpo", "sapo"\]:\s+loss = \(\(per_token_loss',
        "_reduced: by row",
    ),
    (GRPOTrainer, "_compute_loss", r'\["cispo", "dapo", "vespo"\]', "_reduced: by the batch's tokens"),
    (
        GRPOTrainer,
        "_generate_and_score_completions",
        r'"ref" if "ref" in model\.peft_config else None',
        "the reference",
    ),
    (
        GRPOTrainer,
        "_get_per_token_logps_and_entropies",
        r"fused_lm_head=True",
        "the backbone gives the states",
    ),
    (GRPOTrainer, SCORE, r"advantages / \(std_rewards \+ 1e-4\)", "with_signal: how far rounding is blown up"),
    (GRPOTrainer, SCORE, r'self\.scale_rewards == "batch"', "with_signal: what it is divided by"),
    (
        GRPOTrainer,
        SCORE,
        r'multi_objective_aggregation == "normalize_then_sum"',
        "with_signal: divided whatever the scale",
    ),
    (
        RLOOTrainer,
        "_generate_and_score_completions",
        r"rewards = rewards - self\.beta \* kl",
        "a price on the sequence's sum",
    ),
    (
        RLOOTrainer,
        "_generate_and_score_completions",
        r'\["kl"\]\.append\(\(kl_stats\[0\] / kl_stats\[1\]',
        "kl is a token mean",
    ),
    *((c, "log", r"self\._metrics\[mode\]\.clear\(\)", "metrics live from one log to the next") for c in BOTH),
    *((c, "_prepare_inputs", r"self\._step % generate_every == 0", "when a batch is generated") for c in BOTH),
    (
        Trainer,
        "_run_epoch",
        r"on_pre_optimizer_step.*optimizer\.step\(\).*on_step_end.*_maybe_log_save_evaluate",
        "the order",
    ),
    (Trainer, "__init__", r"self\.callback_handler\.on_init_end\(", "KLControl finds its trainer among its callers"),
    (Trainer, "_save_checkpoint", r"self\.state\.save_to_json", "stateful_callbacks is written with the checkpoint"),
]

ATTRIBUTES = [
    "_buffered_inputs",
    "_metrics",
    "_step",
    "accelerator",
    "args",
    "beta",
    "callback_handler",
    "current_gradient_accumulation_steps",
    "is_deepspeed_enabled",
    "is_fsdp_enabled",
    "max_completion_length",
    "model",
    "num_iterations",
    "ref_model",
    "state",
    "temperature",
]
FIELDS = ["beta", "steps_per_generation", "num_iterations", "sync_ref_model", "disable_dropout"]


def note(what: str) -> str:
    return f"TRL {trl.__version__} differs from {PROBED}, which klamp was made for. Look again at: {what}."


@pytest.mark.parametrize(("owner", "name", "parameters", "why"), METHODS)
def test_signatures(owner: Any, name: str, parameters: list[str], why: str) -> None:
    assert hasattr(owner, name), note(f"{owner.__name__}.{name} is gone; {why}")
    found = list(inspect.signature(getattr(owner, name)).parameters)
    assert found == parameters, note(f"{owner.__name__}.{name}{tuple(found)}; {why}")


@pytest.mark.parametrize(("owner", "name", "pattern", "why"), SOURCES)
def test_what_the_methods_do(owner: Any, name: str, pattern: str, why: str) -> None:
    assert hasattr(owner, name), note(f"{owner.__name__}.{name} is gone; {why}")
    source = inspect.getsource(inspect.unwrap(getattr(owner, name)))
    assert re.search(pattern, source, re.DOTALL), note(f"{owner.__name__}.{name} no longer has /{pattern}/; {why}")


@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
def test_attributes(trainer: Any, kind: str) -> None:
    t = trainer(kind=kind)
    wanted = [a for a in ATTRIBUTES if not hasattr(t, a)]
    wanted = [a for a in wanted if a != "current_gradient_accumulation_steps"]  # set when training starts
    assert not wanted, note(f"{kind}Trainer without {wanted}")
    assert t._metrics["train"] == {}, note("trainer._metrics['train'] is not an empty dictionary of lists at the start")
    t._metrics["train"]["klamp/anything"].append(1.0)


@pytest.mark.parametrize("config", [GRPOConfig, RLOOConfig])
def test_fields(config: Any) -> None:
    missing = [f for f in FIELDS if f not in config.__dataclass_fields__]
    assert not missing, note(f"{config.__name__} without {missing}")


def test_the_forward_of_the_policy_takes_what_klamp_passes() -> None:
    for owner in BOTH:
        found = list(inspect.signature(owner._get_per_token_logps_and_entropies).parameters)
        assert found[:5] == ["self", "model", "input_ids", "attention_mask", "logits_to_keep"], note(str(found))
        from klamp.integrations.trl.tokens import IMAGES

        assert set(IMAGES) <= set(found), note(f"image inputs {set(IMAGES) - set(found)} of {owner.__name__}")


def test_the_rest() -> None:
    assert list(inspect.signature(use_adapter).parameters) == ["model", "adapter_name"], note("use_adapter")
    assert TrainerState().stateful_callbacks == {}, note("TrainerState.stateful_callbacks is no dictionary any more")
