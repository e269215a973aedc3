"""Reads a run's options from a run file and the command line, as text or YAML values without types yet."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from colocate.options.values import nearest, shown
from colocate.options.yaml_text import read_yaml

LAUNCH = "COLOCATE_LAUNCH"
"""The variable by which a launcher of ours tells ranks the options that started them."""
REPLICAS = "COLOCATE_REPLICAS"
"""The variable by which it tells them the addresses of the servers that it has started for them."""


def read_file(path: Path) -> dict[str, Any]:
    """The options in a run file.

    Raises:
        ValueError: there is no such file, or it does not contain a mapping of options.
        OSError: it cannot be read.
    """
    if not path.is_file():
        raise ValueError(_no_file(path))
    try:
        content = read_yaml(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8: {error}") from error
    except ValueError as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ValueError(f"{path} must hold options as `name: value` lines, not {type(content).__name__}.")
    return content


def _no_file(path: Path) -> str:
    """The message about a run file that is not there."""
    if path.is_dir():
        return f"There is no run file {str(path)!r}; that is a directory"
    if path.suffix not in (".yaml", ".yml"):
        return f"There is no run file {str(path)!r}; a model is named with --model_name_or_path"
    here = [str(found) for ending in ("yaml", "yml") for found in sorted(path.parent.glob(f"*.{ending}"))]
    near = nearest(str(path), here) or (f"; here are {', '.join(here[:5])}" if here else "")
    return f"There is no run file {str(path)!r}{near or f' ({path.parent.resolve()} has none)'}"


def _stray(argument: str) -> str:
    """The message about a word that follows no option."""
    bare = argument.lstrip("-")
    if argument.startswith("-"):
        return f"{shown(argument)} has one dash, and options have two: write --{bare:.100}"
    if re.match(r"\w+=", argument):
        return f"{shown(argument)} follows no option; write --{bare:.100}"
    if argument.endswith((".yaml", ".yml")):
        return (
            f"{shown(argument)} follows no option. A run file comes first, and there is one: "
            f"colocate train {argument:.100} --option value"
        )
    return f"{shown(argument)} follows no option; write --name {argument:.100}"


def read_overrides(arguments: Sequence[str]) -> dict[str, Any]:
    """The options in `--key value`, `--key=value`, `--key a b c` (a list) and `--flag` (True), as text.

    Raises:
        ValueError: a value without an option before it.
    """
    overrides: dict[str, Any] = {}
    values: list[str] | None = None
    for argument in arguments:
        if argument.startswith("--"):
            key, equals, value = argument[2:].partition("=")
            values = [value] if equals else []
            overrides[key.replace("-", "_")] = values
        elif values is None:
            raise ValueError(_stray(argument))
        else:
            values.append(argument)
    return {key: True if not v else v[0] if len(v) == 1 else v for key, v in overrides.items()}
