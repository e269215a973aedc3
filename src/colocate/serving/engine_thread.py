"""`EngineThread`: what drives an engine that is there for a service alone."""

from __future__ import annotations

import threading

from colocate.serving.driver import Driver
from colocate.serving.refusal import busy
from colocate.serving.stepper import Stepper

_IDLE_S = 0.5
"""Seconds for which the thread sleeps at a time when nothing is asked."""


class EngineThread:
    """Advances a driver until `close`. See `Stepper`, also for the errors of an engine.

    Args:
        is_on_gpu: where the engine computes.
    """

    def __init__(self, driver: Driver, *, is_on_gpu: bool) -> None:
        self._driver = driver
        self._stepper = Stepper(driver, is_on_gpu=is_on_gpu)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="serving-engine", daemon=True)

    def check(self) -> None:
        """Whether the engine is of use. See `Stepper.check`."""
        self._stepper.check()

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop; requests that the engine has are ended."""
        self._is_over.set()
        self._driver.wake()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._is_over.is_set():
                self._stepper.step(_IDLE_S)
            self._driver.fail(busy("The service is being shut down.", 30))
        except BaseException as error:
            self._stepper.end(error)
