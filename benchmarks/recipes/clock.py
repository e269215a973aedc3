"""What a process has used of its cores by the time of an event that is known only later."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from types import TracebackType

INTERVAL_S = 0.2


class CoreClock:
    """Notes in a thread how much processor time the process has had, for as long as a block lasts.

    Where others use the machine, too, this says what a run costs, and the wall clock does not.
    """

    def __init__(self) -> None:
        self._times: list[float] = []
        self._used_s: list[float] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> CoreClock:
        self._note()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join()
        self._note()

    def at(self, moment: float) -> float:
        """Processor seconds used by `moment`, a `time.time()` within the block; linear between two notes."""
        after = min(max(bisect_left(self._times, moment), 1), len(self._times) - 1)
        start, end = self._times[after - 1], self._times[after]
        share = (moment - start) / (end - start) if end > start else 1.0
        before_s, after_s = self._used_s[after - 1], self._used_s[after]
        return before_s + min(max(share, 0.0), 1.0) * (after_s - before_s)

    def _watch(self) -> None:
        while not self._is_over.wait(INTERVAL_S):
            self._note()

    def _note(self) -> None:
        self._times.append(time.time())
        self._used_s.append(time.process_time())
