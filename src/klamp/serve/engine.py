"""The scheduler: a bounded queue of requests, decoded together as they come, in the one thread that calls ``run``."""

from __future__ import annotations

import random
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from klamp.chat import Encoder
from klamp.errors import Busy, Closed, ConfigError, shown
from klamp.serve.continuous_batch import Batch

BROKEN = "\ufffd"
"""What a tokenizer writes for a character that is not complete yet."""


class Text:
    """The text of a sequence so far."""

    def __init__(self, tokenizer: Any, stop: Iterable[str]) -> None:
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


STEPS_IN_MEMORY = 3
"""Saved steps that are held at the same time: the newest, and two to compare it with."""


def split_step(name: str) -> tuple[str, int | None]:
    """``name@40`` as (name, 40)."""
    found = re.fullmatch(r"(.+)@(\d{1,9})", name)
    return (found[1], int(found[2])) if found else (name, None)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one endpoint takes."""

    queue: int = 1024
    """Sequences that may wait or run at the same time."""
    batch: int = 64
    """Sequences that are decoded together."""
    tokens: int = 4096
    """Tokens of one completion at most; also where a request names no number and the context allows it."""
    choices: int = 128
    """Completions of one request."""
    body: int = 8 << 20
    """Bytes of one request."""


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What a request wants, checked but not yet tokenised."""

    model: str
    messages: list[Any] | None = None
    """A chat; None: ``text`` or ``ids`` is continued."""
    tools: list[Any] | None = None
    text: str = ""
    ids: list[int] | None = None
    template: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the chat template."""
    n: int = 1
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int | None = None
    top_logprobs: int = 0
    stream: bool = False


@dataclass(frozen=True)
class Piece:
    """News of a completion: tokens since the last piece, or all of them where nothing is streamed."""

    index: int
    text: str
    ids: list[int]
    logp: list[float]
    tops: list[list[tuple[int, float]]]
    finish: str | None
    """stop, length, or None while it goes on."""


@dataclass(frozen=True)
class Begun:
    """A request is being decoded."""

    prompt: list[int]
    step: int | None


class Model(NamedTuple):
    """Weights to decode with."""

    model: Any
    step: int | None
    """The training step they are of, where they are of one."""


class Models(Protocol):
    """Where names lead to weights; called in the engine's thread."""

    @property
    def encoder(self) -> Encoder:
        """The tokenizer that all of them share."""
        ...

    def weights(self, name: str) -> Model:
        """The weights under ``name``, or ``name@step``; NoSuchModel where there are none."""
        ...


class Request:
    """An :class:`Ask` on its way. ``tell`` is called in the engine's thread with each :class:`Begun`, :class:`Piece`
    or exception."""

    def __init__(self, ask: Ask, tell: Callable[[Any], None]) -> None:
        self.ask, self.tell = ask, tell
        self.cancelled = False
        """Set by whoever asked; its sequences leave the batch before the next token."""


class Sequence:
    """One completion of a request; a row of a batch."""

    def __init__(self, request: Request, prompt: list[int], index: int, encoder: Encoder, most: int) -> None:
        ask = request.ask
        self.request, self.prompt, self.index, self.most = request, prompt, index, most
        self.temperature, self.top_p, self.top_logprobs = ask.temperature, ask.top_p, ask.top_logprobs
        self.end, self.done = encoder.end, False
        seed = random.SystemRandom().getrandbits(64) if ask.seed is None else ask.seed
        self.uniform = random.Random(f"{seed}/{index}").random
        self.text = Text(encoder.tokenizer, ask.stop)
        self.news: tuple[list[int], list[float], list[list[tuple[int, float]]]] = ([], [], [])

    def take(self, token: int, logp: float, top: list[tuple[int, float]]) -> bool:
        """Keep a token and tell of it; whether the sequence goes on."""
        if self.request.cancelled:
            return False
        for kept, new in zip(self.news, (token, logp, top), strict=True):
            kept.append(new)  # type: ignore[attr-defined]
        finish = None
        if token in self.end:
            finish = "stop"
            self.text.ids.append(token)
        elif self.text.add(token):
            finish = "stop"
        elif len(self.text.ids) >= self.most:
            finish = "length"
        self.done = finish is not None  # before it is told: whoever hears of it may ask again
        if finish or self.request.ask.stream:
            ids, logps, tops = self.news
            self.news = ([], [], [])
            self.request.tell(Piece(self.index, self.text.show(last=bool(finish)), ids, logps, tops, finish))
        return finish is None


