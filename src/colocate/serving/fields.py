"""The fields of a request's body: each is taken once, and fields left over are refused by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from colocate.serving.refusal import Refusal

MAX_DEPTH = 64
"""How deeply the lists and objects of a body may be nested: templates and parsers recurse on them."""
_MAX_SHOWN = 80


class Fields:
    """A JSON object of a request. A field that is null counts as absent.

    Args:
        where: the text before a field's name in messages, such as "messages[2].".
    """

    def __init__(self, content: Mapping[str, Any], where: str = "") -> None:
        self._left = {name: value for name, value in content.items() if value is not None}
        self._where = where

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def any(self, name: str) -> Any:
        """A field of any type; None: it is absent."""
        return self._left.pop(name, None)

    def text(self, name: str) -> str | None:
        """A text."""
        value = self.any(name)
        return None if value is None else self.checked_text(name, value)

    def checked_text(self, name: str, value: Any) -> str:
        """`value`, if it is a text."""
        if not isinstance(value, str):
            raise self.refusal(name, value, "must be a string")
        return value

    def flag(self, name: str) -> bool | None:
        """True or false."""
        value = self.any(name)
        if value is not None and not isinstance(value, bool):
            raise self.refusal(name, value, "must be true or false")
        return value

    def whole(self, name: str, least: int, most: int) -> int | None:
        """A whole number from `least` to `most`."""
        value = self.any(name)
        if value is not None and (type(value) is not int or not least <= value <= most):
            raise self.refusal(name, value, f"must be a whole number from {least} to {most}")
        return value

    def wholes(self, name: str, least: int, most: int) -> tuple[int, ...]:
        """A list of whole numbers from `least` to `most`; empty: it is absent."""
        value = self.any(name)
        listed = [] if value is None else value
        is_list = isinstance(listed, list) and all(type(number) is int for number in listed)
        if not is_list or (listed and not least <= min(listed) <= max(listed) <= most):
            raise self.refusal(name, value, f"must be a list of whole numbers from {least} to {most}")
        return tuple(listed)

    def number(self, name: str, least: float, most: float) -> float | None:
        """A number from `least` to `most`."""
        value = self.any(name)
        if value is None:
            return None
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not least <= value <= most:  # so is no NaN, and no whole number beyond floats
            raise self.refusal(name, value, f"must be a number from {least:g} to {most:g}")
        return float(value)

    def texts(self, name: str, most: int, longest: int) -> tuple[str, ...]:
        """A text or a list of up to `most` texts, none empty or of more than `longest` characters."""
        value = self.any(name)
        listed = value if isinstance(value, list) else [] if value is None else [value]
        if len(listed) > most:
            raise self.refusal(name, value, f"has {len(listed)} texts, and may have {most}")
        for text in listed:
            if not 0 < len(self.checked_text(name, text)) <= longest:
                raise self.refusal(name, text, f"must have 1 to {longest} characters")
        return tuple(listed)

    def only(self, name: str, neutral: tuple[Any, ...], why: str) -> None:
        """Take a field that may only have a neutral value, one that asks for nothing.

        Raises:
            Refusal: it has another value; `why` says what the service lacks.
        """
        if name in self and not any(
            type(self._left[name]) is type(x) and self._left[name] == x for x in neutral
        ):
            raise self.refusal(name, self._left[name], f"is not supported: {why}")
        self.any(name)

    def end(self) -> None:
        """Raises Refusal if a field was not taken."""
        if self._left:
            name = next(iter(self._left))
            raise Refusal(
                400,
                f"{self._where}{name!s:.80} is not supported by this service. Leave it out.",
                param=f"{self._where}{name!s:.80}",
                code="unsupported_parameter",
            )

    def missing(self, name: str) -> Refusal:
        """The error for a field that must be there."""
        return Refusal(400, f"{self._where}{name} is missing.", param=self._where + name)

    def refusal(self, name: str, value: Any, why: str) -> Refusal:
        """The error for a value that cannot be used."""
        shown = repr(value[:_MAX_SHOWN] if isinstance(value, str | list) else value)
        shown = shown if len(shown) <= _MAX_SHOWN else f"{shown[:_MAX_SHOWN]}…"
        return Refusal(400, f"{self._where}{name}={shown} {why}.", param=self._where + name)


def check_json(value: Any, where: str = "") -> None:
    """Refuse text that cannot be written as UTF-8, numbers beyond those of 64 bits, and nesting deeper than
    `MAX_DEPTH`. Takes time in proportion to the value's size.

    Raises:
        Refusal: the value is or holds such; it stands at `where`.
    """
    if (fault := _fault(value, MAX_DEPTH)) is None:
        return
    for step in reversed(fault.steps):
        where += f"[{step}]" if isinstance(step, int) else f".{step:.80}" if where else f"{step:.80}"
    if fault.is_depth:
        raise Refusal(400, f"{where[:80]}… {fault.why}", param=where[:80])
    where = where or "A field's name"
    raise Refusal(400, f"{where} {fault.why}", param=where)


@dataclass
class _Fault:
    """A fault of a value, and the steps to it, the last one first."""

    why: str
    is_depth: bool = False
    steps: list[str | int] = field(default_factory=list)


def _fault(value: Any, depth: int) -> _Fault | None:
    """The first fault in a value. Paths are built for faults only, since names may be long and have many
    values below them."""
    if isinstance(value, str):
        return _fault_of_text(value)
    if isinstance(value, float):
        return None if math.isfinite(value) else _Fault("is a number beyond those of 64 bits.")
    if depth == 0:
        return _Fault(f"is nested more than {MAX_DEPTH} deep.", is_depth=True)
    if isinstance(value, dict):
        for name in value:
            if (fault := _fault_of_text(name)) is not None:
                return fault
    for step, inner in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(inner, str | float | dict | list) and (fault := _fault(inner, depth - 1)) is not None:
            fault.steps.append(step)
            return fault
    return None


def _fault_of_text(text: str) -> _Fault | None:
    try:
        text.encode()
    except UnicodeEncodeError:
        return _Fault(f"has half a surrogate pair in {text[:40]!a}, which is no text.")
    return None
