"""LocalBackend with a URL: OpenAI clients of its endpoint are answered by that server, with the newest adapter."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from endpoint_tools import wait_until

from klamp import models
from klamp.local_backend import LocalBackend, TrainableModel, Trajectory, TrajectoryGroup
from klamp.sampling import vllm_server
from server_stub import Stub, serving

pytestmark = pytest.mark.slow

QUESTION: Any = {"role": "user", "content": "The coffee at this café"}


@pytest.fixture
def stub() -> Stub:
    return Stub("tiny", models.load_model("tiny"))


@pytest.fixture
def url(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(vllm_server, "FIRST_WAIT", 0.01)
    with serving(stub) as address:
        yield address


def sampled(stub: Stub) -> list[str]:
    """Which adapter each completion was asked of, in order; the base's are those of the checks at the start."""
    asked = [b["model"] for p, b in stub.asked if p == "/v1/completions" and "prompt_logprobs" not in b]
    return [name for name in asked if name != "tiny"]


def test_clients_are_answered_by_the_server_with_the_newest_adapter(stub: Stub, url: str, tmp_path: Path) -> None:
    model = TrainableModel("agent", "tests", "tiny", lora_rank=4)

    async def work() -> list[dict[str, float]]:
        found = []
        async with LocalBackend(tmp_path, url=url, served="tiny") as backend:
            await model.register(backend)
            async with model.openai_client().with_options(max_retries=0) as client:
                wish: dict[str, Any] = {"model": "agent", "messages": [QUESTION], "max_tokens": 5}
                for step in range(2):
                    answers = await asyncio.gather(*(client.chat.completions.create(n=2, **wish) for _ in range(4)))
                    choices = [c for a in answers for c in a.choices]
                    assert {(c.step, len(c.token_ids) > 0) for c in choices} == {(step, True)}
                    group = [Trajectory([QUESTION, c], reward=float(i % 3)) for i, c in enumerate(choices)]
                    result = await backend.train(model, [TrajectoryGroup(group)], learning_rate=1e-2, clamp=False)
                    found.append(result.metrics)
                before = len(stub.asked)
                past = await client.chat.completions.create(**{**wish, "model": "agent@0"})
                assert past.choices[0].step == 0
                assert len(stub.asked) == before, "a saved step is decoded here"
                whole = await client.completions.create(model="agent", prompt="The soup", max_tokens=9, seed=3)
                pieces = [
                    c.choices[0].text
                    async for c in await client.completions.create(
                        model="agent", prompt="The soup", max_tokens=9, seed=3, stream=True
                    )
                ]
                assert "".join(pieces) == whole.choices[0].text
                cut = await client.completions.create(
                    model="agent", prompt="The soup", max_tokens=9, seed=3, stop=whole.choices[0].text[5:8]
                )
                assert whole.choices[0].text.startswith(cut.choices[0].text)
                assert cut.choices[0].finish_reason == "stop"
                with pytest.raises(openai.BadRequestError, match="top_logprobs is not supported"):
                    await client.chat.completions.create(logprobs=True, top_logprobs=2, **wish)
                with pytest.raises(openai.BadRequestError, match="do not fit"):
                    await client.chat.completions.create(**{**wish, "max_tokens": 300})
                stub.adapters.clear()  # a server that was restarted gets the adapter again
                assert (await client.chat.completions.create(**wish)).choices[0].step == 2
        return found

    for metrics in asyncio.run(work()):
        assert metrics["rollout/gap_max"] < 1e-5
        assert metrics["data/stale"] == metrics["data/retokenised"] == 0
    names = sampled(stub)
    assert len(set(names[:4])) == len(set(names[4:8])) == 1
    assert names[0] != names[4]


def test_closing_tells_whoever_waits_for_the_server(stub: Stub, url: str, tmp_path: Path) -> None:
    model, hanging = TrainableModel("agent", "tests", "tiny", lora_rank=4), threading.Event()

    def hang(path: str, body: dict[str, Any], found: Any) -> Any:
        if body.get("max_tokens") == 17:
            hanging.wait(20)
        return found

    async def work() -> tuple[float, Any]:
        backend = LocalBackend(tmp_path, url=url, served="tiny")
        await model.register(backend)
        stub.fault = hang
        async with model.openai_client().with_options(max_retries=0) as client:
            asked = client.chat.completions.create(model="agent", messages=[QUESTION], max_tokens=17)
            task = asyncio.ensure_future(asked)
            await asyncio.to_thread(wait_until, lambda: any(b.get("max_tokens") == 17 for _, b in stub.asked))
            began = time.monotonic()
            await backend.close()
            return time.monotonic() - began, await asyncio.gather(task, return_exceptions=True)

    took, [error] = asyncio.run(work())
    hanging.set()
    assert took < 3
    assert isinstance(error, openai.InternalServerError)
    assert error.code == "closing"
