"""The turns that the server is drawing: they are sent, answered and given up one by one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from queue import Empty, SimpleQueue

from colocate.engines.turns import Turn
from colocate.rollout_server.trainer.client import HttpClient
from colocate.rollout_server.trainer.watch import ServerWatch
from colocate.types import Completion, Prompt

_LINGER_S = 0.005
"""Seconds for which a turn that has ended waits for others. Each time some have ended, the server is asked
whether its weights are still those; and turns that were decoded together end together."""


class ServerTurns:
    """Turns on their way to the server and back, each a request of its own.

    Members of a group are also sent one by one: a request for several of them is answered when the longest
    has ended. The server finds their common prompt, and the tokens of an episode's earlier turns, in its
    prefix cache.
    """

    def __init__(self, client: HttpClient, watch: ServerWatch) -> None:
        self._client = client
        self.watch = watch
        self.start_id = ""
        """The identity of the server's start whose turns these are."""
        self._futures: dict[int, Future[list[Completion]]] = {}
        """Requests under way, by the numbers of the sequences whose turns they are."""
        self._numbers: dict[Future[list[Completion]], int] = {}
        self._ended: SimpleQueue[Future[list[Completion]]] = SimpleQueue()

    @property
    def are_under_way(self) -> bool:
        return bool(self._numbers)

    def send(self, waiting: Mapping[int, Turn], start: Callable[[Prompt], Future[list[Completion]]]) -> None:
        """Send the turns that are not under way yet.

        Args:
            waiting: all turns to draw, by the numbers of their sequences; those under way are among them.
            start: sends a request for one completion of a prompt.
        """
        new = waiting.keys() - self._futures.keys()
        for number in [number for number in waiting if number in new] if new else ():
            future = start(waiting[number].as_prompt())
            self._futures[number], self._numbers[future] = future, number
            future.add_done_callback(self._ended.put)

    def take(self, wait_s: float) -> dict[int, Completion]:
        """The turns that have ended, after waiting for a first one for up to `wait_s` seconds."""
        ended: dict[int, Completion] = {}
        until_s = time.monotonic() + wait_s
        try:
            while True:
                future = self._ended.get(timeout=max(0.0, until_s - time.monotonic()))
                until_s = until_s if ended else time.monotonic() + _LINGER_S
                if (number := self._numbers.pop(future, None)) is not None:
                    del self._futures[number]
                    (ended[number],) = future.result()
        except Empty:
            return ended

    def abort(self, numbers: Iterable[int] | None = None) -> None:
        """Give the requests for sequences' turns up; None: all. The server stops drawing them."""
        for number in list(self._futures) if numbers is None else list(numbers):
            if (future := self._futures.pop(number, None)) is not None:
                del self._numbers[future]
                self._client.cancel(future)
