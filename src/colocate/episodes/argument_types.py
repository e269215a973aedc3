"""The types of a tool's arguments, as its schema has them.

Some models write all arguments as text: only the schema says whether `75001` is a number or a postal code.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_PYTHON = {"True": "true", "False": "false", "None": "null"}
"""Chat templates are Jinja, and some write these words of Python's into calls."""


def with_typed_arguments(
    calls: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The calls, with texts converted to the types of their parameters. Text that does not fit its type stays
    as the model has written it.

    Args:
        calls: `{"type": "function", "function": {"name", "arguments"}}` each.
        tools: JSON schemas, as `transformers.utils.get_json_schema` makes them.
    """
    parameters = {
        tool["function"]["name"]: tool["function"].get("parameters", {}).get("properties", {})
        for tool in tools
    }
    typed = []
    for call in calls:
        called = call["function"]
        schemas = parameters.get(called["name"], {})
        arguments = {
            name: _typed(value, set(_types(schemas.get(name)))) if isinstance(value, str) else value
            for name, value in called["arguments"].items()
        }
        typed.append({**call, "function": {**called, "arguments": arguments}})
    return typed


def _typed(text: str, types: set[str]) -> Any:
    try:
        value = json.loads(_PYTHON.get(text.strip(), text), parse_constant=_refuse)
    except (ValueError, RecursionError):
        return text
    if isinstance(value, float) and value.is_integer() and "integer" in types and "number" not in types:
        value = int(value)
    return value if types.intersection(_names(value)) else text


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


def _names(value: Any) -> tuple[str, ...]:
    """The types of JSON schema that a value has."""
    if value is None:
        return ("null",)
    if isinstance(value, bool):
        return ("boolean",)
    if isinstance(value, int):
        return ("integer", "number")
    names = {float: "number", list: "array", dict: "object"}
    return (names.get(type(value), ""),)


def _types(schema: Any) -> Iterator[str]:
    if not isinstance(schema, Mapping):
        return
    declared = schema.get("type")
    yield from [declared] if isinstance(declared, str) else declared or []
    for choice in [*schema.get("anyOf", []), *schema.get("oneOf", [])]:
        yield from _types(choice)
    if schema.get("nullable"):
        yield "null"
