"""Ends the process at a set time even if Python hangs: a thread in C waits for that time.

`faulthandler` has one timer for the whole process. Here several that wait share it.
"""

from __future__ import annotations

import faulthandler
import threading
import time

BEAT_S = 1.0
"""A watch of the interpreter puts its time off this often."""

_STDERR = 2


class _LastResort:
    """The times at which the process is to end, by their owners; the earliest one counts."""

    def __init__(self) -> None:
        self._ends_s: dict[object, float] = {}
        self._lock = threading.Lock()

    def arm(self, owner: object, after_s: float) -> None:
        """Let the process end after so many seconds, in place of the owner's earlier time."""
        with self._lock:
            self._ends_s[owner] = time.monotonic() + after_s
            self._set()

    def disarm(self, owner: object) -> None:
        with self._lock:
            if self._ends_s.pop(owner, None) is not None:
                self._set()

    def _set(self) -> None:
        if not self._ends_s:
            faulthandler.cancel_dump_traceback_later()
            return
        left_s = max(min(self._ends_s.values()) - time.monotonic(), 0.001)
        faulthandler.dump_traceback_later(left_s, exit=True, file=_STDERR)


LAST_RESORT = _LastResort()
"""The watch of this process. It prints where each thread is and ends the process with status 1; its thread
does not need Python's global lock to run."""


class InterpreterWatch:
    """Ends the process if one thread keeps all others from running, as C code does that holds Python's lock.

    A thread puts the end off every second, for which it needs the lock itself. So code that only waits, or
    computes without the lock, may take as long as it likes.

    Args:
        after_s: Seconds without a sign of life; None: nothing is watched.
    """

    def __init__(self, after_s: float | None) -> None:
        self._after_s = after_s
        self._stop: threading.Event | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to watch, before any thread starts code that could hold the lock; harmless if it is begun."""
        if self._after_s is None or self._stop is not None:
            return
        self._stop = threading.Event()
        LAST_RESORT.arm(self._stop, self._after_s)
        arguments = (self._stop, self._after_s)
        self._thread = threading.Thread(target=_beat, args=arguments, name="interpreter_watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the watch and its thread."""
        if self._stop is None or self._thread is None:
            return
        self._stop.set()
        LAST_RESORT.disarm(self._stop)
        self._stop = None
        self._thread.join(BEAT_S)  # it has nothing left to do, and takes longer only where the lock is held


def _beat(stop: threading.Event, after_s: float) -> None:
    while not stop.wait(min(BEAT_S, after_s / 4)):
        LAST_RESORT.arm(stop, after_s)
    LAST_RESORT.disarm(stop)  # the watch may have been stopped between the two lines above
