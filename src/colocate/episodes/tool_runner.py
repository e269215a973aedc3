"""Runs the tools that models call, while the engine goes on."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from colocate.episodes.content import MAX_CHARS, MediaError, content_of, encodable
from colocate.episodes.tool_loop import Task, ToolLoop
from colocate.episodes.tool_workers import ToolJob, ToolWorkers
from colocate.episodes.tools import ToolCall
from colocate.rewards.arguments import own_copy
from colocate.users_code.errors import RewardTimeout, words_of
from colocate.users_code.process_state import users_code
from colocate.users_code.time_limit import TimeLimit


@dataclass(frozen=True)
class ToolResult:
    """The outcome of a call."""

    name: str
    """The name by which the model called."""
    content: str | list[Any]
    """The content that the model reads: text, or the list (of content blocks) that the tool returned. An
    error is the text of `{"error": message}`, as TRL has it."""
    is_failure: bool
    """Whether the call could not be made, raised or took too long."""
    latency_s: float
    """Seconds from the tool's beginning to its end."""
    is_left_running: bool = False
    """Whether the tool was given up while it ran, in a thread or on the loop: it may change its environment
    later."""
    is_timeout: bool = False
    """Whether the tool took too long."""

    @property
    def message(self) -> dict[str, Any]:
        """The tool's chat message."""
        return {"role": "tool", "name": self.name, "content": self.content}


class _CallBatch:
    """The calls of one message: sync ones one after the other, then the async ones together. That is TRL's
    order; two methods of one environment never run at the same time unless both are async."""

    def __init__(self, calls: Sequence[ToolCall]) -> None:
        self.calls = list(calls)
        self.results: list[ToolResult | None] = [None] * len(self.calls)
        self.sync: deque[int] = deque()
        self.asynchronous: list[tuple[int, Callable[[], Awaitable]]] = []
        self.running: dict[int, ToolJob | Task] = {}


