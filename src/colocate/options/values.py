"""The value of an option: read as the type that the option declares, and shown in messages.

Values are read in one way from Python, run files and the command line: `GRPOConfig(learning_rate="1e-5")`
means `--learning_rate 1e-5`.
"""

from __future__ import annotations

import difflib
import enum
import math
import numbers
import os
import reprlib
import types
from collections.abc import Iterable, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any, Literal, Union, get_args, get_origin

from colocate.options.distributions import how_to_install
from colocate.options.redaction import is_secret, redacted
from colocate.options.yaml_text import read_yaml

NUMBER_LIMIT = 2**63
"""Every number must be below this limit: counters of steps and tokens are int64."""

_MAX_SHOWN = 200
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
_TYPE_NAMES = {
    types.NoneType: "None",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "a mapping",
}


class _UnfitError(ValueError):
    """A number or list cannot be taken; its text, which says why, follows the value in the final message."""


# ── Shown ────────────────────────────────────────────────────────────────────────────────────────────────


class _Repr(reprlib.Repr):
    """`repr` of a user's value, which may be of any size: long ones are cut."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxdict = self.maxlist = self.maxtuple = self.maxset = 20
        self.maxstring = self.maxother = 150

    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to write more than 4,300 digits.
        return repr(x) if x.bit_length() < 400 else f"<a whole number of {x.bit_length():,} bits>"

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        if level <= 0 and x:
            return "{...}"
        shown = [f"{self.repr1(k, level - 1)}: {self.repr1(v, level - 1)}" for k, v in list(x.items())[:20]]
        return "{" + ", ".join([*shown, *(["..."] if len(x) > 20 else [])]) + "}"

    def repr_instance(self, x: Any, level: int) -> str:
        return " ".join(super().repr_instance(x, level).split())


_REPR = _Repr()


def shown(value: Any, name: str = "") -> str:
    """`repr(value)` in at most 200 characters and without secrets; a member of an enumeration is shown as its
    value.

    Args:
        name: the name of the option that has this value.
    """
    if is_secret(name):
        value = redacted(value, name)
    text = redacted(_REPR.repr(value.value if isinstance(value, enum.Enum) else value))
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."


def nearest(name: str, candidates: Iterable[str]) -> str:
    """`"; did you mean 'x'?"` when a candidate resembles `name`, or what to install for it, or ""."""
    known = list(candidates)
    if hint := how_to_install(str(name), known):
        return hint
    close = difflib.get_close_matches(str(name)[:100], known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


# ── Read ─────────────────────────────────────────────────────────────────────────────────────────────────


def coerce(name: str, value: Any, hint: Any, *, may_be_infinite: bool = False) -> Any:
    """Turn a value from Python, YAML or the command line into the type `hint`; with a union, into its first
    member that takes the value.

    Args:
        name: the option's name, for the message.
        value: a value of any type; a text is read as on a command line.
        hint: a type, an enumeration, a `Literal`, a list or mapping of any of these, or a union.
        may_be_infinite: whether infinity has a meaning for this option ("no bound").

    Raises:
        ValueError: no member takes it; a number is not finite or lies beyond `NUMBER_LIMIT`. The message has
            the name, the value and what is taken.
    """
    try:
        return _coerce(value, hint, may_be_infinite)
    except _UnfitError as error:
        raise ValueError(f"{name}={shown(value, name)} {error}.") from None


def _coerce(value: Any, hint: Any, may_be_infinite: bool) -> Any:
    kinds = members(hint)
    reason = None
    # A word is a string only when it can be nothing narrower: `--scale_rewards false`, `--top_k 5`.
    for member in sorted(kinds, key=_width):
        try:
            return _coerce_member(value, member, may_be_infinite)
        except _UnfitError as error:
            reason = reason or error
            if (
                isinstance(value, str)
                and value.lstrip()[:1] in ("[", "{")
                and _origin(member) in (list, dict)
            ):
                raise  # what looks like a list is not to become the text that it is
        except (TypeError, ValueError):
            continue
    raise reason or _UnfitError(f"is not {' or '.join(map(_type_name, kinds))}")


def members(hint: Any) -> tuple[Any, ...]:
    """The types that a union is of, or the one type that there is."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _origin(member: Any) -> Any:
    return get_origin(member) or member


