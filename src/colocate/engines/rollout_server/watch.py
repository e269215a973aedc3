"""What is done while a server does not answer: it is waited for, and asked whether it is alive or paused."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any

from colocate.engines.rollout_server.client import HOW_TO_START, RequestRefused, ServerUnreachable

logger = logging.getLogger(__name__)


class ServerPaused(RuntimeError):
    """The server answers, but generates nothing, because somebody has paused it."""


class Watch:
    """Asks a server that has been silent for a while during a rollout.

    Args:
        base_url: the server's address, for messages.
        silence_s: seconds without an answer after which the server is asked.
        patience_s: seconds for which it may be paused.
    """

    def __init__(self, base_url: str, *, silence_s: float, patience_s: float) -> None:
        self._base_url = base_url
        self._patience_s = patience_s
        self.silence_s = silence_s
        self._heard_s = time.monotonic()
        self._paused_since_s: float | None = None

    @property
    def is_silent(self) -> bool:
        """Whether nothing was heard from the server for `silence_s`."""
        return time.monotonic() - self._heard_s >= self.silence_s

    def heard(self) -> None:
        """Note that the server has answered a request."""
        self._heard_s = time.monotonic()

    def look(self, ask: Callable[[str], Any]) -> None:
        """Ask the server how it is. If its engine does not go on, a native server says so, and one of vLLM
        leaves the second question without an answer.

        Args:
            ask: sends a GET request for a path and returns the JSON of the answer; it raises if none comes.

        Raises:
            ServerPaused: it has been paused for longer than `patience_s`.
        """
        ask("/health")
        self.heard()
        answer = ask("/is_paused")
        if not isinstance(answer, dict) or not answer.get("is_paused"):
            self._paused_since_s = None
        elif self._paused_since_s is None:
            self._paused_since_s = time.monotonic()
            logger.warning(
                f"The server at {self._base_url} is paused in the middle of a rollout, and not by this "
                f"run; waiting for up to {self._patience_s:g} s (rollout_server_timeout)."
            )
        elif time.monotonic() - self._paused_since_s > self._patience_s:
            raise ServerPaused(
                f"The server at {self._base_url} has been paused for {self._patience_s:g} s "
                "(rollout_server_timeout) in the middle of a rollout, and not by this run: somebody else has "
                "its key. POST /resume lets it go on. Start it with a new key and resume from the last "
                "checkpoint."
            )


def await_ready(
    ask: Callable[..., Any], base_url: str, *, timeout_s: float, answer_s: float, is_main: bool
) -> None:
    """Wait until a server is ready.

    Args:
        ask: sends a GET request for a path, with `deadline_s` and `max_attempts`.
        timeout_s: seconds to wait, and `answer_s` for each answer.
        is_main: this process says that it waits.

    Raises:
        ServerUnreachable: it was not ready within `timeout_s`.
    """
    deadline, is_silent = time.monotonic() + timeout_s, True
    while True:
        remaining_s = deadline - time.monotonic()
        try:
            ask("/health", deadline_s=max(0.1, min(remaining_s, answer_s)), max_attempts=1)
            return
        except (ServerUnreachable, RequestRefused) as error:
            if time.monotonic() + 0.5 > deadline:
                raise ServerUnreachable(
                    f"No rollout server answered at {base_url} within "
                    f"rollout_server_timeout={timeout_s:g} s. {error} {HOW_TO_START}; if it is only slow to "
                    "load, raise rollout_server_timeout."
                ) from error
            if is_silent and is_main:
                is_silent = False
                logger.warning(
                    f"No rollout server answers at {base_url} yet; waiting for it for up to {timeout_s:g} s "
                    "(rollout_server_timeout)."
                )
        time.sleep(0.5)


def await_all(futures: Iterable[Future[Any]], watch: Watch, ask: Callable[[str], Any]) -> None:
    """Wait until all requests are done; raises as soon as one fails, and what `Watch.look` raises."""
    pending: set[Future[Any]] = set(futures)
    while pending:
        done, pending = wait(pending, timeout=watch.silence_s, return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()
        if pending and not done:
            watch.look(ask)
