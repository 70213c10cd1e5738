"""The page of a run while it trains: a process of its own that serves it on 127.0.0.1, to this machine alone.

It answers GET for two names, ``/`` and ``/state.json``, made from the run's own files; no path of a request ever
becomes a path on disk, and nothing is written. A process rather than a thread, so that drawing takes no time from the
training; it ends with the process that started it.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import math
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from klamp.errors import ConfigError
from klamp.report.charts import View, chart_data
from klamp.report.html import parts, policy, render
from klamp.report.write import runs_view
from klamp.results import records

HOST = "127.0.0.1"
LOOK = 2.0
"""Seconds between the looks of an open page."""
SHARE = 0.05
"""Share of a core that making the page may take: of a run of a million steps it is made less often."""
LINGER = 2 * LOOK
"""Seconds that open pages are given, once the run has ended, to take their last look."""
FILES = ("config.yaml", "metrics.jsonl", "alarms.jsonl", "samples.jsonl", "probes.jsonl", "events.jsonl")
WAITING = "Waiting for the first step."


class Watched:
    """A run's page, made again when the run's files have changed."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.lock = threading.Lock()
        self.made: tuple[View, dict[str, Any]] | None = None
        self.seen: Any = None
        self.due = 0.0
        self.ended = False
        self.asked = -math.inf
        """When a page last asked for anything, by the monotonic clock."""

    def look(self) -> tuple[View, dict[str, Any]]:
        """The view and the numbers of its charts, with a version that changes when they do."""
        with self.lock:
            begun = time.thread_time()
            now = _stamps(self.run)
            if self.made is None or (now != self.seen and (time.monotonic() >= self.due or self.ended)):
                view = _view(self.run)
                self.made = view, {**chart_data(view), "version": secrets.token_hex(8)}
                self.seen = now
                self.due = time.monotonic() + (time.thread_time() - begun) / SHARE
            return self.made

    def state(self) -> dict[str, Any]:
        """What an open page asks for."""
        view, data = self.look()
        done = max((run.last_step for arm in view.arms for run in arm.runs), default=0)
        steps = view.settings.get("steps")
        of = f"step {done} of {steps}" if isinstance(steps, int) else f"step {done}"
        ended = "finished" if done == steps else "stopped"
        status = f"{ended}: {of}" if self.ended else f"live: {of}" if done else "live"
        return {"parts": parts(view, data), "data": data, "ended": self.ended, "status": status}

    def page(self) -> tuple[str, str]:
        """The whole page and the nonce of its scripts."""
        view, data = self.look()
        nonce = secrets.token_hex(16)
        return render(view, data, live=LOOK, nonce=nonce), nonce


def _stamps(run: Path) -> list[tuple[int, int] | None]:
    """Size and time of each of the run's files."""
    found: list[tuple[int, int] | None] = []
    for name in FILES:
        try:
            about = (run / name).stat()
        except OSError:
            found.append(None)
        else:
            found.append((about.st_size, about.st_mtime_ns))
    return found


def _view(run: Path) -> View:
    """The page of the run; before its first step, and while its files cannot be read, one that says so."""
    blank = View(
        kind="runs", title=run.resolve().name, headline=WAITING, sentence="", arms=[], target=None, per="token"
    )
    if not (run / "metrics.jsonl").is_file():
        return blank
    try:
        record = records.read(run)
        return runs_view([record]) if record.last_step else blank
    except ConfigError as error:
        return View(**{**vars(blank), "headline": "The run's files cannot be read.", "sentence": str(error)})


class Handler(http.server.BaseHTTPRequestHandler):
    """GET of two names for this machine's own browser; anything else is refused."""

    watched: Watched
    server_version, sys_version = "klamp", ""
    timeout = 10.0
    """Seconds for a request to arrive."""

    def do_GET(self) -> None:
        """The page, or its numbers."""
        port = self.connection.getsockname()[1]
        # A site whose name resolves to 127.0.0.1 is sent here by the browser with its own name as the host.
        if self.headers.get_all("Host") not in ([f"{HOST}:{port}"], [f"localhost:{port}"]):
            return self._answer(421, "text/plain", "This address is for 127.0.0.1 alone.\n")
        self.watched.asked = time.monotonic()
        if self.path == "/":
            text, nonce = self.watched.page()
            return self._answer(200, "text/html", text, policy(nonce, live=True))
        if self.path == "/state.json":
            return self._answer(200, "application/json", json.dumps(self.watched.state(), allow_nan=False))
        return self._answer(404, "text/plain", "There is nothing here but / and /state.json.\n")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("do_"):  # any other method
            return lambda: self._answer(405, "text/plain", "GET only.\n")
        raise AttributeError(name)

    def _answer(self, code: int, kind: str, text: str, security: str = "default-src 'none'") -> None:
        body = text.encode("utf-8", "replace")
        self.send_response(code)
        headers = {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(body)),
            "Content-Security-Policy": f"{security}; frame-ancestors 'none'",
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            **({"Allow": "GET"} if code == 405 else {}),
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the terminal is the run's."""


class Server(http.server.ThreadingHTTPServer):
    """Serves on a socket that the parent has bound."""

    daemon_threads = True

    def __init__(self, listening: socket.socket, watched: Watched) -> None:
        handler = type("RunHandler", (Handler,), {"watched": watched})
        super().__init__(listening.getsockname(), handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self.server_name, self.server_port = listening.getsockname()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A page that was closed half-way is no error of the run."""


@contextlib.contextmanager
def watching(run: str | Path, port: int = 0) -> Iterator[str]:
    """Serve the page of ``run`` while the block runs; gives its address."""
    listening = _bound(port)
    address = f"http://{HOST}:{listening.getsockname()[1]}/"
    command = [sys.executable, "-m", "klamp.report.live", os.fspath(run), str(listening.fileno()), str(os.getpid())]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    # A session of its own: Ctrl-C is for the run, which saves a checkpoint and then ends this.
    process = subprocess.Popen(
        command,
        pass_fds=(listening.fileno(),),
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    listening.close()
    try:
        yield address
    finally:
        process.terminate()
        try:
            process.wait(LINGER + 2)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _bound(port: int) -> socket.socket:
    """A socket that listens on this machine alone: connections wait in it until the server is up."""
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((HOST, port))
        listening.listen(16)
    except OSError as error:
        listening.close()
        raise ConfigError(
            f"--watch={port}: {os.strerror(error.errno or 0)}. Leave the port out, or choose another."
        ) from None
    return listening


def main() -> None:
    """Serve until the parent asks for the end, or is gone."""
    run, descriptor, parent = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    watched, over = Watched(Path(run)), threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    server = Server(socket.socket(fileno=descriptor), watched)
    threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True).start()
    while not over.wait(0.5):
        if os.getppid() != parent:
            return
    watched.ended, end = True, time.monotonic()
    if end - watched.asked < 2 * LINGER:  # a page is open; on a laden machine it asks late
        while watched.asked < end and time.monotonic() < end + LINGER:
            time.sleep(0.05)
        time.sleep(0.5)  # for the answer to arrive, and for a second page


if __name__ == "__main__":
    main()
