"""Checkpoints: ``checkpoints/step-000040/``, safetensors and JSON only, whole or not there.

A folder is written aside, every file hashed into ``manifest.json``, synced, and renamed. What is in it: the adapter or
the model in the layout of peft and transformers (they load it as it is), the tokenizer, the optimiser, the random
states, the controller's and monitor's state, the reference's identity.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from klamp import models
from klamp.distributed import digest, gathered, put, whole
from klamp.errors import CheckpointError, ConfigError, KlampError, ReferencePolicyError, require_number, shown, writing
from klamp.models.optimizer import moments, restore_moments
from klamp.references import CheckpointStep, StepLag, parse
from klamp.references.spec import folder_of, saved_steps
from klamp.sampling.merged_model import ADAPTER
from klamp.seeds import random_state, restore_random
from klamp.train.config import ResolvedConfig
from klamp.train.learner import Learner
from klamp.train.model_card import model_card
from klamp.train.run_folder import GO_ON, RunFolder, damage, seal, sync_folder

FORMAT = "klamp-checkpoint/1"
NOT_OURS = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, SafetensorError)
"""What reading values that klamp did not write stumbles with."""


@dataclass(frozen=True)
class Saved:
    """A whole checkpoint on disk."""

    step: int
    path: Path


def save(
    run: Path, step: int, learner: Learner, tokenizer: Any, config: ResolvedConfig, *, rewards: Sequence[str] = ()
) -> Path:
    """Write the checkpoint of ``step``; the main process writes, every process calls.

    ``rewards`` are the names of the reward functions, for the model card.
    """
    accelerator = learner.accelerator
    final = folder_of(run, step)
    _check_finite(run, step, learner)
    randoms, contents = _gather_randoms(), collect(learner)
    if accelerator.is_main_process and not (final.is_dir() and damage(final) is None):
        with writing(final, GO_ON):
            folder = RunFolder(run)
            metrics = folder.last() if folder.last_step() == step else {}
            card = model_card(config, step, metrics, rewards)
            _save_aside(final, lambda aside: _write(aside, step, learner, tokenizer, contents, randoms, card))
        _retain(run, step, config)
    accelerator.wait_for_everyone()
    return final


def _save_aside(final: Path, write: Callable[[Path], None]) -> None:
    """Fill a folder aside, seal it, give it its name; one that cannot be filled is removed and its space given back."""
    final.parent.mkdir(parents=True, exist_ok=True)
    sweep(final.parent)
    aside = final.parent / f".{final.name}.{os.getpid()}"
    try:
        aside.mkdir()
        write(aside)
        seal(aside)
    except Exception:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    if final.is_dir():  # one that was passed over as damaged: somebody may want to look at it
        os.rename(final, _free(final.parent / f"damaged-{final.name}"))
    os.rename(aside, final)
    sync_folder(final.parent)


def _free(path: Path) -> Path:
    """``path``, or with a number behind it the first that is not taken."""
    names = (path if n == 1 else path.with_name(f"{path.name}-{n}") for n in itertools.count(1))
    return next(p for p in names if not p.exists())


def _check_finite(run: Path, step: int, learner: Learner) -> None:
    """Refuse to save weights that are NaN or infinite: with them the next saves would push out the last good ones."""
    bad = not_finite(learner)
    if bad:
        there = ", ".join(str(s) for s in saved_steps(run)) or "none"
        raise CheckpointError(
            f"the weights after step {step} are not finite ({bad[0]} first of {len(bad)}) and were not saved. Saved "
            f"steps: {there}; they are as they were. Look at the last samples and rewards, or begin anew with a lower "
            "‹optim.lr›."
        )


def _write(
    folder: Path,
    step: int,
    learner: Learner,
    tokenizer: Any,
    contents: Contents,
    randoms: list[dict[str, Any]],
    card: str,
) -> None:
    policy = learner.policy
    model: Any = policy.model
    # The vocabulary never changes here; asked to find that out, peft would look for the base's config on the Hub.
    extra: dict[str, Any] = {"selected_adapters": [ADAPTER], "save_embedding_layers": False} if policy.lora else {}
    if contents.model is not None:
        extra["state_dict"] = contents.model
    with models._quiet(True):  # no bar of transformers' own in the middle of the run's
        model.save_pretrained(folder, safe_serialization=True, **extra)
    (folder / "README.md").write_text(card, encoding="utf-8")  # in place of peft's, which is a form to fill in
    if policy.lora:
        _in_order(folder / "adapter_config.json")
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    if contents.value:
        save_file(contents.value, folder / "value_head.safetensors")
    save_file(contents.optimizer, folder / "optimizer.safetensors")
    if contents.reference:
        save_file(contents.reference, folder / "reference.safetensors")
    state = {
        "format": FORMAT,
        "step": step,
        "skipped": learner.skipped,
        "future_kl": learner.future_kl.tolist(),
        "steering": learner.control.to_dict(),
        "reference": contents.identity,
        "random": randoms,
        "processes": learner.accelerator.num_processes,
    }
    (folder / "trainer.json").write_text(json.dumps(state, indent=1), encoding="utf-8")


def _in_order(config: Path) -> None:
    """peft writes its sets in the order of this process's hashes; sorted, the same adapter has the same bytes."""
    fields = json.loads(config.read_text(encoding="utf-8"))
    for name in ("target_modules", "exclude_modules", "modules_to_save"):
        if isinstance(fields.get(name), list):
            fields[name] = sorted(fields[name])
    config.write_text(json.dumps(fields, indent=2, sort_keys=True), encoding="utf-8")


