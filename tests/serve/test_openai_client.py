"""The real ``openai`` client against the endpoint: what it draws, how it is told, what is refused."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import openai
import pytest
import torch
from endpoint_tools import QUESTION, REPLY, TOOL, connect, connect_async, plain_logp

from klamp import models
from klamp.serve.saved_models import Standalone

pytestmark = pytest.mark.slow

IDS = {"return_token_ids": True}
ROUNDING = 2e-5
"""Of float32 log-probs summed in another order; a temperature of 0.5 doubles it."""
SENTENCE = "The room at this hotel was clean and the waiter at the bar was kind to all of us"
ASKED = {"model": "tiny", "messages": [{"role": "user", "content": "The waiter was"}]}


@pytest.fixture(scope="module")
def plain() -> Any:
    return models.load_model("tiny")


def drawn(choice: Any) -> torch.Tensor:
    return torch.tensor([entry.logprob for entry in choice.logprobs.content])


def test_a_chat_is_answered_with_its_tokens_and_their_log_probs(client: openai.OpenAI, plain: Any) -> None:
    answer = client.chat.completions.create(
        **ASKED, max_completion_tokens=9, n=3, logprobs=True, top_logprobs=2, temperature=0.7, extra_body=IDS
    )
    tokenizer = models.load_tokenizer("tiny")
    assert answer.prompt_token_ids == tokenizer("The waiter was")["input_ids"]  # type: ignore[attr-defined]
    assert [c.index for c in answer.choices] == [0, 1, 2]
    assert len({c.message.content for c in answer.choices}) > 1
    for c in answer.choices:
        ids = c.token_ids  # type: ignore[attr-defined]
        torch.testing.assert_close(
            drawn(c), plain_logp(plain, answer.prompt_token_ids, ids, 0.7), atol=ROUNDING, rtol=0
        )  # type: ignore[attr-defined]
        assert c.message.content == tokenizer.decode(ids, skip_special_tokens=True)
        assert c.finish_reason == ("stop" if ids[-1] == tokenizer.eos_token_id else "length")
        for entry in c.logprobs.content:  # type: ignore[union-attr]
            assert bytes(entry.bytes).decode() == entry.token
            assert len(entry.top_logprobs) == 2
            assert entry.top_logprobs[0].logprob >= entry.logprob - 1e-6
    assert answer.usage is not None
    total = sum(len(c.token_ids) for c in answer.choices)  # type: ignore[attr-defined]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, total)
    bare = client.chat.completions.create(**ASKED, max_tokens=2).choices[0]
    assert bare.logprobs is None
    assert not hasattr(bare, "token_ids"), "ids on request"
    as_ids = client.chat.completions.create(
        **ASKED, max_tokens=2, logprobs=True, extra_body={"return_tokens_as_token_ids": True}
    ).choices[0]
    assert all(e.token.startswith("token_id:") for e in as_ids.logprobs.content)  # type: ignore[union-attr]


def test_sixty_four_at_once_are_as_one_at_a_time(tiny: tuple[str, Standalone], plain: Any) -> None:
    """Ragged prompts, lengths, temperatures: log-probs by transformers alone, and with a seed the same tokens."""
    words = SENTENCE.split()
    wishes: list[dict[str, Any]] = [
        {
            "messages": [{"role": "user", "content": " ".join(words[: 1 + i % len(words)])}],
            "max_tokens": 1 + (7 * i) % 24,
            "temperature": (0.5, 1.0, 1.3)[i % 3],
            "seed": i,
            "logprobs": True,
            "extra_body": IDS,
        }
        for i in range(64)
    ]

    async def together() -> list[Any]:
        async with connect_async(tiny[0]) as client:
            return await asyncio.gather(*(client.chat.completions.create(model="tiny", **w) for w in wishes))

    many = asyncio.run(together())
    worst = 0.0
    for wish, answer in zip(wishes, many, strict=True):
        [c] = answer.choices
        alone = plain_logp(plain, answer.prompt_token_ids, c.token_ids, wish["temperature"])
        worst = max(worst, float((drawn(c) - alone).abs().max()))
    assert worst < ROUNDING
    with connect(tiny[0]) as client:
        for i in range(0, 64, 9):
            [again] = client.chat.completions.create(model="tiny", **wishes[i]).choices
            assert again.token_ids == many[i].choices[0].token_ids  # type: ignore[attr-defined]


def test_rows_join_and_leave_a_batch_that_runs(tiny: tuple[str, Standalone], plain: Any) -> None:
    async def one(client: openai.AsyncOpenAI, n: int) -> Any:
        await asyncio.sleep(0.02 * n)
        return await client.chat.completions.create(
            **ASKED, max_tokens=(60, 5)[n % 2], logprobs=True, extra_body=IDS, n=1 + n % 3
        )

    async def run() -> list[Any]:
        async with connect_async(tiny[0]) as client:
            return await asyncio.gather(*(one(client, n) for n in range(8)))

    for answer in asyncio.run(run()):
        for c in answer.choices:
            alone = plain_logp(plain, answer.prompt_token_ids, c.token_ids)
            torch.testing.assert_close(drawn(c), alone, atol=ROUNDING, rtol=0)


def test_temperature_zero_is_the_likeliest_and_top_p_cuts(client: openai.OpenAI, plain: Any) -> None:
    greedy = client.chat.completions.create(**ASKED, max_tokens=12, temperature=0, extra_body=IDS)
    ids = torch.tensor([greedy.prompt_token_ids])  # type: ignore[attr-defined]
    expected = plain.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    assert greedy.choices[0].token_ids == expected[0, ids.shape[1] :].tolist()  # type: ignore[attr-defined]
    cut = client.chat.completions.create(**ASKED, max_tokens=1, n=40, top_p=0.3, logprobs=True, top_logprobs=20)
    tops = {t.token: t.logprob for c in cut.choices for t in c.logprobs.content[0].top_logprobs}  # type: ignore[union-attr, index]
    assert sum(torch.tensor(list(tops.values())).exp().tolist()) == pytest.approx(1.0, abs=ROUNDING)
    assert {c.message.content for c in cut.choices} <= set(tops)


def test_a_stream_is_the_answer_in_pieces(client: openai.OpenAI) -> None:
    wish: dict[str, Any] = {**ASKED, "max_tokens": 20, "seed": 5, "n": 2, "stop": [" and", " was"], "logprobs": True}
    whole = client.chat.completions.create(**wish, extra_body=IDS)
    text, ids, ends, usage = ["", ""], [[], []], [None, None], None
    logps: list[list[float]] = [[], []]
    with client.chat.completions.create(
        **wish, stream=True, stream_options={"include_usage": True}, extra_body=IDS
    ) as stream:
        for chunk in stream:
            usage = chunk.usage or usage
            for c in chunk.choices:
                text[c.index] += c.delta.content or ""
                ids[c.index] += getattr(c, "token_ids", [])
                logps[c.index] += [e.logprob for e in c.logprobs.content] if c.logprobs else []
                ends[c.index] = c.finish_reason or ends[c.index]  # type: ignore[call-overload]
    for c in whole.choices:
        assert (text[c.index], ends[c.index]) == (c.message.content, c.finish_reason)
        assert ids[c.index] == c.token_ids  # type: ignore[attr-defined]
        assert logps[c.index] == pytest.approx(drawn(c).tolist(), abs=ROUNDING)
        assert " and" not in text[c.index]
    assert usage == whole.usage


def test_text_is_continued_from_text_and_from_ids(client: openai.OpenAI, plain: Any) -> None:
    ids = models.load_tokenizer("tiny")("The bread was")["input_ids"]
    answer = client.completions.create(model="tiny", prompt=["The bread was", "A room"], max_tokens=5, n=2, logprobs=1)
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    lone = client.completions.create(model="tiny", prompt=ids, max_tokens=5, logprobs=0, extra_body=IDS).choices[0]
    assert lone.prompt_token_ids == ids  # type: ignore[attr-defined]
    expected = plain_logp(plain, ids, lone.token_ids)  # type: ignore[attr-defined]
    assert lone.logprobs.token_logprobs == pytest.approx(expected.tolist(), abs=ROUNDING)  # type: ignore[union-attr]
    assert "".join(lone.logprobs.tokens).startswith(lone.text)  # type: ignore[union-attr, arg-type]
    pieces = [c.choices[0].text for c in client.completions.create(model="tiny", prompt="A", max_tokens=4, stream=True)]
    assert len(pieces) >= 4
    # A stop string that may be beginning holds the text back, not the tokens.
    wish: dict[str, Any] = {"model": "tiny", "prompt": "A", "max_tokens": 12, "seed": 2}
    whole = client.completions.create(**wish, extra_body=IDS).choices[0]
    wish["stop"] = [f"{whole.text[:12]}~"]
    chunks = [c.choices[0] for c in client.completions.create(**wish, stream=True, logprobs=0, extra_body=IDS)]
    assert [i for c in chunks for i in c.token_ids] == whole.token_ids  # type: ignore[attr-defined]
    assert sum(len(c.logprobs.token_logprobs) for c in chunks) == 12  # type: ignore[union-attr, arg-type]


def test_an_agent_calls_a_tool_and_reads_its_answer(serve: Any, agent: Any) -> None:
    url, _ = serve(agent)
    messages: list[Any] = [dict(QUESTION)]
    with connect(url) as client:
        assert [m.id for m in client.models.list()] == ["agent"]
        for _ in range(3):
            reply = client.chat.completions.create(
                model="agent", messages=messages, tools=[TOOL], temperature=0, max_tokens=80
            ).choices[0]
            messages.append(reply.message)
            if not reply.message.tool_calls:
                break
            assert reply.finish_reason == "tool_calls"
            assert reply.message.content is None
            for call in reply.message.tool_calls:
                given = json.loads(call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": str(given["a"] + given["b"])})
        assert reply.message.content == REPLY
        assert reply.finish_reason == "stop"
        assert len(messages) == 4
        stream = client.chat.completions.create(
            model="agent", messages=[QUESTION], tools=[TOOL], temperature=0, stream=True
        )
        deltas = [c.choices[0].delta for c in stream]
        [call] = [t for d in deltas for t in d.tool_calls or []]
        assert json.loads(call.function.arguments) == {"a": 2, "b": 3}
        none = client.chat.completions.create(
            model="agent", messages=[QUESTION], tools=[TOOL], tool_choice="none", max_tokens=4
        )
        assert none.choices[0].message.tool_calls is None


@pytest.mark.parametrize(
    ("wish", "param", "said"),
    [
        ({"temperature": 3}, "temperature", "between 0 and 2"),
        ({"max_tokens": 0}, "max_tokens", "whole number from 1"),
        ({"max_tokens": 10**9}, "max_tokens", "whole number from 1"),
        ({"n": 1000}, "n", "whole number from 1 to 128"),
        ({"messages": []}, "messages", "at least one"),
        ({"messages": [{"content": "x"}]}, "messages[0]", "with a role"),
        ({"stop": [1]}, "stop", "a string"),
        ({"seed": "five"}, "seed", "whole number"),
        ({"top_p": 0}, "top_p", "must be > 0"),
        ({"extra_body": {"chat_template_kwargs": {"tools": []}}}, "chat_template_kwargs", "template's own names"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0]", "type text only"),
        ({"frequency_penalty": 0.5}, "frequency_penalty", "not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not supported"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice", "not constrained"),
        ({"top_logprobs": 3}, "top_logprobs", "needs logprobs"),
        ({"max_tokens": 300}, None, "the model's context is 256"),
        ({"messages": [{"role": "user", "content": "a b c " * 300}]}, None, "do not fit"),
    ],
)
def test_what_cannot_be_had_is_refused_in_openais_shape(
    client: openai.OpenAI, wish: dict[str, Any], param: str | None, said: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=said) as refused:
        client.chat.completions.create(**{**ASKED, **wish})
    assert refused.value.type == "invalid_request_error"
    assert refused.value.param == param


def test_models_keys_sizes_and_the_queue_are_bounded(serve: Any) -> None:
    url, door = serve("tiny", key="secret", queue=4, batch=2, body=2000)
    with connect(url) as stranger, pytest.raises(openai.AuthenticationError, match="key is missing or wrong"):
        stranger.models.list()
    with connect(url, "secret") as client:
        for name in ("other", "tiny@3", "other@0"):
            for call in (
                lambda name=name: client.chat.completions.create(**{**ASKED, "model": name}),
                lambda name=name: client.models.retrieve(name),
            ):
                with pytest.raises(openai.NotFoundError, match="There are: tiny") as missing:
                    call()
                assert missing.value.code == "model_not_found"
        assert client.models.retrieve("tiny").id == "tiny"
        with pytest.raises(openai.APIStatusError, match="larger than 2000 bytes") as refused:
            client.completions.create(model="tiny", prompt="x" * 3000)
        assert refused.value.status_code == 413
        with pytest.raises(openai.RateLimitError, match="at most 4 may"):
            client.chat.completions.create(**ASKED, n=5)
        with pytest.raises(openai.NotFoundError):
            client.embeddings.create(model="tiny", input="x")
        # More than fit into a batch of two are answered all the same.
        assert len(client.chat.completions.create(**ASKED, n=4, max_tokens=3).choices) == 4
    assert door.engine.load == 0

    async def flood() -> list[Any]:
        async with connect_async(url, "secret") as client:
            jobs = [client.chat.completions.create(**ASKED, max_tokens=30) for _ in range(20)]
            return await asyncio.gather(*jobs, return_exceptions=True)

    kinds = {type(found) for found in asyncio.run(flood())}
    assert openai.RateLimitError in kinds
    assert kinds - {openai.RateLimitError} == {type(found) for found in asyncio.run(flood())} - {openai.RateLimitError}


@pytest.mark.parametrize("stream", [False, True])
def test_whoever_hangs_up_leaves_the_batch(tiny: tuple[str, Standalone], stream: bool) -> None:
    url, door = tiny

    async def run() -> None:
        async with connect_async(url) as client:
            wish = {**ASKED, "max_tokens": 250, "n": 8, "extra_body": {"ignored": 1}, "stream": stream}
            task = asyncio.ensure_future(client.chat.completions.create(**wish))
            began = time.monotonic()
            while not door.engine.running and time.monotonic() - began < 20:
                await asyncio.sleep(0.001)
            assert door.engine.running
            if stream:
                answer = await task
                await anext(aiter(answer))
                await answer.close()
            else:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())
    began = time.monotonic()
    while door.engine.load and time.monotonic() - began < 20:
        time.sleep(0.005)
    assert door.engine.load == 0


def test_a_body_that_is_not_json_or_not_an_object_is_refused(tiny: tuple[str, Standalone]) -> None:
    import httpx

    half = json.dumps({**ASKED, "messages": [{"role": "user", "content": "\ud800"}]}).encode()
    flags = json.dumps({"model": "tiny", "prompt": [True]}).encode()
    with httpx.Client(trust_env=False) as raw:
        for content in (
            b"{",
            b"[1]",
            b"\xff",
            b"[" * 100000,
            b"",
            half,
            half.replace(b"\\ud800", b"\xed\xa0\x80"),
            flags,
        ):
            answer = raw.post(f"{tiny[0]}/{'completions' if content is flags else 'chat/completions'}", content=content)
            assert answer.status_code == 400, content[:60]
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        wrong = raw.get(f"{tiny[0]}/chat/completions")
        assert (wrong.status_code, set(wrong.json()["error"])) == (405, {"message", "type", "param", "code"})
