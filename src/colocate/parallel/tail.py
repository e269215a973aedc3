"""The last lines that a rank has written, for those that tell of its death."""

from __future__ import annotations

from collections import deque
from typing import Any

NUM_LINES = 12
"""Lines of a dead rank's stderr that are shown."""


class Tail:
    """A stream that passes everything on, unless to None, and keeps the last lines."""

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
