"""Files of models and adapters, read with errors that name the file: a library's own errors say what is wrong
with a text or a header, but not in which file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from safetensors import safe_open


class DamagedFile(ValueError):
    """A file is not what its name says, as after a copy or a download that was cut short."""

    def __init__(self, path: Path, kind: str, error: object) -> None:
        super().__init__(
            f"{path} is no readable {kind} ({error}): it is damaged or was cut short. Copy or download it "
            "again, or take another checkpoint."
        )


def read_object(path: Path) -> dict[str, Any]:
    """The mapping that a JSON file holds.

    Raises:
        DamagedFile: it is no JSON, or holds something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # a wrong encoding is a ValueError, too
        raise DamagedFile(path, "JSON", error) from error
    if not isinstance(found, dict):
        raise DamagedFile(path, "JSON object", f"it holds a {type(found).__name__}")
    return found


@contextmanager
def open_weights(path: Path) -> Iterator[safe_open]:
    """A safetensors file whose tensors go to the host as they are asked for.

    Raises:
        DamagedFile: it is no safetensors file, or lacks a part.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise DamagedFile(path, "safetensors file", error) from error
