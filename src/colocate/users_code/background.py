"""An event loop in a thread of its own: async reward functions and tools then also run where another loop
runs already."""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections.abc import Awaitable
from concurrent.futures import Future
from types import FrameType
from typing import Any

from colocate.users_code.errors import RewardTimeout

# The loop ends what is late by itself, unless something blocks it: so much later its caller gives it up.
SLACK_S = 0.5


class BackgroundLoop:
    """An event loop for the life of a run, so that connections and semaphores of a function stay valid.

    Args:
        timeout_s: Seconds that an awaitable may take; None: no limit.
        name: The thread's name.
    """

    def __init__(self, timeout_s: float | None = None, name: str = "rewards") -> None:
        self._timeout_s = timeout_s
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._is_closing = threading.Event()

    def submit(self, awaitable: Awaitable) -> Future:
        """Start an awaitable on the loop and return a handle for `result`. The first call, and the first one
        after `pause`, starts the thread."""
        return asyncio.run_coroutine_threadsafe(_settle(awaitable, self._timeout_s), self._running())

    def result(self, future: Future) -> Any:
        """Wait for the result of a submitted awaitable.

        Raises:
            RewardTimeout: it took longer than `timeout_s`.
        """
        # The loop counts from the beginning; this is for one that something blocks.
        patience_s = None if self._timeout_s is None else self._timeout_s + SLACK_S
        try:
            value, error = future.result(patience_s)
        except TimeoutError:
            assert self._timeout_s is not None
            raise RewardTimeout(self._timeout_s, self._places()) from None
        if error is not None:
            raise error
        return value

    def pause(self) -> None:
        """Cancel submitted awaitables and end the thread. Other tasks of the loop go on when something is
        submitted again."""
        if self._loop is None or self._thread is None:
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=SLACK_S)
        if self._thread.is_alive():  # something blocks it, and it ends with the process
            self._loop = None
        self._thread = None

    def close(self) -> None:
        """Cancel all tasks of the loop, and end the loop and its thread."""
        if self._loop is None:
            return
        self._is_closing.set()
        self._running()
        self.pause()
        if self._loop is not None:
            self._loop.close()
        self._loop, self._is_closing = None, threading.Event()

    def _running(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        if self._thread is None:
            # A daemon: a run that ends with an exception must not wait for it.
            arguments = (self._loop, self._is_closing)
            self._thread = threading.Thread(target=_run, args=arguments, name=self._name, daemon=True)
            self._thread.start()
        return self._loop

    def _places(self) -> list[tuple[FrameType, int]]:
        """The frames and lines at which the loop's thread is, the outermost first."""
        assert self._thread is not None and self._thread.ident is not None
        frame = sys._current_frames().get(self._thread.ident)
        return list(traceback.walk_stack(frame))[::-1] if frame is not None else []


def _run(loop: asyncio.AbstractEventLoop, is_closing: threading.Event) -> None:
    while True:
        try:
            loop.run_forever()
            break
        except (SystemExit, KeyboardInterrupt):
            # The task that raised it has kept it for whoever awaits it, but asyncio leaves the loop too.
            continue
    rest = [task for task in asyncio.all_tasks(loop) if is_closing.is_set() or _was_submitted(task)]
    for task in rest:
        task.cancel()
    if rest:
        loop.run_until_complete(asyncio.wait(rest))


def _was_submitted(task: asyncio.Task) -> bool:
    return getattr(task.get_coro(), "cr_code", None) is _settle.__code__


async def _settle(awaitable: Awaitable, timeout_s: float | None) -> tuple[Any, BaseException | None]:
    """Return the awaitable's result, or the exception that it raised, since raising a SystemExit here would
    end the loop."""
    value: Any = None
    error: BaseException | None = None
    clock = asyncio.get_running_loop().time
    start = clock()
    try:
        async with asyncio.timeout(timeout_s) as limit:
            value = await awaitable
    except asyncio.CancelledError:
        raise
    except BaseException as raised:
        error = raised
    # What blocked the loop was not interrupted, and what swallowed the interruption went on.
    if limit.expired() or (timeout_s is not None and clock() - start > timeout_s):
        assert timeout_s is not None
        cancelled = error.__cause__ if isinstance(error, TimeoutError) and error.__cause__ else error
        trace = None if cancelled is None else cancelled.__traceback__
        error = RewardTimeout(timeout_s).with_traceback(trace)
    return value, error
