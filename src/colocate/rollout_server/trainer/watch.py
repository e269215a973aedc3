"""Waiting for a server: the time-outs, and the check meanwhile of whether it is alive or paused."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from colocate.rollout_server.trainer.client import HOW_TO_START, RequestRefused, ServerUnreachable

logger = logging.getLogger(__name__)

T = TypeVar("T")

FORGOTTEN_S = 10.0
"""Seconds without a step, an answer or anything to do after which requests to a server count as lost. A
trainer under load may take a while to send what it has counted as sent."""


@dataclass(frozen=True)
class Timeouts:
    """Time-outs and attempts after which a trainer gives a server up."""

    answer_s: float = 60.0
    """Deadline of requests that take the server no work."""
    silence_s: float = 15.0
    """Seconds without an answer after which a server that generates is asked how it is."""
    max_attempts: int = 5
    """The number of times that a request is sent."""
    first_delay_s: float = 0.25
    """Pause before a request is sent again; it doubles each time."""
    message_s: float = float("inf")
    """Seconds for a piece of the weights."""
    poll_s: float = 0.02
    """Seconds for which `poll` waits for a first turn to end until whoever polls sees to other things."""
    num_pushes: int = 1
    """Pushes of weights at once: all their chunks together take the memory of one."""
    has_substitute: bool = False
    """Others can do its work. Then whatever is wrong with it is no reason to stop: not even another model
    that it came back with."""


ALONE = Timeouts()
"""Time-outs with the only server that there is."""


def timeouts_among(num_servers: int) -> Timeouts:
    """The time-outs with one of several servers. One that is gone refuses at once and is given up in half a
    second; one that is only busy may take seconds to answer."""
    return Timeouts(
        answer_s=4.0,
        silence_s=1.0,
        max_attempts=3,
        first_delay_s=0.1,
        message_s=20.0,
        poll_s=0.02 / num_servers,
        num_pushes=num_servers,
        has_substitute=True,
    )


class ServerPaused(RuntimeError):
    """The server answers, but generates nothing, because somebody has paused it."""


class RequestsForgotten(ServerUnreachable):
    """The server is well and draws nothing, though requests to it have no answer."""


class ServerWatch:
    """Asks a server that has been silent for a while during a rollout.

    The server itself tells whether its engine's steps go on: a native one answers with 503 if a step takes
    too long, and vLLM answers `/is_paused` only between two steps. Seen from here, a counter that stands
    still may mean a long step, unless the engine has nothing to do.

    Args:
        base_url: the server's address, for messages.
        silence_s: seconds without an answer after which the server is asked.
        max_pause_s: seconds for which it may be paused.
    """

    def __init__(self, base_url: str, *, silence_s: float, max_pause_s: float) -> None:
        self._base_url = base_url
        self._max_pause_s = max_pause_s
        self.silence_s = silence_s
        self._heard_s = time.monotonic()
        self._paused_since_s: float | None = None
        self._idle: tuple[int, float] | None = None
        """The step at which its engine was found with nothing to do, and when it was first found so."""

    @property
    def is_silent(self) -> bool:
        """Whether nothing was heard from the server for `silence_s`."""
        return time.monotonic() - self._heard_s >= self.silence_s

    def heard(self) -> None:
        """Note that the server has answered a request."""
        self._heard_s = time.monotonic()
        self._idle = None

    def look(self, ask: Callable[[str], Any]) -> None:
        """Ask the server how it is, while requests to it are under way. If its engine does not go on, a
        native server says so, and one of vLLM leaves the second question without an answer.

        Args:
            ask: sends a GET request for a path and returns the JSON of the answer; it raises if none comes.

        Raises:
            ServerPaused: it has been paused for longer than `max_pause_s`.
            RequestsForgotten: a native server has had nothing to do for `FORGOTTEN_S`.
        """
        idle = self._idle
        ask("/health")
        self.heard()
        answer = ask("/is_paused")
        if not isinstance(answer, dict) or not answer.get("is_paused"):
            self._paused_since_s = None
            self._check_busy(answer, idle)
        elif self._paused_since_s is None:
            self._paused_since_s = time.monotonic()
            logger.warning(
                f"The server at {self._base_url} is paused in the middle of a rollout, and not by this "
                f"run; waiting for up to {self._max_pause_s:g} s (rollout_server_timeout)."
            )
        elif time.monotonic() - self._paused_since_s > self._max_pause_s:
            raise ServerPaused(
                f"The server at {self._base_url} has been paused for {self._max_pause_s:g} s "
                "(rollout_server_timeout) in the middle of a rollout, and not by this run: somebody else has "
                "its key. POST /resume lets it go on. Start it with a new key and resume from the last "
                "checkpoint."
            )

    def _check_busy(self, answer: Any, idle: tuple[int, float] | None) -> None:
        """Check as `look` does; vLLM does not count its steps."""
        if not isinstance(answer, dict) or answer.get("is_busy") is not False:
            return
        now_s, num_steps = time.monotonic(), answer.get("num_steps", 0)
        self._idle = idle if idle is not None and idle[0] == num_steps else (num_steps, now_s)
        if (for_s := now_s - self._idle[1]) >= FORGOTTEN_S:
            raise RequestsForgotten(
                f"The server at {self._base_url} has had nothing to do for {for_s:.0f} s, and stands at step "
                f"{num_steps}, though it was sent requests that it has not answered: they were lost on the "
                "way. Look into its log, and into what is between."
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


def await_all(
    futures: Iterable[Future[T]], watch: ServerWatch, ask: Callable[[str], Any], note: Callable[[T], object]
) -> None:
    """Wait until all requests are done, and pass each to `note`. Raises the first failure at once, or what
    `ServerWatch.look` raises."""
    futures = list(futures)
    done: SimpleQueue[Future[T]] = SimpleQueue()
    for future in futures:
        future.add_done_callback(done.put)
    left = len(futures)
    while left:
        try:
            future = done.get(timeout=watch.silence_s)
        except Empty:
            watch.look(ask)
            continue
        note(future.result())
        left -= 1
