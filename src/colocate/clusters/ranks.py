"""One start of all ranks of a run on Ray: their actors, their output in the driver, and how they end."""

from __future__ import annotations

import codecs
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

from colocate.clusters.actor import News, Place, RankActor
from colocate.clusters.cluster import Ask
from colocate.parallel.tail import Tail
from colocate.redaction import redacted

GRACE_S = 12.0
"""Seconds for the other ranks after one has ended with an error: they may come to the same error, or tell of
it (`watch.GRACE_S` is shorter)."""
_START_S = 300.0
"""Seconds in which the actors must answer: Ray may have to unpack the job's files on their nodes."""
_ANSWER_S = 10.0
_SAME_INTERRUPT_S = 0.5
"""Seconds after a Ctrl-C within which a second one is the same one, passed on by `ray job` or a shell."""


@dataclass(frozen=True)
class Ending:
    """How a start of the ranks has ended."""

    code: int
    """The exit code: 0, or that of the rank that ended first."""
    text: str = ""
    """Who ended first, how, and its last lines."""
    was_lost: bool = False
    """A process was killed or has crashed, or its node is gone: not an error that must come again."""
    was_stopped: bool = False
    """The run was asked to stop."""


class Ranks:
    """The actors of all ranks and what is known of each.

    Args:
        groups: a placement group for each node.
        name: what the actors' names begin with.
    """

    def __init__(self, groups: Sequence[Any], ask: Ask, name: str) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._ask = ask
        remote: Any = ray.remote(RankActor)
        self._actors: list[Any] = [
            remote.options(
                name=f"{name}-rank{node * ask.ranks_per_node + local}",
                num_cpus=ask.bundle["CPU"],
                num_gpus=ask.bundle.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, local),
                max_restarts=0,
                max_task_retries=0,
                max_concurrency=4,
            ).remote()
            for node, group in enumerate(groups)
            for local in range(ask.ranks_per_node)
        ]
        self._names = [f"rank {rank}" for rank in range(ask.num_ranks)]
        self._voices: list[_Voice] = []

    def start(self, arguments: Sequence[str]) -> None:
        """Start all ranks' processes.

        Raises:
            RuntimeError: a node lacks the run's directory or this package, or does not answer.
        """
        import ray

        is_copy = "working_dir" in ray.get_runtime_context().runtime_env
        directory = None if is_copy else os.getcwd()
        try:
            found = ray.get([actor.place.remote(directory) for actor in self._actors], timeout=_START_S)
            size = _terminal_size()
            sizes = [size if rank == 0 else None for rank in range(len(found))]
            variables = [self._variables(rank, found) for rank in range(len(found))]
            starts = [
                actor.start.remote(arguments, *each)
                for actor, *each in zip(self._actors, variables, sizes, strict=True)
            ]
            pids = ray.get(starts, timeout=_START_S)
        except ray.exceptions.RayTaskError as error:
            raise RuntimeError(f"A rank could not be started: {error.cause}") from error
        except ray.exceptions.RayError as error:
            raise RuntimeError(f"A rank could not be started: {redacted(str(error))}") from error
        self._names = [
            f"rank {rank} ({place.host}, pid {pid})"
            for rank, (place, pid) in enumerate(zip(found, pids, strict=True))
        ]
        self._size = size
        self._voices = [_Voice(rank, is_heard=rank == 0 or size is None) for rank in range(len(found))]

    def checkpoints(self, output_dir: str) -> frozenset[tuple[str, int]]:
        """The checkpoints in `output_dir` as the first rank sees them whose node answers."""
        import ray

        for actor in self._actors:
            with suppress(ray.exceptions.RayError):
                answer = ray.get(actor.checkpoints.remote(output_dir), timeout=_ANSWER_S)
                return frozenset(answer)
        return frozenset()

    def wait(self) -> Ending:
        """Show the ranks' output until all have ended, or one has failed.

        The first Ctrl-C and SIGTERM are passed on: the ranks save the step in hand, and end.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed again.
        """
        import ray

        asked = {actor.follow.remote(): rank for rank, actor in enumerate(self._actors)}
        failures: list[Ending] = []
        until_s = float("inf")
        with _passing_on() as received:
            while asked and time.monotonic() < until_s:
                ready, _ = ray.wait(list(asked), timeout=0.2)
                self._pass_on(received)
                for reference in ready:
                    rank = asked.pop(reference)
                    try:
                        news = ray.get(reference)
                    except ray.exceptions.RayError as error:
                        failures.append(self._lost(rank, error))
                        continue
                    self._voices[rank].say(news)
                    if news.code is None:
                        asked[self._actors[rank].follow.remote()] = rank
                    elif news.code != 0:
                        failures.append(self._failed(rank, news.code, was_stopped=received.first is not None))
                if any(failure.was_lost for failure in failures):
                    break
                if failures and not received.first:
                    until_s = min(until_s, time.monotonic() + GRACE_S)
        lost = [failure for failure in failures if failure.was_lost]
        return (lost or failures or [Ending(0)])[0]

    def end(self) -> None:
        """Kill every rank that is left, with what it has started, and its actor."""
        import ray

        ends = [actor.end.remote() for actor in self._actors]
        with suppress(ray.exceptions.RayError):
            ray.wait(ends, num_returns=len(ends), timeout=_ANSWER_S)
        for actor in self._actors:
            with suppress(ray.exceptions.RayError):
                ray.kill(actor)

    def _variables(self, rank: int, places: Sequence[Place]) -> dict[str, str]:
        """What torchrun would set, and the GPUs of the node's ranks, which all of them see: LOCAL_RANK is the
        number of a rank's own."""
        per_node = self._ask.ranks_per_node
        first = rank - rank % per_node
        gpu_ids = [number for place in places[first : first + per_node] for number in place.gpu_ids]
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(places)),
            "LOCAL_RANK": str(rank - first),
            "LOCAL_WORLD_SIZE": str(per_node),
            "MASTER_ADDR": places[0].address,
            "MASTER_PORT": str(places[0].free_port),
            "CUDA_VISIBLE_DEVICES": ",".join(sorted(gpu_ids, key=lambda number: (len(number), number))),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            "PYTHONUNBUFFERED": "1",
            **{name: os.environ[name] for name in ("TERM", "COLORTERM") if name in os.environ},
        }

    def _pass_on(self, received: _Received) -> None:
        for number in received.take():
            for actor in self._actors:
                actor.signal.remote(number)
        if self._size is not None and (size := _terminal_size()) not in (None, self._size):
            self._size = size
            self._actors[0].resize.remote(size)

    def _failed(self, rank: int, code: int, *, was_stopped: bool) -> Ending:
        if code > 0:
            return Ending(code, self._obituary(rank, f"ended with exit code {code}"), was_stopped=was_stopped)
        with suppress(ValueError):
            name = signal.Signals(-code).name
            what = f"was ended by {name}"
            return Ending(128 - code, self._obituary(rank, what), was_lost=True, was_stopped=was_stopped)
        return Ending(1, self._obituary(rank, f"was ended by signal {-code}"), was_lost=True)

    def _lost(self, rank: int, error: Exception) -> Ending:
        reason = " ".join(redacted(str(error)).split())[:400]
        return Ending(1, self._obituary(rank, f"is lost with its node or its actor: {reason}"), was_lost=True)

    def _obituary(self, rank: int, what: str) -> str:
        if rank == 0:
            return f"{self._names[0]} {what}. Its last lines are above."
        lines = [f"    {redacted(line)}" for line in self._voices[rank].tail.lines()]
        said = " It had written nothing to stderr." if not lines else " Its last lines:\n" + "\n".join(lines)
        return f"{self._names[rank]} {what}.{said}"


