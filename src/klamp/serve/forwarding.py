"""The same routes in front of another OpenAI server, vLLM for instance: requests go on as they are, streams too."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

from klamp.errors import ConfigError
from klamp.serve.app import read_body
from klamp.serve.engine import Limits
from klamp.serve.openai_answers import ApiError

PATHS = ("models", "chat/completions", "completions")
KEPT = ("content-type", "accept")
"""Headers that go on; the rest belong to this connection."""


def forward_to(app: FastAPI, url: str, limits: Limits, *, own_key: bool = False) -> None:
    """Add the routes that pass requests on to ``url``, which ends in /v1.

    The server there gets VLLM_API_KEY where that is set, or else the client's key, unless that is ours (``own_key``).
    """
    import httpx

    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--forward {url!r} must be an address such as http://127.0.0.1:8000/v1.")
    theirs = os.environ.get("VLLM_API_KEY")
    client = httpx.AsyncClient(base_url=url.rstrip("/") + "/", timeout=httpx.Timeout(None, connect=10.0))

    async def passed_on(request: Request, path: str) -> Response:
        passed = KEPT if theirs or own_key else (*KEPT, "authorization")
        headers = {name: request.headers[name] for name in passed if name in request.headers}
        if theirs:
            headers["authorization"] = f"Bearer {theirs}"
        body = await read_body(request, limits)
        try:
            found = await client.send(
                client.build_request(request.method, path, content=body, headers=headers), stream=True
            )
        except httpx.TransportError as error:
            raise ApiError(f"{url} does not answer: {error or type(error).__name__}.", status=502) from None

        async def pieces() -> AsyncIterator[bytes]:
            try:
                async for piece in found.aiter_raw():
                    yield piece
            finally:  # also when whoever asked has gone: the other server then stops too
                await found.aclose()

        kept = {n: v for n, v in found.headers.items() if n in ("content-type", "content-encoding", "retry-after")}
        return StreamingResponse(pieces(), status_code=found.status_code, headers=kept)

    def route(path: str) -> None:
        async def handle(request: Request) -> Response:
            return await passed_on(request, path)

        app.add_api_route(f"/v1/{path}", handle, methods=["GET" if path == "models" else "POST"], response_model=None)

    for path in PATHS:
        route(path)
