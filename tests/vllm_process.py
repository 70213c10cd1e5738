"""A real vLLM server as a process of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest

from klamp import models

READY = 400
"""Seconds in which a server must be ready; forty on two idle cores."""


class Vllm:
    """A server process that can be killed and started again on the same port."""

    def __init__(self, environment: Path, folder: Path) -> None:
        self.environment, self.folder = environment, folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        (folder / "chat.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it answers."""
        env = {
            **os.environ,
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        env.pop("PYTHONPATH", None)
        flags = "--dtype float32 --max-model-len 256 --enforce-eager --enable-lora --max-lora-rank 16 --max-loras 3"
        command = [str(self.environment / "bin" / "vllm"), "serve", str(models.resolve("tiny"))]
        command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(self.port), *flags.split()]
        command += ["--logprobs-mode", "processed_logprobs", "--chat-template", str(self.folder / "chat.jinja")]
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
        until = time.monotonic() + READY
        while time.monotonic() < until:
            if self.process.poll() is not None:
                break
            try:
                urllib.request.urlopen(f"{self.url}/v1/models", timeout=2).read()
                return
            except OSError:
                time.sleep(1)
        pytest.fail(f"vLLM did not start:\n{(self.folder / 'server.log').read_text()[-3000:]}")

    def kill(self) -> None:
        """End it and its workers at once."""
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
