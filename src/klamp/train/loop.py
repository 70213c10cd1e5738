"""The loop: prompts → rollouts → rewards → one step under KL control → metrics → checkpoint.

Which prompts a step takes and what it draws follow from (seed, step, process) alone, so a run that was killed goes on
from its last checkpoint exactly as if it had not been.
"""

from __future__ import annotations

import contextlib
import os
import signal
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import torch

from klamp import models
from klamp.chat import as_text
from klamp.errors import ConfigError, KlampError, TrainingError
from klamp.models.optimizer import check_optimizer
from klamp.progress import Display, opening
from klamp.prompts import load_prompts
from klamp.references import parse
from klamp.references.states import check_reference
from klamp.sampling.rollout import Rollout
from klamp.sampling.sampler import context_of
from klamp.sampling.server_sampler import Ahead, ServerSampler
from klamp.seeds import mix, seed_everything
from klamp.train import checkpoint
from klamp.train.config import ResolvedConfig, TrainConfig
from klamp.train.launch import build_policy, check_tracker, make_accelerator, make_sampler
from klamp.train.learner import Learner, Outcome
from klamp.train.metrics import Clock
from klamp.train.preflight import preflight
from klamp.train.resume import Changes
from klamp.train.rewards import RewardFunction, Scorer
from klamp.train.run_folder import RunFolder


