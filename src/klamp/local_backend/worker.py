"""One model in memory: policy, optimiser, reference and sampler. Every call comes from the backend's thread for it.

A call of ``train`` is one step of the trainer's own :class:`~klamp.train.learner.Learner`, written to disk before it
returns. A call that fails leaves the model at the step before.
"""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from klamp import models
from klamp.chat import Encoder
from klamp.errors import ConfigError, KlampError, ReferencePolicyError
from klamp.local_backend.arguments import Arguments, Place
from klamp.local_backend.completions import Completions
from klamp.local_backend.tokenized_trajectories import Batch
from klamp.monitor import Alarm
from klamp.references import AdapterPath, Base, Ema, Periodic, ReferenceSpec, StepLag, parse, states
from klamp.references.spec import folder_of, saved_steps
from klamp.sampling.sampler import context_of, end_ids
from klamp.seeds import mix
from klamp.train import checkpoint
from klamp.train.config import ResolvedConfig, TrainConfig
from klamp.train.kl_config import control_of
from klamp.train.launch import make_accelerator
from klamp.train.learner import Learner, Outcome
from klamp.train.loop import _learner
from klamp.train.preflight import preflight
from klamp.train.run_folder import RunFolder, atomic_text


@dataclass(frozen=True)
class TrainResult:
    """What a call of ``train`` did."""

    step: int
    """Steps done, this one included."""
    metrics: dict[str, float]
    checkpoint_path: str
    """The adapter after the step; peft and transformers load it as it is."""
    alarms: list[Alarm]
    reference: dict[str, Any]
    """What KL was measured to: its text and the hash of its weights."""

    @property
    def summary(self) -> str:
        """The step in a line."""
        m = self.metrics
        return (
            f"step {self.step}: reward {m['reward/mean']:.4f}, KL {m['kl/ref/exact']:.4f} a token to "
            f"{self.reference['reference']}, price {m['kl/beta']:.4g}, {m['time/step']:.1f} s"
        )


