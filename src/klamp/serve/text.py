"""Text as its tokens come: whole characters, cut before a stop string, nothing shown that a stop might take back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

BROKEN = "\ufffd"
"""What a tokenizer writes for a character that is not complete yet."""


class Text:
    """The text of a sequence so far."""

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        self.tokenizer, self.stop = tokenizer, tuple(stop)
        self.ids: list[int] = []
        self.whole = ""
        """All that was said; after a stop string, what stands before it."""
        self.stopped = False
        self.shown = 0
        self.start = self.read = 0

    def add(self, token: int) -> bool:
        """Take in a token; whether a stop string is complete."""
        self.ids.append(token)
        self._grow(last=False)
        return self.stopped

    def show(self, *, last: bool) -> str:
        """What can be shown that was not; with ``last`` all of it."""
        if last and not self.stopped:
            self._grow(last=True)
        end = len(self.whole) - (0 if last else self._held_back())
        new, self.shown = self.whole[self.shown : end], max(self.shown, end)
        return new

    def _grow(self, *, last: bool) -> None:
        # A few tokens before the new ones are decoded with them: spaces and characters depend on neighbours.
        before = self._decoded(self.ids[self.start : self.read])
        now = self._decoded(self.ids[self.start :])
        if now.endswith(BROKEN) and not last:
            return
        new = now[len(before) :]
        self.start, self.read = self.read, len(self.ids)
        known = len(self.whole)
        self.whole += new
        found = [
            place for s in self.stop if (place := self.whole.find(s, max(0, known - len(s) + 1))) >= 0
        ]  # fmt: skip
        if found:
            self.whole, self.stopped = self.whole[: min(found)], True

    def _held_back(self) -> int:
        """How much of the end may be the beginning of a stop string."""
        longest = max((len(s) for s in self.stop), default=1) - 1
        ends = range(min(longest, len(self.whole)), 0, -1)
        return next((n for n in ends if any(s.startswith(self.whole[-n:]) for s in self.stop)), 0)

    def _decoded(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True)) if ids else ""
