"""The functions that a model may call, as it sees them (JSON schemas) and as its calls find them."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from transformers.utils import get_json_schema

Tool = Callable[..., Any]


class ToolCall(NamedTuple):
    """A call of a tool that a model has written."""

    function: Tool | None
    """The function to call; None: there is none, and `problem` says why."""
    name: str
    """The name that the model wrote; that of the tool's message."""
    arguments: Any
    """The arguments that the model wrote: a dict by name, or else an error for the model to read."""
    problem: str = ""
    """Why the call cannot be made."""


class Toolbox:
    """The tools of an episode.

    Args:
        functions: functions and bound methods, sync or `async def`, each with types for its arguments and a
            docstring that describes it and every argument, as `transformers.utils.get_json_schema` reads it.

    Attributes:
        names: the tools' names, those of the functions.
        schemas: their JSON schemas, for a chat template.

    Raises:
        ValueError: something is not a function, has no docstring, lacks a type or the description of an
            argument, or two tools have one name.
    """

    def __init__(self, functions: Iterable[Tool] = ()) -> None:
        self._functions: dict[str, Tool] = {}
        self.schemas: list[dict[str, Any]] = []
        for function in functions:
            schema = _schema(function)
            name = schema["function"]["name"]
            if name in self._functions:
                raise ValueError(
                    f"Two tools have the name {name!r}: {_place(self._functions[name])} and "
                    f"{_place(function)}. A call of the model names its tool, so rename one of them."
                )
            self._functions[name] = function
            self.schemas.append(schema)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._functions)

    @property
    def functions(self) -> tuple[Tool, ...]:
        return tuple(self._functions.values())

    def __len__(self) -> int:
        return len(self._functions)

    def with_functions(self, functions: Mapping[str, Tool]) -> Toolbox:
        """A toolbox with this one's names and schemas, but other functions behind some names: the methods of
        another object of the same class, say."""
        other = copy.copy(self)
        other._functions = {**self._functions, **functions}
        return other

    def calls(self, message: Mapping[str, Any]) -> list[ToolCall]:
        """The calls that a parsed assistant message makes, in their order.

        A call that cannot be made is one too, with the words that TRL has for it: the model reads them as the
        result.

        Args:
            message: a dict with `tool_calls`, each `{"type": "function", "function": {"name", "arguments"}}`;
                without them no tool is called.
        """
        calls = message.get("tool_calls")
        return [self._call(call) for call in calls] if isinstance(calls, Sequence) else []

    def _call(self, call: Any) -> ToolCall:
        kind = call.get("type", "function") if isinstance(call, Mapping) else type(call).__name__
        if kind != "function":
            name = str(call.get("name", "unknown")) if isinstance(call, Mapping) else "unknown"
            return ToolCall(None, name, {}, f"Unsupported tool call type: {kind}")
        called = call.get("function")
        if not isinstance(called, Mapping) or not isinstance(called.get("name"), str):
            return ToolCall(None, "unknown", {}, "A tool call needs a function with a name and arguments.")
        name, arguments = called["name"], called.get("arguments", {})
        function = self._functions.get(name)
        return ToolCall(function, name, arguments, "" if function else f"Tool {name} not found.")


def _schema(function: Any) -> dict[str, Any]:
    if not (inspect.isfunction(function) or inspect.ismethod(function)):
        raise ValueError(
            f"A tool is a function or a method; got {function!r:.100}. Write one with `def` that calls it, "
            "with types and a docstring: they tell the model how to call it."
        )
    try:
        return get_json_schema(function)
    except Exception as error:
        raise ValueError(
            f"The tool {_place(function)} cannot be described to the model: {error}\n"
            "A tool needs a docstring, and for each argument a type in its signature and a line below Args:"
            '\n\n    def add(a: int, b: int) -> int:\n        """Add two numbers.\n\n        Args:\n'
            '            a: The first number.\n            b: The second number.\n        """'
        ) from error


def _place(function: Any) -> str:
    """A function in words: its qualified name and where it is written."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    place = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
    return f"{getattr(function, '__qualname__', function)!r}{place}"
