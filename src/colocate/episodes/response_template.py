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
) -> Message | None:
    """The assistant message that `tokenizer.parse_response` reads, in the form of chat templates.

    Args:
        text: what the model has written, its stop token too: templates may look for it.
        prefix: what came before, or the last of it: templates look for the beginning of the turn.
        tools: JSON schemas of the tools; they say of which types arguments are.

    Returns:
        A message with `content` and, where there are any, `reasoning_content` and `tool_calls`. None: the
        template cannot read the text, or what it reads is no message.
    """
    try:
        read = tokenizer.parse_response(text, prefix=prefix, tools=list(tools) if tools else None)
    except Exception:  # templates are written by others, and refuse a broken call in several ways
        return None
    if not isinstance(read, dict) or not isinstance(read.get("content") or "", str):
        return None
    message: Message = {"role": "assistant", "content": read.get("content") or ""}
    reasoning = next((read[name] for name in _REASONING if isinstance(read.get(name), str)), "")
    if reasoning:
        message["reasoning_content"] = reasoning
    calls = read.get("tool_calls") or []
    if calls:
        message["tool_calls"] = [_call_of(call) for call in calls] if isinstance(calls, list) else [None]
        if None in message["tool_calls"]:
            return None
    return message


def _call_of(call: Any) -> dict[str, Any] | None:
    called = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(called, dict) or not isinstance(called.get("name"), str):
        return None
    arguments = called.get("arguments") or {}
    if not isinstance(arguments, dict):
        return None
    number = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {"type": "function", "function": {"name": called["name"], "arguments": arguments}, **number}
