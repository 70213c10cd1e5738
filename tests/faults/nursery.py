"""A process that has klamp and torch imported and forks a klamp command whenever it is asked to.

The child is a process with a session, limits and a user of its own: it is killed, starved and signalled like one that a
shell started, without the seconds that imports take. One JSON object a line on stdin, one back on stdout.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

ENV = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}


COUNTED: dict[str, int] = {}
"""Kills that hit, by what they hit; the last lines of the tests' output say them."""


def count(what: str, kills: int) -> None:
    """``kills`` hit, and the run ended as it should have."""
    COUNTED[what] = COUNTED.get(what, 0) + kills


class Child:
    """A klamp command in a process of its own."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self.nursery, self.pid = nursery, pid
        self.code: int | None = None
        self.said = ""

    def poll(self) -> int | None:
        """Its exit code, as subprocess has it; None while it runs."""
        if self.code is None:
            found = self.nursery.ask(do="poll", pid=self.pid)
            self.code, self.said = found["code"], found["said"]
        return self.code

    def wait(self, seconds: float = 120) -> int:
        """Its exit code once it has ended."""
        until = time.monotonic() + seconds
        while self.poll() is None:
            if time.monotonic() > until:
                self.signal(signal.SIGKILL)
                raise AssertionError(f"still running after {seconds:g} s")
            time.sleep(0.005)
        assert self.code is not None
        return self.code

    def signal(self, number: int) -> None:
        """Send it a signal; its pid stays its own until it was waited for."""
        if self.code is None:
            os.kill(self.pid, number)


class Nursery:
    """The tests' end of the process."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | ENV,
            text=True,
        )

    def klamp(
        self,
        *args: object,
        limit: int | None = None,
        bound: bool = False,
        cwd: Path | None = None,
        env: dict[str, str] | None = None,
    ) -> Child:
        """Start ``klamp ARGS``; ``limit``: bytes of the largest file it may write; ``bound``: permissions bind it."""
        words, place = [str(a) for a in args], None if cwd is None else str(cwd)
        started = self.ask(do="start", args=words, limit=limit, bound=bound, cwd=place, env=env or {})
        return Child(self, started["pid"])

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())  # type: ignore[no-any-return]

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(30)
        self.process.stdout.close()


def main() -> None:
    """Serve until stdin ends; children that are left then are killed."""
    import accelerate.utils
    import peft
    import torch
    import transformers.models.llama.modeling_llama
    import tyro  # noqa: F401

    import klamp.cli
    import klamp.train.loop

    _ = accelerate, peft, transformers, klamp
    torch.set_num_threads(1)
    pipes: dict[int, int] = {}
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "start":
            answer: dict[str, Any] = {"pid": _start(request, pipes)}
        else:
            answer = _poll(request["pid"], pipes)
        print(json.dumps(answer), flush=True)
    for pid in pipes:
        os.kill(pid, signal.SIGKILL)


def _start(request: dict[str, Any], pipes: dict[int, int]) -> int:
    # A pipe, not a file: a limit on the size of files must not cut what is said about it.
    read, write = os.pipe()
    os.set_blocking(read, False)
    pid = os.fork()
    if pid:
        os.close(write)
        pipes[pid] = read
        return pid
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs are started deaf to it
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(write, 1)
        os.dup2(write, 2)
        _confine(request)
        code = _klamp(request["args"])
    finally:
        os._exit(code)


def _confine(request: dict[str, Any]) -> None:
    os.environ.update(request["env"])
    if request["cwd"]:
        os.chdir(request["cwd"])
        sys.path.insert(0, request["cwd"])
    if request["limit"] is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["limit"], resource.RLIM_INFINITY))
    if request["bound"]:
        _bind()


def _bind() -> None:
    """Give up root's right to pass over permissions (CAP_DAC_OVERRIDE), where there is one to give up."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, sets) == 0
    sets[0] &= ~(1 << 1)
    assert libc.capset(header, sets) == 0


def _klamp(args: list[str]) -> int:
    """The exit code of the command, as the interpreter would have it."""
    from klamp.cli import main

    try:
        return main(args)
    except SystemExit as left:
        return left.code if isinstance(left.code, int) else 1
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _poll(pid: int, pipes: dict[int, int]) -> dict[str, Any]:
    ended, status = os.waitpid(pid, os.WNOHANG)
    if not ended:
        return {"code": None, "said": ""}
    said = b""
    read = pipes.pop(pid)
    try:
        while block := os.read(read, 1 << 16):
            said += block
    except BlockingIOError:  # a process that it started still has the other end
        pass
    os.close(read)
    return {"code": os.waitstatus_to_exitcode(status), "said": said.decode(errors="replace")}


if __name__ == "__main__":
    main()
