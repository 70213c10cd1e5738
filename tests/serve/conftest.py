"""A model that calls a tool, an endpoint for it, and real OpenAI clients."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from endpoint_tools import CALL, QUESTION, REPLY, TEMPLATE, TOOL, connect, conversation

from klamp import models
from klamp.serve.app import Server, make_app
from klamp.serve.engine import Limits
from klamp.serve.saved_models import SavedModels, Standalone


@pytest.fixture(scope="session")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny, taught to call a tool and to read its answer out: one question, by heart."""
    torch.manual_seed(0)
    model, tokenizer = models.load_model("tiny"), models.load_tokenizer("tiny")
    tokenizer.chat_template = TEMPLATE
    lessons = []
    for messages, said in (([QUESTION], CALL), (conversation(), REPLY)):
        text = tokenizer.apply_chat_template(messages, tools=[TOOL], tokenize=False, add_generation_prompt=True)
        before = tokenizer(text, add_special_tokens=False)["input_ids"]
        after = [*tokenizer(said, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        lessons.append((torch.tensor([[*before, *after]]), len(before)))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    worst = 9.0
    while worst > 0.02:
        losses = [
            torch.nn.functional.cross_entropy(model(ids).logits[0, first - 1 : -1], ids[0, first:])
            for ids, first in lessons
        ]
        worst = max(float(loss.detach()) for loss in losses)
        sum(losses).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    folder = tmp_path_factory.mktemp("agent") / "agent"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


Serve = Callable[..., "tuple[str, Standalone]"]


@pytest.fixture(scope="session")
def serve() -> Iterator[Serve]:
    """Serve a model by its folder or name; (address, engine's door)."""
    opened: list[Any] = []

    def start(source: Any, *, key: str | None = None, **limits: int) -> tuple[str, Standalone]:
        door = Standalone(SavedModels(str(source), Path(source).name, device="cpu"), Limits(**limits))
        app = make_app(door.find, lambda: [door], limits=Limits(**limits), key=key)
        server = Server(app, "127.0.0.1", 0)
        opened.append((server, door))
        return server.url, door

    yield start
    for server, door in opened:
        server.close()
        door.close()


@pytest.fixture(scope="session")
def tiny(serve: Serve) -> tuple[str, Standalone]:
    return serve("tiny")


@pytest.fixture(scope="session")
def client(tiny: tuple[str, Standalone]) -> Iterator[openai.OpenAI]:
    with connect(tiny[0]) as found:
        yield found