class Trainer:
    """A run: everything made once, and the loop over it."""

    def __init__(
        self,
        config: TrainConfig,
        *,
        rewards: Sequence[RewardFunction] | None = None,
        quiet: bool = False,
        watch: Callable[[int, Trainer], dict[str, float]] | None = None,
    ) -> None:
        check_tracker(config.track)
        self.folder, self.watch = RunFolder(config.run), watch
        self.config, self.changes = self.folder.claim(replace(config, model=models.canonical(config.model)))
        config = self.config
        models.resolve(config.model)
        self.prompts = load_prompts(config.prompts, config.model)
        check_reference(
            parse(config.kl.reference),
            self.folder.path,
            config.model,
            full=config.full,
            trust_remote_code=config.trust_remote_code,
        )
        self.scorer = Scorer(config.reward, rewards)
        self.scorer.check_columns(self.prompts.columns)
        self.accelerator = make_accelerator(config)
        _check_processes(config, self.accelerator.num_processes)
        seed_everything(config.seed, self.accelerator.process_index)
        if config.deterministic:
            torch.use_deterministic_algorithms(True)
        self.tokenizer = models.load_tokenizer(config.model, trust_remote_code=config.trust_remote_code)
        self.encoded = models.encode_prompts(self.tokenizer, self.prompts.given, chat=config.rollout.chat)
        context = _context(config)
        self._check_context(context)
        with _together(self.accelerator, config):
            self.learner = _learner(config, self.accelerator)
        self.sampler = make_sampler(config, self.learner, self.tokenizer, context, self.encoded)
        self.display = Display(config.steps, quiet=quiet or not self.accelerator.is_main_process)
        self.stop = Stop(told=not self.display.quiet)
        self.rollouts = Ahead(
            self.sample,
            last=config.steps,
            ahead=config.rollout.ahead > 0,
            stopped=lambda: bool(self.stop.asked) and self.accelerator.num_processes == 1,
        )
        if self.learner.policy.note:
            self.display.say(self.learner.policy.note)

    def run(self) -> dict[str, float]:
        """Train to the last step and return its metrics."""
        with _together(self.accelerator, self.config):
            if not self.accelerator.is_main_process:
                return self._run()
            checkpoint.check_disk(self.folder.path, self.learner)
            with self.folder.lock():
                return self._run()

    def _run(self) -> dict[str, float]:
        done = self._resume()
        metrics = self.folder.last()
        if done < self.config.steps:
            self.display.say(opening(self.config))
        with self.stop.listening(), self.display.live(done), contextlib.closing(self.sampler):
            self._check_server(done)
            for step in range(done + 1, self.config.steps + 1):
                clock = Clock()
                rollout = self._take(step)
                clock.lap("sample")
                scored = self.scorer(rollout.prompts, rollout.completions, rollout.columns)
                clock.lap("reward")
                if step == 1 and self.config.preflight:
                    preflight(self.learner, rollout, sampled=self.config.rollout.engine == "builtin")
                outcome = self.learner.step(step, rollout, scored)
                self.sampler.refresh(step)
                clock.lap("update")
                metrics = self._record(step, outcome, clock, rollout, scored.total.tolist())
                self.stop.agree(self.accelerator)
                self._save_if_due(step)
                self._check_gap(step, metrics)
                self.stop.leave_if_agreed()
        self.display.repeated(self.folder.alarms)
        self.accelerator.end_training()
        return metrics

    def _check_server(self, done: int) -> None:
        """Before the first step: the server holds the run's base, and serves the adapter as it is."""
        if isinstance(self.sampler, ServerSampler):
            if self.accelerator.is_main_process:
                self.sampler.check(self.encoded)
            self.sampler.refresh(done)
            if self.config.rollout.ahead:
                self.display.say("rollout.ahead=1: completions are one update old; the loss corrects for it")

    def _check_gap(self, step: int, metrics: Mapping[str, float]) -> None:
        """Stop where the sampler has left the policy by more than is allowed."""
        limit, gap = self.config.rollout.max_gap, metrics["rollout/gap"]
        if limit is not None and gap > limit:
            raise TrainingError(
                f"sampler and trainer differ by {gap:.3g} nats a token at step {step}, more than ‹rollout.max_gap="
                f"{limit:g}›. Look at rollout/version_lag and the server's dtype, or raise the limit."
            )

    def _take(self, step: int) -> Rollout:
        """The step's rollout; klamp's own sampler needs the device to itself, so nothing is drawn beside it."""
        if self.config.rollout.engine == "builtin":
            return self.sample(step)
        rollout = self.rollouts.take(step)
        if rollout is None:  # stopped while it waited for the server: what is done is saved
            self.stop.leaving = self.stop.asked
            if step > 1:
                self._save_if_due(step - 1)
            self.stop.leave_if_agreed()
        assert rollout is not None, "leaving ends the run"
        return rollout

    def sample(self, step: int) -> Rollout:
        """This process's share of the step's prompts, with their completions."""
        config, rank, ranks = self.config, self.accelerator.process_index, self.accelerator.num_processes
        picked = self.prompts.of_step(step - 1, config.rollout.prompts, config.seed)
        share = len(picked) // ranks
        own = picked[rank * share : (rank + 1) * share]
        generator = torch.Generator(self.learner.device).manual_seed(mix(config.seed, step, rank, 2))
        rollout = self.sampler.sample([self.encoded[i] for i in own], [self.prompts.given[i] for i in own], generator)
        taken = [i for n, i in enumerate(own) if n not in rollout.left_out]
        repeated = [i for i in taken for _ in range(config.rollout.group_size)]
        return replace(rollout, columns={k: [v[i] for i in repeated] for k, v in self.prompts.columns.items()})

    def _resume(self) -> int:
        """Steps already done: from the newest whole checkpoint when resuming, none otherwise."""
        config = self.config
        main = self.accelerator.is_main_process
        saved = None
        if config.resume:  # before anything is written: a damaged one stops the run, and all stays as it was
            saved = checkpoint.newest(self.folder.path, skip_damaged=config.skip_damaged)
        if main:
            if saved is not None:  # noted before it is done: killed in between, the next resumption notes it again
                self.folder.note_resumed(saved.step, self.changes)
            self.folder.write_config(replace(config, resume=False))
        if config.track:  # trackers write into the folder, which is this run's from here on
            self.accelerator.init_trackers(Path(config.run).name)
        done = 0
        if saved is not None:
            since = self.folder.changes_since(saved.step, self.changes)
            done = checkpoint.load(saved, self.learner, price="kl.beta" not in since)
            self.sampler.refresh(done)
            if "kl.target" in since:
                self.learner.control = self.learner.control.retarget(*since["kl.target"])
            if "kl.beta" in since:
                self.learner.control = self.learner.control.init()
            self.display.say(f"resuming after step {done} from {saved.path}{_told(self.changes)}")
        elif config.resume:
            self.display.say("nothing to resume: no checkpoint yet, starting at step 1")
        if main:
            self.folder.rewind(done)
            checkpoint.sweep(self.folder.path / "checkpoints")
        self.accelerator.wait_for_everyone()
        return done

    def _record(
        self, step: int, outcome: Outcome, clock: Clock, rollout: Rollout, rewards: list[float]
    ) -> dict[str, float]:
        metrics = dict(outcome.metrics)
        if rollout.version is not None:
            metrics |= {
                "rollout/version_lag": float(step - 1 - rollout.version),
                "rollout/failed": float(len(rollout.left_out)),
            }
        if self.watch is not None:
            metrics |= self.watch(step, self)
        clock.lap("watch")
        metrics |= clock.metrics(metrics["train/tokens"])
        if self.accelerator.is_main_process:
            self.folder.append(self.folder.metrics, {"step": step, **metrics})
            for alarm in outcome.alarms:
                self.folder.append(self.folder.alarms, alarm.to_dict())
            if step % self.config.sample_every == 0 or step in (1, self.config.steps):
                self._write_samples(step, outcome, rollout, rewards)
        self.accelerator.log(metrics, step=step)
        self.display.step(step, metrics, outcome.alarms)
        return metrics

    def _write_samples(self, step: int, outcome: Outcome, rollout: Rollout, rewards: list[float]) -> None:
        """The first completion of each prompt with the KL of its tokens."""
        mask, tokens, kl = rollout.mask.cpu(), rollout.tokens.cpu(), outcome.token_kl.cpu()
        for row in range(0, len(rollout), rollout.group_size):
            keep = mask[row]
            self.folder.append(
                self.folder.samples,
                {
                    "step": step,
                    "prompt": as_text(rollout.prompts[row]),
                    "completion": rollout.completions[row],
                    "reward": rewards[row],
                    **({} if rollout.version is None else {"version": rollout.version}),
                    "tokens": [self.tokenizer.decode([int(t)]) for t in tokens[row][keep]],
                    "kl": [round(float(v), 6) for v in kl[row][keep]],
                },
            )

    def _save_if_due(self, step: int) -> None:
        due = step % self.config.save_every == 0 or step == self.config.steps or self.stop.leaving
        if due:
            named = list(self.scorer.functions)
            checkpoint.save(self.folder.path, step, self.learner, self.tokenizer, self.config, rewards=named)

    def _check_context(self, context: int | None) -> None:
        if context is None:
            return
        room = context - self.config.rollout.max_tokens
        for n, ids in enumerate(self.encoded):
            if len(ids) > room:
                raise ConfigError(
                    f"prompt {n + 1} has {len(ids)} tokens; the model's context of {context} less ‹rollout.max_tokens="
                    f"{self.config.rollout.max_tokens}› leaves {room}. Shorten {self.prompts.texts[n][:60]!r}..."
                )


