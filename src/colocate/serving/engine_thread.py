"""`EngineThread`: the thread that has a service's engine."""

from __future__ import annotations

import threading

from colocate.serving.driver import Driver
from colocate.serving.refusal import Refusal, busy
from colocate.serving.stepper import Stepper

IDLE_S = 0.5
"""Seconds for which the thread sleeps at a time when nothing is asked."""


class EngineThread:
    """Advances a driver until `close`. See `Stepper`, also for the errors of an engine.

    Args:
        step_s: see `stepper.step_limit_s`.
    """

    def __init__(self, driver: Driver, step_s: float) -> None:
        self._driver = driver
        self._stepper = Stepper(driver, step_s)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="serving-engine", daemon=True)

    def check(self) -> None:
        """Whether the engine is of use. See `Stepper.check`."""
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
        """End all requests of the driver; returns what those who ask from now on are told."""
        refusal = busy("The service is being shut down.", 30)
        self._driver.fail(refusal)
        return refusal

    def _refuse_all(self, refusal: Refusal) -> None:
        """Called at the end of the thread."""
