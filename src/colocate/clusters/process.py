"""A process of a run on the cluster, a rank or a server, as the driver knows it."""

from __future__ import annotations

import codecs
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from colocate.clusters.actor import News, Place, ProcessActor
from colocate.parallel.tail import Tail
from colocate.redaction import redacted
from colocate.version import __version__

_START_S = 300.0
"""Seconds in which actors must answer first: Ray may have to unpack the job's files on their nodes."""
ANSWER_S = 10.0
"""Seconds for an answer of an actor that has nothing to wait for."""


@dataclass(frozen=True)
class Ending:
    """How a process has ended, and how the run has with it."""

    code: int
    """The exit code, 128 + N after signal N."""
    text: str = ""
    """Who ended, how, and its last lines."""
    was_lost: bool = False
    """The process was killed or has crashed, or its node is gone: not an error that must come again."""
    has_words: bool = True
    """The process has said why."""
    was_stopped: bool = False
    """The run was asked to stop."""


class Process:
    """One process: its actor, what it has said, and how it has ended.

    Args:
        name: what messages call it, as in "rank 3".
        options: Ray's, of its actor: where it is, and what it takes.
        output: what messages say of where its output is: nothing, or as in ", of out/replica-0.log".
    """

    place: Place
    """Where it is; known once it is `present`."""
    pid = 0
    url = ""
    """Its address, if it is a server."""
    is_ready = was_ready = False
    """It is a server and answers, or has answered before it was lost."""
    ending: Ending | None = None

    def __init__(self, name: str, options: Mapping[str, Any], output: str = "") -> None:
        self.name = name
        self.tail = Tail(None)
        self.heard_s = time.monotonic()
        self.asked: Any = None
        """What Ray's answer to the last question is found by."""
        self._options, self._output = options, output
        self._decoders = {number: codecs.getincrementaldecoder("utf-8")("replace") for number in (1, 2)}
        self._sit()

    def __str__(self) -> str:
        if not self.pid:
            return self.name
        return f"{self.name} ({', '.join(filter(None, (self.place.host, f'pid {self.pid}', self.url)))})"

    def _sit(self) -> None:
        """Take the place on the cluster, with an actor."""
        import ray

        remote: Any = ray.remote(ProcessActor)
        limits = dict(max_restarts=0, max_task_retries=0, max_concurrency=4)
        self.actor: Any = remote.options(**self._options, **limits).remote()
        self._is_seated = True

    def start(self, arguments: Sequence[str], variables: Mapping[str, str], **options: Any) -> None:
        """Start the process, again if it has ended. See `ProcessActor.start`."""
        if not self._is_seated:
            self._sit()
        self.ending, self.is_ready = None, False
        self.asked = self.actor.start.remote(run_directory(), arguments, variables, **options)

    def say(self, number: int, text: str) -> None:
        """Do with its output on a file descriptor, 1 or 2, what is to be done with it."""
        raise NotImplementedError

    def take(self) -> None:
        """Take the answer to the last question, which is there, and ask the next one."""
        import ray

        try:
            news: News = ray.get(self.asked)
        except ray.exceptions.RayError as error:
            self._is_seated = False
            self.lost(f"is lost with its node or its actor: {brief(error)}")
            return
        self.is_ready, self.was_ready = news.is_ready, self.was_ready or news.is_ready
        self.pid, self.heard_s = news.pid, time.monotonic()
        for number, chunk in news.chunks:
            self.say(number, self._decoders[number].decode(chunk))
        if news.was_hung:
            more = " any more" if news.is_ready else ""
            self.lost(f"did not answer{more}, though it ran, and was killed")
        elif (code := news.code) is None:
            self.asked = self.actor.follow.remote()
        elif code >= 0:
            self._end(code, f"ended with exit code {code}")
        else:
            names = {each.value: each.name for each in signal.Signals}
            self.lost(f"was ended by {names.get(-code, f'signal {-code}')}", 128 - code)

    def lost(self, how: str, code: int = 1) -> Ending:
        """Note that the process was lost, and not by an error of its own."""
        return self._end(code, how, was_lost=True)

    def last_words(self) -> str:
        """The last lines that it has written, for the message of its end; empty: none."""
        lines = "".join(f"\n    {redacted(line)}" for line in self.tail.lines())
        return f"Its last lines{self._output}:{lines}" if lines else ""

    def _end(self, code: int, how: str, was_lost: bool = False) -> Ending:
        words, self.asked = self.last_words(), None
        text = f"{self} {how}. {words or 'It had said nothing.'}"
        self.ending = Ending(code, text, was_lost, has_words=bool(words))
        return self.ending


@contextmanager
def present(processes: Sequence[Process]) -> Iterator[None]:
    """Waits until all actors are at their places, and notes where that is; after the block, kills all
    processes that are left, with what they have started, and their actors.

    Raises:
        RuntimeError: a node lacks the run's directory or this package, has another version of it, or does not
            answer.
    """
    import ray

    try:
        try:
            asked = [process.actor.place.remote(run_directory(), __version__) for process in processes]
            places = ray.get(asked, timeout=_START_S)
        except ray.exceptions.RayError as error:
            raise RuntimeError(
                f"One of {len(processes)} processes ({processes[0]}, ...) could not be started within "
                f"{_START_S:.0f} s: {brief(getattr(error, 'cause', error))}"
            ) from error
        for process, place in zip(processes, places, strict=True):
            process.place = place
        yield
    finally:
        with suppress(ray.exceptions.RayError):  # the cluster may be gone
            if ends := [process.actor.end.remote() for process in processes]:
                ray.wait(ends, num_returns=len(ends), timeout=ANSWER_S)
            for process in processes:
                ray.kill(process.actor)


def hear(processes: Sequence[Process], timeout_s: float) -> None:
    """Take what the processes have to say; waits so long for the first of them."""
    import ray

    if asked := {process.asked: process for process in processes if process.asked is not None}:
        ray.wait([*asked], timeout=timeout_s)
        for answer in ray.wait([*asked], num_returns=len(asked), timeout=0)[0]:
            asked[answer].take()


def run_directory() -> str | None:
    """The directory that the run's processes are in; see `ProcessActor.place`."""
    import ray

    return None if "working_dir" in ray.get_runtime_context().runtime_env else os.getcwd()


def brief(error: Exception) -> str:
    """What Ray says of a death, whose end names the cause, on one line."""
    text = " ".join(redacted(str(error)).split())
    return text if len(text) <= 600 else f"{text[:200]} … {text[-400:]}"
