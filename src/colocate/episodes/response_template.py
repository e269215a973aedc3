"""The response template that a tokenizer may carry: it declares how the model writes a message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of the reasoning; chat templates are given it as `reasoning_content`, whichever they read."""


def templated_message(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    prefix: str,
    tools: Sequence[dict[str, Any]] | None,
) -> Message:
    """The assistant message that `tokenizer.parse_response` reads, in the form of chat templates.

    Args:
        text: the model's text with its stop token, which templates may look for.
        prefix: the text before, or its end: templates look for the beginning of the turn.
        tools: JSON schemas of the tools; they tell the types of arguments.

    Returns:
        A message with `content` and, where there are any, `reasoning_content` and `tool_calls`.

    Raises:
        ValueError: the template cannot read the text, or does not read a message.
    """
    try:
        read = tokenizer.parse_response(text, prefix=prefix, tools=list(tools) if tools else None)
    except Exception as error:  # templates are written by others, and refuse a broken call in several ways
        raise ValueError(f"{type(error).__name__}: {error}") from error
    if not isinstance(read, dict) or not isinstance(read.get("content") or "", str):
        raise ValueError(f"it reads no message, but {read!r:.100}")
    message: Message = {"role": "assistant", "content": read.get("content") or ""}
    reasoning = next((read[name] for name in _REASONING if isinstance(read.get(name), str)), "")
    if reasoning:
        message["reasoning_content"] = reasoning
    calls = read.get("tool_calls") or []
    if not isinstance(calls, list):
        raise ValueError(f"it reads no list of calls, but {calls!r:.100}")
    if calls:
        message["tool_calls"] = [_call_of(call) for call in calls]
    return message


def _call_of(call: Any) -> dict[str, Any]:
    called = call.get("function", call) if isinstance(call, dict) else None
    name = called.get("name") if isinstance(called, dict) else None
    arguments = called.get("arguments") or {} if isinstance(called, dict) else None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError(f"it reads no call with a name and arguments, but {call!r:.100}")
    number = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {"type": "function", "function": {"name": name, "arguments": arguments}, **number}
