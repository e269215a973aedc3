"""The parser of a script's command line: arguments from dataclasses and from a YAML file."""

from __future__ import annotations

import copy
import enum
import os
import sys
import types
import typing
from argparse import Action, ArgumentTypeError
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field
from pathlib import Path
from typing import Any

from transformers.hf_argparser import HfArgumentParser

from colocate.config.grpo_options import GRPOOptions
from colocate.config.run_config import RunConfig
from colocate.options.declared import documented
from colocate.options.run_file import read_file
from colocate.options.values import nearest, shown
from colocate.options.yaml_text import read_yaml


class TrlParser(HfArgumentParser):
    """A parser that makes dataclasses of a command line and of the file that `--config` names.

    The file is a YAML mapping of arguments, which the command line overrides; its entry `env` is a mapping of
    environment variables, which are set. Numbers and truth values in it are those of YAML 1.2, as in run
    files.

    Args:
        dataclass_types: one dataclass or several; None: no dataclass.
        options: arguments of `argparse.ArgumentParser`.

    Raises:
        ValueError: a dataclass has a field `config`.
    """

    def __init__(self, dataclass_types: Any = None, **options: Any) -> None:
        if dataclass_types is None:
            dataclass_types = []
        elif not isinstance(dataclass_types, Iterable):
            dataclass_types = [dataclass_types]
        dataclass_types = list(dataclass_types)
        for one in dataclass_types:
            if "config" in one.__dataclass_fields__:
                raise ValueError(
                    f"{one.__name__} has a field named 'config', but --config names the file of arguments: "
                    "give the field another name."
                )
        super().__init__(dataclass_types=dataclass_types, **options)

    def parse_args_and_config(
        self,
        args: Iterable[str] | None = None,
        return_remaining_strings: bool = False,
        fail_with_unknown_args: bool = True,
        separate_remaining_strings: bool = False,
    ) -> tuple[Any, ...]:
        """The dataclasses, in the order of `dataclass_types`, made of command line and file.

        Args:
            args: the command line. None: the program's own.
            return_remaining_strings: return arguments that no dataclass has as a last member, the file's
                arguments (as `--name` and value) before those of the command line, instead of refusing it.
            fail_with_unknown_args: refuse an argument in the file that no dataclass has. Unknown arguments on
                the command line are always refused.
            separate_remaining_strings: return the file's remaining arguments and those of the command line as
                two members.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: no file follows `--config`; the file cannot be read or holds no mapping; `env` is no
                mapping; an argument is unknown; or a dataclass refuses a value.
        """
        arguments, path = _without_config(list(sys.argv[1:] if args is None else args))
        values = {} if path is None else _read(path)
        _set_environment(values.pop("env", {}), path)
        from_file = self.set_defaults_with_config(**values)
        outputs = self.parse_args_into_dataclasses(
            args=arguments, return_remaining_strings=return_remaining_strings
        )
        if not return_remaining_strings:
            if from_file and fail_with_unknown_args:
                raise ValueError(self._unknown(path, values))
            return outputs
        *records, remaining = outputs
        if separate_remaining_strings:
            return (*records, from_file, remaining)
        return (*records, from_file + remaining)

    def set_defaults_with_config(self, **values: Any) -> list[str]:
        """Make `values` the defaults of the arguments of these names, which are then not required any longer;
        returns those that no argument has, as `--name` and text in turn."""
        known = set()
        for action in self._actions:
            if action.dest in values:
                action.default, action.required = values[action.dest], False
                known.add(action.dest)
        unknown = ((name, value) for name, value in values.items() if name not in known)
        return [text for name, value in unknown for text in (f"--{name}", str(value))]

    def _unknown(self, path: Path | None, values: Mapping[str, Any]) -> str:
        known = [action.dest for action in self._actions]
        hints = [f"{shown(name)}{nearest(name, known)}" for name in values if name not in known]
        return (
            f"{path} has arguments that this script does not take: {', '.join(hints)}. Remove them, or parse "
            "with fail_with_unknown_args=False."
        )

    def _add_dataclass_arguments(self, dtype: Any) -> None:
        declared = _declared_help(dtype)
        self._help, self._reads_text = _inherited_help(dtype) | declared, bool(declared)
        super()._add_dataclass_arguments(dtype)

    def _parse_dataclass_field(self, parser: Any, field: Field) -> None:  # type: ignore[override]
        """Add the argument of a field, also of kinds that transformers' parser does not know: mappings, None
        in words, options of several types, which colocate's classes read from text, and truth values that may
        be None, which need no value on the command line."""
        hint: Any = field.type
        members = _members_but_none(hint)
        field = copy.copy(field)
        if field.name in self._help and "help" not in field.metadata:
            field.metadata = types.MappingProxyType({**field.metadata, "help": self._help[field.name]})
        is_mapping = [typing.get_origin(member) or member for member in members] == [dict]
        is_text = self._reads_text and len(members) > 1 and not any(map(_is_enum, members))
        if is_mapping or is_text:
            field.type = str
        super()._parse_dataclass_field(parser, field)
        action = self._option_string_actions[f"--{field.name}"]
        if is_mapping:
            action.type = _mapping
        if bool in members and action.nargs is None:
            action.nargs, action.const = "?", True
        if type(None) in typing.get_args(hint) and _may_say_none(action, members):
            action.type = _or_none(action.type)


