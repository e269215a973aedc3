"""`EngineThread`: what drives an engine that is there for a service alone."""

from __future__ import annotations

import logging
import threading

from colocate.serving.driver import Driver
from colocate.serving.refusal import busy

logger = logging.getLogger(__name__)

_IDLE_S = 0.5
"""Seconds for which the thread sleeps at a time when nothing is asked."""


class EngineThread:
    """Advances a driver until `close`. An error of the engine ends the requests that it had."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="serving-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop; requests that the engine has are ended."""
        self._is_over.set()
        self._driver.wake()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.is_set():
            try:
                self._driver.advance(_IDLE_S)
            except Exception as error:
                logger.exception("The engine has failed; its requests are answered with the error.")
                self._driver.fail(RuntimeError(f"The engine has failed: {error}"))
        self._driver.fail(busy("The service is being shut down.", 30))
