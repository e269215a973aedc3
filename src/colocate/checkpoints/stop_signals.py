"""The signals that ask a run to stop: SIGTERM, which schedulers send before they kill, and Ctrl-C."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
SAME_INTERRUPT_S = 0.5
"""Seconds after a SIGINT within which a second one is the same Ctrl-C, passed on by a launcher or a shell."""


@contextmanager
def stop_event() -> Iterator[threading.Event]:
    """An event that SIGINT and SIGTERM set within the block. After it they do what they did before."""
    is_over = threading.Event()
    before = {number: signal.signal(number, lambda *_: is_over.set()) for number in STOP_SIGNALS}
    try:
        yield is_over
    finally:
        restore(before)


def restore(handlers: Mapping[signal.Signals, Any]) -> None:
    """Install handlers that `signal.signal` or `signal.getsignal` has returned."""
    for number, handler in handlers.items():
        # None: the handler was not installed from Python, which cannot install it again.
        signal.signal(number, signal.SIG_DFL if handler is None else handler)


class StopSignals:
    """Notes a SIGTERM or the first Ctrl-C during a block instead of acting on it.

    A second Ctrl-C stops at once. Outside the main thread Python cannot handle signals, and both keep their
    usual meaning. A SIGINT that the process ignores, as in a shell's background job, stays ignored.
    """

    def __init__(self) -> None:
        self.noted: list[int] = []
        self._interrupted_s: float | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                if number != signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self.note)
        return self

    def __exit__(self, *_: object) -> None:
        self.restore_handlers()

    def restore_handlers(self) -> None:
        """Restore the handlers that the signals had before the block."""
        restore(self._previous)

    def note(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed again.
        """
        if number == signal.SIGINT:
            now_s = time.monotonic()
            if self._interrupted_s is not None:
                if now_s - self._interrupted_s > SAME_INTERRUPT_S:
                    raise KeyboardInterrupt
                return
            self._interrupted_s = now_s
        self.noted.append(number)
