"""`Driver`: the requests of many callers on one open engine.

    ask, cancel ──inbox──▶ advance: choose a batch ▶ submit ▶ poll ▶ hand out what was drawn
    (any thread)           (the engine's thread)

An engine draws all its sequences by one set of sampling parameters, so that requests are batched by theirs.
Batches take turns of `SLICE_S` seconds: the native engine sets one aside for another, with its pages; other
engines finish the turns that have begun, begin no new ones meanwhile, and read resting sequences anew.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from colocate.engines.base import RolloutEngine
from colocate.engines.native.engine import NativeEngine
from colocate.types import Completion, Prompt, SamplingParams

logger = logging.getLogger(__name__)

SLICE_S = 1.0
"""Seconds after which requests with other sampling parameters have their turn."""


@dataclass(frozen=True)
class Drawn:
    """Tokens of one choice of a request, as they come; together they are its completion."""

    choice: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    finish_reason: Literal["stop", "length"] | None = None
    """Why it has ended; None: it goes on."""
    sequence: int | None = None
    """The number of the sequence, where it has ended and was kept."""
    num_cached_tokens: int | None = None
    """The number that `Completion.num_cached_tokens` explains."""


@dataclass(frozen=True)
class Begun:
    """Tells that the engine has a request's sequences."""


Update = Drawn | Begun | Exception


@dataclass(eq=False)
class Job:
    """A request to the engine: one sequence for each of `prompt.samples`, the request's choices.

    Args:
        put: called in the engine's thread with each result of the request; an exception ends it.
        keep: keep the sequence when its turn has ended, so that a later job can extend it.
        extends: the number of a kept sequence that goes on with `given_ids`, in place of `prompt`, if the
            engine still has it.
        is_followed: whether tokens are wanted as they are drawn, and not only at the end.
    """

    prompt: Prompt
    sampling: SamplingParams
    put: Callable[[Update], None]
    keep: bool = False
    extends: int | None = None
    given_ids: tuple[int, ...] = ()
    is_followed: bool = False

    def start(self, engine: RolloutEngine, kept: set[int]) -> list[int]:
        """Ask the engine, which has the sequences `kept` at rest; returns the numbers of the sequences, by
        choice. Raises as its methods do."""
        if self.extends not in kept:
            return engine.submit([self.prompt], self.sampling, keep=self.keep)
        (limit,) = self.prompt.limits(self.sampling.max_tokens)
        engine.extend(self.extends, self.given_ids, limit)
        kept.remove(self.extends)
        return [self.extends]


@dataclass(eq=False)
class _Running:
    """A sequence that the engine draws."""

    job: Job
    choice: int
    sent: tuple[int, ...] = ()
    """Tokens of the sequence that were handed out."""


@dataclass(eq=False)
class _Batch:
    """Requests with equal sampling parameters."""

    waiting: dict[Job, None] = field(default_factory=dict)
    running: dict[int, _Running] = field(default_factory=dict)
    """Sequences under way, by their numbers."""
    kept: set[int] = field(default_factory=set)
    """Sequences that rest, as a later request may extend them."""
    unwanted: list[int] = field(default_factory=list)
    """Sequences that were cancelled while the engine had set them aside."""
    aside: Any = None
    """The engine's sequences, while it draws those of another batch."""
    is_closed: bool = False
    """Whether its waiting requests wait for another batch to have its turn."""

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)


