"""One start of all ranks of a run on Ray: their actors, their output in the driver, and how they end."""

from __future__ import annotations

import codecs
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

from colocate.clusters.actor import News, Place, RankActor
from colocate.clusters.cluster import Ask
from colocate.parallel.ray_place import RayPlace
from colocate.parallel.tail import Tail
from colocate.redaction import redacted
from colocate.version import __version__

GRACE_S = 12.0
"""Seconds for the other ranks after one has ended with an error: they may come to the same error, or tell of
it (`watch.GRACE_S` is shorter)."""
_START_S = 300.0
"""Seconds in which the actors must answer: Ray may have to unpack the job's files on their nodes."""
_ANSWER_S = 10.0
"""Seconds for an answer of an actor that has nothing to wait for."""
_SAME_INTERRUPT_S = 0.5
"""Seconds after a Ctrl-C within which a second one is the same one, passed on by `ray job` or a shell."""
_STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)
"""Exit codes of a run that was asked to stop."""


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
    has_words: bool = True
    """The rank has said why."""

    @property
    def is_orderly(self) -> bool:
        """Whether the run has come to its end, or was saved when it was asked to stop."""
        return self.code == 0 or (self.was_stopped and self.code in _STOPPED)


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
                num_cpus=1,
                num_gpus=1 / ask.shares if ask.on_gpus else 0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, local),
                max_restarts=0,
                max_task_retries=0,
                max_concurrency=4,
            ).remote()
            for node, group in enumerate(groups)
            for local in range(ask.ranks_per_node)
        ]
        self._groups = groups
        self._names = [f"rank {rank}" for rank in range(ask.num_ranks)]
        self.places: list[Place] = []
        self._voices: list[_Voice] = []
        self._size: tuple[int, int] | None = None

    def enter(self, directory: str | None) -> None:
        """Let every actor enter the run's directory.

        Args:
            directory: see `RankActor.place`.

        Raises:
            RuntimeError: a node lacks the directory or this package, has another version of it, or does not
                answer.
        """
        self.places = _answers(actor.place.remote(directory) for actor in self._actors)
        for place in self.places:
            if place.version != __version__:
                raise RuntimeError(
                    f"{place.host} has colocate {place.version}, and the run was started with {__version__}: "
                    "install one version on all nodes."
                )

    def start(self, arguments: Sequence[str], variables: Mapping[str, str]) -> None:
        """Start all ranks' processes.

        Args:
            arguments: what follows `colocate`.
            variables: what all ranks' environments have beside what tells them their ranks.

        Raises:
            RuntimeError: an actor cannot start its rank, or does not answer.
        """
        self._size = _terminal_size()
        sizes = [self._size if rank == 0 else None for rank in range(len(self._actors))]
        pids = _answers(
            actor.start.remote(arguments, self._variables(rank) | dict(variables), sizes[rank])
            for rank, actor in enumerate(self._actors)
        )
        self._names = [
            f"rank {rank} ({place.host}, pid {pid})"
            for rank, (place, pid) in enumerate(zip(self.places, pids, strict=True))
        ]
        self._voices = [_Voice(rank, is_heard=rank == 0 or self._size is None) for rank in range(len(pids))]

    def checkpoints(self, output_dir: str) -> frozenset[tuple[str, int]]:
        """The checkpoints in `output_dir` as the first rank sees them whose node answers."""
        import ray

        for actor in self._actors:
            with suppress(ray.exceptions.RayError):
                return frozenset(ray.get(actor.checkpoints.remote(output_dir), timeout=_ANSWER_S))
        return frozenset()

    def wait(self, look: Callable[[], Ending | None] = lambda: None) -> Ending:
        """Show the ranks' output until all have ended, or one has failed.

        The first Ctrl-C and SIGTERM are passed on: the ranks save the step in hand, and end.

        Args:
            look: sees to what the ranks need, several times in a second; returns how that ends the run.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed again.
        """
        import ray

        asked = {actor.follow.remote(): rank for rank, actor in enumerate(self._actors)}
        heard_s = dict.fromkeys(asked.values(), time.monotonic())
        failures: list[Ending] = []
        until_s = float("inf")
        with _passing_on() as received:
            while asked and time.monotonic() < until_s and not any(each.was_lost for each in failures):
                ready, _ = ray.wait(list(asked), timeout=0.2)
                self._pass_on(received)
                if (ending := look()) is not None:
                    return ending
                for reference in ready:
                    rank = asked.pop(reference)
                    try:
                        news = ray.get(reference)
                    except ray.exceptions.RayError as error:
                        failures.append(self._gone(rank, brief(error)))
                        continue
                    heard_s[rank] = time.monotonic()
                    self._voices[rank].say(news)
                    if news.code is None:
                        asked[self._actors[rank].follow.remote()] = rank
                    elif news.code != 0:
                        failures.append(self._failed(rank, news.code))
                if failures and received.first is None:
                    until_s = min(until_s, time.monotonic() + GRACE_S)
        for rank in asked.values():
            if (silence_s := time.monotonic() - heard_s[rank]) > _ANSWER_S:
                failures.append(self._gone(rank, f"nothing was heard of it for {silence_s:.0f} s"))
        # What all ranks find wrong, one alone says, and need not be the first to end.
        failures.sort(key=lambda failure: (not failure.was_lost, not failure.has_words))
        first = [*failures, Ending(0)][0]
        return replace(first, was_stopped=received.first is not None)

    def end(self) -> None:
        """Kill every rank that is left, with what it has started, and its actor."""
        import ray

        ends = [actor.end.remote() for actor in self._actors]
        with suppress(ray.exceptions.RayError):
            ray.wait(ends, num_returns=len(ends), timeout=_ANSWER_S)
        for actor in self._actors:
            with suppress(ray.exceptions.RayError):
                ray.kill(actor)

    def _variables(self, rank: int) -> dict[str, str]:
        """What torchrun would set, and the GPUs of the node's ranks, which all of them see: LOCAL_RANK is the
        number of a rank's own."""
        places, per_node = self.places, self._ask.ranks_per_node
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
            **self._ray_place().as_variable(),
            **{name: os.environ[name] for name in ("TERM", "COLORTERM") if name in os.environ},
        }

    def _ray_place(self) -> RayPlace:
        import ray
        from ray.util.placement_group import placement_group_table

        context = ray.get_runtime_context()
        return RayPlace(
            address=context.gcs_address,
            namespace=context.namespace,
            groups=tuple(placement_group_table(group)["name"] for group in self._groups),
            sizes=(self._ask.ranks_per_node,) * len(self._groups),
            shares=self._ask.shares,
        )

    def _pass_on(self, received: _Received) -> None:
        for number in received.take():
            for actor in self._actors:
                actor.signal.remote(number)
        if self._size is not None and (size := _terminal_size()) not in (None, self._size):
            self._size = size
            self._actors[0].resize.remote(size)

    def _failed(self, rank: int, code: int) -> Ending:
        number = code if code > 0 else 128 - code
        return self._ending(rank, number, how_it_ended(code), was_lost=code < 0)

    def _gone(self, rank: int, reason: str) -> Ending:
        return self._ending(rank, 1, f"is lost with its node or its actor: {reason}", was_lost=True)

    def _ending(self, rank: int, code: int, what: str, *, was_lost: bool) -> Ending:
        lines = [f"    {redacted(line)}" for line in self._voices[rank].tail.lines()]
        if rank == 0:
            said = " Its last lines are above."
        else:
            said = " Its last lines:\n" + "\n".join(lines) if lines else " It had written nothing to stderr."
        text = f"{self._names[rank]} {what}.{said}"
        return Ending(code, text, was_lost, has_words=rank == 0 or bool(lines))


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
        self.tail = Tail(None)

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


