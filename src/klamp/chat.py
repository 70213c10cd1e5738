"""Chats: prompts, messages and the model's turns, and the token ids of all of them.

A prompt is text, or messages such as ``[{"role": "user", "content": "..."}]``. A turn of the model keeps the tokens
it was sampled in; only text without tokens is tokenised. :class:`Encoder` renders a chat with a mark in place of each
turn and splits it at the marks, so the text around the turns is tokenised and the turns are put between as they were
sampled. A model without a chat template reads plain text: messages one a line, the model going on where the last one
ends.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from klamp.errors import ConfigError, shown

Prompt = str | list[dict[str, Any]]


def problem(prompt: object) -> str | None:
    """Why ``prompt`` is neither text nor a list of messages, in words; None where it is one of them."""
    if isinstance(prompt, str):
        return None if prompt else "it is empty"
    if not isinstance(prompt, list):
        return f"got {shown(prompt, 80)}"
    if not prompt:
        return "the list of messages is empty"
    for n, turn in enumerate(prompt):
        if not isinstance(turn, dict):
            return f"message {n} is {shown(turn, 80)}, not an object"
        for key in ("role", "content"):
            if not isinstance(turn.get(key), str):
                return f'message {n} needs a "{key}" of text, got {shown(turn.get(key), 80)} (it has {keys(turn)})'
    return None


def as_text(prompt: Prompt) -> str:
    """The prompt for people: text as it is, one user turn as its content, several turns as ``role: content`` lines."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1 and prompt[0]["role"] == "user":
        return str(prompt[0]["content"])
    return "\n".join(f"{turn['role']}: {turn['content']}" for turn in prompt)


def keys(row: dict[str, Any]) -> str:
    """The keys of a row, for a message that says which ones are there."""
    return ", ".join(f'"{key:.60}"' for key in list(row)[:12]) or "no key"


TOKEN_ID = re.compile(r"token_id:(\d+)")
"""How an inference server writes a token when it is asked for ids in place of text."""


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


def read_turns(items: Sequence[Any]) -> list[dict[str, Any] | Turn]:
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


Item = dict[str, Any] | Turn


@dataclass(frozen=True)
class Row:
    """A sequence with the model's own tokens counted; turns share one where each goes on from the last."""

    ids: list[int]
    counted: list[bool]
    logp: list[float]
    """NaN where the sampler's is not known."""
    turns: list[Turn]

    @property
    def retokenised(self) -> int:
        """Turns whose tokens were made from text."""
        return sum(turn.ids is None for turn in self.turns)


