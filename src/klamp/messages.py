"""Prompts: text, or the turns of a conversation as ``[{"role": "user", "content": "..."}]``, the form of TRL's data."""

from __future__ import annotations

from typing import Any

from klamp.errors import shown

Prompt = str | list[dict[str, Any]]


def problem(prompt: object) -> str | None:
    """Why ``prompt`` is neither text nor a list of messages, in words; None where it is one of them."""
    if isinstance(prompt, str):
        return None if prompt else "it is empty"
    if not isinstance(prompt, list):
        return f"got {shown(prompt, 80)}"
    if not prompt:
        return "the list of messages is empty"
    for n, turn in enumerate(prompt):
        if not isinstance(turn, dict):
            return f"message {n} is {shown(turn, 80)}, not an object"
        for key in ("role", "content"):
            if not isinstance(turn.get(key), str):
                return f'message {n} needs a "{key}" of text, got {shown(turn.get(key), 80)} (it has {keys(turn)})'
    return None


def as_text(prompt: Prompt) -> str:
    """The prompt for people: text as it is, one user turn as its content, several turns as ``role: content`` lines."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1 and prompt[0]["role"] == "user":
        return str(prompt[0]["content"])
    return "\n".join(f"{turn['role']}: {turn['content']}" for turn in prompt)


def keys(row: dict[str, Any]) -> str:
    """The keys of a row, for a message that says which ones are there."""
    return ", ".join(f'"{key:.60}"' for key in list(row)[:12]) or "no key"
