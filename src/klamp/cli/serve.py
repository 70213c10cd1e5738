"""``klamp serve``."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from klamp.errors import ConfigError

if TYPE_CHECKING:
    from klamp.serve.app import Server
    from klamp.serve.engine import Limits
    from klamp.serve.saved_models import Standalone


def serve(
    model: str | None = None,
    /,
    *,
    name: str | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    key: str | None = None,
    forward: str | None = None,
    device: str = "auto",
    queue: int = 1024,
    batch: int = 64,
    max_tokens: int = 4096,
) -> None:
    """Answer OpenAI clients with a model, an adapter, or the steps of a run (name@step).

    Args:
        model: A folder, a Hub id, a built-in name, the folder of an adapter, or the folder of a run.
        name: What clients ask for; the last part of the model's name unless given.
        host: Address to listen on. 127.0.0.1 can be reached from this machine alone.
        port: Port to listen on; 0 takes a free one.
        key: API key that clients must send; KLAMP_API_KEY where it is not given.
        forward: Pass requests on to this server (http://host:port/v1) instead of loading a model.
        device: auto, cpu, cuda or cuda:N.
        queue: Completions that may wait or run at the same time; more are answered with 429.
        batch: Completions that are decoded together.
        max_tokens: Tokens of a completion at most.
    """
    from klamp.serve.app import Server, make_app
    from klamp.serve.engine import Limits

    for flag, value in (("queue", queue), ("batch", batch), ("max-tokens", max_tokens)):
        if value < 1:
            raise ConfigError(f"--{flag} must be >= 1, got {value}. It is a count.")
    if (model is None) == (forward is None):
        raise ConfigError("klamp serve needs a model, or --forward URL. Give one of them.")
    key = key or os.environ.get("KLAMP_API_KEY") or None
    limits = Limits(queue=queue, batch=min(batch, queue), tokens=max_tokens)
    door = None if model is None else _opened(model, name, device, limits)
    if door is None:
        app = make_app(lambda _: None, list, limits=limits, key=key, forward=forward)
    else:
        app = make_app(door.find, lambda: [door], limits=limits, key=key)
    served = [str(forward)] if door is None else door.names()
    done = (lambda: None) if door is None else door.close
    _until_stopped(Server(app, host, port), served, "with a key" if key else "without a key", done)


def _opened(model: str, name: str | None, device: str, limits: Limits) -> Standalone:
    """The model behind an engine of its own."""
    import torch

    from klamp.models import known_device
    from klamp.serve.saved_models import SavedModels, Standalone

    place = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else str(known_device(device))
    return Standalone(SavedModels(model, name or Path(model).name, device=place), limits)


def _until_stopped(server: Server, served: list[str], guarded: str, done: Callable[[], None]) -> None:
    """Say where the endpoint is, and answer until SIGINT or SIGTERM; then call ``done``, which ends the engine."""
    shown = ", ".join(served[:1] + served[-1:] if len(served) > 2 else served)
    print(f"{shown} at {server.url}, {guarded}. Ctrl-C ends it.", flush=True)
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    stopped.wait()
    server.close(done)