def load(saved: Saved, learner: Learner, *, control: bool = True, price: bool = True) -> int:
    """Put everything back as it was after ``saved.step`` and return the step.

    Without ``control`` the learner's stays as it is: that of LocalBackend may be another at every step. Without
    ``price`` the controller has not started, and the rest of the control goes on.
    """
    try:
        return _load(saved, learner, control, price)
    except KlampError:
        raise
    # Whole by its own manifest, and yet not what klamp writes: hand-made, or of another model.
    except (*NOT_OURS, RuntimeError) as error:
        if type(error) is RuntimeError and learner.accelerator.num_processes > 1:  # a lost process says so like this
            raise
        raise CheckpointError(
            f"checkpoint {str(saved.path)!r} does not fit this run: {type(error).__name__} ({error!s:.300}). Remove it "
            "to go on from the one before, or choose another --run."
        ) from error


def _load(saved: Saved, learner: Learner, control: bool, price: bool) -> int:
    folder = saved.path
    state = json.loads((folder / "trainer.json").read_text(encoding="utf-8"))
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        found = state.get("format") if isinstance(state, dict) else type(state).__name__
        raise CheckpointError(f"checkpoint {str(folder)!r} has format {shown(found)}; this klamp reads {FORMAT}.")
    learner.settle()
    _load_weights(folder, learner)
    restore_moments(learner.policy, learner.optimizer, load_file(folder / "optimizer.safetensors"))
    learner.skipped = int(state["skipped"])
    way_out = "Remove the checkpoint to go on from the one before."
    future = [require_number("future_kl", x, way_out=way_out) for x in state.get("future_kl", ())]  # earlier: none
    learner.future_kl = torch.tensor(future, dtype=torch.float64)
    if control:
        steering = state["steering"]
        learner.control = learner.control.from_dict(steering if price else {**steering, "controller": None})
    extra = folder / "reference.safetensors"
    learner.reference.load(load_file(extra) if extra.is_file() else {}, saved.step)
    now = learner.reference.identity()
    same = now["reference"] == state["reference"]["reference"]
    if not same:
        learner.control, learner.future_kl = learner.control.new_reference(), learner.future_kl[:0]
    elif now != state["reference"] and state["reference"]["weights"] != digest({}):
        # The hash of nothing is what earlier versions wrote for a lag before its first step, which is the base.
        raise ReferencePolicyError(
            f"the reference changed since {str(folder)!r} was saved: {state['reference']} then, {now} now. A KL must "
            "be measured against the same reference; restore it, or start a new run."
        )
    randoms = state["random"]
    restore_random(randoms[learner.accelerator.process_index % len(randoms)])
    return saved.step


def newest(run: Path, *, skip_damaged: bool = False) -> Saved | None:
    """The newest whole checkpoint. A damaged one is named in the error, or passed over when asked."""
    problem = None
    for step in reversed(saved_steps(run)):
        path = folder_of(run, step)
        problem = damage(path)
        if problem is None:
            return Saved(step, path)
        if not skip_damaged:
            raise CheckpointError(
                f"checkpoint {str(path)!r} is damaged: {problem}. Remove it to go on from the one before, or add "
                "--skip-damaged."
            )
    if problem is not None:
        raise CheckpointError(
            f"no checkpoint in {str(run / 'checkpoints')!r} is whole; {path.name}, the oldest, is damaged too: "
            f"{problem}. Restore one of them, or remove them all to begin again at step 1."
        )
    return None


def needed_bytes(learner: Learner) -> int:
    """About how large a checkpoint will be: trained weights with two moments each, or the whole model besides."""
    trained = sum(p.numel() * p.element_size() for p in learner.policy.trainable().values())
    return 4 * trained + (1 << 22)


