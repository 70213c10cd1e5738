"""From trajectories to tokens: sampled ones as they are, text once, and only the model's own counted.

A chat is rendered with a mark in place of each turn of the model and split at the marks, so the text around the turns
is tokenised and the turns are put between as they were sampled. A model without a chat template reads plain text:
messages one a line, the model going on where the last one ends.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from klamp.errors import ConfigError
from klamp.local.trajectories import Turn, history, read

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
        items = read(trajectory.messages_and_choices)
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
