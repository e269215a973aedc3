"""Counts of the work done in a phase, such as tokens drawn or micro-batches computed.

counts.begin("completions", 32)     # whoever does the work counts it
counts.add("completions")
counts.words()                      # "1 of 32 completions": the display asks for it, in a thread of its own
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

T = TypeVar("T")


@dataclass
class _Count:
    done: int = 0
    total: int | None = None
    """Their number in the end; None: it is not known."""
    is_limit: bool = False
    """Whether there may be fewer than `total` in the end."""
    is_part: bool = False
    """Whether all of them are one item of what else is counted."""

    def words(self, what: str) -> str:
        if self.total is None:
            return f"{self.done:,} {what}"
        most = "at most " if self.is_limit and self.done < self.total else ""
        return f"{self.done:,} of {most}{self.total:,} {what}"


class WorkCounts:
    """Counts of the work done in the present phase, as far as the host knows.

    Nothing waits for a device to be counted: an engine counts the tokens that it reads in any case, and a
    micro-batch counts once it has been launched. One thread counts, and any thread may read.
    """

    def __init__(self) -> None:
        # Replaced as a whole when a count comes or goes, because other threads go through it.
        self._counts: dict[str, _Count] = {}
        self._read: Callable[[], Mapping[str, int]] | None = None
        self.at_work = ""
        """The name of a reward function or other part that is at work; empty: it has none."""

    def clear(self) -> None:
        """Forget all counts: other work begins."""
        self._counts, self._read, self.at_work = {}, None, ""

    def begin(
        self, what: str, total: int | None = None, *, is_limit: bool = False, is_part: bool = False
    ) -> None:
        """Count `what` from 0.

        Args:
            what: a plural, such as "micro-batches".
            total: how many there will be; None: it is not known.
            is_limit: there may also be fewer than `total`.
            is_part: whether they are parts of one item of another count.
        """
        self._counts = {**self._counts, what: _Count(0, total, is_limit, is_part)}

    def add(self, what: str, number: int = 1) -> None:
        """Note that `number` more are done. A count that was not begun has no total."""
        if what not in self._counts:
            self.begin(what)
        self._counts[what].done += number

    def leave(self, what: str, number: int) -> None:
        """Note how many of all are still to be done."""
        count = self._counts[what]
        count.done = (count.total or 0) - number

    def each(self, what: str, items: Sequence[T]) -> Iterator[T]:
        """The items; each counts as done when the next one is asked for."""
        self.begin(what, len(items))
        for item in items:
            yield item
            self.add(what)

    def done(self, what: str) -> int:
        """The number that was added."""
        return self._counts[what].done if what in self._counts else 0

    def measure(self, read: Callable[[], Mapping[str, int]]) -> None:
        """Have counts read when they are shown.

        Args:
            read: returns the counts by name; called in the display's thread. If it raises, as it may while
                another thread changes its data, the counts are unknown.
        """
        self._read = read

    def words(self) -> str:
        """Text that says what is done; empty if nothing is counted."""
        counts = [count.words(what) for what, count in self._known().items()]
        return ", ".join([self.at_work, *counts] if self.at_work else counts)

    def share(self) -> float:
        """The part of the work that is done, from 0 to 1; NaN if no total is known.

        Of several counts the one that has come farthest is taken: others may be limits, or count larger
        pieces.
        """
        known = [count for count in self._known().values() if count.total]
        part = sum(count.done / (count.total or 1) for count in known if count.is_part)
        shares = [
            min(count.done + part, count.total or 0) / (count.total or 1)
            for count in known
            if not count.is_part
        ]
        return min(1.0, max(shares)) if shares else math.nan

    def _known(self) -> dict[str, _Count]:
        known, read = dict(self._counts), self._read
        try:
            measured = {} if read is None else read()
        except Exception:
            measured = {}
        for what, done in measured.items():
            count = known.get(what, _Count())
            most = done if count.total is None else min(done, count.total)
            known[what] = replace(count, done=max(count.done, most))
        return known
