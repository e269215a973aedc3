"""The signals that ask a run to stop: SIGTERM, which schedulers send before they kill, and Ctrl-C."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from accelerate import Accelerator

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_NAMES = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C"}
SAME_INTERRUPT_S = 0.5
"""Seconds after a SIGINT within which a second one is the same Ctrl-C, passed on by a launcher or a shell."""


@contextmanager
def stop_event() -> Iterator[threading.Event]:
    """An event that SIGINT and SIGTERM set within the block, after which their handlers are restored."""
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


class StopRequest(StopSignals):
    """Notes a SIGTERM or the first Ctrl-C during a block, so that the present step can end and be saved.

    The handler only notes the signal, because a step that stops half-way would leave parameters and moments
    of different steps.

    In forked children SIGTERM keeps its usual meaning: `multiprocessing` ends a child with it, such as one
    that executes a completion, and would otherwise wait for the child for ever. Terminals also send Ctrl-C to
    the children, which ignore it, because the present step still needs them.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__()
        self._accelerator = accelerator
        self._received: signal.Signals | None = None

    def __enter__(self) -> Self:
        global _active
        super().__enter__()
        _active = self
        return self

    def __exit__(self, *_: object) -> None:
        global _active
        if _active is self:
            _active = None
        super().__exit__()

    def note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and signal.SIGINT not in self.noted:
            self._say_what_follows()
        super().note(number, frame)
        self._received = self._received or signal.Signals(number)

    def _say_what_follows(self) -> None:
        if self._accelerator.is_main_process:
            text = "Ctrl-C: will finish this step, save and stop. Press it again to stop at once."
            # Another thread prints it, as the interrupted thread may be printing and hold the stream's lock.
            threading.Thread(target=print, args=(text,), kwargs={"file": sys.stderr, "flush": True}).start()

    def request(self) -> None:
        """Act as if SIGTERM had come, for a reason to stop that only this rank has found."""
        self._received = signal.SIGTERM

    def received(self) -> bool:
        """Whether any rank was asked to stop. All ranks get one answer, so that all stop after one step."""
        if self._accelerator.num_processes == 1:
            return self._received is not None
        from colocate.parallel.verdict import Peers  # loads PyTorch, which takes seconds

        own = 0 if self._received is None else int(self._received)
        numbers = [number for (number,) in Peers.all(self._accelerator.device).gather(own) if number]
        first = signal.Signals(numbers[0]) if numbers else None
        # A signal that only this rank notes after the exchange waits for the next step.
        self._received = first or self._received
        return first is not None

    @property
    def name(self) -> str:
        """The signal's name for messages."""
        return _NAMES[self._received or signal.SIGTERM]

    def exception(self) -> BaseException:
        """The exception to end the saved run with, which is the usual one for the signal."""
        if self._received == signal.SIGINT:
            return KeyboardInterrupt("The run was stopped by Ctrl-C after a step that is saved.")
        return SystemExit(128 + signal.SIGTERM)  # the exit code that a shell gives for this signal


_active: StopRequest | None = None
_masks = threading.local()


# A signal that arrives in the child before its handler is gone would be lost: it waits.
def _before_fork() -> None:
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS if _active else ())


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


def _after_fork_in_child() -> None:
    global _active
    if _active is not None:
        _active.restore_handlers()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _active = None
    _after_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)