def train_policy(
    config: TrainConfig, *, rewards: Sequence[RewardFunction] | None = None, quiet: bool = False
) -> dict[str, float]:
    """Train as ``klamp train`` does.

    Args:
        config: the settings. With ``resume`` the run continues from its last checkpoint.
        rewards: reward functions, in place of ``config.reward.functions``.
        quiet: print nothing.

    Returns:
        The metrics of the last step.
    """
    return Trainer(config, rewards=rewards, quiet=quiet).run()


class Stop:
    """SIGTERM and Ctrl-C end the run after the step at hand, with a checkpoint; a second one ends it at once."""

    def __init__(self, *, told: bool = False) -> None:
        self.told = told
        """Whether the first signal is answered on stderr."""
        self.asked = 0
        """The signal this process heard."""
        self.leaving = 0
        """The signal that all processes agreed to leave by, at the last :meth:`agree`."""
        self.before: dict[int, Any] = {}

    def listening(self) -> Stop:
        """A context in which signals are heard; only the main thread can hear them."""
        return self

    def __enter__(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            try:
                self.before[number] = signal.signal(number, self._hear)
            except ValueError:
                return

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise SystemExit(128 + number)
        self.asked = number
        if self.told:  # not by print: the signal may have come in the middle of another
            os.write(2, b"\nstopping after this step, with a checkpoint; once more stops at once\n")

    def agree(self, accelerator: Any) -> None:
        """A signal that one process heard counts for all: saving is something they do together.

        One that comes later counts at the next step, or a process would save and leave alone.
        """
        self.leaving = self.asked
        if accelerator.num_processes > 1:
            heard = torch.zeros(accelerator.num_processes, device=accelerator.device)
            heard[accelerator.process_index] = self.asked
            self.leaving = int(accelerator.reduce(heard, reduction="sum").max())

    def leave_if_agreed(self) -> None:
        """Exit with the usual code once the step is saved."""
        if self.leaving:
            raise SystemExit(128 + self.leaving)


@contextlib.contextmanager
def _together(accelerator: Any, config: ResolvedConfig) -> Iterator[None]:
    """Say in klamp's words that another process of the run is gone, or has not answered in time."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, KlampError) or accelerator.num_processes == 1 or not _lost(error):
            raise
        raise TrainingError(
            f"process {accelerator.process_index} of {accelerator.num_processes} lost another one, which died or gave "
            f"no answer within process_timeout={config.process_timeout:g} s ({' '.join(str(error).split())[:200]}). "
            "Look for its last words, then start all of them again with --resume."
        ) from error


def _told(changes: Changes) -> str:
    """`` with kl.target 0.1 (was 0.05)`` and so on; nothing where nothing changed."""
    told = ", ".join(f"{field} {now} (was {was})" for field, (was, now) in changes.items())
    return f" with {told}" if told else ""


def _lost(error: RuntimeError) -> bool:
    """Whether this is how torch says that a process cannot be reached; gloo has only words for it."""
    signs = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out", "timeout", "NCCL")
    return isinstance(error, torch.distributed.DistError) or any(sign in str(error) for sign in signs)


def _context(config: ResolvedConfig) -> int | None:
    """The model's context, from its configuration alone."""
    from transformers import AutoConfig

    source = models.resolve(config.model)
    try:
        settings = AutoConfig.from_pretrained(source, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model {config.model!r} could not be loaded: {' '.join(str(error).split())[:400]}") from None
    return context_of(SimpleNamespace(config=settings))


def _learner(config: ResolvedConfig, accelerator: Any) -> Learner:
    if config.rollout.top_p < 1:
        warnings.warn(
            f"rollout.top_p={config.rollout.top_p}: tokens are drawn from a cut distribution, and ratios cannot "
            "correct for what was cut. KL and log-probs of the trainer are those of the whole distribution.",
            stacklevel=2,
        )
    device = accelerator.device
    master = config.full and config.optim.name != "adamw8bit"  # which rounds at random what float32 weights would keep
    wide = config.dtype == "float32" or (config.dtype == "auto" and device.type == "cpu") or master
    dtype = torch.float32 if wide else torch.bfloat16
    model = models.load_model(config.model, dtype=dtype, device=device, trust_remote_code=config.trust_remote_code)
    return Learner(config, build_policy(model, config), accelerator, Path(config.run))


def _check_processes(config: ResolvedConfig, processes: int) -> None:
    check_optimizer(config.optim, processes)
    if config.rollout.prompts % processes:
        raise ConfigError(
            f"‹rollout.prompts={config.rollout.prompts}› does not divide over {processes} processes. Make it "
            "a multiple."
        )
    share = config.rollout.prompts // processes * config.rollout.group_size
    if config.algorithm.minibatches > share:
        raise ConfigError(
            f"‹algorithm.minibatches› {config.algorithm.minibatches} is more than the {share} completions a process "
            f"has with {processes} of them. Lower it."
        )
