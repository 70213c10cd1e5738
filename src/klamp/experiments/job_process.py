"""One run of an experiment, and the process that runs it: ``python -m klamp.experiments.job_process``.

A run is a training run that also reads held-out text and writes what it says at fixed prompts. ``reference.json`` is
made once for an experiment: samples of the reference, what it says at the fixed prompts, and its perplexities. Every
run is read against it.

The process takes one JSON object a line on stdin and sends events back on stdout. When stdin ends it asks its own run
to stop, which saves a checkpoint after the step at hand.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import torch

from klamp import models
from klamp.chat import Prompt, as_text
from klamp.config_io import from_dict, to_dict
from klamp.errors import ConfigError, KlampError
from klamp.experiments.perplexity import Text, heldout, perplexity
from klamp.masked import sum_count
from klamp.models.policy import Policy
from klamp.prompts import load_prompts
from klamp.sampling.rollout import Rollout, parts
from klamp.sampling.sampler import Sampler, context_of
from klamp.seeds import mix
from klamp.train.config import ResolvedConfig, TrainConfig
from klamp.train.kl_after_update import moments, relative_error
from klamp.train.loop import Trainer
from klamp.train.metrics import Accumulator
from klamp.train.run_folder import RunFolder, atomic_text

PROBES = 6
"""Prompts at which every policy is asked for a completion, with the same random numbers."""
PATIENCE = 60.0
"""Seconds that a run waits for the process that had it before."""
Say = Callable[[int, str], None]


@dataclass(frozen=True)
class Job:
    """What a worker needs to know of a run; plain values only."""

    label: str
    config: dict[str, Any]
    """A TrainConfig as plain values."""
    reference: str
    """Path of the experiment's reference.json."""
    heldout: str | None = None
    texts: int = 128
    """Held-out texts that perplexity is taken over; 128 of tiny's 2,000 come within 7 % of all of them, 64 do not."""
    samples: int = 32
    """Samples of the reference that the other perplexity is taken over."""
    every: int = 5
    """Steps between perplexities."""
    fresh: int = 0
    """Samples that KL is read on after the last step."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    @property
    def train_config(self) -> ResolvedConfig:
        """The run's configuration."""
        return from_dict(TrainConfig, self.config, where=self.label).resolved()

    @property
    def steps(self) -> int:
        """Steps of the run."""
        return int(self.config["steps"])


def job(label: str, config: TrainConfig, reference: Path, **options: Any) -> Job:
    """The job that runs ``config``."""
    return Job(label=label, config=to_dict(config), reference=str(reference), **options)


def run_job(job: Job, say: Say) -> None:
    """Train to the last step, from the newest checkpoint where there is one."""
    config = job.train_config
    RunFolder(config.run).wait(PATIENCE)  # whose parent was killed, it may still be finishing its step
    resume = (Path(config.run) / "config.yaml").is_file()
    trainer = Trainer(replace(config, resume=resume), quiet=True, watch=Watch(job, say))
    trainer.run()


def make_reference(job: Job) -> None:
    """Write reference.json: the model before any update, asked what every arm will be asked."""
    config = job.train_config
    tokenizer = models.load_tokenizer(config.model, trust_remote_code=config.trust_remote_code)
    model = models.load_model(config.model, device=_device(config), trust_remote_code=config.trust_remote_code)
    policy = Policy(model, value_head=False, temperature=config.rollout.temperature, lora=False)
    prompts = load_prompts(config.prompts, config.model).given
    encoded = models.encode_prompts(tokenizer, prompts, chat=config.rollout.chat)
    sampler = Sampler(policy, tokenizer, config.rollout, context_of(model))
    drawn = _sample(sampler, encoded, prompts, _spread(len(prompts), job.samples), seed=3)
    probes = _sample(sampler, encoded, prompts, _spread(len(prompts), PROBES), seed=4)
    samples, texts = _texts(drawn), heldout(config.model, tokenizer, job.heldout, job.texts)
    found = {
        "perplexity": {"heldout": perplexity(model, texts), "reference": perplexity(model, samples)},
        "length": float(drawn.mask.sum()) / len(drawn),
        "probes": _probe_rows(tokenizer, probes, torch.zeros(probes.mask.shape)),
        "samples": [asdict(s) for s in samples],
    }
    atomic_text(Path(job.reference), json.dumps(found))


