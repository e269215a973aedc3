"""Calls functions of the user's that are no tools, such as `reset`, within the time that tools have."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from colocate.episodes.tool_workers import ToolJob, ToolWorkers
from colocate.users_code.errors import RewardTimeout
from colocate.users_code.process_state import users_code
from colocate.users_code.time_limit import TimeLimit


@dataclass(frozen=True)
class Outcome:
    """The value that a call has returned, or its error."""

    value: Any = None
    error: BaseException | None = None


class LimitedCalls:
    """Calls functions one after the other in the main thread, or together in threads.

    A call that takes too long has raised TimeoutError: it is interrupted in the main thread, and left to
    itself in another one. SystemExit is an error like others; KeyboardInterrupt is passed on. A process that
    a function forks, and that returns from it, is ended.

    Args:
        timeout_s: seconds that each call may take; None: no limit.
        num_workers: threads; 0: the main thread.
    """

    def __init__(self, timeout_s: float | None, num_workers: int) -> None:
        self._limit = TimeLimit(timeout_s, "function", "tool_timeout_s")
        self._num_workers = num_workers

    def one(self, name: str, function: Callable[[], Any]) -> Outcome:
        """Call a function where it can be interrupted: in the main thread, if this is it."""
        is_main = threading.current_thread() is threading.main_thread()
        return self._here(name, function) if is_main else self._in_threads([(name, function)], 1)[0]

    def all(self, calls: Sequence[tuple[str, Callable[[], Any]]]) -> list[Outcome]:
        """Call functions, each with its name for messages, and return their outcomes.

        Raises:
            RuntimeError: there is a limit and no worker, and this is not the main thread.
        """
        if self._num_workers and calls:
            return self._in_threads(calls, self._num_workers)
        return [self._here(name, function) for name, function in calls]

    def _here(self, name: str, function: Callable[[], Any]) -> Outcome:
        self._limit.check_thread()
        self._limit.arm_last_resort()
        try:
            return self._limit.call(name, lambda: _attempt(name, function))
        except RewardTimeout:
            return Outcome(error=self._late(name))
        finally:
            self._limit.disarm_last_resort()

    def _in_threads(self, calls: Sequence[tuple[str, Callable[[], Any]]], num_threads: int) -> list[Outcome]:
        changed, watch = threading.Event(), self._limit.interpreter_watch()
        workers = ToolWorkers(min(num_threads, len(calls)), changed.set)
        watch.start()
        try:
            jobs = [workers.submit(functools.partial(_attempt, *call)) for call in calls]
            while waiting := [job for job in jobs if not (job.is_done or job.is_abandoned)]:
                changed.wait(self._next_end_s(waiting))
                changed.clear()
                for job in waiting:
                    if self._is_late(job):
                        workers.abandon(job)
        finally:
            watch.stop()
            workers.close()
        outcomes = [
            job.result if job.is_done else Outcome(error=self._late(name))
            for job, (name, _) in zip(jobs, calls, strict=True)
        ]
        for outcome in outcomes:
            if isinstance(outcome.error, KeyboardInterrupt):
                raise outcome.error
        return outcomes

    def _next_end_s(self, jobs: Sequence[ToolJob]) -> float | None:
        """The seconds until the first of the jobs that run is late; None: none is, or there is no limit."""
        if self._limit.timeout_s is None:
            return None
        started = [job.started_s for job in jobs if job.started_s is not None]
        first_s = min(started, default=time.monotonic())
        return max(first_s + self._limit.timeout_s - time.monotonic(), 0.0)

    def _is_late(self, job: ToolJob) -> bool:
        limit_s, started_s = self._limit.timeout_s, job.started_s
        return None not in (limit_s, started_s) and time.monotonic() > started_s + limit_s  # type: ignore[operator]

    def _late(self, name: str) -> TimeoutError:
        return TimeoutError(f"{name} took longer than tool_timeout_s={self._limit.timeout_s:g} s")


def _attempt(name: str, function: Callable[[], Any]) -> Outcome:
    try:
        with users_code(name):
            return Outcome(function())
    except RewardTimeout:
        raise
    except BaseException as error:  # KeyboardInterrupt, too: the main thread raises it
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise
        return Outcome(error=error)