class _Received:
    """Signals that the driver has received and that the ranks are to have."""

    def __init__(self) -> None:
        self.first: int | None = None
        self._new: list[int] = []
        self._interrupted_s = float("-inf")

    def note(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if number == signal.SIGINT:
            since_s = now_s - self._interrupted_s
            if since_s <= _SAME_INTERRUPT_S:
                return
            if since_s < float("inf"):
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
    for number in (signal.SIGINT, signal.SIGTERM):
        if number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, received.note)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _answers(references: Iterable[Any]) -> list[Any]:
    """The answers of all ranks' actors.

    Raises:
        RuntimeError: an actor has raised, or has died, or does not answer.
    """
    import ray

    asked = list(references)
    _, missing = ray.wait(asked, num_returns=len(asked), timeout=_START_S)
    if missing:
        raise RuntimeError(
            f"{len(missing)} of {len(asked)} ranks, the first of them rank {asked.index(missing[0])}, could "
            f"not be started: their actors have not answered for {_START_S:.0f} s."
        )
    try:
        return list(ray.get(asked))
    except ray.exceptions.RayTaskError as error:
        raise RuntimeError(f"A rank could not be started: {redacted(str(error.cause))}") from error
    except ray.exceptions.RayError as error:
        raise RuntimeError(f"A rank could not be started: {brief(error)}") from error


def how_it_ended(code: int) -> str:
    """How a process with an exit code has ended, or with minus the number of the signal that ended it."""
    if code >= 0:
        return f"ended with exit code {code}"
    return "was ended by " + next((each.name for each in signal.Signals if each == -code), f"signal {-code}")


def run_directory(output_dir: str) -> str | None:
    """The directory that the run's processes enter; see `RankActor.place`.

    Raises:
        ValueError: Ray has copied the working directory, and `output_dir` would be in the copy.
    """
    import ray

    if "working_dir" not in ray.get_runtime_context().runtime_env:
        return os.getcwd()
    if not os.path.isabs(output_dir):
        raise ValueError(
            f"output_dir={output_dir!r} would be in the copy of the working directory that Ray makes on "
            "each node and deletes after the job: set the absolute path of one that all nodes share."
        )
    return None


def brief(error: Exception) -> str:
    """What Ray says of a death, whose end names the cause, on one line."""
    text = " ".join(redacted(str(error)).split())
    return text if len(text) <= 600 else f"{text[:200]} … {text[-400:]}"


def _terminal_size() -> tuple[int, int] | None:
    """Columns and rows of the terminal that this process writes to; None: it writes elsewhere."""
    if not (sys.stdout.isatty() and sys.stderr.isatty()):
        return None
    size = shutil.get_terminal_size()
    return size.columns, size.lines
