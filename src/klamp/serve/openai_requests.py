"""What a request's JSON asks for, field by field; an ApiError that names the parameter where it cannot be had."""

from __future__ import annotations

from typing import Any

from klamp.errors import shown
from klamp.serve.engine import Ask, Limits
from klamp.serve.openai_answers import ApiError, Wish

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0, None),
    "presence_penalty": (0, None),
    "logit_bias": ({}, None),
    "response_format": ({"type": "text"}, None),
    "functions": ([], None),
    "function_call": ("none", None),
    "best_of": (1, None),
    "echo": (False, None),
    "suffix": ("", None),
    "top_k": (-1, 0, None),
    "min_p": (0, None),
    "repetition_penalty": (1, None),
    "audio": (None,),
}
"""Settings that change what is drawn and that this endpoint does not have, with the values that ask for nothing."""


def read_wish(body: Any, *, chat: bool, limits: Limits, always_ids: bool) -> Wish:
    """What a request's JSON asks for; an ApiError that names the parameter where it cannot be had."""
    if not isinstance(body, dict):
        raise ApiError(f"the body must be a JSON object, got {shown(body, 60)}.")
    for name, nothing in UNSUPPORTED.items():
        if body.get(name) not in nothing:
            raise ApiError(f"{name}={shown(body[name], 60)} is not supported. Leave it out.", param=name)
    asked = _flag(body, "logprobs") if chat else body.get("logprobs") is not None
    ids = always_ids or _flag(body, "return_token_ids")
    tools, called = _tools(body) if chat else (None, False)
    common: dict[str, Any] = {
        "model": _text(body, "model"),
        "n": _whole(body, "n", 1, most=limits.choices),
        "max_tokens": _max_tokens(body, limits, chat=chat),
        "temperature": _number(body, "temperature", 1.0, most=2.0),
        "top_p": _number(body, "top_p", 1.0, most=1.0),
        "stop": _stop(body),
        "seed": _seed(body),
        "top_logprobs": _top_logprobs(body, chat=chat),
        "stream": _flag(body, "stream"),
    }
    if common["top_p"] <= 0:
        raise ApiError("top_p must be > 0. 1.0 samples the model itself.", param="top_p")
    if chat:
        template = body.get("chat_template_kwargs") or {}
        if not isinstance(template, dict) or template.keys() & {"tools", "tokenize", "chat_template"}:
            raise ApiError("chat_template_kwargs must be an object of the template's own names.", param=CHAT_KWARGS)
        asks = [Ask(messages=_messages(body), tools=tools, template=template, **common)]
    else:
        asks = [Ask(**prompt, **common) for prompt in _prompts(body)]
        if len(asks) * common["n"] > limits.choices:
            raise ApiError(f"{len(asks)} prompts with n={common['n']} exceed {limits.choices} completions.", param="n")
    options = body.get("stream_options")
    return Wish(
        asks=asks,
        chat=chat,
        stream=common["stream"],
        usage=isinstance(options, dict) and bool(options.get("include_usage")),
        logprobs=asked or always_ids,
        ids=ids,
        as_ids=_flag(body, "return_tokens_as_token_ids") or (always_ids and not asked),
        tools=called,
    )


CHAT_KWARGS = "chat_template_kwargs"


