"""Limits the time that a function takes in the main thread."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from colocate.users_code.errors import RewardTimeout
from colocate.users_code.last_resort import LAST_RESORT, InterpreterWatch

logger = logging.getLogger(__name__)

REPEAT_S = 1.0
"""A function that swallowed its interruption is interrupted again after this many seconds, and again."""
GRACE_S = 10.0
"""A function that still runs this many seconds after its limit ends the process."""


class TimeLimit:
    """Calls functions and interrupts those that take too long, by an exception from a signal's handler.

    The function stays in the main thread, where math-verify and others use signals of their own. Three things
    watch it:

    - A thread sends SIGVTALRM when the time is over, which interrupts Python code and waiting (locks, pipes,
      `time.sleep`).
    - A timer of the process's CPU time sends SIGVTALRM, too, for C code that keeps all threads from running
      but looks for signals, as regular expressions and large integers do.
    - If neither helps, because C code never looks for signals or the function swallows the exception, then
      `GRACE_S` seconds later the last resort prints where each thread is and ends the process with status 1,
      so that the run does not hang.

    In another thread nothing can be interrupted: there the last resort alone is left.

    Args:
        timeout_s: Seconds that each call may take; None: no limit.
        kind: What is called, in words.
        option: The option that has set `timeout_s`.
    """

    def __init__(
        self, timeout_s: float | None, kind: str = "reward function", option: str = "reward_timeout_s"
    ) -> None:
        self.timeout_s = timeout_s
        self.kind, self.option = kind, option
        self._has_warned = False

    def check_thread(self) -> None:
        """Raises RuntimeError outside the main thread, which is the only thread that can be interrupted."""
        thread = threading.current_thread()
        if self.timeout_s is not None and thread is not threading.main_thread():
            raise RuntimeError(
                f"{self.option}={self.timeout_s:g}, but the trainer runs in the thread {thread.name!r}, "
                f"and only the main thread can be interrupted. Train there, or set {self.option}=None."
            )

    def warn_of_thread(self) -> None:
        """Say once, outside the main thread, that a function which takes too long ends the process."""
        thread = threading.current_thread()
        if self.timeout_s is not None and thread is not threading.main_thread() and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "The trainer runs in the thread %r, and only the main thread can be interrupted: a %s that "
                "takes longer than %s=%g s ends the process %g s later. Train in the main thread to get an "
                "error, or set %s=None for no limit.",
                thread.name,
                self.kind,
                self.option,
                self.timeout_s,
                GRACE_S,
                self.option,
            )

    def interpreter_watch(self) -> InterpreterWatch:
        """A timer that ends the process if a function in another thread keeps this one from running for as
        long."""
        return InterpreterWatch(None if self.timeout_s is None else self.timeout_s + GRACE_S)

    def arm_last_resort(self) -> None:
        """Let the process end in `timeout_s` + `GRACE_S` seconds, unless this or `disarm` is called before.

        It must be armed before any thread starts code that could hold Python's global lock.
        """
        if self.timeout_s is not None:
            LAST_RESORT.arm(self, self.timeout_s + GRACE_S)

    def disarm_last_resort(self) -> None:
        if self.timeout_s is not None:
            LAST_RESORT.disarm(self)

    def call(self, name: str, function: Callable[[], Any]) -> Any:
        """Call `function` and return what it returns.

        Args:
            name: The function's name for the log.

        Raises:
            RewardTimeout: it took longer than `timeout_s`.
        """
        if self.timeout_s is None or threading.current_thread() is not threading.main_thread():
            return function()
        watch = _Deadline(f"{self.kind} {name!r}", self.timeout_s, self.option)
        try:
            watch.start()
            result = function()
        finally:
            # No call before this line: an interruption could come between, and leave the watch running.
            watch.is_over = True
            watch.stop()
        if watch.is_late:  # something swallowed the interruption, or came before it
            raise RewardTimeout(self.timeout_s)
        return result


class _Deadline:
    """Watches one call of a function, and interrupts it when its time is over."""

    def __init__(self, called: str, timeout_s: float, option: str) -> None:
        self.is_over = False
        self._called, self._option = called, option
        self._timeout_s = timeout_s
        self._deadline = self._next = time.monotonic() + timeout_s
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._send, name=option, daemon=True)
        self._main = threading.get_ident()
        self._previous: Any = signal.SIG_DFL

    @property
    def is_late(self) -> bool:
        return time.monotonic() > self._deadline

    def start(self) -> None:
        self._previous = signal.signal(signal.SIGVTALRM, self._interrupt)
        # CPU time of one thread does not overtake the clock, and that of several only makes it look early.
        signal.setitimer(signal.ITIMER_VIRTUAL, self._timeout_s, 0.1)
        self._thread.start()

    def stop(self) -> None:
        self._end.set()
        if self._thread.ident is not None:
            self._thread.join()
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, signal.SIG_DFL if self._previous is None else self._previous)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        # Never twice at once: the first may have come while the watch was being stopped.
        if self.is_over or now < self._next:
            return
        self._next = now + REPEAT_S
        raise RewardTimeout(self._timeout_s)

    def _send(self) -> None:
        if self._end.wait(self._timeout_s):
            return
        signal.pthread_kill(self._main, signal.SIGVTALRM)
        if self._end.wait(REPEAT_S):
            return
        logger.error(
            "The %s goes on after it was interrupted. Unless it ends, the process ends %s + %g = %g s after "
            "it was called.",
            self._called,
            self._option,
            GRACE_S,
            self._timeout_s + GRACE_S,
        )
        while not self._end.wait(REPEAT_S):
            signal.pthread_kill(self._main, signal.SIGVTALRM)
