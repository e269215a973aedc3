"""`EngineThread`: the thread of a service's engine. `Stepper` knows whether the engine is of use."""

from __future__ import annotations

import logging
import math
import threading
import time

import torch

from colocate.engines.base import RolloutEngine
from colocate.engines.native.engine import NativeEngine
from colocate.serving.driver import Driver
from colocate.serving.refusal import Refusal, busy

logger = logging.getLogger(__name__)

NUM_FIRST_STEPS, FIRST_STEPS_S = 16, 1800.0
"""The steps in which an engine on a GPU compiles its kernels and captures its graphs, and the seconds that
each of them may take. On a CPU all steps have this time: those of a large model take minutes."""
STEP_S = 60.0
"""Seconds that a later step on a GPU may take. It takes milliseconds, or some seconds where it is the first
to need a kernel."""
CALL_S = 300.0
"""Seconds for what is done between two steps. What may wait for others, such as a broadcast of weights, has a
limit of its own, which is shorter."""
_PROBE_S = 5.0
"""Seconds between two tokens that an engine is asked for which has failed."""
IDLE_S = 0.5
"""Seconds for which the thread sleeps at a time when nothing is asked."""


def step_limit_s(engine: RolloutEngine, device: torch.device) -> float:
    """Seconds that a step of an engine may take, once it has made its first ones. One that is not the native
    engine may draw whole completions in a step, however long they are."""
    if not isinstance(engine, NativeEngine):
        return math.inf
    return STEP_S if device.type == "cuda" else FIRST_STEPS_S


class Stepper:
    """Advances an engine step by step, and tells any thread whether it can be used.

    An engine hangs if the work of its thread takes longer than the limit for such work. It is broken if,
    after an error, it cannot even draw a test token; that is tried again and again, and meanwhile requests
    are refused. It has ended if its thread has.

    Args:
        step_s: see `step_limit_s`.
    """

    def __init__(self, driver: Driver, step_s: float) -> None:
        self._driver = driver
        self._step_s = step_s
        self._doing = (time.monotonic(), CALL_S)
        """The time since which the thread does what it does, and how many seconds that may take."""
        self._failure: str | None = None
        self._probed_s = 0.0
        self.num_steps = 0
        """The number of steps that the engine has taken for requests."""

    def check(self) -> None:
        """Check that the engine can be used. Any thread may call this.

        Raises:
            Refusal: it cannot; with the reason and status 503.
        """
        if (trouble := self.trouble) is not None:
            raise _of_no_use(trouble)

    @property
    def trouble(self) -> str | None:
        """Why the engine cannot be used; None: it can. Any thread may ask."""
        if self._failure is not None:
            return self._failure
        since_s, limit_s = self._doing
        if (for_s := time.monotonic() - since_s) <= limit_s:
            return None
        return (
            f"The engine hangs: it has been at one thing for {for_s:.0f} s, longer than the {limit_s:g} s "
            f"that this may take, at step {self.num_steps}. End the server and start it again."
        )

    # ── The engine's thread ──────────────────────────────────────────────────────────────────────────────

    def note_call(self) -> None:
        """Note that something is done between two steps."""
        self._doing = (time.monotonic(), CALL_S)

    def step(self, wait_s: float) -> None:
        """Let the driver advance; an error of the engine ends the requests that it had.

        Args:
            wait_s: seconds to wait for something to do, if there is nothing.
        """
        least_s = FIRST_STEPS_S if self.num_steps < NUM_FIRST_STEPS else 0.0
        self._doing = (time.monotonic(), max(least_s, self._step_s))
        if self._failure is not None:
            return self._ask_again(self._failure, wait_s)
        self.num_steps += self._driver.has_requests
        try:
            self._driver.advance(wait_s)
        except Exception as error:
            logger.exception("The engine has failed; its requests are answered with the error.")
            self._driver.fail(RuntimeError(f"The engine has failed: {error}"))
            self._probe()

    def end(self, error: BaseException) -> Refusal:
        """Note that the thread ends by an error, and end all requests. Returns their error."""
        logger.error("The engine's thread has ended by an error.", exc_info=error)
        self._failure = (
            f"The engine has ended by an error ({type(error).__name__}). The server's log says more. Start "
            "the server again."
        )
        refusal = _of_no_use(self._failure)
        try:
            self._driver.fail(refusal)
        except Exception:
            logger.exception("Not all requests could be told that the engine has ended.")
        return refusal

    def _ask_again(self, failure: str, wait_s: float) -> None:
        if time.monotonic() - self._probed_s >= _PROBE_S:
            self._probe()
        else:
            self._driver.fail(_of_no_use(failure), wait_s)

    def _probe(self) -> None:
        """Find out whether the engine can draw a token."""
        self._probed_s = time.monotonic()
        try:
            self._driver.draw_one()
        except Exception as error:
            if self._failure is None:
                logger.exception("The engine that has failed cannot draw a single token.")
            self._failure = (
                f"The engine is broken: it cannot draw a single token ({type(error).__name__}). The server's "
                "log says more. Start the server again unless it recovers."
            )
        else:
            self._failure = None


class EngineThread:
    """Advances a driver until `close`. See `Stepper`, also for the errors of an engine.

    Args:
        step_s: see `step_limit_s`.
    """

    def __init__(self, driver: Driver, step_s: float) -> None:
        self._driver = driver
        self._stepper = Stepper(driver, step_s)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="serving-engine", daemon=True)

    def check(self) -> None:
        """Check that the engine can be used. See `Stepper.check`."""
        self._stepper.check()

    def start(self) -> None:
        """Begin to draw."""
        self._thread.start()

    def close(self) -> None:
        """Stop; requests that the engine has are ended."""
        self._is_over.set()
        self._driver.wake()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._is_over.is_set():
                self._go_on()
            refusal = self._shut_down()
        except BaseException as error:
            refusal = self._stepper.end(error)
        self._refuse_all(refusal)

    def _go_on(self) -> None:
        self._stepper.step(IDLE_S)

    def _shut_down(self) -> Refusal:
        """End all requests of the driver; returns the error for later ones."""
        refusal = busy("The service is being shut down.", 30)
        self._driver.fail(refusal)
        return refusal

    def _refuse_all(self, refusal: Refusal) -> None:
        """Called at the end of the thread."""


def _of_no_use(why: str) -> Refusal:
    return Refusal(503, why, code="engine_unavailable")
