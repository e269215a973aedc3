"""A polite request to stop: SIGTERM, as schedulers send it some time before they kill."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object


class StopRequest:
    """Remembers a SIGTERM while the block runs, so that the step in hand can end and be saved.

    The handler only takes notes: a step that stops half-way would leave parameters and moments of different
    ages. Outside the main thread Python cannot handle signals, and SIGTERM keeps its usual meaning.

    It keeps that meaning in forked children, too: who ends a child that executes a completion, as
    `multiprocessing` does with SIGTERM, must not wait for it for ever.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._received = False
        self._previous: Any = None

    def __enter__(self) -> StopRequest:
        global _active
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGTERM, self._note)
            _active = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _active
        if _active is self:
            _active = None
            self.restore_handler()

    def restore_handler(self) -> None:
        """Let SIGTERM mean what it meant before."""
        # None: the handler was not installed from Python, which cannot install it again.
        signal.signal(signal.SIGTERM, signal.SIG_DFL if self._previous is None else self._previous)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received = True

    def request(self) -> None:
        """As if the signal had come: for a reason to stop that this rank alone has found."""
        self._received = True

    def received(self) -> bool:
        """Whether any rank was asked to stop; all ranks get the same answer, so all stop at the same step."""
        if self._accelerator.num_processes == 1:
            return self._received
        return any(gather_object([self._received]))


_active: StopRequest | None = None
_masks = threading.local()


# A SIGTERM that arrives in the child before its handler is gone would be lost: it waits.
def _before_fork() -> None:
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM} if _active else ())


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


def _after_fork_in_child() -> None:
    global _active
    if _active is not None:
        _active.restore_handler()
        _active = None
    _after_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)
