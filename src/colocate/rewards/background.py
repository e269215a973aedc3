"""An event loop in a thread of its own, so that async reward functions run also where a loop runs already."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable
from concurrent.futures import Future
from typing import Any


class BackgroundLoop:
    """One loop for the life of a run: what a function keeps (connections, semaphores) belongs to it."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def submit(self, awaitable: Awaitable) -> Future:
        """Start it on the loop; the first call starts the thread."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            # A daemon: a run that ends with an exception must not wait for it.
            self._thread = threading.Thread(target=self._loop.run_forever, name="rewards", daemon=True)
            self._thread.start()
        return asyncio.run_coroutine_threadsafe(_result(awaitable), self._loop)

    def close(self) -> None:
        if self._loop is None or self._thread is None:
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._loop = self._thread = None


async def _result(awaitable: Awaitable) -> Any:
    return await awaitable
