"""`EngineLoop`: the thread of a rollout server's engine. It draws, and it alone touches the weights.

requests ──ask──▶ held while paused ▶ refused if they want other weights ▶ Driver ▶ engine
messages, pauses, sleep ──do──▶ done between two steps
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from colocate.engines.native.engine import NativeEngine
from colocate.http.key import ServerKey
from colocate.rollout_server.native.weights import NativeWeights
from colocate.rollout_server.wire.receiver import Receiver, other_weights
from colocate.serving.driver import Driver, Job
from colocate.serving.engine_thread import IDLE_S, EngineThread, step_limit_s
from colocate.serving.refusal import Refusal

T = TypeVar("T")


class Aborted(Exception):
    """A request was given up before its end; it has the tokens drawn so far."""


@dataclass(eq=False)
class _Held:
    """A request that waits for the end of a pause."""

    job: Job
    weights: str | None


@dataclass(frozen=True)
class _QueuedCall:
    """Something that the engine's thread is to do."""

    do: Callable[[], None]
    refuse: Callable[[Exception], None]
    """Called in its place when the thread has ended."""


class EngineLoop(EngineThread):
    """Draws for requests; between two steps it changes weights and memory as it is asked.

    While the engine is paused it draws nothing, and requests wait. A request names its weights, which must be
    the present ones when it begins; an aborting pause ends all requests that have begun. So each completion
    is of one version.

    Args:
        engine: awake.
        key: the server's key, with which messages are signed.
    """

    def __init__(self, engine: NativeEngine, weights: NativeWeights, key: ServerKey) -> None:
        super().__init__(Driver(engine), step_limit_s(engine, weights.device))
        self._engine, self._weights = engine, weights
        self.receiver = Receiver(weights, key)
        """The trainer's messages are answered by it, in the engine's thread (`do`)."""
        self._calls: queue.SimpleQueue[_QueuedCall] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._refusal: Exception | None = None
        """The error that every request gets once the thread has ended."""
        self._held: dict[Job, _Held] = {}
        self._draining: list[Future[None]] = []
        self.is_paused = False

    # ── What any thread may ask ──────────────────────────────────────────────────────────────────────────

    @property
    def num_steps(self) -> int:
        """The number of steps that the engine has taken for requests; it stands still if the engine hangs."""
        return self._stepper.num_steps

    @property
    def has_requests(self) -> bool:
        """Whether a request is being drawn, which makes `num_steps` grow."""
        return self._driver.has_requests

    def ask(self, job: Job, weights: str | None) -> None:
        """Draw a request's completions with the weights of this name (None: any), now or after the pause.

        `job.put` gets `Refusal` if others are there then, and `Aborted` if the request was given up.
        """
        self._call(partial(self._begin, _Held(job, weights)), job.put)

    def cancel(self, job: Job) -> None:
        """Forget a request, whose client is gone."""
        self._call(partial(self._forget, job), lambda refusal: None)

    def pause(self, *, drains: bool = False) -> Future[None]:
        """Stop drawing, until `resume`.

        Args:
            drains: complete the requests that have begun, rather than end them with the tokens drawn so far.

        Returns:
            A future that is done when nothing is drawn any more.
        """
        done: Future[None] = Future()
        done.set_running_or_notify_cancel()  # a pause comes, even if who asked no longer waits
        self._call(partial(self._pause, drains, done), done.set_exception)
        return done

    def resume(self) -> Future[None]:
        """Go on, with requests that wait."""
        return self.do(self._resume)

    def sleep(self) -> Future[None]:
        """Pause, and give the memory of weights and KV cache back."""
        return self.do(self._sleep)

    def wake_up(self, *, weights: bool, kv_cache: bool) -> Future[None]:
        """Take memory again: for weights, whose contents are to be sent, and for the KV cache."""
        return self.do(partial(self._wake_up, weights, kv_cache))

    def do(self, action: Callable[[], T]) -> Future[T]:
        """Call `action` in the engine's thread, between two steps."""
        done: Future[T] = Future()

        def call() -> None:
            if not done.set_running_or_notify_cancel():  # who asked has given up; from now on nobody can
                return
            try:
                done.set_result(action())
            except BaseException as error:
                done.set_exception(error)

        def refuse(refusal: Exception) -> None:
            if done.set_running_or_notify_cancel():
                done.set_exception(refusal)

        self._call(call, refuse)
        return done

    def _call(self, do: Callable[[], None], refuse: Callable[[Exception], None]) -> None:
        """Have the engine's thread do something, or refuse it if that has ended."""
        with self._lock:
            if self._refusal is None:
                self._calls.put(_QueuedCall(do, refuse))
                self._driver.wake()
                return
        refuse(self._refusal)

    # ── The engine's thread ──────────────────────────────────────────────────────────────────────────────

    def _go_on(self) -> None:
        self._do_calls(IDLE_S if self.is_paused else 0.0)
        if self.is_paused:
            return
        self._stepper.step(IDLE_S)
        if self._draining and not self._driver.has_requests:
            self._end_pause_of_draining()

    def _shut_down(self) -> Refusal:
        self._abort()
        return Refusal(503, "The server is being shut down.", code="engine_unavailable")

    def _do_calls(self, wait_s: float) -> None:
        try:
            self._stepper.note_call()
            if wait_s > 0:
                self._do_call(self._calls.get(timeout=wait_s))
            while True:
                self._do_call(self._calls.get_nowait())
        except queue.Empty:
            pass

    def _do_call(self, call: _QueuedCall) -> None:
        self._stepper.note_call()
        try:
            call.do()
        except BaseException:  # which ends the thread
            self._calls.put(call)  # to be refused
            raise

    def _refuse_all(self, refusal: Refusal) -> None:
        with self._lock:
            self._refusal = refusal
        for held in self._held.values():
            held.job.put(refusal)
        for done in self._draining:
            done.set_exception(refusal)
        while not self._calls.empty():
            self._calls.get().refuse(refusal)

    def _begin(self, held: _Held) -> None:
        if self.is_paused or self._draining:
            self._held[held.job] = held
        elif (present := self.receiver.version) is None or held.weights not in (None, present):
            held.job.put(Refusal(409, other_weights(held.weights or "any", present)))
        else:
            self._driver.ask(held.job)

    def _forget(self, job: Job) -> None:
        self._held.pop(job, None)
        self._driver.cancel(job)

    def _pause(self, drains: bool, done: Future[None]) -> None:
        if drains and not self.is_paused and self._driver.has_requests:
            self._draining.append(done)
            return
        self._abort()
        self.is_paused = True
        self._end_pause_of_draining()
        done.set_result(None)

    def _end_pause_of_draining(self) -> None:
        self.is_paused = True
        waiting, self._draining = self._draining, []
        for done in waiting:
            done.set_result(None)

    def _abort(self) -> None:
        """End all requests that have begun, with the tokens drawn so far."""
        self._driver.fail(Aborted())

    def _resume(self) -> None:
        self.is_paused = False
        held, self._held = list(self._held.values()), {}
        for each in held:
            self._begin(each)

    def _sleep(self) -> None:
        self._abort()
        self.is_paused = True
        self._engine.sleep()
        # Also for who has not said so: a request to sleep may reach a server that was started since.
        self.receiver.note_sleep(True)
        self._weights.drop()

    def _wake_up(self, weights: bool, kv_cache: bool) -> None:
        if weights:
            self._weights.take()
        if kv_cache:
            self._engine.wake_up()
