"""What is wrong with a file of rows, and in which line: the readers say neither."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path


def find_fault(files: Iterable[Path]) -> str | None:
    """A sentence about the first file that cannot be read, or None if each looks right.

    Text is checked for its encoding, JSON for its syntax; a .jsonl file has one object in each line.
    """
    for file in files:
        fault = _fault(file)
        if fault is not None:
            return f"{file} {fault}"
    return None


def _fault(file: Path) -> str | None:
    if file.stat().st_size == 0:
        return "is empty."
    if file.suffix == ".parquet":
        return None
    try:
        if file.suffix == ".jsonl":
            return _fault_of_lines(file)
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        return f"is not text in UTF-8: {error}."
    try:
        if file.suffix == ".json":
            json.loads(text)
    except ValueError as error:
        # One object in each line is allowed here, too.
        fault = _fault_of_lines(file)
        return fault and f"is no JSON: {error}."
    return None


def _fault_of_lines(file: Path) -> str | None:
    with file.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8"))
            except UnicodeDecodeError as error:
                return f"is not text in UTF-8, line {number}: {error}."
            except ValueError as error:
                return f"has no JSON in line {number}: {error}. Each line is one row: {{...}}"
            if not isinstance(row, dict):
                return f"has a {type(row).__name__} in line {number}, where a row is {{...}}."
    return None
