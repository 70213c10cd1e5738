"""A headless Chromium, spoken to over its DevTools pipe: null-terminated JSON on file descriptors 3 and 4."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# Puts the two pipes where Chromium looks for them, then becomes it.
PLUMB = (
    "import fcntl, os, sys; r, w = (fcntl.fcntl(int(n), fcntl.F_DUPFD, 10) for n in sys.argv[1:3]); "
    "os.dup2(r, 3); os.dup2(w, 4); os.execv(sys.argv[3], sys.argv[3:])"
)
PATIENCE = 120.0
"""Seconds for an answer; a laden machine is slow."""


def found() -> str | None:
    """The browser's path, if there is one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page of a browser."""

    def __init__(self, read: int, write: int) -> None:
        self.write = write
        self.answers: dict[int, dict[str, Any]] = {}
        self.events: list[dict[str, Any]] = []
        self.changed = threading.Condition()
        self.count = 0
        threading.Thread(target=self._listen, args=(read,), daemon=True).start()
        target = self._send("Target.createTarget", {"url": "about:blank"})["targetId"]
        self.session = self._send("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """A DevTools command for the page."""
        return self._send(method, params, self.session)

    def open(
        self, page: Path | str, *, width: int = 1400, height: int = 900, dark: bool = False, charts: bool = True
    ) -> None:
        """Load a file, or an address, at a size and wait until its charts are drawn, or, without charts, complete."""
        address = page if isinstance(page, str) else page.resolve().as_uri()
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.call("Page.navigate", url=address)
        deadline = time.monotonic() + PATIENCE
        ready = "document.documentElement?.dataset.drawn === 'true'"
        if not charts:
            ready = f"document.readyState === 'complete' && location.href === {json.dumps(address)}"
        while not self.evaluate(ready):
            assert time.monotonic() < deadline, f"the page did not draw: {self.problems()}"
            time.sleep(0.1)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def problems(self, *own: str) -> list[str]:
        """Errors and warnings the page caused, and requests it made beyond its own file and its ``own`` addresses."""
        said = []
        for event in list(self.events):
            method, params = event["method"], event["params"]
            if method == "Runtime.exceptionThrown":
                said.append(json.dumps(params["exceptionDetails"])[:500])
            if method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
                said.append(json.dumps(params["args"])[:500])
            if method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                said.append(params["entry"]["text"])
            if method == "Network.requestWillBeSent" and not params["request"]["url"].startswith(
                ("file:", "data:", "blob:", *own)
            ):
                said.append(f"request to {params['request']['url']}")
        return said

    def screenshot(self, file: Path, *, whole: bool = True) -> None:
        """The page as PNG."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=whole, format="png")
        file.write_bytes(base64.b64decode(shot["data"]))

    def _send(self, method: str, params: dict[str, Any], session: str | None = None) -> dict[str, Any]:
        self.count += 1
        number = self.count
        message = {"id": number, "method": method, "params": params, **({"sessionId": session} if session else {})}
        os.write(self.write, json.dumps(message).encode() + b"\0")
        with self.changed:
            assert self.changed.wait_for(lambda: number in self.answers, PATIENCE), f"no answer to {method}"
            answer = self.answers.pop(number)
        assert "error" not in answer, (method, answer["error"])
        result: dict[str, Any] = answer["result"]
        return result

    def _listen(self, read: int) -> None:
        with os.fdopen(read, "rb", buffering=0) as pipe:
            left = b""
            while block := pipe.read(1 << 16):
                *whole, left = (left + block).split(b"\0")
                with self.changed:
                    for message in map(json.loads, whole):
                        if "id" in message:
                            self.answers[message["id"]] = message
                        else:
                            self.events.append(message)
                    self.changed.notify_all()


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """Start Chromium, give a page, end it."""
    path = found()
    assert path is not None
    to_read, to_write = os.pipe()
    from_read, from_write = os.pipe()
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe"]
    flags += ["--no-first-run", "--disable-extensions", "--disable-background-networking", "--hide-scrollbars"]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [
            sys.executable,
            "-c",
            PLUMB,
            str(to_read),
            str(from_write),
            path,
            *flags,
            f"--user-data-dir={profile}",
        ]
        process = subprocess.Popen(
            command, pass_fds=(to_read, from_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(to_read)
        os.close(from_write)
        try:
            yield Browser(from_read, to_write)
        finally:
            os.close(to_write)
            process.terminate()
            process.wait(30)
