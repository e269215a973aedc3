"""Threads that run sync tools, when the main thread is not to."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any


class ToolJob:
    """A function in a thread of `ToolWorkers`, until it is done or given up."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function
        self.started_s: float | None = None
        """When a thread took it, by `time.monotonic`; None: it waits for one."""
        self.result: Any = None
        self.is_done = False
        self.is_abandoned = False


class ToolWorkers:
    """A fixed number of threads that take jobs in the order in which they come.

    A thread cannot be interrupted. One whose job is abandoned is replaced at once, so that no tool that hangs
    holds up the others; it ends when its job does, or with the process.

    Args:
        num_threads: how many jobs run at a time.
        notify: called, in the thread, when a job is done.
    """

    def __init__(self, num_threads: int, notify: Callable[[], None]) -> None:
        self._num_threads = num_threads
        self._notify = notify
        self._jobs: queue.SimpleQueue[ToolJob | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_started = False

    def submit(self, function: Callable[[], Any]) -> ToolJob:
        """Queue a function that must not raise. The first call starts the threads."""
        if not self._is_started:
            self._is_started = True
            for _ in range(self._num_threads):
                self._start_thread()
        job = ToolJob(function)
        self._jobs.put(job)
        return job

    def abandon(self, job: ToolJob) -> None:
        """Give a job up: if it waits, it is never begun; if it runs, another thread takes its thread's
        place."""
        with self._lock:
            if job.is_done or job.is_abandoned:
                return
            job.is_abandoned = True
            is_running = job.started_s is not None
        if is_running:
            self._start_thread()

    def close(self) -> None:
        """End the threads that have nothing to do; the others end after their jobs."""
        if self._is_started:
            for _ in range(self._num_threads):
                self._jobs.put(None)
        self._is_started = False

    def _start_thread(self) -> None:
        # A daemon: a run must be able to end beside a tool that does not.
        threading.Thread(target=self._work, name="tool_workers", daemon=True).start()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            with self._lock:
                if job.is_abandoned:
                    continue
                job.started_s = time.monotonic()
            result = job.function()
            with self._lock:
                job.result, job.is_done = result, True
                is_replaced = job.is_abandoned
            self._notify()
            if is_replaced:
                return
