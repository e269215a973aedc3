"""The origin of a run: the command that started it, the commit of the code around it, the options set."""

from __future__ import annotations

import dataclasses
import enum
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from colocate.options.names import OF_TRL

_GIT_TIMEOUT_S = 5.0


def provenance(options: Any) -> dict[str, Any]:
    """The entries `command`, `commit` and `options` of `run.json`, before secrets are taken out of them.

    Args:
        options: a dataclass instance, such as a `GRPOConfig`.
    """
    return {
        "command": command_of(sys.orig_argv),
        "commit": commit_of(Path.cwd()),
        "options": changed_options(options),
    }


def command_of(words: Sequence[str]) -> str:
    """The command as it is typed, from an interpreter's `sys.orig_argv`.

    A console script is started as `/env/bin/python /env/bin/colocate train` and typed as `colocate train`.
    """
    if not words:
        return ""
    interpreter, *rest = words
    if rest and Path(rest[0]).is_absolute() and Path(rest[0]).parent == Path(interpreter).parent:
        return shlex.join([Path(rest[0]).name, *rest[1:]])
    return shlex.join([Path(interpreter).name, *rest])


def commit_of(directory: Path) -> str | None:
    """The commit that is checked out where `directory` lies, with "-dirty" where files differ from it.

    None outside of a repository, and where git does not answer.
    """
    described = ["git", "-C", str(directory), "describe", "--always", "--dirty", "--abbrev=40", "--match="]
    try:
        done = subprocess.run(described, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def changed_options(options: Any) -> dict[str, Any]:
    """The fields of a dataclass instance whose values are not their defaults, in their order.

    A value that was derived from other options (`generation_batch_size`) is among them; an object that
    transformers makes of an option (`accelerator_config`) is not, nor is a second name (`options.names`).
    """
    changed = {}
    for field in dataclasses.fields(options):
        value = _plain(getattr(options, field.name))
        if not isinstance(value, _JSON) or field.name in OF_TRL:
            continue
        if field.default is not dataclasses.MISSING:
            default = field.default
        elif field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        else:
            default = dataclasses.MISSING
        if value != _plain(default):
            changed[field.name] = value
    return changed


_JSON = str | int | float | list | dict | None


def _plain(value: Any) -> Any:
    """`value` as JSON has it: enumerations by their values, tuples as lists, and else its text."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, dict):
        return {str(key): _item(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_item(item) for item in value]
    return value


def _item(value: Any) -> Any:
    value = _plain(value)
    return value if isinstance(value, _JSON) else str(value)
