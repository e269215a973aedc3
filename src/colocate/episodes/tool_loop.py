"""The event loop of the async tools, replaced if one of them blocks it."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future

from colocate.users_code.background import SLACK_S, BackgroundLoop


class Task:
    """An awaitable on the loop."""

    def __init__(self, future: Future, timeout_s: float | None) -> None:
        self.future = future
        self.started_s = time.monotonic()
        self.ended_s: float | None = None
        self.late_s = None if timeout_s is None else self.started_s + timeout_s
        """When the loop cancels it, by `time.monotonic`."""
        self.overdue_s = None if self.late_s is None else self.late_s + SLACK_S
        """When it is given up, because it has swallowed its cancellation, or the loop is blocked."""


class ToolLoop:
    """Runs async tools at the same time, and cancels each after `timeout_s` seconds.

    A tool that computes or sleeps without `await` blocks the loop and all tools on it, and nothing can
    interrupt it. Tools that begin after this was noticed get another loop; those on the blocked one go on if
    it is free again in time.

    Args:
        timeout_s: Seconds that a tool may take; None: no limit, and a blocked loop is not noticed.
        notify: called, in the loop's thread, when a tool has ended.
    """

    def __init__(self, timeout_s: float | None, notify: Callable[[], None]) -> None:
        self._timeout_s = timeout_s
        self._notify = notify
        self._loop = self._new_loop()
        self._ping: Task | None = None

    def submit(self, awaitable: Awaitable) -> Task:
        """Start an awaitable; the task's `future` gives a pair, the result and the exception raised."""
        task = Task(self._loop.submit(awaitable), self._timeout_s)
        task.future.add_done_callback(lambda _: self._end(task))
        return task

    def check(self, is_late: bool) -> None:
        """Replace the loop if it is blocked.

        Args:
            is_late: whether a task has not ended though its time is over: then the loop is asked to do
                something, and has until a later check to answer.
        """
        if self._ping is not None:
            if self._ping.future.done():
                self._ping = None
            elif time.monotonic() > self._ping.started_s + SLACK_S:
                self._loop, self._ping = self._new_loop(), None
        elif is_late:
            self._ping = Task(self._loop.submit(_nothing()), None)

    def pause(self) -> None:
        """End the thread until a tool is submitted again; connections that tools have on the loop stay."""
        self._loop.pause()
        self._ping = None

    def close(self) -> None:
        self._loop.close()

    def _new_loop(self) -> BackgroundLoop:
        return BackgroundLoop(self._timeout_s, name="tools")

    def _end(self, task: Task) -> None:
        task.ended_s = time.monotonic()
        self._notify()


async def _nothing() -> None:
    """Ends at once, unless the loop is blocked."""