class Watch:
    """Called after every step: perplexities every few steps, completions at the fixed prompts three times a run."""

    def __init__(self, job: Job, say: Say) -> None:
        self.job, self.say = job, say
        third = max(1, job.steps // 3)
        self.probe_steps = {third, 2 * third, job.steps}
        self.texts: list[Text] | None = None
        self.samples = [Text(s["ids"], s["first"]) for s in read_reference(Path(job.reference))["samples"]]

    def __call__(self, step: int, trainer: Trainer) -> dict[str, float]:
        """``heldout/*`` of the policy after this step's update, and ``kl/fresh`` after the last one."""
        window = trainer.learner.control.state.monitor.window
        self.say(step, f"KL {window[-1]['kl']:.3f}" if window else "")
        if step in self.probe_steps:
            self._probe(step, trainer)
        found = fresh_kl(trainer, self.job.fresh) if step == self.job.steps and self.job.fresh else {}
        if step % self.job.every and step != self.job.steps:
            return found
        if self.texts is None:
            self.texts = heldout(trainer.config.model, trainer.tokenizer, self.job.heldout, self.job.texts)
        model = _own_sampler(trainer).model
        return found | {
            "heldout/perplexity": perplexity(model, self.texts),
            "heldout/perplexity_reference": perplexity(model, self.samples),
        }

    def _probe(self, step: int, trainer: Trainer) -> None:
        prompts = trainer.prompts.given
        rollout = _sample(_own_sampler(trainer), trainer.encoded, prompts, _spread(len(prompts), PROBES), seed=4)
        folder = RunFolder(trainer.config.run)
        for row in _probe_rows(trainer.tokenizer, rollout, token_kl(trainer, rollout)):
            folder.append(folder.probes, {"step": step, **row})


def _own_sampler(trainer: Trainer) -> Sampler:
    """The sampler of a run, whose model the experiments read perplexities from."""
    if not isinstance(trainer.sampler, Sampler):
        raise ConfigError(
            "‹rollout.engine=vllm› cannot be compared or swept: perplexities are read from klamp's own sampler. Use "
            "klamp train for runs through a server."
        )
    return trainer.sampler


@torch.no_grad()
def token_kl(trainer: Trainer, rollout: Rollout) -> torch.Tensor:
    """[N, C] exact KL of the tokens of ``rollout`` under the policy as it is now."""
    learner = trainer.learner
    rollout = rollout.to(learner.device)
    wide = learner.device.type != "cuda" or trainer.config.dtype == "float32"
    kl = torch.zeros(rollout.mask.shape, device=learner.device)
    for piece in parts(rollout, torch.arange(len(rollout), device=learner.device), trainer.config.optim.micro_batch):
        with torch.autocast(learner.device.type, dtype=torch.bfloat16, enabled=not wide):
            stats = learner.policy.stats(piece, learner.policy(piece).hidden, learner.reference.states(piece))
        assert stats.kl is not None, "the learner always has a reference"
        piece.put(kl, stats.kl)
    return kl.cpu()


def fresh_kl(trainer: Trainer, count: int) -> dict[str, float]:
    """KL of the policy as it is on ``count`` samples of its own, in the unit of the target, and its relative error.

    They are drawn as a step's are, so many at a time, but are used for nothing else: no update has seen them.
    """
    config, prompts, added = trainer.config, trainer.prompts.given, Accumulator(torch.clone)
    each = config.rollout.prompts * config.rollout.group_size
    rows = _spread(len(prompts), count)
    for i in range(0, count, each):
        rollout = _sample(_own_sampler(trainer), trainer.encoded, prompts, rows[i : i + each], seed=5 + i)
        kl, mask = token_kl(trainer, rollout), rollout.mask.cpu()
        added.add("kl", *sum_count(kl, mask, per=config.kl.unit))
        for name, value in moments(kl, mask, 1, config.kl.unit).items():
            added.add(name, value, torch.ones(()))
    sums = added.totals()
    return {"kl/fresh": sums.mean("kl"), "kl/fresh_noise": relative_error(sums)}


def read_reference(path: Path) -> dict[str, Any]:
    """The contents of reference.json."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error}. Remove it to have it made again.") from None
    if not isinstance(found, dict) or not {"perplexity", "probes", "samples", "length"} <= found.keys():
        raise ConfigError(f"{str(path)!r} is not klamp's. Remove it to have it made again.")
    return found


def _sample(
    sampler: Sampler, encoded: list[list[int]], prompts: list[Prompt], rows: list[int], *, seed: int
) -> Rollout:
    """One completion for each of ``rows``, drawn with random numbers of its own: training's stay untouched."""
    single = copy.copy(sampler)
    single.config = replace(sampler.config, group_size=1)
    device = next(sampler.model.parameters()).device
    generator = torch.Generator(device).manual_seed(mix(0, seed))
    return single.sample([encoded[i] for i in rows], [prompts[i] for i in rows], generator)


def _texts(rollout: Rollout) -> list[Text]:
    """Prompt and completion of every row, of which the completion counts."""
    texts = []
    for ids, attention, mask in zip(rollout.ids.cpu(), rollout.attention.cpu(), rollout.mask.cpu(), strict=True):
        kept = ids[attention.bool()].tolist()
        texts.append(Text(kept, len(kept) - int(mask.sum())))
    return texts


def _probe_rows(tokenizer: Any, rollout: Rollout, kl: torch.Tensor) -> list[dict[str, Any]]:
    rows = []
    for n, (tokens, mask) in enumerate(zip(rollout.tokens.cpu(), rollout.mask.cpu(), strict=True)):
        kept = [int(t) for t in tokens[mask]]
        shown = [tokenizer.decode([t]) for t in kept]
        rows.append(
            {"prompt": as_text(rollout.prompts[n]), "tokens": shown, "kl": [round(float(v), 5) for v in kl[n][mask]]}
        )
    return rows


def _spread(total: int, count: int) -> list[int]:
    """``count`` indices spread over ``total``; all of them, again and again, where there are fewer."""
    return [i * total // count for i in range(count)] if total >= count else [i % total for i in range(count)]


def _device(config: TrainConfig) -> str:
    if config.device != "auto":
        return config.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def main() -> int:
    """Serve jobs until stdin ends."""
    events = _take_stdout()
    orders: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    busy = threading.Event()
    threading.Thread(target=_listen, args=(orders, busy), daemon=True).start()
    while (order := orders.get()) is not None:
        busy.set()
        _serve(order, events)
        busy.clear()
    return 0


def _serve(order: dict[str, Any], events: TextIO) -> None:
    def tell(event: str, **more: Any) -> None:
        # With the parent gone nobody listens; the run goes on to its checkpoint all the same.
        with contextlib.suppress(BrokenPipeError):
            events.write(json.dumps({"event": event, **more}) + "\n")
            events.flush()

    try:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        work = Job(**order["job"])
        if order["kind"] == "reference":
            make_reference(work)
        else:
            run_job(work, lambda step, text: tell("step", step=step, text=text))
    except KlampError as error:
        tell("failed", error=str(error))
    except Exception as error:
        traceback.print_exc()
        tell("failed", error=f"{type(error).__name__}: {error}")
    else:
        tell("done")


def _listen(orders: queue.SimpleQueue[dict[str, Any] | None], busy: threading.Event) -> None:
    for line in sys.stdin:
        orders.put(json.loads(line))
    orders.put(None)
    if busy.is_set():
        os.kill(os.getpid(), signal.SIGTERM)


def _take_stdout() -> TextIO:
    """The real stdout for events; whatever else prints goes to stderr, which is the log."""
    events = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return events


if __name__ == "__main__":
    raise SystemExit(main())
