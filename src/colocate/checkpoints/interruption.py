"""A polite request to stop: SIGTERM, as schedulers send it some time before they kill, or Ctrl-C."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from types import FrameType, TracebackType
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_NAMES = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C"}
SAME_INTERRUPT_S = 0.5
"""A second SIGINT so soon after the first is the same Ctrl-C, which a launcher has passed on, too."""


class StopRequest:
    """Remembers a SIGTERM or the first Ctrl-C while the block runs, so that the step in hand can end and be
    saved. The second Ctrl-C stops at once.

    The handler only takes notes: a step that stops half-way would leave parameters and moments of different
    ages. Outside the main thread Python cannot handle signals, and both keep their usual meaning; so does
    SIGINT where it is ignored, as in a shell's background jobs.

    SIGTERM keeps its meaning in forked children: who ends a child that executes a completion, as
    `multiprocessing` does with SIGTERM, must not wait for it for ever. Ctrl-C, which terminals send to
    children as well, they ignore: without them the step in hand could not end as it would have.
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
        """Let the signals mean what they meant before."""
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
            # By another thread: the interrupted one may be printing, and hold what this would wait for.
            threading.Thread(target=print, args=(text,), kwargs={"file": sys.stderr, "flush": True}).start()

    def request(self) -> None:
        """As if SIGTERM had come: for a reason to stop that this rank alone has found."""
        self._received = signal.SIGTERM

    def received(self) -> bool:
        """Whether any rank was asked to stop; all ranks get the same answer, so all stop at the same step."""
        if self._accelerator.num_processes == 1:
            return self._received is not None
        first = next(filter(None, gather_object([self._received])), None)
        # Noted here alone in the meantime, a signal waits for the next step.
        self._received = first or self._received
        return first is not None

    @property
    def name(self) -> str:
        """Who asked, in words."""
        return _NAMES[self._received or signal.SIGTERM]

    def exception(self) -> BaseException:
        """What ends the run, now that it is saved: what its caller expects of such a signal."""
        if self._received == signal.SIGINT:
            return KeyboardInterrupt("The run was stopped by Ctrl-C after a step that is saved.")
        return SystemExit(128 + signal.SIGTERM)  # what a shell expects of a process that obeyed it


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
