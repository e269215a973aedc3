"""`Readers`: threads that read the bodies of requests, while others' answers go on."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass
class _ReadTask:
    """The work for one body, and the future that its caller awaits."""

    work: Callable[[], Any]
    loop: asyncio.AbstractEventLoop
    result: asyncio.Future[Any]
    since_s: float

    def tell(self, result: Any, error: BaseException | None) -> None:
        if self.result.done():  # nobody waits any more
            return
        if error is None:
            self.result.set_result(result)
        else:
            self.result.set_exception(error)


class Readers:
    """Threads that do one body's work each, the oldest first.

    They are daemon threads: one that never ends, because of a chat template, say, keeps neither the process
    from ending nor the others from reading.

    Args:
        num: how many bodies are read at the same time.
        late_s: seconds after which a body is late, if it waits for a reader, or all readers are at work.
    """

    def __init__(self, num: int, late_s: float) -> None:
        self._num, self._late_s = num, late_s
        self._waiting: deque[_ReadTask] = deque()
        self._began_s: dict[int, float] = {}
        """When the readers began that are at work now."""
        self._num_threads = 0
        self._is_closed = False
        self._change = threading.Condition()

    async def read(self, work: Callable[[], T]) -> T:
        """Call `work` in a reader, and return its result or raise its error. It is not called if nobody
        awaits it any more when a reader is free."""
        loop = asyncio.get_running_loop()
        task = _ReadTask(work, loop, loop.create_future(), time.monotonic())
        with self._change:
            if self._is_closed:
                raise RuntimeError("the readers are closed")
            self._waiting.append(task)
            if len(self._began_s) + len(self._waiting) > self._num_threads < self._num:
                self._num_threads += 1
                threading.Thread(
                    target=self._run, args=(self._num_threads,), name="serving-reader", daemon=True
                ).start()
            self._change.notify()
        try:
            result: T = await task.result
            return result
        finally:
            with self._change:
                if task in self._waiting:
                    self._waiting.remove(task)

    @property
    def delay_s(self) -> float:
        """Seconds for which bodies have been late; 0: none is."""
        with self._change:
            since_s = [task.since_s for task in self._waiting]
            if len(self._began_s) == self._num:
                since_s.append(max(self._began_s.values()))
        delay_s = time.monotonic() - min(since_s, default=float("inf"))
        return delay_s if delay_s > self._late_s else 0.0

    def close(self) -> None:
        """Begin no more work; readers at work finish theirs, and nobody waits for that."""
        with self._change:
            self._is_closed = True
            self._waiting.clear()
            self._change.notify_all()

    def _run(self, number: int) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._is_closed or self._waiting)
                if self._is_closed:
                    return
                task = self._waiting.popleft()
                self._began_s[number] = time.monotonic()
            result, error = None, None
            try:
                result = task.work()
            except BaseException as raised:
                error = raised
            with self._change:
                del self._began_s[number]
            with suppress(RuntimeError):  # the loop has ended, and whoever waited there
                task.loop.call_soon_threadsafe(task.tell, result, error)
