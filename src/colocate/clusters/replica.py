"""A replica of a run on Ray: a rollout server, started again in its place when it is lost or hangs.

The trainers find it by its address, as they find a server that somebody has started by hand, and the pool of
their engines gives a server that is back the present weights before any request.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from colocate.clusters.process import Ending, Process
from colocate.http.key import VARIABLE
from colocate.options.redaction import redacted

_STEP = "/is_paused"
"""A question that vLLM's engine answers in its loop, between two steps: each answer tells that the loop has
come round again, also where there is nothing to draw. A native server answers with an error if its engine has
ended, or has been in a step for longer than one takes."""
QUESTION_S, ANSWER_S, PATIENCE = 1.0, 10.0, 6
"""Seconds between an answer and the next question, seconds for an answer, and how many on end may be missing:
a minute. What holds an engine's loop for a while, such as a piece of the weights, takes seconds."""
START_S = 1800.0
"""Seconds after which a server hangs that has not answered yet: a large model is loaded in less."""


class Replica(Process):
    """A server that is started again when it is lost. If it has no GPUs of its own, it uses those of the
    ranks in `beside`. Its output is appended to its log."""

    is_ready = False
    """Whether it has answered since it was last started."""

    def __init__(self, number: int, seat: Mapping[str, Any], beside: Sequence[Process], log: Path) -> None:
        super().__init__(f"replica {number}", seat, f", of {log}")
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log, self.beside = log, beside

    def say(self, number: int, text: str) -> None:
        with self._log.open("a", encoding="utf-8") as log:
            log.write(redacted(text))
        self.tail.write(text)

    async def keep(self, arguments: Sequence[str], variables: Mapping[str, str], max_restarts: int) -> Ending:
        """Run the server, and start it again in its place whenever it is lost. Returns the ending of a server
        that never was ready, since it would end so again.

        Args:
            max_restarts: how often it is started again without having been ready in between.
        """
        num_restarts, was_ready = 0, False
        while num_restarts <= max_restarts:
            self.is_ready, self.fault = False, ""
            watch = asyncio.create_task(self._watch(variables[VARIABLE]))
            ending = await self.run(arguments, variables)
            watch.cancel()
            was_ready = was_ready or self.is_ready
            if not was_ready:
                return Ending(1, ending.text)
            num_restarts = 1 if self.is_ready else num_restarts + 1
            follows = f"It is started again in its place ({num_restarts} of {max_restarts} times)."
            if num_restarts > max_restarts:
                follows = "It is given up (--max_restarts); the run goes on while one is left."
            print(f"\n{ending.text}\n{follows}", file=sys.stderr, flush=True)
        return await asyncio.Future()  # it takes no part any more in how the run ends

    async def _watch(self, key: str) -> None:
        """Find out when the server is ready, and kill it when it hangs."""
        import ray

        begin_s, num_unanswered = time.monotonic(), 0
        with suppress(ray.exceptions.RayError):  # of which `run` tells
            while num_unanswered < PATIENCE:
                await asyncio.sleep(QUESTION_S)
                if await self.actor.answers.remote(self.url + _STEP, key, ANSWER_S):
                    self.is_ready, num_unanswered = True, 0
                else:
                    num_unanswered += self.is_ready or time.monotonic() - begin_s > START_S
            late = "did not answer for half an hour, and was killed"
            self.fault = "did not answer any more, though it ran, and was killed" if self.is_ready else late
            await self.actor.end.remote()
