"""uvicorn in a thread of its own, on a port that is known before the first request."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from typing import Any

from klamp.errors import ConfigError, KlampError

STARTS_WITHIN = 30.0
"""Seconds; it takes a fraction of one."""


class Server:
    """An application that answers at ``url`` until ``close``."""

    def __init__(self, app: Any, host: str, port: int) -> None:
        """Port 0 takes a free one."""
        import uvicorn

        self.socket = _bound(host, port)
        self.host, self.port = self.socket.getsockname()[:2]
        config = uvicorn.Config(app, log_level=logging.WARNING, lifespan="off", timeout_graceful_shutdown=5)
        self.uvicorn = uvicorn.Server(config)
        self.thread = threading.Thread(target=self._serve, name=f"klamp-serve-{self.port}", daemon=True)
        self.thread.start()
        began = time.monotonic()
        while not self.uvicorn.started:
            if not self.thread.is_alive() or time.monotonic() - began > STARTS_WITHIN:
                raise KlampError(f"the endpoint at {self.url} did not start.")
            time.sleep(0.005)

    @property
    def url(self) -> str:
        """What an OpenAI client takes as ``base_url``."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/v1"

    def close(self) -> None:
        """Stop answering; requests that run have five seconds."""
        self.uvicorn.should_exit = True
        self.thread.join(timeout=10)
        if self.thread.is_alive():  # a connection that does not end: its thread is a daemon and ends with the process
            self.uvicorn.force_exit = True
            self.thread.join(timeout=5)
        self.socket.close()

    def _serve(self) -> None:
        asyncio.run(self.uvicorn.serve(sockets=[self.socket]))


def _bound(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind, protocol)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"{host}:{port} cannot be listened on: {error}. Choose another --host or --port.") from None
    return found
