"""Tool calls are read in the formats that models write them in, and what cannot be read stays text."""

from __future__ import annotations

import json

import pytest

from klamp.serve.engine import Text
from klamp.serve.tool_calls import tool_calls

ADD, TIME = ("add", {"a": 2, "b": {"c": "}"}}), ("time", {})
SAY, MARK, END = ("say", {"x": "é"}), ("mark", {"x": "[TOOL_CALLS]"}), ("end", {"x": "</tool_call><tool_call>"})
DEEP = ("deep", {"x": [{"y": [[], {"z": None}]}]})


@pytest.mark.parametrize(
    ("text", "content", "expected"),
    [
        ('<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": {"c": "}"}}}\n</tool_call>', "", [ADD]),
        (
            'Let me see. <tool_call>{"name": "time", "arguments": {}}</tool_call>\n'
            '<tool_call>{"name": "add", "arguments": "{\\"a\\": 2, \\"b\\": {\\"c\\": \\"}\\"}}"}</tool_call>',
            "Let me see.",
            [TIME, ADD],
        ),
        ('<tool_call>{"name": "time", "arguments": {}}', "", [TIME]),
        ('{"name": "add", "parameters": {"a": 2, "b": {"c": "}"}}}', "", [ADD]),
        ('<|python_tag|>{"name": "time", "parameters": {}}; {"name": "time", "parameters": {}}', "", [TIME, TIME]),
        ('[TOOL_CALLS] [{"name": "add", "arguments": {"a": 2, "b": {"c": "}"}}}]', "", [ADD]),
        ('Well.[TOOL_CALLS]time{}[TOOL_CALLS]add[ARGS]{"a": 2, "b": {"c": "}"}}', "Well.", [TIME, ADD]),
        (
            '[TOOL_CALLS][{"name": "time", "arguments": {}, "id": "a"}, {"name": "say", "arguments": {"x": "é"}}] Yes.',
            "Yes.",
            [TIME, SAY],
        ),
        ('[TOOL_CALLS]say[CALL_ID]aB3[ARGS]{"x": "\\u00e9"}[TOOL_CALLS]mark{"x": "[TOOL_CALLS]"}', "", [SAY, MARK]),
        ('<tool_call>{"name": "end", "arguments": {"x": "</tool_call><tool_call>"}}</tool_call>', "", [END]),
        (
            '{"name": "deep", "parameters": {"x": [{"y": [[], {"z": null}]}]}}\n{"name": "time", "parameters": {}};',
            "",
            [DEEP, TIME],
        ),
        ("no call at all", "no call at all", []),
        ('{"name": "Ada", "age": 36}', None, []),
        ('{"name": "Ada"}', None, []),
        ('<tool_call>{"name": "time", "arguments": {}}}</tool_call>', None, []),
        ("[TOOL_CALLS][]", None, []),
        ('<tool_call>{"name": "add", "arguments": {"a": </tool_call>', None, []),
        ('{"answer": 42}', None, []),
        ('{"name": "add"} and more', None, []),
        ('[TOOL_CALLS]{"name": 1}', None, []),
        ("", "", []),
        ("{" * 5000, None, []),
    ],
)
def test_calls_are_read(text: str, content: str | None, expected: list) -> None:
    said = tool_calls(text)
    assert [(c.name, json.loads(c.arguments)) for c in said.calls] == expected
    assert said.content == (text if content is None else content)
    ids = {c.to_dict()["id"] for c in said.calls}
    assert len(ids) == len(expected)


class Bytes:
    """A tokenizer whose tokens are single bytes, so that characters come in pieces."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return bytes(ids).decode(errors="replace")


@pytest.mark.parametrize(
    ("said", "stop", "expected"),
    [
        ("héllo wörld 🙂!", [], "héllo wörld 🙂!"),
        ("one STOP two", ["STOP"], "one "),
        ("one STO two", ["STOP", "x"], "one STO two"),
        ("aab", ["ab"], "a"),
        ("🙂🙃", ["🙃"], "🙂"),
        ("xaxb", ["xb", "axb"], "x"),
    ],
)
def test_text_comes_in_whole_characters_and_ends_before_a_stop(said: str, stop: list[str], expected: str) -> None:
    text, shown = Text(Bytes(), stop), ""
    for byte in said.encode():
        stopped = text.add(byte)
        shown += text.show(last=stopped)
        assert "\ufffd" not in shown
        assert expected.startswith(shown), "nothing is shown that is taken back"
        if stopped:
            break
    shown += text.show(last=True)
    assert shown == text.whole == expected
