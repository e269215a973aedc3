"""The source of the functions and classes that a user passes, described so that ranks can compare it."""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_PLAIN = (bool, int, float, complex, str, bytes, tuple, type(None))


def sources_of(given: Mapping[str, Any]) -> dict[str, str]:
    """A description of every callable, by the place where it was passed, such as "reward_funcs[0]".

    Args:
        given: the value of each argument: one callable, a list of them, a mapping, or None. Other values are
            left out.
    """
    found: dict[str, str] = {}
    for name, value in given.items():
        if isinstance(value, Mapping):
            parts = {f"{name}[{key!r}]": part for key, part in value.items()}
        elif isinstance(value, (list, tuple)):
            parts = {f"{name}[{number}]": part for number, part in enumerate(value)}
        else:
            parts = {name: value}
        found |= {place: source_of(part) for place, part in parts.items() if callable(part)}
    return found


def source_of(function: Any) -> str:
    """The name of a function, a class or an object's class, with the name of its source file and a digest of
    that; without a file, with a digest of the compiled function."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    if not hasattr(function, "__qualname__"):
        function = type(function)
    name = function.__qualname__
    code = getattr(function, "__code__", None)
    line = f", line {code.co_firstlineno}" if code is not None and "<" in name else ""  # names that repeat
    try:
        file = Path(inspect.getsourcefile(function) or "")
        content = file.read_bytes()
    except (TypeError, OSError):  # made in C, or typed into a console
        if code is None:
            return name
        constants = [value for value in code.co_consts if isinstance(value, _PLAIN)]
        return f"{name} ({_digest(repr((code.co_code, code.co_names, constants)).encode())})"
    return f"{name} ({file.name}{line}, {_digest(content)})"


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=6).hexdigest()
