"""A model served on its own: its engine in a thread, its endpoint in another."""

from __future__ import annotations

import threading
from typing import Any

from klamp.serve.engine import Engine, Limits, Request, split_step
from klamp.serve.saved_models import SavedModels


class Standalone:
    """The door of :class:`~klamp.serve.saved_models.SavedModels`; one thread decodes."""

    def __init__(self, saved: SavedModels, limits: Limits) -> None:
        self.saved, self.engine = saved, Engine(saved, limits)
        self.ready = threading.Condition()
        self.closed = False
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
        """Begin a request, or raise Busy."""
        self.engine.submit(request)
        with self.ready:
            self.ready.notify()

    def close(self) -> None:
        """End the thread after what runs."""
        self.closed = True
        with self.ready:
            self.ready.notify()
        self.thread.join()

    def _run(self) -> None:
        while True:
            with self.ready:
                self.ready.wait_for(lambda: self.closed or self.engine.waiting)
            if self.closed:
                return
            self.engine.run(lambda: self.closed)
