"""How models write calls of tools, and how such text becomes an assistant message.

A chat template shows which way its model was taught: it renders a call into the history.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

MAX_PARSED_CHARS = 1_000_000
"""Text that is longer is plain content: no call is so long."""

Call = tuple[str, dict[str, Any]]
"""(name, arguments)."""
Syntax = Callable[[str], tuple[str, list[Call]] | None]
"""The content without calls and the calls of a text; None: it has no call, or one that cannot be read."""


def hermes(text: str) -> tuple[str, list[Call]] | None:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Qwen 2.5 and 3 write it."""
    return _tagged(text, lambda body: _json_call(body, "arguments"))


def xml(text: str) -> tuple[str, list[Call]] | None:
    """`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`: Qwen 3.5."""
    return _tagged(text, _xml_call)


def llama(text: str) -> tuple[str, list[Call]] | None:
    """`{"name": ..., "parameters": {...}}` and nothing else, as Llama 3.1 and 3.2 write it."""
    call = _json_call(text.strip().removeprefix("<|python_tag|>"), "parameters")
    return None if call is None else ("", [call])


def mistral(text: str) -> tuple[str, list[Call]] | None:
    """`[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`, or `[TOOL_CALLS]name[ARGS]{...}` each."""
    content, *parts = text.split("[TOOL_CALLS]")
    calls: list[Call | None] = []
    for part in parts:
        name, has_name, arguments = part.partition("[ARGS]")
        if has_name:
            value = _json(arguments)
            calls.append((name.strip(), value) if isinstance(value, dict) else None)
        else:
            value = _json(part)
            calls += [_call_of(item, "arguments") for item in value] if isinstance(value, list) else [None]
    return _unless_broken(content, calls)


SYNTAXES: dict[str, Syntax] = {"<function=": xml, "[TOOL_CALLS]": mistral, "<tool_call>": hermes}
"""Each syntax by what its calls contain, in the order in which they are looked for."""


def syntax_of(rendered_call: str) -> Syntax | None:
    """The syntax of a call that a chat template has rendered; None: none that is known."""
    for mark, syntax in SYNTAXES.items():
        if mark in rendered_call:
            return syntax
    return llama if re.search(r'\{"name": .*"parameters":', rendered_call, re.DOTALL) else None


def message_of(text: str, syntax: Syntax | None, *, has_reasoning: bool) -> dict[str, Any]:
    """The assistant message that a model has written; a call that cannot be read stays in the content.

    Args:
        has_reasoning: what comes before `</think>` is a part of its own, and not content.
    """
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if len(text) > MAX_PARSED_CHARS:
        return message
    reasoning, is_closed, answer = text.partition("</think>")
    if has_reasoning and is_closed:
        # Where the generation prompt opens the reasoning, only its end is sampled.
        message["reasoning_content"] = reasoning.removeprefix("<think>").strip("\n")
        message["content"] = answer.lstrip("\n")
    found = None if syntax is None else syntax(message["content"])
    if found is not None:
        message["content"], calls = found
        message["tool_calls"] = [
            {"type": "function", "function": {"name": name, "arguments": arguments}}
            for name, arguments in calls
        ]
    return message


def _tagged(text: str, call_of: Callable[[str], Call | None]) -> tuple[str, list[Call]] | None:
    content, *parts = text.split("<tool_call>")
    calls: list[Call | None] = []
    for part in parts:
        body, is_closed, _ = part.partition("</tool_call>")
        calls.append(call_of(body) if is_closed else None)
    return _unless_broken(content, calls)


def _unless_broken(content: str, calls: list[Call | None]) -> tuple[str, list[Call]] | None:
    whole = [call for call in calls if call is not None]
    return (content.strip("\n"), whole) if calls and len(whole) == len(calls) else None


def _json_call(text: str, arguments_key: str) -> Call | None:
    return _call_of(_json(text), arguments_key)


def _call_of(value: Any, arguments_key: str) -> Call | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get(arguments_key, {})
    return (value["name"], arguments) if isinstance(arguments, dict) else None


def _xml_call(text: str) -> Call | None:
    match = re.fullmatch(r"\s*<function=([^>\n]+)>(.*)</function>\s*", text, re.DOTALL)
    if match is None:
        return None
    return match[1].strip(), dict(_xml_parameters(match[2]))


def _xml_parameters(text: str) -> Iterator[tuple[str, Any]]:
    for part in text.split("<parameter=")[1:]:
        name, _, rest = part.partition(">")
        value = rest.rpartition("</parameter>")[0].removeprefix("\n").removesuffix("\n")
        # Numbers, lists and the like are written as JSON, and texts as they are.
        read = _json(value)
        yield name.strip(), value if read is _BROKEN or isinstance(read, str) else read


_BROKEN = object()


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return _BROKEN
