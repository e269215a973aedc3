"""A rank on the cluster, whose output is shown in the driver."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from colocate.clusters.actor import Size
from colocate.clusters.process import Process
from colocate.parallel.rank_failure import Failure


class Rank(Process):
    """A rank whose output is shown: that of the first rank at once, that of the others line by line with
    their names. On a terminal the first rank draws, and lines of the others are only kept."""

    def __init__(self, number: int, seat: Mapping[str, Any]) -> None:
        super().__init__(f"rank {number}", seat)
        self._open = {1: "", 2: ""}
        self._prefix = f"[rank {number}] " if number else ""

    @property
    def size(self) -> Size:  # type: ignore[override]
        return None if self._prefix else _terminal_size()

    def last_output(self, failure: Failure | None) -> str:
        return super().last_output(failure) if self._prefix else "Its last lines are above."

    def say(self, number: int, text: str) -> None:
        if number == 2:
            self.tail.write(text)
        if self._prefix:
            *whole, self._open[number] = (self._open[number] + text).split("\n")
            text = "".join(f"{self._prefix}{line.rpartition(chr(13))[2]}\n" for line in whole)
        if not (self._prefix and _terminal_size()):
            print(text, end="", file=sys.stdout if number == 1 else sys.stderr, flush=True)


def _terminal_size() -> Size:
    """The size of the terminal that this process writes to; None: it writes elsewhere."""
    if not (sys.stdout.isatty() and sys.stderr.isatty()):
        return None
    columns, rows = os.get_terminal_size()
    return rows, columns