class Encoder:
    """Token ids of chats for one tokenizer."""

    def __init__(self, tokenizer: Any, *, vocabulary: int, context: int | None, end: tuple[int, ...]) -> None:
        self.tokenizer, self.vocabulary, self.context, self.end = tokenizer, vocabulary, context, end
        self.chat = tokenizer.chat_template is not None

    def use_template(self, template: str) -> None:
        """Render chats with ``template`` from now on."""
        self.tokenizer.chat_template, self.chat = template, True

    def prompt(self, messages: Sequence[Any], tools: list[Any] | None = None, **template: Any) -> list[int]:
        """The ids before the model's next turn. Choices among the messages keep the tokens they were sampled in.

        ``template`` are further arguments of the chat template.
        """
        items = history(messages)
        turns = [t for t in items if isinstance(t, Turn)]
        around = self._around(items, tools, going_on=True, **template)
        ids: list[int] = []
        for n, turn in enumerate(turns):
            ids = self._before(turn, ids, around[n], first=n == 0) + self._ids(turn, around[n + 1])
        ids = ids + self._fixed(self._after(ids, around[-1]), first=not turns)
        if not ids:
            raise ConfigError("the messages are empty, and this tokenizer puts no BOS before them to start from.")
        return ids

    def rows(self, trajectory: Any) -> list[Row]:
        """The sequences of a trajectory: one, or more where a turn was not sampled after the tokens of the last."""
        items = read_turns(trajectory.messages_and_choices)
        turns = [t for t in items if isinstance(t, Turn)]
        around = functools.cache(lambda: self._around(items, getattr(trajectory, "tools", None), going_on=False))
        rows: list[Row] = []
        for n, turn in enumerate(turns):
            so_far = rows[-1].ids if rows else []
            known = turn.ids is not None and turn.prompt_ids is not None
            before = list(turn.prompt_ids or ()) if known else self._before(turn, so_far, around()[n], first=n == 0)
            own = list(turn.ids or ()) if known else self._ids(turn, around()[n + 1])
            if not rows or before[: len(so_far)] != so_far:
                rows.append(Row([], [], [], []))
            _extend(rows[-1], before, own, turn)
        for row in rows:
            self._check(row)
        if not any(any(row.counted) for row in rows):
            raise ConfigError(
                f"a trajectory has nothing that the model said: {trajectory.messages_and_choices!r:.80}. It needs a "
                "choice, or an assistant's message with text."
            )
        return [row for row in rows if any(row.counted)]

    def _before(self, turn: Turn, so_far: list[int], text: str, *, first: bool) -> list[int]:
        if turn.prompt_ids is not None:
            return list(turn.prompt_ids)
        return so_far + self._fixed(self._after(so_far, text), first=first)

    def _ids(self, turn: Turn, following: str) -> list[int]:
        """The turn's own ids; of a text, with the end token where the template shows that the turn has ended."""
        if turn.ids is not None:
            return list(turn.ids)
        ids = self._fixed(turn.text, first=False)
        ended = self.chat and not turn.cut_off and following.startswith(self.tokenizer.eos_token)
        return [*ids, int(self.tokenizer.eos_token_id)] if ended else ids

    def _after(self, so_far: list[int], text: str) -> str:
        """``text`` without the end token that the turn before it has said already."""
        if so_far and so_far[-1] in self.end:
            return text.removeprefix(self.tokenizer.convert_ids_to_tokens(so_far[-1]))
        return text

    def _fixed(self, text: str, *, first: bool) -> list[int]:
        special = first and not self.chat
        encoded = self.tokenizer(text, add_special_tokens=special, truncation=False, verbose=False)["input_ids"]
        return [int(i) for i in encoded]

    def _around(self, items: Sequence[Item], tools: list[Any] | None, *, going_on: bool, **template: Any) -> list[str]:
        """The text before, between and after the turns: one more than there are turns."""
        if not self.chat:
            return _plain(items)
        said = str(items)
        salt = next(k for k in itertools.count() if f"[turn {k}." not in said)
        marks = [f"[turn {salt}.{n}]" for n, item in enumerate(items) if isinstance(item, Turn)]
        names = iter(marks)
        chat = [{"role": "assistant", "content": next(names)} if isinstance(i, Turn) else i for i in items]
        extra = {**template, "tools": tools} if tools else template
        try:
            text: str = self.tokenizer.apply_chat_template(
                chat, tokenize=False, add_generation_prompt=going_on, **extra
            )
        except Exception as error:  # templates raise what they like
            raise ConfigError(f"the chat template does not take these messages: {error}") from error
        pieces: list[str] = []
        for mark in marks:
            before, found, text = text.partition(mark)
            if not found:
                raise ConfigError(
                    f"the chat template leaves out a turn of the model ({len(pieces) + 1} of {len(marks)}). Sample "
                    "each turn with backend.sample: its choice knows the prompt it had."
                )
            pieces.append(before)
        return [*pieces, text]

    def _check(self, row: Row) -> None:
        wrong = next((i for i in row.ids if not 0 <= i < self.vocabulary), None)
        if wrong is not None:
            raise ConfigError(f"token id {wrong} is not in the vocabulary of {self.vocabulary}. Is it another model's?")
        if self.context is not None and len(row.ids) > self.context:
            raise ConfigError(
                f"a trajectory has {len(row.ids)} tokens, the model's context is {self.context}. Shorten it; nothing "
                "is cut off silently."
            )


def _extend(row: Row, before: list[int], own: list[int], turn: Turn) -> None:
    new = len(before) - len(row.ids)
    row.ids[:] = [*before, *own]
    row.counted.extend([False] * new + [True] * len(own))
    row.logp.extend([0.0] * new + list(turn.logp if turn.logp is not None else [math.nan] * len(own)))
    row.turns.append(turn)


def _plain(items: Sequence[Item]) -> list[str]:
    pieces, text = [], ""
    for n, item in enumerate(items):
        if isinstance(item, Turn):
            pieces.append(text)
            text = ""
        elif item["role"] == "assistant":
            text += _content(item)
        else:
            text += ("\n" if n else "") + _content(item)
    return [*pieces, text]


def _content(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text", "")) for part in content)
