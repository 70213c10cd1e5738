"""Real OpenAI clients, a conversation with a tool, and log-probs by plain transformers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import openai
import torch

TEMPLATE = (
    "{% if tools %}tools: {{ tools | map(attribute='function.name') | join(', ') }}\n{% endif %}"
    "{% for m in messages %}<|bos|>{{ m.role }}: {% if m.tool_calls is defined %}{% for c in m.tool_calls %}"
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}{% else %}{{ m.content }}{% endif %}<|eos|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|bos|>assistant: {% endif %}"
)
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
QUESTION = {"role": "user", "content": "What is 2 + 3?"}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
REPLY = "The sum is 5."


def conversation() -> list[dict[str, Any]]:
    """The tool's turn as it comes after the question."""
    called = {"id": "x", "type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
    return [
        QUESTION,
        {"role": "assistant", "content": "", "tool_calls": [called]},
        {"role": "tool", "content": "5", "tool_call_id": "x"},
    ]


def connect(url: str, key: str = "none") -> openai.OpenAI:
    """A real client that does not try again: what is refused is seen."""
    return openai.OpenAI(
        base_url=url, api_key=key, max_retries=0, http_client=openai.DefaultHttpxClient(trust_env=False)
    )


def connect_async(url: str, key: str = "none") -> openai.AsyncOpenAI:
    """The same for many requests at once."""
    http = openai.DefaultAsyncHttpxClient(trust_env=False)
    return openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0, http_client=http)


def wait_until(true: Callable[[], object], seconds: float = 20.0) -> None:
    """Look every millisecond; an endpoint that does not get there fails the test and does not hang it."""
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, "it did not come to that"
        time.sleep(0.001)


@torch.no_grad()
def plain_logp(model: Any, prompt: list[int], said: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Log-probs of ``said`` after ``prompt`` by transformers alone, one sequence, no cache, no padding."""
    logits = model(torch.tensor([[*prompt, *said]])).logits[0, len(prompt) - 1 : -1]
    return (logits.float() / temperature).log_softmax(-1).gather(1, torch.tensor(said)[:, None]).squeeze(1)