class Driver:
    """Hands requests to an engine that is awake, and hands out the tokens that it draws.

    `ask`, `cancel` and `wake` may be called by any thread, everything else by the engine's alone.
    """

    def __init__(self, engine: RolloutEngine, *, slice_s: float = SLICE_S) -> None:
        self._engine = engine
        self._slice_s = slice_s
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._batches: dict[SamplingParams, _Batch] = {}
        """Batches in the order of their turns; the present one is the first."""
        self._current: _Batch | None = None
        self._since_s = 0.0
        """When the present batch has begun its turn."""
        self._lock = threading.Lock()
        self._num_asked = 0
        """Requests in the inbox, where calls that wake the engine's thread may be, too."""

    @property
    def has_requests(self) -> bool:
        """Whether a request is being drawn, or waits for its turn. Any thread may ask."""
        return bool(self._batches) or self._num_asked > 0

    def ask(self, job: Job) -> None:
        """Queue a request for the engine."""
        with self._lock:
            self._num_asked += 1
        self._inbox.put(partial(self._add, job))

    def cancel(self, job: Job, choice: int | None = None) -> None:
        """Forget a request, or one of its choices; it gets no further results. One that is over may be
        cancelled."""
        self._inbox.put(partial(self._drop, job, choice))

    def wake(self) -> None:
        """Let `advance` return if it waits."""
        if self._inbox.empty():  # else it does not wait; and a thread that is paused reads none of them
            self._inbox.put(_nothing)

    def advance(self, wait_s: float = 0.0) -> None:
        """Take new requests and cancellations, let the engine draw a little further, and hand out the tokens.

        Args:
            wait_s: seconds to wait for something to do, if there is nothing.

        Raises:
            What the engine's `poll` raises; `fail` is to be called then.
        """
        is_idle = not any(batch.has_work for batch in self._batches.values())
        self._read_inbox(wait_s if is_idle else 0.0)
        self._choose()
        if (batch := self._current) is None:
            return
        if not batch.is_closed:
            self._start(batch)
        if self._engine.is_busy:
            for number, completion in self._engine.poll().items():
                self._end(batch, number, completion)
        for number, running in batch.running.items():
            if running.job.is_followed:
                self._tell(number, running)

    def fail(self, error: Exception, wait_s: float = 0.0) -> None:
        """End all requests, those that wait too, and free the sequences that the engine has kept. Tokens
        already drawn are handed out before the error.

        Args:
            wait_s: seconds to wait for a request, if there is none.
        """
        self._read_inbox(0.0 if self._batches else wait_s)
        batches, self._batches, self._current = list(self._batches.values()), {}, None
        for batch in batches:
            if batch.aside is None:
                for number, running in batch.running.items():
                    self._tell(number, running)
                try:
                    self._engine.abort([*batch.running, *batch.kept])
                except Exception:  # those who wait are told in any case
                    logger.exception("An engine that has failed could not let go of its sequences.")
            for job in dict.fromkeys([*(running.job for running in batch.running.values()), *batch.waiting]):
                job.put(error)

    def draw_one(self) -> None:
        """Have the engine, which has nothing to draw, draw a token for nobody. Raises what it raises."""
        (number,) = self._engine.submit([Prompt((0,), 0)], SamplingParams(max_tokens=1))
        try:
            while number not in self._engine.poll():
                pass
        except BaseException:
            with suppress(Exception):  # the first error is the one to be told
                self._engine.abort([number])
            raise

    # ── What was asked ───────────────────────────────────────────────────────────────────────────────────

    def _read_inbox(self, wait_s: float) -> None:
        try:
            if wait_s > 0:
                self._inbox.get(timeout=wait_s)()
            while True:
                self._inbox.get_nowait()()
        except queue.Empty:
            pass

    def _add(self, job: Job) -> None:
        self._batches.setdefault(job.sampling, _Batch()).waiting[job] = None
        with self._lock:
            self._num_asked -= 1

    def _drop(self, job: Job, choice: int | None) -> None:
        batch = self._batches.get(job.sampling)
        if batch is None:
            return
        batch.waiting.pop(job, None)
        numbers = [
            number
            for number, running in batch.running.items()
            if running.job is job and choice in (None, running.choice)
        ]
        for number in numbers:
            del batch.running[number]
        if batch.aside is None:
            self._engine.abort(numbers)
        else:
            batch.unwanted += numbers

    # ── Whose turn it is ─────────────────────────────────────────────────────────────────────────────────

    def _choose(self) -> None:
        """Make the batch whose turn it is the present one."""
        if (current := self._current) is not None:
            if any(batch.has_work for batch in self._batches.values() if batch is not current):
                if time.monotonic() - self._since_s > self._slice_s:
                    current.is_closed = True
                is_over = not current.running and (current.is_closed or not current.waiting)
                if not is_over and not (current.is_closed and isinstance(self._engine, NativeEngine)):
                    return
            elif current.has_work or current.kept:
                current.is_closed = False
                return
            self._end_turn(current)
        for sampling, batch in list(self._batches.items()):
            if batch.has_work:
                return self._begin_turn(batch)
            if not batch.kept:  # everything in it was cancelled
                del self._batches[sampling]

    def _end_turn(self, batch: _Batch) -> None:
        """Move a batch behind all others, or drop it if it has nothing left."""
        (sampling,) = (key for key, other in self._batches.items() if other is batch)
        del self._batches[sampling]
        batch.is_closed = False
        if isinstance(self._engine, NativeEngine) and (batch.running or batch.kept):
            batch.aside = self._engine.set_aside()
        else:
            self._engine.abort(batch.kept)
            batch.kept.clear()
        if batch.has_work or batch.kept:
            self._batches[sampling] = batch
        self._current = None

    def _begin_turn(self, batch: _Batch) -> None:
        if batch.aside is not None:
            assert isinstance(self._engine, NativeEngine), "only that sets sequences aside"
            self._engine.take_back(batch.aside)
            self._engine.abort(batch.unwanted)
            batch.aside, batch.unwanted = None, []
        self._current, self._since_s = batch, time.monotonic()

    # ── What is drawn ────────────────────────────────────────────────────────────────────────────────────

    def _start(self, batch: _Batch) -> None:
        for job in list(batch.waiting):  # one that waits is told of any error that ends the batch
            try:
                numbers = job.start(self._engine, batch.kept)
            except ValueError as error:  # this request alone cannot be drawn
                del batch.waiting[job]
                job.put(error)
                continue
            del batch.waiting[job]
            for choice, number in enumerate(numbers):
                batch.running[number] = _Running(job, choice)
            job.put(Begun())

    def _tell(self, number: int, running: _Running) -> None:
        """Hand out the tokens that a turn under way has drawn."""
        token_ids, logprobs = self._engine.progress(number, len(running.sent))
        if token_ids:
            running.sent += token_ids
            num_cached = self._engine.num_cached_tokens(number)
            running.job.put(Drawn(running.choice, token_ids, logprobs, num_cached_tokens=num_cached))

    def _end(self, batch: _Batch, number: int, completion: Completion) -> None:
        """Hand out the end of a turn."""
        running = batch.running.pop(number, None)
        if running is None:
            return
        token_ids, num_sent, job = completion.token_ids, len(running.sent), running.job
        if token_ids[:num_sent] != running.sent:
            # What a lost engine of a pool had told of is drawn again elsewhere, by other arithmetic maybe.
            job.put(RuntimeError("An engine was lost in the middle of this answer, and another one differs."))
            self._drop(job, None)
            return
        logprobs = None if completion.logprobs is None else completion.logprobs[num_sent:]
        kept = number if job.keep else None
        if kept is not None:
            batch.kept.add(kept)
        reason, num_cached = completion.finish_reason, completion.num_cached_tokens
        job.put(Drawn(running.choice, token_ids[num_sent:], logprobs, reason, kept, num_cached))


def _nothing() -> None:
    """Does nothing but end a wait."""
