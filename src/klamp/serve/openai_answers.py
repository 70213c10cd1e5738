"""What comes back to OpenAI's clients, and what goes wrong, in OpenAI's shape."""

from __future__ import annotations

import json
import math
import secrets
import time
from dataclasses import dataclass, field, replace
from typing import Any

from klamp.serve.engine import Ask, Begun, Piece
from klamp.serve.tool_calls import tool_calls


class ApiError(Exception):
    """An answer other than 200."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        """As OpenAI writes it."""
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True, kw_only=True)
class Wish:
    """A request of the API: what the engine is asked, and how the answer is written."""

    asks: list[Ask]
    """One a prompt; a chat has one."""
    chat: bool
    stream: bool
    usage: bool
    """Whether a stream ends with the usage."""
    logprobs: bool
    ids: bool
    """Whether tokens' ids, the prompt's and the step come with every choice."""
    as_ids: bool
    """Whether a token of the log-probs is written ``token_id:N``."""
    tools: bool
    """Whether tool calls are looked for."""


@dataclass
class Answer:
    """A response in the making: pieces go in, JSON comes out."""

    wish: Wish
    tokenizer: Any
    end: tuple[int, ...]
    begun: dict[int, Begun] = field(default_factory=dict)
    """By prompt."""
    tokens: int = 0
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.id = ("chatcmpl-" if self.wish.chat else "cmpl-") + secrets.token_hex(12)
        self.kept: dict[int, list[Piece]] = {}
        self.offsets: dict[int, int] = {}

    @property
    def usage(self) -> dict[str, int]:
        """Tokens of the prompts, each once, and of all completions."""
        prompt = sum(len(b.prompt) for b in self.begun.values())
        return {"prompt_tokens": prompt, "completion_tokens": self.tokens, "total_tokens": prompt + self.tokens}

    def envelope(self, kind: str) -> dict[str, Any]:
        """What every response and chunk begins with."""
        name = ("chat.completion" if self.wish.chat else "text_completion") + (kind if self.wish.chat else "")
        found = {"id": self.id, "object": name, "created": self.created, "model": self.wish.asks[0].model}
        steps = {b.step for b in self.begun.values()}
        return found | ({"system_fingerprint": f"step-{steps.pop()}"} if len(steps) == 1 and None not in steps else {})

    # -- all at once ------------------------------------------------------------------------------------------------

    def whole(self, pieces: list[tuple[int, Piece]]) -> dict[str, Any]:
        """The response of finished completions, each with its prompt's number."""
        choices = [self._choice(prompt, piece) for prompt, piece in sorted(pieces, key=lambda p: (p[0], p[1].index))]
        self.tokens = sum(len(piece.ids) for _, piece in pieces)
        found = {**self.envelope(""), "choices": choices, "usage": self.usage}
        if self.wish.ids and self.wish.chat:
            found["prompt_token_ids"] = self.begun[0].prompt
        return found

    def _choice(self, prompt: int, piece: Piece) -> dict[str, Any]:
        index = prompt * self.wish.asks[0].n + piece.index
        choice: dict[str, Any] = {"index": index, "finish_reason": piece.finish, "logprobs": None}
        if self.wish.chat:
            choice["message"] = {"role": "assistant", "content": piece.text, "refusal": None}
            content, calls = self._called(piece.ids, piece.text)
            if calls:
                choice["message"] |= {"content": content or None, "tool_calls": calls}
                choice["finish_reason"] = "tool_calls" if piece.finish == "stop" else piece.finish
        else:
            choice["text"] = piece.text
        if self.wish.logprobs:
            choice["logprobs"] = self._logprobs(index, piece)
        return choice | self._extras(prompt, piece.ids) | self._spans(prompt, piece.ids)

    def _spans(self, prompt: int, ids: list[int]) -> dict[str, Any]:
        """Which step drew the tokens, as ART's vLLM writes it: its PipelineTrainer evaluates nothing else."""
        begun = self.begun[prompt]
        if not self.wish.ids or begun.step is None:
            return {}
        of = {"generation_id": self.id, "policy_version": begun.step, "update_seq": begun.step}
        of["lora_slot"] = self.wish.asks[prompt].model
        before = [{"start_token": 1, "end_token": len(begun.prompt), **of}] if len(begun.prompt) > 1 else []
        own = [{"start_token": 0, "end_token": len(ids), **of}]
        return {"policy_token_spans": own, "prompt_policy_token_spans": before}

    def _called(self, ids: list[int], text: str) -> tuple[str, list[dict[str, Any]]]:
        """Text and tool calls; some formats mark a call by a special token, so those are kept to look for them."""
        if not self.wish.tools:
            return text, []
        said = tool_calls(self.tokenizer.decode([i for i in ids if i not in self.end], skip_special_tokens=False))
        return (said.content, [c.to_dict() for c in said.calls]) if said.calls else (text, [])

    def _extras(self, prompt: int, ids: list[int]) -> dict[str, Any]:
        if not self.wish.ids:
            return {}
        begun, ask = self.begun[prompt], self.wish.asks[prompt]
        found: dict[str, Any] = {"token_ids": ids, "prompt_token_ids": begun.prompt, "step": begun.step}
        return found | {"temperature": ask.temperature or 1.0}

    # -- piece by piece ---------------------------------------------------------------------------------------------

    def chunks(self, prompt: int, piece: Piece) -> list[dict[str, Any]]:
        """The chunks of a stream that a piece makes; with tools a message is told when it is whole."""
        index = prompt * self.wish.asks[0].n + piece.index
        first = index not in self.kept
        self.kept.setdefault(index, [])
        self.tokens += len(piece.ids)
        if not self.wish.chat:
            told = piece.text or piece.finish or self.wish.ids or self.wish.logprobs
            return [self._chunk(index, {"text": piece.text}, piece, prompt)] if told else []
        found = [self._chunk(index, {"delta": {"role": "assistant", "content": ""}}, None, prompt)] if first else []
        if self.wish.tools:
            self.kept[index].append(piece)
            if piece.finish is None:
                return found
            piece = joined(self.kept[index])
        delta, finish = {"content": piece.text}, piece.finish
        content, calls = self._called(piece.ids, piece.text) if self.wish.tools else (piece.text, [])
        if calls:
            numbered = [{"index": i, **call} for i, call in enumerate(calls)]
            delta = {"content": content or None, "tool_calls": numbered}  # type: ignore[dict-item]
            finish = "tool_calls" if finish == "stop" else finish
        found.append(self._chunk(index, {"delta": delta}, replace(piece, finish=finish), prompt))
        return found

    def _chunk(self, index: int, said: dict[str, Any], piece: Piece | None, prompt: int) -> dict[str, Any]:
        choice = {"index": index, **said, "logprobs": None, "finish_reason": None if piece is None else piece.finish}
        if piece is not None:
            if self.wish.logprobs:
                choice["logprobs"] = self._logprobs(index, piece)
            extras = self._extras(prompt, piece.ids)
            choice |= extras if piece.finish else {k: v for k, v in extras.items() if k == "token_ids"}
        found = {**self.envelope(".chunk"), "choices": [choice]}
        # As vLLM has it: a chat's prompt comes once, beside the first piece of a choice.
        return found | ({"prompt_token_ids": self.begun[prompt].prompt} if piece is None and self.wish.ids else {})

    # -- log-probs --------------------------------------------------------------------------------------------------

    def _logprobs(self, index: int, piece: Piece) -> dict[str, Any]:
        if self.wish.chat:
            entries = []
            for token, logp, top in zip(piece.ids, piece.logp, piece.tops, strict=True):
                tops = [self._entry(i, v) for i, v in top]
                entries.append({**self._entry(token, logp), "top_logprobs": tops})
            return {"content": entries, "refusal": None}
        names = [self._name(i) for i in piece.ids]
        offset, offsets = self.offsets.get(index, 0), []
        for i in piece.ids:
            offsets.append(offset)
            offset += len(self.tokenizer.decode([i], skip_special_tokens=True))
        self.offsets[index] = offset
        tops = [{self._name(i): _finite(v) for i, v in top} for top in piece.tops]
        logps = [_finite(v) for v in piece.logp]
        return {"tokens": names, "token_logprobs": logps, "top_logprobs": tops, "text_offset": offsets}

    def _entry(self, token: int, logp: float) -> dict[str, Any]:
        text = self.tokenizer.decode([token], skip_special_tokens=False)
        whole = None if "\ufffd" in text else list(text.encode())
        return {"token": self._name(token), "logprob": _finite(logp), "bytes": whole}

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self.wish.as_ids else str(self.tokenizer.decode([token]))


def joined(pieces: list[Piece]) -> Piece:
    """All of a completion's pieces as one."""
    ids, logp, tops = ([x for p in pieces for x in getattr(p, name)] for name in ("ids", "logp", "tops"))
    return replace(pieces[-1], text="".join(p.text for p in pieces), ids=ids, logp=logp, tops=tops)


def sse(data: dict[str, Any] | str) -> str:
    """An event of a stream."""
    return f"data: {data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, allow_nan=False)}\n\n"


def _finite(logp: float) -> float:
    return logp if math.isfinite(logp) else -9999.0  # what OpenAI writes for a token that cannot be drawn
