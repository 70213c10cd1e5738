"""Tool calls in what a model said, for the formats that most models were trained on.

=========  =========================================================================
Hermes     ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` (Qwen, SmolLM, Hermes)
Mistral    ``[TOOL_CALLS][{"name": ..., "arguments": {...}}]``, or ``[TOOL_CALLS]name{...}``
Llama 3    ``{"name": ..., "parameters": {...}}``, several with ``;`` between, after ``<|python_tag|>`` or alone
=========  =========================================================================
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator
from typing import Any, NamedTuple

HERMES = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)
MISTRAL = "[TOOL_CALLS]"
PYTHON_TAG = "<|python_tag|>"
NAMED = re.compile(r"\s*([A-Za-z_][\w.-]*)\s*(?:\[ARGS\])?\s*(?=\{)")
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
    calls = [_call(_json(block)) for block in HERMES.findall(text)]
    if not calls or not all(calls):
        return None
    return Said(HERMES.sub("", text).strip(), [c for c in calls if c])


def _mistral(text: str) -> Said | None:
    before, mark, rest = text.partition(MISTRAL)
    if not mark:
        return None
    many = _json(rest.strip())
    if isinstance(many, list):
        calls = [_call(one) for one in many]
    else:
        calls = [
            Call(name[1], json.dumps(arguments)) if name and isinstance(arguments, dict) else None
            for piece in rest.split(MISTRAL)
            for name in [NAMED.match(piece)]
            for arguments in [_json(piece[name.end() :].strip()) if name else None]
        ]
    return Said(before.strip(), [c for c in calls if c]) if calls and all(calls) else None


def _llama(text: str) -> Said | None:
    before, mark, rest = text.partition(PYTHON_TAG)
    if not mark:
        before, rest = "", text
    if not rest.lstrip().startswith("{"):
        return None
    calls = [_call(value) for value in _objects(rest)]
    return Said(before.strip(), [c for c in calls if c]) if calls and all(calls) else None


def _objects(text: str) -> Iterator[Any]:
    """JSON values with semicolons between; None for what is not one."""
    place = 0
    while place < len(text.rstrip()):
        try:
            value, place = DECODER.raw_decode(text, len(text) - len(text[place:].lstrip()))
        except (ValueError, RecursionError):
            yield None
            return
        yield value
        rest = text[place:].lstrip()
        if rest and not rest.startswith(";"):
            yield None
            return
        place = len(text) - len(rest) + 1 if rest else len(text)


def _call(value: Any) -> Call | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # some models write the object as a string
        arguments = _json(arguments)
    return Call(value["name"], json.dumps(arguments)) if isinstance(arguments, dict) else None


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