def check_disk(run: Path, learner: Learner) -> None:
    """Refuse to start what could not be saved."""
    there = next(p for p in (run.absolute(), *run.absolute().parents) if p.is_dir())
    needed, free = needed_bytes(learner), shutil.disk_usage(there).free
    if free < 2 * needed:
        raise ConfigError(
            f"run {str(run)!r}: {free / 2**20:.0f} MiB free, and two checkpoints need {2 * needed / 2**20:.0f} MiB. "
            "Free some space, or choose a --run elsewhere."
        )


def sweep(folder: Path) -> None:
    """Remove what a killed process left half written or half deleted."""
    for leftover in folder.glob(".step-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _retain(run: Path, last: int, config: ResolvedConfig) -> None:
    """Delete checkpoints beyond ``keep``, but never one that the reference needs, nor one after ``last``."""
    if config.keep == 0:
        return
    steps = [s for s in saved_steps(run) if s <= last]
    discard(run, set(steps[-config.keep :]), config, steps)


def discard(run: Path, protected: set[int], config: ResolvedConfig, among: list[int] | None = None) -> None:
    """Delete checkpoints other than those ``protected`` and those that the reference of ``config`` needs."""
    steps = saved_steps(run) if among is None else among
    spec = parse(config.kl.reference)
    if isinstance(spec, CheckpointStep):
        protected = protected | {spec.step}
    if isinstance(spec, StepLag):
        # The newest step at least `lag` back, now and at every step until the next save.
        protected = protected | {s for s in steps if s > steps[-1] - spec.lag}
        protected |= set([s for s in steps if s <= steps[-1] - spec.lag][-1:])
    for step in steps:
        if step not in protected:
            _discard(folder_of(run, step))


def _discard(folder: Path) -> None:
    """Take the name away first: a process killed while it deletes leaves no checkpoint with files missing."""
    gone = folder.parent / f".{folder.name}.{os.getpid()}"
    with contextlib.suppress(OSError):
        os.rename(folder, gone)
        shutil.rmtree(gone, ignore_errors=True)


def _load_weights(folder: Path, learner: Learner) -> None:
    policy = learner.policy
    own = dict(policy.model.named_parameters())
    if policy.lora:
        weights = {
            k.replace(".weight", f".{ADAPTER}.weight"): v
            for k, v in load_file(folder / "adapter_model.safetensors").items()
        }
    else:
        weights = _full_weights(folder)
    missing = [n for n, p in own.items() if p.requires_grad and n not in weights]
    if missing:
        raise CheckpointError(f"checkpoint {str(folder)!r} has no {missing[0]!r}. It was saved from another model.")
    for name, value in weights.items():
        if name in own:
            put(own[name], value)
    if policy.value is not None:
        heads = load_file(folder / "value_head.safetensors")
        for name, p in policy.value.named_parameters():
            put(p, heads[name])


def _full_weights(folder: Path) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        weights |= load_file(file)
    return weights


def _gather_randoms() -> list[dict[str, Any]]:
    from accelerate.utils import gather_object

    found: list[dict[str, Any]] = gather_object([random_state()])
    return found


@dataclass(frozen=True)
class Contents:
    """Gathered tensors by name. Empty on processes that do not write."""

    model: dict[str, Tensor] | None
    """The model's weights where they are sharded; None where the model can save itself."""
    value: dict[str, Tensor]
    """PPO's value head."""
    optimizer: dict[str, Tensor]
    reference: dict[str, Tensor]
    """Weights of the reference that exist nowhere else."""
    identity: dict[str, Any]


def collect(learner: Learner) -> Contents:
    """Every process calls; under FSDP2 they gather together, one tensor at a time."""
    keep, sharded, policy = learner.accelerator.is_main_process, learner.sharded, learner.policy
    learner.settle()
    if not (keep or sharded):
        return Contents(None, {}, {}, {}, {})
    model: Any = policy.model
    named = model.state_dict(keep_vars=True) if sharded else {}
    saved = {k: v for k, v in named.items() if not policy.lora or "lora_" in k}
    return Contents(
        model=gathered(saved, keep=keep) if sharded else None,
        value={} if policy.value is None else gathered(policy.value.state_dict(), keep=keep),
        optimizer=gathered(moments(policy, learner.optimizer), keep=keep),
        reference=gathered(learner.reference.tensors(), keep=keep),
        identity=learner.reference.identity(),
    )


def not_finite(learner: Learner) -> list[str]:
    """Trained parameters that hold a NaN or an infinity; the same list on every process."""
    learner.settle()
    return [n for n, p in learner.policy.trainable().items() if bool(whole((~torch.isfinite(p)).sum()) > 0)]
