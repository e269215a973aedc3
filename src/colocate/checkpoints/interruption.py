"""Requests to stop after the present step: SIGTERM, which schedulers send before they kill, and Ctrl-C."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from types import FrameType, TracebackType
from typing import Any

from accelerate import Accelerator

from colocate.parallel.verdict import Peers

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_NAMES = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C"}
SAME_INTERRUPT_S = 0.5
"""Seconds after a SIGINT within which a second one is the same Ctrl-C, passed on by a launcher."""


class StopRequest:
    """Notes a SIGTERM or the first Ctrl-C during a block, so that the present step can end and be saved.

    A second Ctrl-C stops at once. The handler only notes the signal, because a step that stops half-way would
    leave parameters and moments of different steps. Outside the main thread Python cannot handle signals, and
    both signals keep their usual meaning. A SIGINT that the process ignores, as in a shell's background job,
    stays ignored.

    In forked children SIGTERM keeps its usual meaning: `multiprocessing` ends a child with it, such as one
    that executes a completion, and would otherwise wait for the child for ever. Terminals send Ctrl-C to the
    children, too, which ignore it, because the present step still needs them.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._received: signal.Signals | None = None
        self._interrupted_s: float | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        global _active
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if number != signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._note)
            _active = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _active
        if _active is self:
            _active = None
            self.restore_handlers()

    def restore_handlers(self) -> None:
        """Restore the handlers that the signals had before the block."""
        for number, previous in self._previous.items():
            # None: the handler was not installed from Python, which cannot install it again.
            signal.signal(number, signal.SIG_DFL if previous is None else previous)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            now = time.monotonic()
            if self._interrupted_s is not None and now - self._interrupted_s > SAME_INTERRUPT_S:
                raise KeyboardInterrupt
            if self._interrupted_s is None:
                self._interrupted_s = now
                self._say_what_follows()
        self._received = self._received or signal.Signals(number)

    def _say_what_follows(self) -> None:
        if self._accelerator.is_main_process:
            text = "Ctrl-C: the step in hand is finished and saved. Press it again to stop at once."
            # Another thread prints it, as the interrupted thread may be printing and hold the stream's lock.
            threading.Thread(target=print, args=(text,), kwargs={"file": sys.stderr, "flush": True}).start()

    def request(self) -> None:
        """Act as if SIGTERM had come, for a reason to stop that only this rank has found."""
        self._received = signal.SIGTERM

    def received(self) -> bool:
        """Whether any rank was asked to stop. All ranks get one answer, so that all stop after one step."""
        if self._accelerator.num_processes == 1:
            return self._received is not None
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
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS if _active else ())


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
