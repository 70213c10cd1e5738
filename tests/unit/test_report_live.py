"""The live page's server: two names and GET, for this machine alone; nothing else of the disk can be reached."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from klamp.errors import ConfigError
from klamp.report import html as page_module
from klamp.report import live

SECRET = "nobody may read this"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "mine"
    (folder / "checkpoints").mkdir(parents=True)
    (tmp_path / "secret.txt").write_text(SECRET)
    (folder / "secret.txt").write_text(SECRET)
    return folder


@pytest.fixture
def port(run: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The server in a thread of this process."""
    monkeypatch.setattr(page_module, "zipped_plotly", lambda: "")
    server = live.Server(live._bound(0), live.Watched(run))
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield server.server_port
    server.shutdown()
    server.server_close()


def add_step(run: Path, step: int, kl: float = 0.01) -> None:
    (run / "config.yaml").write_text("model: tiny\nsteps: 9\nkl: {per: token}\n")
    row = {"step": step, "kl/steered": kl, "kl/target": 0.05, "reward/mean": 0.3, "kl/beta": 0.1}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def ask(port: int, path: str = "/", method: str = "GET", **headers: str) -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    found = answer.status, answer.read().decode(), dict(answer.getheaders())
    connection.close()
    return found


def test_before_the_first_step_it_waits_and_then_follows_the_run(
    run: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "SHARE", 1e9)  # no rest between two looks
    code, text, headers = ask(port)
    assert code == 200
    assert "<h1>Waiting for the first step.</h1>" in text
    assert headers["Cache-Control"] == "no-store"
    assert "connect-src 'self'" in headers["Content-Security-Policy"]
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    first = json.loads(ask(port, "/state.json")[1])
    assert first["data"]["arms"] == []
    for step in (1, 2, 3, 4):
        add_step(run, step, (0.01, 0.02, 0.03, 0.045)[step - 1])
    state = json.loads(ask(port, "/state.json")[1])
    assert state["status"] == "live: step 4 of 9"
    assert state["data"]["arms"][0]["kl"]["y"] == [0.01, 0.02, 0.03, 0.045]
    assert state["data"]["version"] != first["data"]["version"]
    assert "<h1>KL holds its target: 0.045 of 0.05 nats per token.</h1>" in state["parts"]["lead"]
    assert json.loads(ask(port, "/state.json")[1])["data"]["version"] == state["data"]["version"], "nothing is new"


def test_making_the_page_takes_a_small_share_of_the_time(run: Path) -> None:
    add_step(run, 1)
    watched = live.Watched(run)
    watched.look()  # imports and compiles
    add_step(run, 2)
    watched.due, begun, spent = 0.0, time.monotonic(), time.thread_time()
    _, first = watched.look()
    assert watched.due > begun + 0.5 * (time.thread_time() - spent) / live.SHARE
    watched.due += 60
    add_step(run, 3)
    assert watched.look()[1]["version"] == first["version"], "it rests, though there is something new"
    watched.ended = True
    assert len(watched.look()[1]["arms"][0]["kl"]["y"]) == 3, "the last look is never put off"


@pytest.mark.parametrize(
    "path",
    [
        "/secret.txt",
        "/metrics.jsonl",
        "/config.yaml",
        "/../secret.txt",
        "/../../secret.txt",
        "/%2e%2e/secret.txt",
        "/..%2fsecret.txt",
        "//etc/passwd",
        "/etc/passwd",
        "/checkpoints/",
        "/checkpoints",
        "/.",
        "/index.html",
        "/state.json/../secret.txt",
        "/state.json?file=/etc/passwd",
        "file:///etc/passwd",
        "*",
    ],
)
def test_no_other_file_can_be_reached_and_no_folder_is_listed(run: Path, port: int, path: str) -> None:
    add_step(run, 1)
    code, text, _ = ask(port, path)
    assert code == 404
    assert SECRET not in text
    assert "root:" not in text
    assert "mine" not in text


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "CONNECT", "ODD"])
def test_only_get_is_answered_and_nothing_is_written(run: Path, port: int, method: str) -> None:
    add_step(run, 1)
    before = sorted((p, p.read_bytes()) for p in run.parent.rglob("*") if p.is_file())
    code, _, headers = ask(port, "/", method)
    assert code == 405
    assert headers["Allow"] == "GET"
    assert sorted((p, p.read_bytes()) for p in run.parent.rglob("*") if p.is_file()) == before


@pytest.mark.parametrize("host", ["evil.example", "evil.example:PORT", "127.0.0.1", "127.0.0.1:1", "[::1]:PORT", ""])
def test_another_hosts_name_is_refused(run: Path, port: int, host: str) -> None:
    add_step(run, 1)
    for path in ("/", "/state.json"):
        code, text, _ = ask(port, path, Host=host.replace("PORT", str(port)))
        assert code == 421
        assert "KL" not in text
    assert ask(port, Host=f"localhost:{port}")[0] == 200


def test_it_listens_on_this_machine_alone_and_names_a_port_that_is_taken(run: Path, port: int) -> None:
    with pytest.raises(ConfigError, match=rf"--watch={port}: Address already in use"):
        live._bound(port)
    others = {a[4][0] for a in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)} - {"127.0.0.1"}
    for address in others:
        if not address.startswith("127."):
            with pytest.raises(OSError, match="refused"):
                socket.create_connection((address, port), timeout=2)


def test_files_that_cannot_be_read_are_told_on_the_page(run: Path, port: int) -> None:
    add_step(run, 1)
    (run / "metrics.jsonl").write_text('{"step": 1, "kl/steered": []}\n')
    text = ask(port)[1]
    assert "<h1>The run&#39;s files cannot be read.</h1>" in text
    assert "line 1: kl/steered must be a number" in text


PARENT = """
import sys, time
from klamp.report.live import watching
with watching(sys.argv[1]) as address:
    print(address, flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
def test_the_server_ends_with_a_run_that_is_killed(run: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(run)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    port = int(parent.stdout.readline().strip().rstrip("/").rpartition(":")[2])
    assert "Waiting" in ask(port)[1]
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    until = time.monotonic() + 20
    while time.monotonic() < until:
        try:
            ask(port)
        except OSError:
            return
        time.sleep(0.2)
    pytest.fail("the server outlived its run")
