"""Finds what is wrong with a file of rows, and in which line: the errors of the libraries that read it say
neither."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from pathlib import Path


def find_fault(files: Iterable[Path], *, max_lines: int | None = None) -> str | None:
    """A sentence about the first file that cannot be read, or None if all of them look right.

    Text is checked for its encoding, JSON for its syntax.

    Args:
        files: files whose ending says what they hold; a .jsonl file has one object in each line.
        max_lines: how many lines of each file to check at most, as for a stream; a .json file, which may be
            one long line, is then not checked.
    """
    for file in files:
        fault = _fault(file, max_lines)
        if fault is not None:
            return f"{file} {fault}"
    return None


def find_wrong_encoding(files: Iterable[Path]) -> str | None:
    """A sentence about the first file that is empty or not UTF-8; readers of JSON find that only when a row
    is used."""
    for file in files:
        fault = _wrong_encoding(file, None) if file.stat().st_size else "is empty."
        if fault is not None and file.suffix != ".parquet":
            return f"{file} {fault}"
    return None


def _fault(file: Path, max_lines: int | None) -> str | None:
    if file.stat().st_size == 0:
        return "is empty."
    if file.suffix == ".parquet":
        return None
    fault = _wrong_encoding(file, max_lines)
    if fault is None and file.suffix == ".jsonl":
        return _wrong_line(file, max_lines)
    if fault is None and file.suffix == ".json" and max_lines is None:
        try:
            json.loads(file.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            # One object in each line is allowed here, too.
            return _wrong_line(file, None) and f"is no JSON: {error}."
    return fault


def _wrong_encoding(file: Path, max_lines: int | None) -> str | None:
    with file.open("rb") as stream:
        for number, line in enumerate(itertools.islice(stream, max_lines), start=1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                return f"is not text in UTF-8, line {number}: {error}."
    return None


def _wrong_line(file: Path, max_lines: int | None) -> str | None:
    with file.open("rb") as stream:
        for number, line in enumerate(itertools.islice(stream, max_lines), start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                return f"has no JSON in line {number}: {error}. Each line is one row: {{...}}"
            if not isinstance(row, dict):
                return f"has a {type(row).__name__} in line {number}, where a row is {{...}}."
    return None