class _Voice:
    """A rank's output in the driver: the first rank's as it comes, whole lines of the others by name.

    Args:
        is_heard: else the lines are only kept, since the first rank draws on the terminal.
    """

    def __init__(self, rank: int, *, is_heard: bool) -> None:
        self._prefix = f"[rank {rank}] " if rank else ""
        self._is_heard = is_heard
        self._decoders = {number: codecs.getincrementaldecoder("utf-8")("replace") for number in (1, 2)}
        self._open = {1: "", 2: ""}
        self.tail = Tail(_Silence())

    def say(self, news: News) -> None:
        for number, chunk in news.chunks:
            text = self._decoders[number].decode(chunk)
            if number == 2:
                self.tail.write(text)
            if self._is_heard:
                self._print(number, text)

    def _print(self, number: int, text: str) -> None:
        stream = sys.stdout if number == 1 else sys.stderr
        if self._prefix:
            *whole, self._open[number] = (self._open[number] + text).split("\n")
            text = "".join(f"{self._prefix}{line.rpartition(chr(13))[2]}\n" for line in whole)
        stream.write(text)
        stream.flush()


class _Silence:
    def write(self, text: str) -> int:
        return len(text)


class _Received:
    """Signals that the driver has received and that the ranks are to have."""

    def __init__(self) -> None:
        self.first: int | None = None
        self._new: list[int] = []
        self._interrupted_s = float("-inf")

    def note(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if number == signal.SIGINT:
            is_again = self._interrupted_s > 0
            if is_again and now_s - self._interrupted_s <= _SAME_INTERRUPT_S:
                return
            if is_again:
                raise KeyboardInterrupt
            self._interrupted_s = now_s
        self.first = self.first or number
        self._new.append(number)

    def take(self) -> list[int]:
        taken, self._new = self._new, []
        return taken


@contextmanager
def _passing_on() -> Iterator[_Received]:
    """Notes SIGINT and SIGTERM during the block instead of acting on them."""
    received, before = _Received(), {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            if number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, received.note)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _terminal_size() -> tuple[int, int] | None:
    """Columns and rows of the terminal that this process writes to; None: it writes elsewhere."""
    if not (sys.stdout.isatty() and sys.stderr.isatty()):
        return None
    size = shutil.get_terminal_size()
    return size.columns, size.lines
