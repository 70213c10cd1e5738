"""What was said and what it was worth: choices, trajectories and groups of them, with ART's attribute names.

Anything with these attributes is accepted in their place: an OpenAI choice, an ``art.Trajectory``, a message as a
dictionary. :func:`read` turns the turns of a trajectory into :class:`Turn`, which is all that the rest looks at.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import time
from collections.abc import AsyncIterator, Awaitable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from klamp.errors import ConfigError

TOKEN_ID = re.compile(r"token_id:(\d+)")
"""How an inference server writes a token when it is asked for ids in place of text."""


@dataclass(frozen=True)
class Message:
    """One message of a chat."""

    role: str
    content: str | None


@dataclass(frozen=True)
class Choice:
    """What the model said in one turn, with the tokens it said it in. Those are trained on, never the text."""

    message: Message
    finish_reason: Literal["stop", "length"]
    """stop: it ended by itself. length: it was cut off."""
    token_ids: tuple[int, ...]
    """As sampled; the end token is among them when the model said it."""
    logp: tuple[float, ...]
    """Log-prob of each token under the distribution it was drawn from."""
    prompt_token_ids: tuple[int, ...]
    """What the model had before it."""
    temperature: float = 1.0
    step: int | None = None
    """The step whose weights said it."""
    index: int = 0


@dataclass
class Trajectory:
    """Messages and choices in the order they came, and the reward of the whole. Only choices are trained on."""

    messages_and_choices: list[Any]
    """Dictionaries with role and content, and choices. Without a single choice, the assistant's messages count, and
    are tokenised once."""
    reward: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    """Averaged over the step and returned as ``trajectory/NAME``."""
    metadata: dict[str, Any] = field(default_factory=dict)
    logs: list[str] = field(default_factory=list)
    tools: list[Any] | None = None
    """Passed to the chat template."""
    additional_histories: list[Any] = field(default_factory=list)
    """Side conversations with ``messages_and_choices`` and ``tools`` of their own, trained on with the same reward."""
    start_time: float = field(default_factory=time.monotonic, repr=False, compare=False)

    def log(self, message: str) -> None:
        """Keep a line with the trajectory."""
        self.logs.append(message)

    def finish(self) -> Trajectory:
        """Note the seconds since the trajectory was made as the metric ``duration``."""
        self.metrics["duration"] = time.monotonic() - self.start_time
        return self

    @contextlib.asynccontextmanager
    async def track_duration(self, name: str) -> AsyncIterator[None]:
        """Add the seconds that the block takes to the metric ``NAME_duration``."""
        began = time.monotonic()
        try:
            yield
        finally:
            key = f"{name}_duration"
            self.metrics[key] = self.metrics.get(key, 0.0) + time.monotonic() - began

    def messages(self) -> list[dict[str, Any]]:
        """All of it as plain messages."""
        return [as_message(item) for item in self.messages_and_choices]


class TrajectoryGroup:
    """Trajectories that are compared with one another: attempts at the same task. Failed ones may be among them.

    ``await TrajectoryGroup(coroutines)`` runs them at the same time and raises what one of them raises, unless
    ``gather_trajectory_groups`` allows some to fail. ``TrajectoryGroup.gather`` keeps whatever fails.
    """

    def __init__(
        self,
        trajectories: Iterable[Any],
        *,
        metadata: Mapping[str, Any] | None = None,
        exceptions: Iterable[BaseException] = (),
    ) -> None:
        given = list(trajectories)
        self.pending = given if any(isinstance(t, Awaitable) for t in given) else []
        """Coroutines among the rest, until the group is awaited."""
        if self.pending:
            given = []
        self.trajectories = [t for t in given if not isinstance(t, BaseException)]
        self.exceptions = [*(t for t in given if isinstance(t, BaseException)), *exceptions]
        self.metadata = dict(metadata or {})

    @classmethod
    async def gather(
        cls, rollouts: Iterable[Awaitable[Any]], *, metadata: Mapping[str, Any] | None = None
    ) -> TrajectoryGroup:
        """Run the rollouts at the same time; one that raises an Exception is kept as such and not trained on."""
        from klamp.local.gather import allowing

        with allowing(math.inf):
            return await cls(rollouts, metadata=metadata)

    def __await__(self) -> Generator[Any, None, TrajectoryGroup]:
        from klamp.local.gather import rolled_out

        return rolled_out(self).__await__()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.trajectories)

    def __len__(self) -> int:
        return len(self.trajectories)


@dataclass(frozen=True)
class Turn:
    """A turn of the model as it is trained on."""

    text: str
    ids: tuple[int, ...] | None
    """None: only text is known, and is tokenised once."""
    logp: tuple[float, ...] | None = None
    """NaN or None where it is not known."""
    prompt_ids: tuple[int, ...] | None = None
    temperature: float | None = None
    step: int | None = None
    cut_off: bool = False


def is_choice(item: object) -> bool:
    """Whether an item is a choice, ours or OpenAI's, and not a message."""
    return not isinstance(item, Mapping) and hasattr(item, "message")