class Worker:
    """A model folder, opened: at its newest checkpoint, or at step 0, which is saved."""

    def __init__(self, place: Place) -> None:
        self.place, self.folder = place, RunFolder(place.folder)
        config = TrainConfig(
            model=place.base_model,
            run=str(place.folder),
            seed=place.seed,
            device=place.device,
            keep=place.keep,
            lora=place.lora,
        ).resolved()
        place.folder.mkdir(parents=True, exist_ok=True)
        with self.folder.lock(), _randomness_untouched():
            accelerator = make_accelerator(config)
            if accelerator.num_processes > 1:
                raise ConfigError("LocalBackend trains in one process. For several use torchrun -m klamp train.")
            self.tokenizer = models.load_tokenizer(place.base_model)
            torch.manual_seed(mix(place.seed, 1))
            self.learner: Learner = _learner(config, accelerator)
            self._claim()
            self._go_on(config)
        model: Any = self.learner.policy.model
        self.encoder = Encoder(
            self.tokenizer,
            vocabulary=int(model.get_input_embeddings().weight.shape[0]),
            context=context_of(model),
            end=end_ids(self.tokenizer, model),
        )
        self.completions = Completions(self)

    # -- the folder -------------------------------------------------------------------------------------------------

    def _claim(self) -> None:
        """Refuse a folder of another base, adapter shape or seed; the base by the hash of its weights."""
        base = states.AdapterOff(self.learner.policy, None, Base()).identity()["weights"]
        lora, file = self.place.lora, self.place.folder / "model.json"
        mine = {"base_model": self.place.base_model, "weights": base, "rank": lora.rank, "alpha": lora.alpha}
        mine |= {"targets": lora.targets, "seed": self.place.seed}
        if not file.is_file():
            if saved_steps(self.place.folder):
                raise ConfigError(
                    f"{str(self.place.folder)!r} holds checkpoints of something else: model.json is missing. Choose "
                    "another name or path."
                )
            atomic_text(file, json.dumps(mine, indent=1) + "\n")
            return
        saved = json.loads(file.read_text(encoding="utf-8"))
        different = [k for k in mine if saved.get(k) != mine[k] and k != "base_model"]
        if different:
            name = different[0]
            raise ConfigError(
                f"the model in {str(self.place.folder)!r} was made with {name}={saved.get(name)!r} (base_model "
                f"{saved.get('base_model')!r}), not {mine[name]!r}. Use those, or another name."
            )

    def _go_on(self, config: ResolvedConfig) -> None:
        saved = checkpoint.newest(self.place.folder)
        if saved is None:
            checkpoint.check_disk(self.place.folder, self.learner)
            path = checkpoint.save(self.place.folder, 0, self.learner, self.tokenizer, config)
            saved = checkpoint.Saved(0, path)
        else:
            checkpoint.load(saved, self.learner, control=False)
        self._remember(saved.step, saved.path)
        self.held = ""
        self.folder.rewind(self.step)

    def _remember(self, step: int, path: Path) -> None:
        """What the next step goes on from, as it is on disk: a restart reads the same."""
        state = json.loads((path / "trainer.json").read_text(encoding="utf-8"))
        self.step, self.path = step, path
        self.steering: dict[str, Any] = state["steering"]
        self.anchored: dict[str, Any] = state["reference"]

    # -- training ---------------------------------------------------------------------------------------------------

    def train(self, groups: Sequence[Any], arguments: Arguments) -> TrainResult:
        """One step on ``groups``, saved."""
        began = time.perf_counter()
        batch = Batch.of(groups, self.encoder, arguments, now=self.step)
        step = self.step + 1
        config = arguments.config(
            self.place, step=step, groups=batch.groups, largest=batch.largest, temperature=batch.temperature
        )
        with self.folder.lock():
            self._check_current()
            checkpoint.check_disk(self.place.folder, self.learner)
            self._hold_to(parse(config.kl.reference))
            self._settle(config, arguments)
            before = self.learner.reference.identity() if self._moves() else None
            try:
                outcome = self._step(step, batch, config, arguments)
                metrics = {
                    **outcome.metrics,
                    **batch.metrics(outcome.sampler_gap),
                    "time/step": time.perf_counter() - began,
                }
                self._write(step, config, outcome, metrics)
            except BaseException:
                self._back()
                raise
            self._remember(step, folder_of(self.place.folder, step))
        self.completions.asked = 0
        return TrainResult(step, metrics, str(self.path), outcome.alarms, before or self.anchored)

    def _step(self, step: int, batch: Batch, config: ResolvedConfig, arguments: Arguments) -> Outcome:
        rollout, scored = batch.tensors(int(self.tokenizer.pad_token_id), arguments)
        if step == 1 and batch.says_something:
            preflight(self.learner, rollout)
        outcome = self.learner.step(step, rollout, scored, stale=batch.stale)
        self.completions.refresh()
        return outcome

    def _write(self, step: int, config: ResolvedConfig, outcome: Outcome, metrics: dict[str, float]) -> None:
        self.folder.write_config(config)
        self.folder.append(self.folder.metrics, {"step": step, **metrics})
        for alarm in outcome.alarms:
            self.folder.append(self.folder.alarms, alarm.to_dict())
        checkpoint.save(self.place.folder, step, self.learner, self.tokenizer, config)

    def _settle(self, config: ResolvedConfig, arguments: Arguments) -> None:
        """This step's settings on the learner; a controller with the settings of the step before goes on from there."""
        learner = self.learner
        learner.config = config
        learner.policy.temperature = config.rollout.temperature
        for group in learner.optimizer.param_groups:
            group["initial_lr"] = config.optim.lr
        control = control_of(config.kl, arguments.priced)
        if self.steering.get("settings") == control.to_dict()["settings"]:
            control = control.from_dict(self.steering)
        learner.control = control if self.anchored["reference"] == config.kl.reference else control.new_reference()

    def _check_current(self) -> None:
        newest = max(saved_steps(self.place.folder), default=-1)
        if newest != self.step:
            raise KlampError(
                f"the model in {str(self.place.folder)!r} is at step {newest} on disk and at step {self.step} here: "
                "somebody else trained it, or removed its checkpoints. Make a new LocalBackend to go on from the disk."
            )

    def _back(self) -> None:
        """The model as it was before a step that failed."""
        self.learner.optimizer.zero_grad(set_to_none=True)
        self.learner.optimizer.state.clear()
        self._release()
        with _randomness_untouched():
            checkpoint.load(checkpoint.Saved(self.step, self.path), self.learner, control=False)
        self.folder.rewind(self.step)
        self.completions.refresh()

    def delete_checkpoints(self, keep: Sequence[int]) -> list[int]:
        """Delete other steps than ``keep``, the newest and those that the newest step's reference needs."""
        with self.folder.lock():
            config = self.folder.own_config() if self.step else TrainConfig(model=self.place.base_model).resolved()
            checkpoint.discard(self.place.folder, {self.step, *keep}, config)
        return saved_steps(self.place.folder)

    # -- the reference ----------------------------------------------------------------------------------------------

    def _hold_to(self, spec: ReferenceSpec) -> None:
        """Measure to ``spec`` from now on: loaded once, looked at again when its files change."""
        text, again = str(spec), str(spec) == self.anchored["reference"]
        wanted = text + _stamp(spec)
        if self.held != wanted:
            states.check_reference(spec, self.place.folder, self.place.base_model, full=False)
            self._release()
            with _randomness_untouched():  # an adapter is made with random weights before its own are loaded
                self.learner.reference = states.make_reference(
                    self.learner.policy, self.learner._forward, spec, self.place.folder
                )
            self.held = wanted
            extra = self.path / "reference.safetensors"
            if again and extra.is_file():
                self.learner.reference.load(load_file(extra), self.step)
            if again and not self._moves():
                self._same_weights()
        if isinstance(spec, StepLag):
            with _randomness_untouched():
                self.learner.reference.load({}, self.step)

    def _moves(self) -> bool:
        return isinstance(self.learner.reference.spec, StepLag | Ema | Periodic)

    def _same_weights(self) -> None:
        now = self.learner.reference.identity()
        if now != self.anchored:
            self._release()
            raise ReferencePolicyError(
                f"the reference {now['reference']} has other weights than at step {self.step} ({now['weights']}, then "
                f"{self.anchored['weights']}). A KL must be measured to the same reference: restore it, or give the "
                "new one another path."
            )

    def _release(self) -> None:
        """Unload a reference of its own weights; the base, which needs none, in its place."""
        policy = self.learner.policy
        model: Any = policy.model
        self.learner.reference = states.AdapterOff(policy, self.learner._forward, Base())
        self.held = ""
        if states.REFERENCE in model.peft_config:
            with states._keeping_trainable(policy):
                model.delete_adapter(states.REFERENCE)


def _stamp(spec: ReferenceSpec) -> str:
    """When and how large the files of an adapter are: other than before, it is loaded anew."""
    if not isinstance(spec, AdapterPath):
        return ""
    files = [Path(spec.path) / name for name in ("adapter_model.safetensors", "adapter_config.json")]
    return "".join(f" {f.stat().st_mtime_ns} {f.stat().st_size} {f.stat().st_ino}" for f in files if f.is_file())


@contextlib.contextmanager
def _randomness_untouched() -> Iterator[None]:
    """Random numbers of the caller's program go on as if nothing had happened here."""
    python, used = random.getstate(), torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = [torch.cuda.current_device()] if used else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