class ToolRunner:
    """Runs calls of tools: sync ones in the main thread, async ones on an event loop of their own.

    The caller starts the calls of an assistant message under a key, and polls between the engine's windows. A
    message's results come together, in the order of its calls, when all have ended. Messages do not wait for
    each other, except that sync tools of all messages take turns in the main thread (they may use signals,
    which other threads cannot). With `num_workers` they run in threads instead.

    After `timeout_s` seconds the model reads an error in place of a result, and

    - an async tool is cancelled;
    - a sync tool in the main thread is interrupted by an exception from a signal's handler, as a reward
      function is (`TimeLimit`). A tool that neither this nor its repetitions end, because it is in C code
      that never looks for signals, ends the process some seconds later: the engine could not go on;
    - a sync tool in a worker's thread cannot be interrupted: it is left to itself, and another thread takes
      its thread's place. If it keeps all threads from running, the process ends.

    The model also reads whatever a tool raises, `SystemExit` included. Only `KeyboardInterrupt` and
    `MediaError` (a tool has returned an image) are passed on. Tools get copies of their arguments, and lists
    that they return are copied: changing them later changes no message.

    A runner is a context manager, which may be entered within itself: at the end of the outermost one, calls
    are forgotten and threads end. The next call starts others.

    Args:
        timeout_s: Seconds that a call may take; None: no limit.
        num_workers: threads for sync tools; 0: they run in the main thread, in `poll`.
        max_result_chars: a longer result is an error.
    """

    def __init__(
        self,
        timeout_s: float | None = None,
        num_workers: int = 0,
        max_result_chars: int = MAX_CHARS,
    ) -> None:
        self._timeout_s = timeout_s
        self._max_result_chars = max_result_chars
        self._limit = TimeLimit(timeout_s, "tool", "tool_timeout_s")
        self._changed = threading.Event()
        self._loop = ToolLoop(timeout_s, self._changed.set)
        self._workers = ToolWorkers(num_workers, self._changed.set) if num_workers else None
        self._batches: dict[Hashable, _CallBatch] = {}
        self._queue: deque[Hashable] = deque()  # keys of batches with a sync call for the main thread
        self._watch = self._limit.interpreter_watch()
        self._left: list[ToolJob] = []
        """Jobs that were given up and may still run."""
        self._num_users = 0

    @property
    def has_work(self) -> bool:
        """Whether calls were started whose results `poll` has not returned yet."""
        return bool(self._batches)

    def start(self, key: Hashable, calls: Sequence[ToolCall]) -> None:
        """Accept calls. Async tools begin at once; sync ones in `poll`, or when a worker is free.

        Args:
            key: names the calls in the result of `poll`.

        Raises:
            ValueError: `poll` has not returned the results of earlier calls under this key.
        """
        if key in self._batches:
            raise ValueError(f"Calls under {key!r} are under way: poll them before starting others.")
        batch = self._batches[key] = _CallBatch(calls)
        for index, call in enumerate(batch.calls):
            if call.function is None:
                batch.results[index] = self._failure(call, call.problem, 0.0)
            elif inspect.iscoroutinefunction(call.function):
                batch.asynchronous.append((index, functools.partial(_call, call)))
            else:
                batch.sync.append(index)
        self._advance(key, batch)

    def poll(self, budget_s: float = 0.0) -> dict[Hashable, list[ToolResult]]:
        """Run calls that wait for the main thread, and return results.

        Args:
            budget_s: sync tools are begun for that many seconds, at least one if any wait. A tool that still
                runs then is interrupted only at the end of its own time.

        Returns:
            The results of each message whose calls have all ended, in the order of its calls, by its key.

        Raises:
            RuntimeError: there is a limit of time, and this is not the main thread, which alone can be
                interrupted.
        """
        self._changed.clear()
        end = time.monotonic() + budget_s
        self._collect()
        try:
            while self._queue:
                key = self._queue[0]
                self._run_here(key, self._batches[key])
                if time.monotonic() >= end:
                    break
        finally:
            self._limit.disarm_last_resort()
        self._collect()
        self._stop_watching_if_idle()
        finished: dict[Hashable, list[ToolResult]] = {}
        for key, batch in self._batches.items():
            results = [result for result in batch.results if result is not None]
            if len(results) == len(batch.calls):
                finished[key] = results
        for key in finished:
            del self._batches[key]
        return finished

    def wait(self, timeout_s: float | None = None) -> None:
        """Sleep until there is something for `poll` to do, at most `timeout_s` seconds (None: however long).
        Returns at once if nothing is under way."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        if not self.has_work or any(not batch.running for batch in self._batches.values()):
            return  # nothing to wait for, or a batch waits for `poll`
        due = [self._overdue_s(work) for batch in self._batches.values() for work in batch.running.values()]
        wakes = [moment for moment in (end, *due) if moment is not None]
        self._changed.wait(max(min(wakes) - time.monotonic(), 0.0) if wakes else None)

    def cancel(self, key: Hashable) -> bool:
        """Forget the calls under a key, if there are any: async tools are cancelled, and sync ones in threads
        left to themselves.

        Returns:
            Whether one was running, so that it may still change its environment.
        """
        batch = self._batches.pop(key, None)
        if key in self._queue:
            self._queue.remove(key)
        running = list(batch.running.values()) if batch is not None else []
        for work in running:
            self._give_up(work)
        return any(isinstance(work, Task) or work.started_s is not None for work in running)

    def __enter__(self) -> ToolRunner:
        self._num_users += 1
        return self

    def __exit__(self, *error: object) -> None:
        self._num_users -= 1
        if self._num_users == 0:
            self._end_calls()
            self._loop.pause()

    def close(self) -> None:
        """Forget all calls, and end the threads and the loop."""
        self._end_calls()
        self._loop.close()

    def _end_calls(self) -> None:
        for key in list(self._batches):
            self.cancel(key)
        if self._workers is not None:
            self._workers.close()
        self._watch.stop()

    # --- beginning -----------------------------------------------------------------------------------------

    def _advance(self, key: Hashable, batch: _CallBatch) -> None:
        """Begin the next calls of a batch that has no sync call running."""
        if batch.sync and self._workers is None:
            self._queue.append(key)
        elif batch.sync and self._workers is not None:
            index = batch.sync.popleft()
            attempt = functools.partial(self._attempt_in_thread, batch.calls[index])
            self._watch.start()
            batch.running[index] = self._workers.submit(attempt)
        else:
            for index, begin in batch.asynchronous:
                self._begin_async(batch, index, begin)
            batch.asynchronous.clear()

    def _begin_async(self, batch: _CallBatch, index: int, begin: Callable[[], Awaitable]) -> None:
        try:
            awaitable = begin()
        except Exception as error:  # the arguments are not those of the function
            batch.results[index] = self._failure(batch.calls[index], error, 0.0)
            return
        self._watch.start()
        batch.running[index] = self._loop.submit(self._awaited(batch.calls[index].name, awaitable))

    async def _awaited(self, name: str, awaitable: Awaitable) -> str | list[Any]:
        with users_code(f"The tool {name!r}"):
            return self._content(name, await awaitable)

    def _run_here(self, key: Hashable, batch: _CallBatch) -> None:
        """Run the next sync call of the first batch in the queue."""
        self._limit.check_thread()
        index = batch.sync.popleft()
        call = batch.calls[index]
        self._limit.arm_last_resort()
        start = time.monotonic()
        outcome: ToolResult | Awaitable | BaseException
        try:
            outcome = self._limit.call(call.name, functools.partial(self._attempt, call))
        except RewardTimeout:
            outcome = self._timeout(call, time.monotonic() - start)
        except (KeyboardInterrupt, MediaError) as passed_on:
            outcome = passed_on
        is_last = not batch.sync
        if is_last:
            self._queue.popleft()
        try:
            self._settle(batch, index, outcome)
        finally:
            if is_last:
                self._advance(key, batch)

    def _attempt(self, call: ToolCall) -> ToolResult | Awaitable:
        """Call a sync tool. It may return an awaitable, such as that of an async function that it wraps."""
        start = time.monotonic()
        try:
            with users_code(f"The tool {call.name!r}"):
                value = _call(call)
            if inspect.isawaitable(value):
                return value
            content = self._content(call.name, value)
        except (KeyboardInterrupt, RewardTimeout, MediaError):
            raise
        except BaseException as error:
            return self._failure(call, error, time.monotonic() - start)
        return ToolResult(call.name, content, False, time.monotonic() - start)

    def _attempt_in_thread(self, call: ToolCall) -> ToolResult | Awaitable | BaseException:
        try:
            return self._attempt(call)
        except BaseException as error:  # which is passed on: the main thread raises it
            return error

    # --- ending --------------------------------------------------------------------------------------------

    def _collect(self) -> None:
        """Take the results of calls that have ended in other threads, and give up overdue calls."""
        is_late, now = False, time.monotonic()
        for key, batch in self._batches.items():
            for index, work in list(batch.running.items()):
                call, overdue_s = batch.calls[index], self._overdue_s(work)
                if isinstance(work, Task):
                    if work.future.done():
                        self._settle(batch, index, self._outcome(call, work))
                        continue
                    is_late = is_late or (work.late_s is not None and now > work.late_s)
                elif work.is_done:
                    self._settle(batch, index, work.result)
                    self._advance(key, batch)
                    continue
                if overdue_s is not None and now > overdue_s:
                    self._give_up(work)
                    late = self._timeout(call, self._timeout_s or 0.0)
                    self._settle(batch, index, dataclasses.replace(late, is_left_running=True))
                    if isinstance(work, ToolJob):
                        self._advance(key, batch)
        self._loop.check(is_late)

    def _settle(self, batch: _CallBatch, index: int, outcome: ToolResult | Awaitable | BaseException) -> None:
        """Note a call's outcome; an awaitable becomes one more async call, and errors that are passed on are
        raised."""
        batch.running.pop(index, None)
        if isinstance(outcome, BaseException):
            batch.results[index] = self._failure(batch.calls[index], outcome, 0.0)
            raise outcome
        if isinstance(outcome, ToolResult):
            batch.results[index] = outcome
        else:
            batch.asynchronous.append((index, lambda: outcome))

    def _outcome(self, call: ToolCall, task: Task) -> ToolResult | BaseException:
        latency_s = (task.ended_s or time.monotonic()) - task.started_s
        if task.future.cancelled():
            return self._failure(call, f"The tool {call.name} was cancelled.", latency_s)
        content, error = task.future.result()
        if error is None:
            return ToolResult(call.name, content, False, latency_s)
        if isinstance(error, KeyboardInterrupt | MediaError):
            return error
        if isinstance(error, RewardTimeout):
            return self._timeout(call, latency_s)
        return self._failure(call, error, latency_s)

    def _overdue_s(self, work: ToolJob | Task) -> float | None:
        """When the work is given up at the earliest, by `time.monotonic`; None: never."""
        if isinstance(work, Task):
            return work.overdue_s
        started_s = time.monotonic() if work.started_s is None else work.started_s
        return None if self._timeout_s is None else started_s + self._timeout_s

    def _give_up(self, work: ToolJob | Task) -> None:
        if isinstance(work, Task):
            work.future.cancel()
        elif self._workers is not None:
            self._workers.abandon(work)
            self._left.append(work)

    def _stop_watching_if_idle(self) -> None:
        """Stop the watch if idle: a machine that is suspended between tools must not look like one that
        hangs."""
        self._left = [job for job in self._left if job.started_s is not None and not job.is_done]
        if not self._left and not any(batch.running for batch in self._batches.values()):
            self._watch.stop()

    # --- what the model reads ------------------------------------------------------------------------------

    def _content(self, name: str, value: Any) -> str | list[Any]:
        return content_of(value, name, self._max_result_chars)

    def _failure(self, call: ToolCall, error: BaseException | str, latency_s: float) -> ToolResult:
        text = error if isinstance(error, str) else _text(error)
        content = encodable(str({"error": text[: self._max_result_chars]}))
        return ToolResult(call.name, content, True, latency_s)

    def _timeout(self, call: ToolCall, latency_s: float) -> ToolResult:
        late = self._failure(call, f"The tool {call.name} took longer than {self._timeout_s:g} s.", latency_s)
        return dataclasses.replace(late, is_timeout=True)


def _call(call: ToolCall) -> Any:
    assert call.function is not None
    return call.function(**own_copy(call.arguments))


def _text(error: BaseException) -> str:
    """The text that the model reads of an error: in TRL the message of an `Exception` alone."""
    if isinstance(error, Exception):
        with suppress(Exception):
            return str(error)
    return words_of(error)