class Engine:
    """Requests go in from any thread; one thread decodes them. Each is told of its end, whatever happens."""

    def __init__(self, models: Models, limits: Limits) -> None:
        self.models, self.limits = models, limits
        self.waiting: deque[Request] = deque()
        self.running: list[Batch] = []
        self.lock = threading.Lock()
        self.closed = False

    @property
    def load(self) -> int:
        """Sequences that wait or run."""
        rows: list[Any] = [row for b in list(self.running) for row in list(b.rows)]
        return sum(r.ask.n for r in list(self.waiting)) + len({id(row) for row in rows if not row.done})

    def submit(self, request: Request) -> None:
        """Put a request into the queue, or raise Busy or Closed."""
        with self.lock:
            self.check_room(self.load, request)
            self.waiting.append(request)

    def check_room(self, load: int, request: Request) -> None:
        """Raise Busy where ``load`` completions leave no room for a request, and Closed where nothing is taken."""
        if self.closed:
            raise closed()
        if load + request.ask.n > self.limits.queue:
            raise Busy(f"{load} completions wait or run, and at most {self.limits.queue} may. Ask again later.")

    def run(self, wanted: Callable[[], bool] = lambda: False) -> None:
        """Decode until nothing runs or waits; once the thread is ``wanted`` elsewhere, only what runs is finished."""
        try:
            while self.running or (self.waiting and not wanted()):
                if not wanted():
                    self._admit()
                for batch in list(self.running):
                    batch.keep([i for i, row in enumerate(batch.rows) if not row.request.cancelled])  # type: ignore[attr-defined]
                    if batch.rows:
                        batch.step()
                self.running = [b for b in self.running if b.rows]
                if self.closed:
                    self.fail(closed())
        except BaseException as error:  # out of memory, say: whoever waits is told, and the next request starts afresh
            self.fail(error)
            if not isinstance(error, Exception):
                raise

    def close(self) -> None:
        """Take nothing more. What waits is told now, what runs before its next token, by the thread that decodes."""
        with self.lock:
            self.closed = True
            waiting = list(self.waiting)
            self.waiting.clear()
        for request in waiting:
            request.tell(closed())

    def _admit(self) -> None:
        """Begin as many waiting requests as the batch has room for; they join the rows of their model."""
        new: dict[int, tuple[Any, list[Sequence]]] = {}
        room = self.limits.batch - sum(len(b.rows) for b in self.running)
        while True:
            with self.lock:
                # One that is larger than the batch is begun when nothing else runs.
                if not self.waiting or self.limits.batch > room < self.waiting[0].ask.n:
                    break
                request = self.waiting.popleft()
            if request.cancelled:
                continue
            room -= request.ask.n
            try:
                model, rows = self._begun(request)
            except Exception as error:
                request.tell(error)
                continue
            new.setdefault(id(model), (model, []))[1].extend(rows)
        for model, rows in new.values():
            try:
                batch = Batch(model, rows, int(self.models.encoder.tokenizer.pad_token_id))
            except Exception as error:  # out of memory, say
                for request in {id(row.request): row.request for row in rows}.values():
                    request.tell(error)
                continue
            beside = next((b for b in self.running if b.joins and batch.joins and b.model is model), None)
            self.running.append(batch)
            if beside is not None:
                beside.join(batch)  # where this fails, both are told
                self.running.remove(batch)

    def _begun(self, request: Request) -> tuple[Any, list[Sequence]]:
        model, step = self.models.weights(request.ask.model)
        prompt, most = self.sized(request.ask)
        request.tell(Begun(prompt, step))
        return model, [Sequence(request, prompt, i, self.models.encoder, most) for i in range(request.ask.n)]

    def sized(self, ask: Ask) -> tuple[list[int], int]:
        """The prompt's tokens, and how many a completion may have; a ConfigError where they do not fit."""
        prompt, context = self._prompt(ask), self.models.encoder.context
        room = self.limits.tokens if context is None else min(self.limits.tokens, context - len(prompt))
        most = room if ask.max_tokens is None else ask.max_tokens
        if room < 1 or most > room:
            said = f"max_tokens={ask.max_tokens}" if ask.max_tokens is not None else "a completion"
            allowed = f"the model's context is {context}" if context is not None else "there is no limit on the prompt"
            raise ConfigError(
                f"a prompt of {len(prompt)} tokens and {said} do not fit: {allowed}, and a completion has at most "
                f"{self.limits.tokens} tokens. Shorten the prompt or lower max_tokens."
            )
        return prompt, most

    def _prompt(self, ask: Ask) -> list[int]:
        encoder = self.models.encoder
        if ask.messages is not None:
            return encoder.prompt(ask.messages, ask.tools, **ask.template)
        if ask.ids is None:
            ids = [int(i) for i in encoder.tokenizer(ask.text, truncation=False, verbose=False)["input_ids"]]
        else:
            ids = ask.ids
        wrong = next((i for i in ids if not 0 <= i < encoder.vocabulary), None)
        if wrong is not None:
            raise ConfigError(f"prompt has token id {shown(wrong)}, and the vocabulary has {encoder.vocabulary}.")
        if not ids:
            raise ConfigError("the prompt is empty, and this tokenizer puts no BOS before it to start from.")
        return ids

    def fail(self, error: BaseException) -> None:
        """Tell everybody who waits that nothing will come."""
        told = {id(r): r for b in self.running for row in b.rows if (r := row.request)}  # type: ignore[attr-defined]
        with self.lock:
            told |= {id(r): r for r in self.waiting}
            self.waiting.clear()
        self.running = []
        for request in told.values():
            request.tell(error)


def closed() -> Closed:
    """What is told to whoever asks an endpoint that closes."""
    return Closed("the endpoint is closing. Ask again when it is back.")
