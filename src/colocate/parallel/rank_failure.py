"""Reports of why a rank has failed: the last lines that it wrote, its error file, and errors that all ranks
share.

Of several ranks that end, their launcher shows the one that failed first, by the error files: torchrun names
the file, and so do accelerate, which starts torchrun, and the launcher on Ray. See
https://docs.pytorch.org/docs/stable/elastic/errors.html. Options, data and model are checked on every rank,
so all of them find the same fault; the first rank alone prints it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import textwrap
import time
import traceback
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from colocate.options.redaction import redacted

VARIABLE = "TORCHELASTIC_ERROR_FILE"


class Failure(NamedTuple):
    """The contents of an error file."""

    at_s: int
    """When the rank failed, in seconds of its node's clock."""
    text: str


def record_failure(error: BaseException, text: str = "") -> None:
    """Write down why this rank fails, unless it has done so already, or no launcher has asked for it.

    A rank that ends because another one has failed must not call it.

    Args:
        text: the message for the user; empty: the traceback.
    """
    name = os.environ.get(VARIABLE)
    if not name:
        return
    lines = text or "".join(traceback.format_exception(error))
    extra = {"py_callstack": redacted(lines), "timestamp": str(int(time.time()))}
    message = {"message": redacted(f"{type(error).__name__}: {error}"), "extraInfo": extra}
    with suppress(OSError), open(name, "x", encoding="utf-8") as file:
        json.dump({"message": message}, file)


def read_failure(path: Path) -> Failure | None:
    """Read a rank's error file; None: there is none, or it was cut short."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        extra: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["message"]["extraInfo"]
        return Failure(int(extra["timestamp"]), str(extra["py_callstack"]))
    return None


NUM_LINES = 12
"""Lines of a dead rank's stderr that are shown."""


class LastLines:
    """A stream that passes everything on (to None: nothing) and keeps the last lines."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._lines: deque[str] = deque(maxlen=NUM_LINES)
        self._open = ""

    def write(self, text: str) -> int:
        *whole, rest = (self._open + text).split("\n")
        # A progress bar begins its line again and again.
        self._lines.extend(line.rpartition("\r")[2] for line in whole if line.strip())
        self._open = rest.rpartition("\r")[2]
        return len(text) if self._stream is None else int(self._stream.write(text))

    def lines(self) -> list[str]:
        return [line[:400] for line in (*self._lines, self._open) if line.strip()][-NUM_LINES:]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def say(text: str) -> None:
    """Print to stderr why this rank ends, unless the first rank ends for the same reason and has printed it.

    The first rank waits until the others have heard that, for `meeting.APART_S` seconds at most.
    """
    is_first = os.environ.get("RANK", "0") == "0"
    if is_first:
        print(in_lines(text, sys.stderr), file=sys.stderr, flush=True)
    is_said = False
    if os.environ.get("WORLD_SIZE", "1") != "1":
        # Ranks that cannot ask each other say what they know, each of them.
        with suppress(Exception, KeyboardInterrupt):
            from colocate.parallel.meeting import place_of_launcher  # loads PyTorch, which takes seconds

            place = place_of_launcher()
            is_said = place is not None and place.ends_as_first(text)
    if not (is_first or is_said):
        print(in_lines(text, sys.stderr), file=sys.stderr, flush=True)


def in_lines(text: str, stream: IO[str]) -> str:
    """The text with its lines broken between words if it goes to a terminal, which breaks within words.

    A line that is a command, or ends with one, stays whole, so that it can be copied; so does a traceback.
    """
    if not stream.isatty() or "Traceback (most recent call last)" in text:
        return text
    columns = shutil.get_terminal_size().columns
    return "\n".join(
        line
        if re.match(r"(\w[\w ]*: )?colocate \w[\w-]* (?:[^:]|:(?=\S))+$", line)
        else textwrap.fill(line, columns, break_long_words=False, break_on_hyphens=False)
        for line in text.split("\n")
    )
