"""Tool calls in what a model said, for the formats that most models were trained on.

=========  =========================================================================
Hermes     ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` (Qwen, SmolLM, Hermes)
Mistral    ``[TOOL_CALLS][{"name": ..., "arguments": {...}}]``, or ``[TOOL_CALLS]name{...}``, or with ``[CALL_ID]`` and
           ``[ARGS]`` between
Llama 3    ``{"name": ..., "parameters": {...}}``, several with ``;`` between, after ``<|python_tag|>`` or alone
=========  =========================================================================
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator
from typing import Any, NamedTuple

HERMES, HERMES_END = "<tool_call>", "</tool_call>"
MISTRAL = "[TOOL_CALLS]"
PYTHON_TAG = "<|python_tag|>"
NAMED = re.compile(r"\s*([A-Za-z_][\w.-]*)\s*(?:\[CALL_ID\]\s*\w*\s*)?(?:\[ARGS\])?\s*(?=\{)")
DECODER = json.JSONDecoder()


class Call(NamedTuple):
    """A function and its arguments as JSON text."""

    name: str
    arguments: str

    def to_dict(self) -> dict[str, Any]:
        """As OpenAI writes it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


class Said(NamedTuple):
    """What is left of a text beside its tool calls."""

    content: str
    calls: list[Call]


def tool_calls(text: str) -> Said:
    """The calls in ``text``; one that cannot be read stays text, as does all of it then."""
    for parse in (_hermes, _mistral, _llama):
        found = parse(text)
        if found is not None:
            return found
    return Said(text, [])


def _hermes(text: str) -> Said | None:
    content, mark, rest = text.partition(HERMES)
    calls = []
    while mark:
        value, rest = _first(rest)
        call, rest = _call(value), rest.lstrip()
        if call is None or (rest and not rest.startswith(HERMES_END)):
            return None
        calls.append(call)
        between, mark, rest = rest.removeprefix(HERMES_END).partition(HERMES)
        content += between
    return Said(content.strip(), calls) if calls else None


def _mistral(text: str) -> Said | None:
    content, mark, rest = text.partition(MISTRAL)
    calls: list[Call | None] = []
    while mark:
        name = NAMED.match(rest)
        value, rest = _first(rest[name.end() :] if name else rest)
        if name:
            calls.append(Call(name[1], _written(value)) if isinstance(value, dict) else None)
        else:
            calls += [_call(one) for one in value] if isinstance(value, list) else [None]
        between, mark, rest = rest.partition(MISTRAL)
        content += between
    return Said(content.strip(), [c for c in calls if c]) if calls and all(calls) else None


def _llama(text: str) -> Said | None:
    before, mark, rest = text.partition(PYTHON_TAG)
    if not mark:
        before, rest = "", text
    if not rest.lstrip().startswith("{"):
        return None
    # An object that has a name and no arguments may be an answer in JSON.
    calls = [
        _call(v) if isinstance(v, dict) and {"parameters", "arguments"} & v.keys() else None for v in _objects(rest)
    ]
    return Said(before.strip(), [c for c in calls if c]) if calls and all(calls) else None


def _objects(text: str) -> Iterator[Any]:
    """JSON values with semicolons or white space between; None for what is not one."""
    while text.strip():
        value, text = _first(text)
        yield value
        if value is None:
            return
        text = text.lstrip().removeprefix(";")


def _first(text: str) -> tuple[Any, str]:
    """The JSON value that ``text`` begins with, and what comes after it; None where it begins with none."""
    text = text.lstrip()
    try:
        value, end = DECODER.raw_decode(text)
    except (ValueError, RecursionError):
        return None, text
    return value, text[end:]


def _call(value: Any) -> Call | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # some models write the object as a string
        arguments = _json(arguments)
    return Call(value["name"], _written(arguments)) if isinstance(arguments, dict) else None


def _written(arguments: dict[str, Any]) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
