"""Closing: whoever waits is told, whatever the endpoint is doing, and nothing waits for somebody who has gone."""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from endpoint_tools import connect_async, wait_until

from klamp.local_backend import LocalBackend, TrainableModel
from klamp.serve.app import Server, make_app
from klamp.serve.engine import Limits
from klamp.serve.saved_models import SavedModels, Standalone

QUESTION: Any = {"role": "user", "content": "The coffee at this café"}
SOON = 3.0
"""Seconds. Closing takes 0.2; an endpoint that waits for its clients takes five."""


@pytest.fixture(scope="module")
def saved() -> SavedModels:
    return SavedModels("tiny", "tiny", device="cpu")


def opened(saved: SavedModels) -> tuple[Server, Standalone]:
    door = Standalone(saved, Limits(batch=4))
    return Server(make_app(door.find, lambda: [door], limits=Limits()), "127.0.0.1", 0), door


async def ask(client: openai.AsyncOpenAI, *, stream: bool, leave: bool) -> str:
    """A long request; how it ended."""
    try:
        answer = await client.chat.completions.create(
            model="tiny", messages=[QUESTION], max_tokens=240, n=2, stream=stream
        )
        if stream:
            async for _ in answer:
                if leave:
                    await answer.close()
                    return "left"
        return "answered"
    except openai.APIError as error:
        return str(getattr(error, "code", None) or type(error).__name__)


def asking(url: str, chance: random.Random) -> tuple[threading.Thread, list[str]]:
    """Eight requests at once in a thread: answers, streams, and streams that are left."""
    ends: list[str] = []

    async def run() -> None:
        async with connect_async(url) as client:
            kinds = [(chance.random() < 0.6, chance.random() < 0.3) for _ in range(8)]
            ends.extend(await asyncio.gather(*(ask(client, stream=s, leave=g) for s, g in kinds)))

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    return thread, ends


def test_whoever_waits_is_told_that_the_endpoint_closes(saved: SavedModels) -> None:
    chance, told = random.Random(4), set()
    for _ in range(6):
        server, door = opened(saved)
        thread, ends = asking(server.url, chance)
        time.sleep(chance.choice([0.0, 0.02, 0.1, 0.3]))
        began = time.monotonic()
        door.close()
        server.close()
        assert time.monotonic() - began < SOON
        assert not server.thread.is_alive()
        thread.join(SOON)
        assert len(ends) == 8, "a client was left waiting"
        told |= set(ends)
    assert "closing" in told
    assert told <= {"closing", "left", "answered", "APIConnectionError"}, "connections that came too late are refused"


@pytest.mark.slow
def test_what_runs_is_finished_before_the_endpoint_closes(saved: SavedModels) -> None:
    server, door = opened(saved)
    thread, ends = asking(server.url, random.Random(0))
    wait_until(lambda: door.engine.running)
    server.close(door.close)
    thread.join(SOON)
    assert set(ends) <= {"answered", "left"}
    assert not server.thread.is_alive()


@pytest.mark.slow
def test_clients_that_do_not_read_or_do_not_ask_are_cut_off(
    saved: SavedModels, caplog: pytest.LogCaptureFixture
) -> None:
    server, door = opened(saved)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{"
    with socket.create_connection((server.host, server.port)) as silent:
        with socket.create_connection((server.host, server.port)) as half:
            half.sendall(head)
            door.close()
            began = time.monotonic()
            server.close()
            assert time.monotonic() - began < 9
            assert not server.thread.is_alive()
            assert half.recv(10) in (b"", b"HTTP/1.1 5")
        assert silent.recv(10) == b""
    assert not [r for r in caplog.records if r.exc_info], "no stack is shown for a client that was cut off"


def test_an_endpoint_leaves_the_programs_logging_alone(saved: SavedModels, tmp_path: Path) -> None:
    """logging.config closes every handler there is; a file opened with mode "w" is then lost."""
    handler = logging.FileHandler(tmp_path / "own.log", mode="w")
    own = logging.getLogger("somebody")
    own.addHandler(handler)
    try:
        server, door = opened(saved)
        own.error("still here")
        server.close(door.close)
    finally:
        own.removeHandler(handler)
        handler.close()
    assert (tmp_path / "own.log").read_text() == "still here\n"


@pytest.mark.slow
def test_a_call_that_is_given_up_does_not_stop_the_endpoint(tmp_path: Path) -> None:
    """A job cancelled while it waited used to count as waiting for ever: nothing was decoded after it."""
    model = TrainableModel(name="agent", project="tests", base_model="tiny")

    async def run() -> None:
        async with LocalBackend(tmp_path) as backend:
            await model.register(backend)
            [one] = backend._opened.values()
            busy = threading.Event()
            blocking = asyncio.ensure_future(one.call(lambda _: busy.wait(20)))
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(backend.get_step(model), 0.05)
            busy.set()
            await blocking
            async with model.openai_client() as client:
                asked = client.chat.completions.create(model="agent", messages=[QUESTION], max_tokens=3)
                assert (await asyncio.wait_for(asked, 20)).choices[0].finish_reason

    asyncio.run(run())


@pytest.mark.slow
def test_a_backend_closes_while_it_is_asked(tmp_path: Path) -> None:
    model = TrainableModel(name="agent", project="tests", base_model="tiny")

    async def run() -> tuple[float, list[Any]]:
        backend = LocalBackend(tmp_path)
        await model.register(backend)
        async with model.openai_client().with_options(max_retries=0) as client:
            wish: dict[str, Any] = {"model": "agent", "messages": [QUESTION], "max_tokens": 200, "n": 8}
            asked = [asyncio.ensure_future(client.chat.completions.create(**wish)) for _ in range(4)]
            [one] = backend._opened.values()
            await asyncio.to_thread(wait_until, lambda: one.engine.running)
            began = time.monotonic()
            await backend.close()
            return time.monotonic() - began, await asyncio.gather(*asked, return_exceptions=True)

    took, ends = asyncio.run(run())
    assert took < SOON
    assert {getattr(e, "code", type(e)) for e in ends} == {"closing"}
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{model.inference_base_url}/models", trust_env=False)
