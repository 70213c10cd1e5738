"""The weights that ``klamp serve`` finds: a model, a LoRA adapter, or the steps that a run has saved."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

from klamp import models
from klamp.chat import Encoder
from klamp.errors import ConfigError, NoSuchModel
from klamp.references.spec import saved_steps
from klamp.sampling.families import check_sampled
from klamp.sampling.sampler import context_of, end_ids
from klamp.serve.engine import STEPS_IN_MEMORY, Engine, Limits, Model, Request, split_step


class SavedModels:
    """A model by its name, and where ``source`` is a run's folder, by ``name@step``; read when first asked for."""

    def __init__(self, source: str, name: str, *, device: str, dtype: str | None = None) -> None:
        self.source, self.name, self.device, self.dtype = source, name, device, dtype
        folder = Path(source).expanduser()
        self.run = folder if saved_steps(folder) and not (folder / "config.json").is_file() else None
        self.loaded: OrderedDict[int | None, Any] = OrderedDict()
        base = source if self.run is None else str(_step_folder(self.run, saved_steps(self.run)[-1]))
        self.tokenizer = models.load_tokenizer(_base_of(base) or base)
        model = self._load(self._newest())
        self.encoder = Encoder(
            self.tokenizer,
            vocabulary=int(model.get_input_embeddings().weight.shape[0]),
            context=context_of(model),
            end=end_ids(self.tokenizer, model),
        )

    def names(self) -> list[str]:
        """The model's name, and one for every saved step."""
        steps = saved_steps(self.run) if self.run is not None else []
        return [self.name, *(f"{self.name}@{step}" for step in steps)]

    def weights(self, name: str) -> Model:
        """The newest step, or the one that is named."""
        _, step = split_step(name)
        if step is not None and (self.run is None or step not in saved_steps(self.run)):
            raise NoSuchModel(name, self.names())
        step = self._newest() if step is None else step
        return Model(self._load(step), step)

    def _newest(self) -> int | None:
        return saved_steps(self.run)[-1] if self.run is not None else None

    def _load(self, step: int | None) -> Any:
        if step not in self.loaded:
            while len(self.loaded) >= STEPS_IN_MEMORY:
                self.loaded.popitem(last=False)
            place = self.source if self.run is None or step is None else str(_step_folder(self.run, step))
            self.loaded[step] = load_merged(place, device=self.device, dtype=self.dtype)
            check_sampled(self.loaded[step])
        self.loaded.move_to_end(step)
        return self.loaded[step]


def load_merged(place: str, *, device: str, dtype: str | None = None) -> Any:
    """A model, or the base of an adapter's folder with the adapter merged into it."""
    base = _base_of(place)
    model = models.load_model(base or place, device=device, dtype=dtype)
    if base is None:
        return model
    from peft import PeftModel

    try:
        return PeftModel.from_pretrained(model, place).merge_and_unload().eval()
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError, OSError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"adapter {place!r} was not made for its base model {base!r}: {first}") from None


def _base_of(place: str) -> str | None:
    """The base model that an adapter's folder names; None for a model of its own."""
    file = Path(place).expanduser() / "adapter_config.json"
    if not file.is_file():
        return None
    base = json.loads(file.read_text(encoding="utf-8")).get("base_model_name_or_path")
    if not base:
        raise ConfigError(f"adapter {place!r} does not say which model it is for (base_model_name_or_path).")
    return str(base)


def _step_folder(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:06d}"


class Standalone:
    """The door of :class:`~klamp.serve.saved_models.SavedModels`; one thread decodes."""

    def __init__(self, saved: SavedModels, limits: Limits) -> None:
        self.saved, self.engine = saved, Engine(saved, limits)
        self.ready = threading.Condition()
        self.thread = threading.Thread(target=self._run, name="klamp-engine", daemon=True)
        self.thread.start()

    @property
    def tokenizer(self) -> Any:
        """For the text of tokens."""
        return self.saved.tokenizer

    @property
    def end(self) -> tuple[int, ...]:
        """Tokens that end a sequence."""
        return self.saved.encoder.end

    def names(self) -> list[str]:
        """The model and its saved steps."""
        return self.saved.names()

    def find(self, name: str) -> Standalone | None:
        """Itself, where ``name`` is its own, with or without a step that is saved."""
        base, step = split_step(name)
        return self if name == self.saved.name or (step is not None and base == self.saved.name) else None

    def submit(self, request: Request) -> None:
        """Begin a request, or raise Busy or Closed."""
        self.engine.submit(request)
        with self.ready:
            self.ready.notify()

    def close(self) -> None:
        """End the thread before its next token; whoever waits is told."""
        self.engine.close()
        with self.ready:
            self.ready.notify()
        self.thread.join()

    def _run(self) -> None:
        while not self.engine.closed:
            self.engine.run()
            with self.ready:
                self.ready.wait_for(lambda: self.engine.closed or self.engine.waiting)