def _width(member: Any) -> int:
    origin = _origin(member)
    order = [types.NoneType, bool, int, float, list, dict]
    return order.index(origin) if origin in order else len(order)


def _type_name(member: Any) -> str:
    if get_origin(member) is Literal:
        return "one of " + ", ".join(repr(choice) for choice in get_args(member))
    if isinstance(member, type) and issubclass(member, enum.Enum):
        return "one of " + ", ".join(repr(choice.value) for choice in member)
    known = _TYPE_NAMES.get(_origin(member))
    return known or str(getattr(member, "__name__", member))


def _coerce_member(value: Any, member: Any, may_be_infinite: bool) -> Any:
    origin = _origin(member)
    if member is Any:
        return value
    if origin is types.NoneType:
        return _require(None, value is None or (isinstance(value, str) and value.lower() in _NONE))
    if origin is bool:
        return _truth_value(value)
    if origin in (int, float):
        return _number(value, origin, may_be_infinite)
    if origin is list:
        return _list(value, *(get_args(member) or (Any,)))
    if origin is dict:
        value = _parsed(value, "{", "mapping")
        return _require(value if isinstance(value, dict) else dict(value), isinstance(value, Mapping))
    if origin is Literal:
        return _require(value, value in get_args(member))
    if isinstance(origin, type) and issubclass(origin, enum.Enum):
        # Left as text: the options' tables are, and transformers turns it into its member.
        return value if isinstance(value, str) and origin(value) else origin(value)
    if origin is str and isinstance(value, os.PathLike):
        return os.fspath(value)
    # A list or mapping is no string, nor is a bool or number that another member should have taken.
    return _require(value, isinstance(value, origin))


_NONE = ("none", "null", "~")


def _require(value: Any, condition: bool) -> Any:
    if not condition:
        raise ValueError
    return value


def _unwrapped(value: Any) -> Any:
    """`value` as a Python number if it is a scalar of numpy or PyTorch, else as it is."""
    return value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value


def _truth_value(value: Any) -> bool:
    value = _unwrapped(value)
    # "1" is True for `--flag 1`; a number with a point is no truth value.
    word = str(value).lower() if isinstance(value, (int, str)) else None
    return _require(word in _TRUE, word in (*_TRUE, *_FALSE))


def _number(value: Any, kind: type, may_be_infinite: bool) -> int | float:
    value = _unwrapped(value)
    _require(value, isinstance(value, (str, numbers.Real)) and not isinstance(value, bool))
    try:
        # Exact, where a float would round 2⁵³ + 1, and 1e999999999 costs nothing.
        exact = Decimal(value.strip()) if isinstance(value, str) else _decimal(value)
    except InvalidOperation:
        raise ValueError from None
    if not exact.is_finite():
        if may_be_infinite and exact.is_infinite() and exact > 0:
            return math.inf
        raise _UnfitError("is not finite; set a finite number")
    if not -NUMBER_LIMIT < exact < NUMBER_LIMIT:
        raise _UnfitError(f"is too large: numbers lie below 2**63 = {NUMBER_LIMIT:,}")
    if kind is float:
        return float(exact)
    return int(_require(exact, exact == exact.to_integral_value()))


def _decimal(value: numbers.Real) -> Decimal:
    return Decimal(int(value)) if isinstance(value, numbers.Integral) else Decimal(float(value))


def _list(value: Any, item: Any) -> list[Any]:
    value = _parsed(value, "[", "list")
    if isinstance(value, str):
        value = [value]
    # Sets have no order, and of a mapping's keys nobody thinks as a list.
    is_list = isinstance(value, Iterable) and not isinstance(value, (bytes, Mapping, set, frozenset))
    values = []
    for one in list(_require(value, is_list)):
        try:
            values.append(_coerce(one, item, may_be_infinite=False))
        except _UnfitError as error:
            raise _UnfitError(f"has {shown(one)}, which {error}") from None
    return values


def _parsed(value: Any, bracket: str, kind: str) -> Any:
    """A text that begins like a list or mapping, read as one; anything else as it is."""
    if not (isinstance(value, str) and value.lstrip()[:1] == bracket):
        return value
    try:
        return read_yaml(value)
    except ValueError as error:
        raise _UnfitError(f"is no {kind} that can be read: {' '.join(str(error).split())[:200]}") from None