def _without_config(arguments: list[str]) -> tuple[list[str], Path | None]:
    """The command line without `--config FILE` or `--config=FILE`, and that file."""
    for index, argument in enumerate(arguments):
        if argument == "--config":
            if index + 1 == len(arguments):
                raise ValueError("--config needs a file: --config FILE.yaml")
            return arguments[:index] + arguments[index + 2 :], Path(arguments[index + 1])
        if argument.startswith("--config="):
            return arguments[:index] + arguments[index + 1 :], Path(argument.removeprefix("--config="))
    return arguments, None


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"--config {path}: there is no such file.")
    return read_file(path)


def _set_environment(variables: Any, path: Path | None) -> None:
    if not isinstance(variables, Mapping):
        raise ValueError(
            f"env={shown(variables)} in {path} is not a mapping: write `env:` and, indented, `NAME: value`."
        )
    for name, value in variables.items():
        os.environ[str(name)] = str(value)


# ── Fields ───────────────────────────────────────────────────────────────────────────────────────────────


def _declared_help(dtype: Any) -> dict[str, str]:
    """The help of each option of a run that a class or one of its base classes declares."""
    records = {*GRPOOptions.__mro__, RunConfig} - {object}
    bases = [base for base in reversed(dtype.__mro__) if base in records]
    texts = {name: words.text for base in bases for name, words in documented(base).items()}
    # `argparse` fills in what follows a percent sign.
    return {name: text.replace("%", "%%") for name, text in texts.items() if text}


def _inherited_help(dtype: Any) -> dict[str, str]:
    """The help that base classes have of fields that a class declares anew."""
    declared = [getattr(base, "__dataclass_fields__", {}) for base in reversed(dtype.__mro__)]
    fields = [field for fields in declared for field in fields.values()]
    return {field.name: field.metadata["help"] for field in fields if "help" in field.metadata}


def _members_but_none(hint: Any) -> list[Any]:
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return [m for m in (typing.get_args(hint) if is_union else (hint,)) if m is not type(None)]


def _is_enum(member: Any) -> bool:
    return isinstance(member, type) and issubclass(member, enum.Enum)


def _may_say_none(action: Action, members: list[Any]) -> bool:
    """True if "none" can only mean None: it is no text, choice or member of a list."""
    is_single = len(members) == 1 and action.nargs is None
    return is_single and not (members[0] in (str, bool) or _is_enum(members[0]) or action.choices)


def _or_none(read: Any) -> Callable[[str], Any]:
    def read_or_none(text: str) -> Any:
        return None if text.lower() in ("none", "null") else read(text)

    # `argparse` names the type in its messages.
    read_or_none.__name__ = getattr(read, "__name__", "value")
    return read_or_none


def _mapping(text: str) -> dict[str, Any]:
    """The mapping that a text in JSON or YAML stands for."""
    try:
        value = read_yaml(text)
    except ValueError as error:
        raise ArgumentTypeError(f"{shown(text)} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ArgumentTypeError(f"{shown(text)} is no mapping: write '{{\"name\": value}}'")
    return value
