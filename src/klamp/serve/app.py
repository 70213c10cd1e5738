"""The web application: OpenAI's routes in front of engines or of another server, and the thread of uvicorn."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from klamp.errors import Busy, Closed, ConfigError, KlampError, NoSuchModel
from klamp.serve import engine
from klamp.serve.engine import Begun, Limits, Piece
from klamp.serve.openai_answers import Answer, ApiError, Wish, sse
from klamp.serve.openai_requests import read_wish


class Door(Protocol):
    """A model behind the application."""

    @property
    def tokenizer(self) -> Any:
        """For the text of tokens."""
        ...

    @property
    def end(self) -> tuple[int, ...]:
        """Tokens that end a sequence."""
        ...

    def names(self) -> list[str]:
        """What it can be asked for by: the model's name, and ``name@step`` for the steps that are saved."""
        ...

    def submit(self, request: engine.Request) -> None:
        """Begin a request, or raise Busy or Closed."""
        ...


Find = Callable[[str], "Door | None"]


def make_app(
    find: Find,
    doors: Callable[[], list[Door]],
    *,
    limits: Limits,
    key: str | None = None,
    always_ids: bool = False,
    forward: str | None = None,
) -> FastAPI:
    """OpenAI's endpoint for the models that ``find`` knows; with ``forward`` every request goes on to that URL.

    ``always_ids``: log-probs and token ids come with every choice, asked for or not, as training needs them.
    """

    async def guard(request: Request) -> None:
        if key is not None and request.url.path != "/health" and not _has_key(request, key):
            raise ApiError("the API key is missing or wrong.", status=401, code="invalid_api_key")

    app = FastAPI(title="klamp", docs_url=None, redoc_url=None, openapi_url=None, dependencies=[Depends(guard)])

    @app.exception_handler(ApiError)
    async def refused(_: Request, error: ApiError) -> Response:
        return _error(error)

    @app.exception_handler(HTTPException)
    async def unknown_path(request: Request, error: HTTPException) -> Response:
        wrong = f"{request.method} {request.url.path!r}"
        return _error(ApiError(f"there is no {wrong} here.", status=error.status_code, code="unknown_url"))

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> Response:
        return _error(as_api_error(error))

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    if forward is not None:
        from klamp.serve.forwarding import forward_to  # which reads bodies as this module does

        forward_to(app, forward, limits, own_key=key is not None)
    else:
        _answer_models(app, find, doors, limits=limits, always_ids=always_ids)
    return app


def _answer_models(
    app: FastAPI, find: Find, doors: Callable[[], list[Door]], *, limits: Limits, always_ids: bool
) -> None:
    """Add the routes that klamp's own engines answer."""

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(name) for door in doors() for name in door.names()]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        door = known(name)
        if name not in door.names():
            raise as_api_error(NoSuchModel(name, door.names()))
        return _model(name)

    def known(name: str) -> Door:
        door = find(name)
        if door is None:
            raise as_api_error(NoSuchModel(name, [n for d in doors() for n in d.names()]))
        return door

    async def answer(request: Request, *, chat: bool) -> Response:
        wish = read_wish(await read_json(request, limits), chat=chat, limits=limits, always_ids=always_ids)
        return await _answered(request, wish, known(wish.asks[0].model))

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await answer(request, chat=True)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await answer(request, chat=False)


