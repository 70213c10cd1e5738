"""A server that answers as vLLM does, over the real model and its real adapters, and misbehaves when told to."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

Fault = Callable[[str, dict[str, Any], Any], Any]
"""(path, request, answer) -> the answer, changed; an int is a status to refuse with."""


class Stub:
    """The state of a server: its base, its adapters, what it was asked, and how it misbehaves."""

    def __init__(self, base: str, model: Any, end: tuple[int, ...] = ()) -> None:
        self.base, self.model, self.end = base, model.eval(), end
        self.adapters: dict[str, Any] = {}
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.fault: Fault | None = None
        self.raw_logprobs = False
        self.lock = threading.Lock()

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Status and JSON for a request."""
        with self.lock:
            self.asked.append((path, body))
            status, found = self._answer(path, body)
        if self.fault is not None and status == 200:
            changed = self.fault(path, body, found)
            return (changed, {"error": {"message": "told to"}}) if isinstance(changed, int) else (200, changed)
        return status, found

    def _answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/v1/models":
            return 200, {"data": [{"id": name} for name in (self.base, *self.adapters)]}
        if path == "/v1/load_lora_adapter":
            return self._load(body["lora_name"], Path(body["lora_path"]))
        if path == "/v1/unload_lora_adapter":
            known = self.adapters.pop(body["lora_name"], None)
            return (200, {}) if known is not None else (404, {"error": {"message": "no such adapter"}})
        if body["model"] not in (self.base, *self.adapters):
            return 404, {"error": {"message": f"The model `{body['model']}` does not exist."}}
        if "prompt_logprobs" in body:
            return 200, {"choices": [{"prompt_logprobs": self._scored(body)}]}
        return 200, {"choices": [self._drawn(body, i) for i in range(body["n"])]}

    def _load(self, name: str, folder: Path) -> tuple[int, Any]:
        from peft import PeftModel

        if not (folder / "adapter_config.json").is_file():
            return 400, {"error": {"message": f"No adapter found for {folder}"}}
        import copy

        loaded = PeftModel.from_pretrained(copy.deepcopy(self.model), folder)
        self.adapters[name] = loaded.merge_and_unload().eval()
        return 200, {}

    @torch.no_grad()
    def _logits(self, name: str, ids: list[int]) -> torch.Tensor:
        model = self.adapters.get(name, self.model)
        return model(input_ids=torch.tensor([ids])).logits[0].float()  # type: ignore[no-any-return]

    def _scored(self, body: dict[str, Any]) -> list[Any]:
        ids = body["prompt"]
        logp = self._logits(body["model"], ids).log_softmax(-1)
        return [None, *({str(t): {"logprob": float(logp[n, t])}} for n, t in enumerate(ids[1:]))]

    def _drawn(self, body: dict[str, Any], index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(body["seed"] + 7919 * index)
        ids, tokens, logps = list(body["prompt"]), [], []
        for _ in range(body["max_tokens"]):
            logits = self._logits(body["model"], ids)[-1]
            logp = (logits / body["temperature"]).log_softmax(-1)
            token = int(torch.multinomial(logp.exp(), 1, generator=generator))
            tokens.append(token)
            logps.append(float((logits.log_softmax(-1) if self.raw_logprobs else logp)[token]))
            ids.append(token)
            if token in body.get("stop_token_ids", []):
                break
        ended = tokens[-1] in body.get("stop_token_ids", [])
        reason = "stop" if ended else "length"
        return {"index": index, "token_ids": tokens, "logprobs": {"token_logprobs": logps}, "finish_reason": reason}


@contextmanager
def serving(stub: Stub, port: int = 0) -> Iterator[str]:
    """The address of ``stub`` on this machine, for as long as the context lasts."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._reply({})

        def do_POST(self) -> None:
            self._reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _reply(self, body: dict[str, Any]) -> None:
            status, found = stub.answer(self.path, body)
            text = json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: Any) -> None:
            pass

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: Any) -> None:
            """A client that gave up on a late answer is what some tests are about."""

    server = Quiet(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def late(seconds: float) -> Fault:
    """Answer, but not soon."""

    def fault(path: str, body: dict[str, Any], found: Any) -> Any:
        if path == "/v1/completions":
            time.sleep(seconds)
        return found

    return fault
