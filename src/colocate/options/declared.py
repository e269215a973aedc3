"""The options that records declare: dataclasses whose fields have a type, conditions, a default and a text.

A value is read in one way, by `Option.read`, whether it comes from Python, a run file or a command line.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import typing
from collections.abc import Collection, Mapping
from dataclasses import MISSING, Field, fields
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin

from colocate.options.requirements import (
    MAY_BE_INFINITE,
    Mark,
    OneOf,
    Requirement,
    check_choice,
    check_range,
)
from colocate.options.values import coerce, members, shown

_HEADING = re.compile(r" *# ── (.+?) ─+$")


class Option(NamedTuple):
    """An option: a field of a record."""

    name: str
    hint: Any
    """The type that values are read as."""
    default: Any
    conditions: tuple[Any, ...] = ()
    """The requirement of a number, the names to choose from, and marks."""

    def read(self, value: Any, label: str = "") -> Any:
        """The value as the option's type.

        Args:
            value: a value of any type; a text is read as on a command line.
            label: the option's name in messages. "": `name`.

        Raises:
            ValueError: it is of no such type, out of the option's range, or none of its choices.
        """
        label, choices = label or self.name, self.condition(OneOf)
        try:
            value = coerce(label, value, self.hint, may_be_infinite=MAY_BE_INFINITE in self.conditions)
        except ValueError:
            if choices is not None and isinstance(value, (str, int, float, type(None))):
                _check_choice(label, value, choices)
            raise
        return self.check(value, label)

    def check(self, value: Any, label: str = "") -> Any:
        """Raise ValueError for a value that is not allowed; returns it, under its present name."""
        label, choices = label or self.name, self.condition(OneOf)
        if choices is not None and value is not None and not isinstance(value, bool):
            value = choices.older.get(value, value)
            _check_choice(label, value, choices)
        if (requirement := self.condition(Requirement)) is not None:
            check_range(label, value, requirement)
        return value

    def is_default(self, value: Any) -> bool:
        """Whether a value is the option's default, which need not be of its type."""
        return type(value) is type(self.default) and value == self.default

    def condition(self, kind: type) -> Any:
        """The option's condition of a kind, or None."""
        return next((one for one in self.conditions if isinstance(one, kind)), None)


def _check_choice(label: str, value: Any, choices: OneOf) -> None:
    if value in choices.refused:
        raise ValueError(f"{label}={shown(value)} is not supported: {choices.refused[value]}.")
    check_choice(label, value, choices.names)


@functools.cache
def declared(record: type) -> Mapping[str, Option]:
    """The options that a dataclass declares, those of its base classes included, by name."""
    hints = typing.get_type_hints(record, include_extras=True)
    found = {}
    for field in fields(record):
        hint = hints[field.name]
        hint, *conditions = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        found[field.name] = Option(
            field.name, as_read(field.name, hint), default_of(field), tuple(conditions)
        )
    return found


def as_read(name: str, hint: Any) -> Any:
    """The type that the option `name`, which a class declares as `hint`, is read as."""
    # To transformers, a string for a mapping is its JSON; only a `*_config` may also name a file.
    if name.endswith("_kwargs") and str in members(hint):
        return Union[tuple(member for member in members(hint) if member is not str)]  # noqa: UP007
    return hint


def default_of(field: Field) -> Any:
    """The value that a field has where none is given."""
    return field.default if field.default_factory is MISSING else field.default_factory()


def ranges_of(record: type) -> dict[str, Requirement]:
    """The requirement of each number for which a dataclass or a base class declares one, by name."""
    return _conditions_of(record, Requirement)


def choices_of(record: type) -> dict[str, Collection[Any]]:
    """The names that an option takes, for each option for which a dataclass or a base class declares them."""
    return {name: choice.names for name, choice in _conditions_of(record, OneOf).items()}


def _conditions_of(record: type, kind: type) -> dict[str, Any]:
    found = {name: option.condition(kind) for name, option in declared(record).items()}
    return {name: condition for name, condition in found.items() if condition is not None}


def marked(record: type, mark: Mark) -> frozenset[str]:
    """The options of a dataclass, inherited ones included, that have a mark."""
    return frozenset(name for name, option in declared(record).items() if mark in option.conditions)


# ── Texts ────────────────────────────────────────────────────────────────────────────────────────────────


class Documentation(NamedTuple):
    """The words that a class has in its source about one of its fields."""

    heading: str
    """The nearest heading above the field; "": there is none."""
    text: str
    """The text below it, and the names to choose from."""


@functools.cache
def documented(record: type) -> Mapping[str, Documentation]:
    """The documentation of the fields that a class declares itself, in their order."""
    if not inspect.get_annotations(record):
        return {}
    source = inspect.getsource(record)
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef)
    lines, heading, last = source.splitlines(), "", definition.lineno
    found = {}
    for node, following in zip(definition.body, [*definition.body[1:], None], strict=True):
        for match in filter(None, map(_HEADING.match, lines[last : node.lineno])):
            heading = match[1]
        last = node.lineno
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            is_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            text = str(following.value.value) if is_text else ""  # type: ignore[union-attr]
            if (choices := declared(record)[node.target.id].condition(OneOf)) is not None:
                text += f" One of {', '.join(map(str, choices.names))}."
            found[node.target.id] = Documentation(heading, " ".join(text.split()))
    return found