async def _answered(request: Request, wish: Wish, door: Door) -> Response:
    news: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def telling(prompt: int) -> Callable[[Any], None]:
        def tell(what: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is gone with whoever asked
                loop.call_soon_threadsafe(news.put_nowait, (prompt, what))

        return tell

    asked = [engine.Request(ask, telling(i)) for i, ask in enumerate(wish.asks)]
    try:
        for one in asked:
            door.submit(one)
    except (Busy, Closed) as error:
        _cancel(asked)
        raise as_api_error(error) from None
    answer = Answer(wish, door.tokenizer, door.end)
    pieces = _pieces(news, wish, answer)
    if not wish.stream:
        return await _whole(request, answer, pieces, asked)
    try:  # what is wrong with the prompt is an answer of its own, not part of a stream
        first = await anext(pieces)
    except BaseException:
        _cancel(asked)
        raise
    return StreamingResponse(_stream(first, pieces, answer, asked), media_type="text/event-stream")


async def _pieces(news: asyncio.Queue[tuple[int, Any]], wish: Wish, answer: Answer) -> AsyncIterator[tuple[int, Piece]]:
    """Every piece with its prompt's number, until all completions are done."""
    open_ones = sum(ask.n for ask in wish.asks)
    while open_ones:
        prompt, what = await news.get()
        if isinstance(what, Begun):
            answer.begun[prompt] = what
        elif isinstance(what, Piece):
            open_ones -= what.finish is not None
            yield prompt, what
        else:
            raise as_api_error(what)


async def _whole(
    request: Request, answer: Answer, pieces: AsyncIterator[tuple[int, Piece]], asked: list[engine.Request]
) -> Response:
    """The whole response; whoever hangs up has its completions taken out of the batch."""

    async def gathered() -> list[tuple[int, Piece]]:
        return [piece async for piece in pieces]

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    done, left = asyncio.ensure_future(gathered()), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({done, left}, return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            return Response(status_code=499)
        return JSONResponse(answer.whole(done.result()))
    finally:
        _cancel(asked)
        done.cancel()
        left.cancel()
        await asyncio.gather(done, left, return_exceptions=True)


async def _stream(
    first: tuple[int, Piece],
    pieces: AsyncIterator[tuple[int, Piece]],
    answer: Answer,
    asked: list[engine.Request],
) -> AsyncIterator[str]:
    try:
        for chunk in answer.chunks(*first):
            yield sse(chunk)
        async for prompt, piece in pieces:
            for chunk in answer.chunks(prompt, piece):
                yield sse(chunk)
        if answer.wish.usage:
            yield sse({**answer.envelope(".chunk"), "choices": [], "usage": answer.usage})
        yield sse("[DONE]")
    except ApiError as error:
        yield sse(error.body())
    finally:
        _cancel(asked)


def _cancel(asked: list[engine.Request]) -> None:
    """Nobody waits any more: sequences that still run leave the batch."""
    for request in asked:
        request.cancelled = True


def as_api_error(error: Any) -> ApiError:
    """What went wrong in the engine: the asker's fault where klamp says so."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Busy):
        return ApiError(str(error), status=429, code="queue_full")
    if isinstance(error, NoSuchModel):
        return ApiError(str(error), status=404, param="model", code="model_not_found")
    if isinstance(error, Closed):
        return ApiError(str(error), status=503, code="closing")
    if isinstance(error, ConfigError):
        too_long = "do not fit" in str(error)
        return ApiError(str(error), code="context_length_exceeded" if too_long else None)
    return ApiError(f"the model failed: {type(error).__name__}: {error!s:.300}", status=500)


async def read_body(request: Request, limits: Limits) -> bytes:
    """The body, no larger than it may be; what is larger is not read."""
    too_large = ApiError(f"the body is larger than {limits.body} bytes.", status=413)
    told = request.headers.get("content-length", "")
    if told.isdigit() and int(told) > limits.body:
        raise too_large
    body = b""
    try:
        async for piece in request.stream():
            body += piece
            if len(body) > limits.body:
                raise too_large
    except ClientDisconnect:
        raise ApiError("the client hung up.", status=499) from None
    return body


async def read_json(request: Request, limits: Limits) -> Any:
    """The body's JSON; text that no tokenizer takes is refused here."""
    body = await read_body(request, limits)
    try:
        found = json.loads(body)
        if b"\\u" in body or b"\xed" in body:  # the two ways to write half of a surrogate pair
            json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ApiError("the body has half of a surrogate pair, which is no character.") from None
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is not JSON: {error!s:.100}.") from None
    return found


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": int(time.time()), "owned_by": "klamp"}


def _has_key(request: Request, key: str) -> bool:
    given = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
    return hmac.compare_digest(given.encode(), key.encode())


def _error(error: ApiError) -> Response:
    headers = {"retry-after": "1"} if error.status in (429, 503) else None
    return JSONResponse(error.body(), status_code=error.status, headers=headers)


STARTS_WITHIN = 30.0
"""Seconds; it takes a fraction of one."""
GRACE = 5
"""Seconds that requests which run have to end by themselves when the endpoint closes."""
ENDS_WITHIN = 10.0
"""Seconds from then until the server's thread is no longer waited for; it takes about one."""


class Server:
    """An application that answers at ``url`` until ``close``."""

    def __init__(self, app: Any, host: str, port: int) -> None:
        """Port 0 takes a free one."""
        import uvicorn

        self.socket = _bound(host, port)
        self.host, self.port = self.socket.getsockname()[:2]
        # uvicorn's own log_config would close the handlers of whoever opens an endpoint in a program of their own.
        quiet: dict[str, Any] = {"log_config": None, "log_level": logging.WARNING, "access_log": False}
        how: dict[str, Any] = {"interface": "asgi3", "lifespan": "off", "timeout_graceful_shutdown": GRACE + 1}
        self.app = app
        self.uvicorn = uvicorn.Server(uvicorn.Config(self._answer, **how, **quiet))
        self.thread = threading.Thread(target=self._serve, name=f"klamp-serve-{self.port}", daemon=True)
        self.thread.start()
        began = time.monotonic()
        while not self.uvicorn.started:
            if not self.thread.is_alive() or time.monotonic() - began > STARTS_WITHIN:
                raise KlampError(f"the endpoint at {self.url} did not start.")
            time.sleep(0.005)

    @property
    def url(self) -> str:
        """What an OpenAI client takes as ``base_url``."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/v1"

    def close(self, end: Callable[[], None] = lambda: None) -> None:
        """Stop listening. What runs has GRACE seconds; then ``end`` is called, which answers the rest with an error.

        A client that neither reads its answer nor sends all of its request is cut off after one more second.
        """
        self.uvicorn.should_exit = True
        self.thread.join(GRACE)
        end()
        self.thread.join(ENDS_WITHIN)
        if self.thread.is_alive():
            logging.getLogger(__name__).warning("the endpoint at %s has not ended; its thread goes on.", self.url)
        self.socket.close()

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await self.app(scope, receive, send)
        except asyncio.CancelledError:  # cut off as it closes: uvicorn would print the stack
            if not self.uvicorn.should_exit:
                raise

    def _serve(self) -> None:
        asyncio.run(self.uvicorn.serve(sockets=[self.socket]))


def _bound(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind, protocol)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"{host}:{port} cannot be listened on: {error}. Choose another --host or --port.") from None
    return found
