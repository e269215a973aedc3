"""A process of a run on the cluster, a rank or a server, as the driver knows it."""

from __future__ import annotations

import codecs
import math
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from colocate.clusters.actor import Place, ProcessActor, Size
from colocate.options.redaction import redacted
from colocate.parallel.rank_failure import NUM_LINES, Failure, LastLines
from colocate.version import __version__

_START_S = 300.0
"""Seconds in which actors must answer first: Ray may have to unpack the job's files on their nodes."""
ANSWER_S = 10.0
"""Seconds for an answer of an actor that has nothing to wait for."""


@dataclass(frozen=True)
class Ending:
    """The ending of a process, and of the run with it."""

    code: int
    """The exit code, 128 + N after signal N."""
    text: str = ""
    """The process that ended, how, and its last lines."""
    was_lost: bool = False
    """The process was killed or has crashed, or its node is gone: not an error that must come again."""
    has_words: bool = True
    """The process has said why."""
    was_stopped: bool = False
    """The run was asked to stop."""
    failed_at_s: float = math.inf
    """When the process noted an error of its own; infinite: it ends because of another."""

    @property
    def order(self) -> tuple[bool, bool, bool, float]:
        """Sort key of endings, those that explain most first: lost processes, then the processes' own errors
        by time (an error of all ranks is noted by one of them)."""
        return not self.was_lost, self.failed_at_s == math.inf, not self.has_words, self.failed_at_s


class Process:
    """One process: its actor on the cluster, and its last output.

    Args:
        seat: Ray's options for its actor: the place, and the resources.
        output: where its output is, for messages, as in ", of out/replica-0.log".
    """

    place: Place  # known once it is `present`
    size: Size = None
    pid, url = 0, ""
    fault = ""
    """The reason for which this run killed it, as messages say it."""

    def __init__(self, name: str, seat: Mapping[str, Any], output: str = "") -> None:
        self.name, self._seat, self._output = name, seat, output
        self.tail = LastLines(None)
        self.heard_s = time.monotonic()
        self._decoders = {number: codecs.getincrementaldecoder("utf-8")("replace") for number in (1, 2)}
        self._sit()

    def __str__(self) -> str:
        if not self.pid:
            return self.name
        return f"{self.name} ({', '.join(filter(None, (self.place.host, f'pid {self.pid}', self.url)))})"

    def _sit(self) -> None:
        import ray

        remote: Any = ray.remote(ProcessActor)
        limits = dict(max_restarts=0, max_task_retries=0, max_concurrency=4)
        self.actor: Any = remote.options(**self._seat, **limits).remote()
        self._is_seated = True

    async def run(self, arguments: Sequence[str], variables: Mapping[str, str]) -> Ending:
        """Start the process (`ProcessActor.start`), handle its output, and return its ending."""
        import ray

        if not self._is_seated:
            self._sit()
        try:
            self.pid = await self.actor.start.remote(run_directory(), arguments, variables, self.size)
            code = None
            while code is None:
                chunks, code = await self.actor.follow.remote(self.size)
                self.heard_s = time.monotonic()
                for number, chunk in chunks:
                    self.say(number, self._decoders[number].decode(chunk))
        except ray.exceptions.RayError as error:
            self._is_seated = False
            return self.ending(f"is lost with its node or its actor: {_brief(error)}")
        if code >= 0:
            failure = await self.actor.failure.remote() if code else None
            return self.ending(f"ended with exit code {code}", code, was_lost=False, failure=failure)
        names = {each.value: each.name for each in signal.Signals}
        return self.ending(f"was ended by {names.get(-code, f'signal {-code}')}", 128 - code)

    def say(self, number: int, text: str) -> None:
        """Handle its output on file descriptor 1 or 2."""
        raise NotImplementedError

    def last_output(self, failure: Failure | None) -> str:
        """The error that it has noted, or else the last lines that it has written; empty: none."""
        said, about = self.tail.lines(), f"Its last lines{self._output}"
        if failure is not None:
            said, about = failure.text.strip().splitlines()[-NUM_LINES:], "Its error"
        lines = "".join(f"\n    {redacted(line)}" for line in said)
        return f"{about}:{lines}" if lines else ""

    def ending(
        self, how: str, code: int = 1, *, was_lost: bool = True, failure: Failure | None = None
    ) -> Ending:
        """The ending of the process, with its last output. By default it was lost, and did not fail by an
        error of its own."""
        words = self.last_output(failure)
        text = f"{self} {self.fault or how}. {words or 'It had said nothing.'}"
        at_s = math.inf if failure is None else failure.at_s
        return Ending(code, text, was_lost, has_words=bool(self.last_output(None)), failed_at_s=at_s)


@contextmanager
def present(processes: Sequence[Process]) -> Iterator[None]:
    """Waits until all actors are at their places, or raises a RuntimeError; after the block, kills all
    processes that are left, their children, and their actors."""
    import ray

    try:
        asked = [process.actor.place.remote(run_directory(), __version__) for process in processes]
        for process, place in zip(processes, ray.get(asked, timeout=_START_S), strict=True):
            process.place = place
    except ray.exceptions.RayError as error:
        raise RuntimeError(
            f"One of {len(processes)} processes ({processes[0]}, ...) could not be started within "
            f"{_START_S:.0f} s: {_brief(getattr(error, 'cause', error))}"
        ) from error
    else:
        yield
    finally:
        with suppress(ray.exceptions.RayError):  # the cluster may be gone
            ends = [process.actor.end.remote() for process in processes]
            ray.wait(ends, num_returns=len(ends), timeout=ANSWER_S)
            for process in processes:
                ray.kill(process.actor)


def run_directory() -> str | None:
    """The directory that the run's processes are in; see `ProcessActor.place`."""
    import ray

    return None if "working_dir" in ray.get_runtime_context().runtime_env else os.getcwd()


def _brief(error: Exception) -> str:
    """Ray's words about a death, whose end names the cause, on one line."""
    text = " ".join(redacted(str(error)).split())
    return text if len(text) <= 600 else f"{text[:200]} … {text[-400:]}"