def _text(body: dict[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str) or not value:
        raise ApiError(f"{name} must be a string, got {shown(value, 60)}.", param=name)
    return value


def _flag(body: dict[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise ApiError(f"{name} must be true or false, got {shown(value, 60)}.", param=name)
    return bool(value)


def _number(body: dict[str, Any], name: str, default: float, *, most: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    fits = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= most
    if not fits:
        raise ApiError(f"{name} must be a number between 0 and {most:g}, got {shown(value, 60)}.", param=name)
    return float(value)


def _whole(body: dict[str, Any], name: str, default: int, *, most: int, least: int = 1) -> int:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ApiError(f"{name} must be a whole number from {least} to {most}, got {shown(value, 60)}.", param=name)
    return value


def _seed(body: dict[str, Any]) -> int | None:
    value = body.get("seed")
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise ApiError(f"seed must be a whole number, got {shown(value, 60)}.", param="seed")
    return value


def _max_tokens(body: dict[str, Any], limits: Limits, *, chat: bool) -> int | None:
    names = ("max_completion_tokens", "max_tokens") if chat else ("max_tokens",)
    name = next((n for n in names if body.get(n) is not None), None)
    if name is None:
        return None if chat else 16  # OpenAI's default for text
    return _whole(body, name, 0, most=limits.tokens)


def _top_logprobs(body: dict[str, Any], *, chat: bool) -> int:
    if not chat:
        return _whole(body, "logprobs", 0, most=20, least=0)
    most = _whole(body, "top_logprobs", 0, most=20, least=0)
    if most and not _flag(body, "logprobs"):
        raise ApiError("top_logprobs needs logprobs=true.", param="top_logprobs")
    return most


def _stop(body: dict[str, Any]) -> tuple[str, ...]:
    value = body.get("stop")
    found = [value] if isinstance(value, str) else value or []
    fits = isinstance(found, list) and len(found) <= 16 and all(isinstance(s, str) and s for s in found)
    if not fits:
        raise ApiError(f"stop must be a string or at most 16 of them, got {shown(value, 60)}.", param="stop")
    return tuple(found)


def _messages(body: dict[str, Any]) -> list[dict[str, Any]]:
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise ApiError("messages must be a list with at least one message.", param="messages")
    return [_message(m, f"messages[{i}]") for i, m in enumerate(given)]


def _message(message: Any, where: str) -> dict[str, Any]:
    """A message whose content is text, as templates want it."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ApiError(f"{where} must be an object with a role, got {shown(message, 60)}.", param=where)
    content = message.get("content")
    if isinstance(content, list):
        parts = [p for p in content if isinstance(p, dict) and p.get("type", "text") == "text"]
        if len(parts) != len(content) or not all(isinstance(p.get("text"), str) for p in parts):
            raise ApiError(f"{where}.content may have parts of type text only.", param=where)
        content = "".join(p["text"] for p in parts)
    if content is not None and not isinstance(content, str):
        raise ApiError(f"{where}.content must be text, got {shown(content, 60)}.", param=where)
    calls = message.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(_is_call(c) for c in calls)):
        raise ApiError(f"{where}.tool_calls must be a list of function calls.", param=where)
    # Some templates test for the name of a call alone, so an empty list is left out.
    kept = {k: v for k, v in message.items() if k not in ("content", "tool_calls") and v is not None}
    role = {"developer": "system"}.get(message["role"], message["role"])
    return {**kept, "role": role, "content": content or "", **({"tool_calls": calls} if calls else {})}


def _is_call(call: Any) -> bool:
    return isinstance(call, dict) and isinstance(call.get("function"), dict) and "name" in call["function"]


def _tools(body: dict[str, Any]) -> tuple[list[Any] | None, bool]:
    """The tools that the template is given, and whether calls of them are looked for."""
    tools, choice = body.get("tools") or None, body.get("tool_choice")
    if tools is not None and not (isinstance(tools, list) and all(_is_call(t) for t in tools)):
        raise ApiError("tools must be a list of functions.", param="tools")
    if choice not in (None, "auto", "none"):
        raise ApiError(
            f"tool_choice={shown(choice, 60)} is not supported: what the model says is not constrained. Use 'auto' or "
            "'none'.",
            param="tool_choice",
        )
    if choice == "none":
        return None, False
    return tools, tools is not None


def _prompts(body: dict[str, Any]) -> list[dict[str, Any]]:
    """One a prompt: text or token ids."""
    given = body.get("prompt")

    def ids(value: Any) -> bool:
        return isinstance(value, list) and bool(value) and all(type(i) is int for i in value)

    many = given if isinstance(given, list) and not ids(given) else [given]
    if not many or not all(isinstance(p, str) or ids(p) for p in many):
        raise ApiError(f"prompt must be text, token ids, or a list of them, got {shown(given, 60)}.", param="prompt")
    return [{"text": p} if isinstance(p, str) else {"ids": p} for p in many]