def as_message(item: Any) -> dict[str, Any]:
    """A message as a dictionary, of whatever kind it came."""
    if is_choice(item):
        calls = [_plain_call(c) for c in getattr(item.message, "tool_calls", None) or ()]
        return {"role": "assistant", "content": item.message.content, **({"tool_calls": calls} if calls else {})}
    if isinstance(item, Mapping):
        message = dict(item)
        if message.get("tool_calls"):
            message["tool_calls"] = [_plain_call(call) for call in message["tool_calls"]]
    elif hasattr(item, "role") and hasattr(item, "content"):
        message = {"role": item.role, "content": item.content}
    else:
        raise ConfigError(
            f"a message must have role and content, got {item!r:.80}. Write {{'role': ..., 'content': ...}}."
        )
    if not isinstance(message.get("role"), str):
        raise ConfigError(f"a message must have a role, got {item!r:.80}. Use system, user, assistant or tool.")
    return message


def _plain_call(call: Any) -> dict[str, Any]:
    """A tool call as a dictionary, its arguments as templates read them: an object, not text."""
    if isinstance(call, Mapping):
        kind, function = call.get("id"), call.get("function") or {}
        name, arguments = function.get("name"), function.get("arguments")
    else:
        kind, name, arguments = getattr(call, "id", None), call.function.name, call.function.arguments
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):
            arguments = json.loads(arguments)
    return {"id": kind, "type": "function", "function": {"name": name, "arguments": arguments}}


def read(items: Sequence[Any]) -> list[dict[str, Any] | Turn]:
    """Messages as dictionaries and choices as turns; without any choice the assistant's messages are the turns."""
    if any(is_choice(item) for item in items):
        return [_turn(item) if is_choice(item) else as_message(item) for item in items]
    messages = [as_message(item) for item in items]
    return [_from_text(m) if m["role"] == "assistant" else m for m in messages]


def history(items: Sequence[Any]) -> list[dict[str, Any] | Turn]:
    """The same for a prompt: choices keep their tokens, every message is text that somebody else wrote."""
    return [_turn(item) if is_choice(item) else as_message(item) for item in items]


def _from_text(message: dict[str, Any]) -> Turn:
    if not isinstance(message.get("content"), str) or message.get("tool_calls"):
        raise ConfigError(
            f"an assistant's message of a trajectory without choices must be text, got {message!r:.80}. Keep the "
            "choice that the model returned; it has the tokens."
        )
    return Turn(message["content"], None)


def _turn(choice: Any) -> Turn:
    text = choice.message.content or ""
    ids, logp = _tokens(choice)
    if ids is None and getattr(choice.message, "tool_calls", None):
        raise ConfigError(
            f"a choice with tool calls came without its tokens: {text!r:.60}. Ask the server for them "
            "(return_token_ids, or logprobs with return_tokens_as_token_ids)."
        )
    if ids is not None and logp is not None and len(ids) != len(logp):
        raise ConfigError(f"a choice has {len(ids)} token ids and {len(logp)} log-probs: {text!r:.60}. Give one each.")
    prompt = getattr(choice, "prompt_token_ids", None)
    return Turn(
        text,
        ids,
        logp,
        None if prompt is None or ids is None else tuple(int(i) for i in prompt),
        getattr(choice, "temperature", None),
        getattr(choice, "step", None),
        getattr(choice, "finish_reason", None) == "length",
    )


def _tokens(choice: Any) -> tuple[tuple[int, ...] | None, tuple[float, ...] | None]:
    """Ids and log-probs of a choice: klamp's own, ``token_ids`` beside OpenAI's logprobs, or ids written in those."""
    entries = getattr(getattr(choice, "logprobs", None), "content", None) or ()
    logp: tuple[float, ...] | None = getattr(choice, "logp", None)
    if logp is None and entries:
        logp = tuple(math.nan if e.logprob is None else float(e.logprob) for e in entries)
    ids = getattr(choice, "token_ids", None)
    if ids is not None:
        return tuple(int(i) for i in ids), logp
    written = [TOKEN_ID.fullmatch(str(e.token)) for e in entries]
    found = [int(m.group(1)) for m in written if m is not None]
    if found and len(found) == len(written):
        return tuple(found), logp
    return None, None
