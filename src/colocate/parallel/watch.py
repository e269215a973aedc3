"""The ranks of a run watch each other: when one has died, the others say which, and end.

Without that a rank that is killed leaves the others in a collective, for as long as `ddp_timeout` says, and
then their errors name a socket and not the rank. Each rank runs a thread. Every second it writes a sign of
life into the store that the ranks have met at (MASTER_ADDR, MASTER_PORT), and reads those of the others:

    rank 1 is killed    a rank of its host finds the process gone, and writes that down for other hosts
    rank 1 raises       it writes its error down; the others have `GRACE_S` to raise the same error
    rank 1 ends         it writes that down; ranks in shared work that it has not done count it as lost
    its host is gone    it is silent for `ddp_timeout`
    rank 1 hangs        a rank that waits says after a minute what rank 1 does (`stalls`), and waits on

The thread ends its process with `os._exit`, since nothing else ends one that waits inside a collective. It
does so only while the process is at work that it shares with the others (`watching`).
"""

from __future__ import annotations

import atexit
import functools
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from torch.distributed import PrefixStore, TCPStore

from colocate.options.redaction import redacted
from colocate.parallel.rank_failure import NUM_LINES, LastLines, record_failure
from colocate.parallel.stalls import MainThreadWork, Stalls
from colocate.parallel.verdict import PeerError, first_line

logger = logging.getLogger(__name__)

Work = TypeVar("Work", bound=Callable[..., Any])

BEAT_S = 1.0
GRACE_S = 10.0
"""Seconds that a rank may go on after another has raised: the same error may be on its way to all."""
_CONNECT_S = 30.0
_ADVICE = (
    "Steps since the last checkpoint are lost; the same command with --resume_from_checkpoint auto goes on "
    "from it."
)


@dataclass(frozen=True)
class RankState:
    """The state of a rank that the others read."""

    rank: int
    host: str
    pid: int
    place: str
    """Names the machine and its space of process ids; empty if that is not known."""
    started: str
    """When the process started, since its id may be given to another process."""
    beat: int = 0
    finished: int = 0
    """The number of the last piece of shared work that was finished; pieces are counted from 1."""
    failed: int = 0
    """The number of the last piece of shared work that has failed."""
    order: int = 0
    """Which of all failures, counted from 1, this one was."""
    error: str = ""
    at: str = ""
    """How far the rank has come, as in "after step 12"."""
    lines: list[str] = field(default_factory=list)
    """The last lines on stderr, or of the error."""
    ended: bool = False
    """Whether the script has ended by itself."""
    waits: bool = False
    doing: str = ""
    remedy: str = ""
    """The place in the run, as in `MainThreadWork`."""

    @property
    def name(self) -> str:
        return f"rank {self.rank} ({self.host}, pid {self.pid})"

    def is_gone(self, place: str) -> bool:
        """Whether the process has ended; False where this machine cannot know."""
        return bool(place) and place == self.place and _start_of(self.pid) != self.started


class RankLoss(NamedTuple):
    """A rank that will not come back, and the known facts about it."""

    rank: int
    text: str


class Watch:
    """One rank's watching thread, its sign of life, and its knowledge of the others.

    Args:
        store: shared by all ranks, with a connection that nobody else waits on.
        silence_s: seconds without a sign of life after which a rank counts as dead.
    """

    def __init__(self, store: Any, rank: int, num_ranks: int, silence_s: float) -> None:
        self._store, self._silence_s = store, silence_s
        self._others = [other for other in range(num_ranks) if other != rank]
        pid = os.getpid()
        self._state = RankState(rank, socket.gethostname(), pid, _place(), _start_of(pid) or "")
        self._states: dict[int, RankState] = {}
        self._last_news_s = dict.fromkeys(self._others, time.monotonic())
        self._first_seen_s: dict[tuple[int, int], float] = {}
        """When each failure of another rank was seen first."""
        self._lock = threading.RLock()
        self._number = 0
        """The number of the piece of shared work that was begun last."""
        self._is_at_work = False
        self._progress: Callable[[], str] = str
        self._stop = threading.Event()
        self._tail = LastLines(sys.stderr)
        self._stalls = Stalls(rank)
        self._thread = threading.Thread(target=self._run, name="colocate-watch", daemon=True)

    def start(self) -> None:
        sys.stderr = self._tail  # type: ignore[assignment]
        self._beat()
        self._thread.start()
        atexit.register(self._end)

    @contextmanager
    def work(self, progress: Callable[[], str]) -> Iterator[None]:
        """Shared work: if another rank is lost before it has finished this piece, this process ends.

        Work within other work is part of it.

        Args:
            progress: how far the work has come, as in "after step 12".

        Raises:
            PeerError: the work has failed here because another rank had failed or died before.
        """
        if self._is_at_work:
            yield
            return
        with self._lock:
            self._number += 1
            self._is_at_work, self._progress = True, progress
        try:
            yield
        except BaseException as error:
            self._is_at_work = False
            if _is_orderly(error):
                self._tell(finished=self._number)
                raise
            cause = self._note_failure(error)
            if cause is not None and isinstance(error, Exception):
                raise PeerError(f"{cause.text}\n{_ADVICE}") from error
            raise
        else:
            self._is_at_work = False
            self._tell(finished=self._number)
        finally:
            # Of the work, and not the trainer with it.
            self._progress = functools.partial(str, self._state.at)

    def _note_failure(self, error: BaseException) -> RankLoss | None:
        """Tell the others of an error; another rank's loss that explains it, which may be noticed later."""
        lines = redacted("".join(traceback.format_exception(error))).splitlines()[-NUM_LINES:]
        text, order = redacted(first_line(error)), sys.maxsize
        with suppress(Exception):
            order = self._store.add("failures", 1)
        self._tell(failed=self._number, order=order, error=text, lines=lines)
        until_s = time.monotonic() + 3 * BEAT_S
        while isinstance(error, RuntimeError) and not isinstance(error, PeerError):
            with suppress(Exception):
                self._read()
            losses = [loss for loss in self._losses(at_once=True) if self._explains(loss, text, order)]
            if losses or time.monotonic() > until_s:
                if not losses:
                    record_failure(error)
                return next(iter(losses), None)
            time.sleep(BEAT_S / 5)
        if not isinstance(error, PeerError):
            record_failure(error)
        return None

    def _explains(self, loss: RankLoss, text: str, order: int) -> bool:
        """Whether the loss of a rank has led to this rank's error `text`, the failure number `order`."""
        state = self._states.get(loss.rank)
        if state is None or state.failed < self._number:
            return True
        return state.order < order and state.error != text

    # ── The thread ───────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        lost_store_s = None
        while not self._stop.wait(BEAT_S):
            try:
                self._beat()
                self._read()
                lost_store_s = None
            except Exception as error:
                lost_store_s = lost_store_s or time.monotonic()
                store_error = first_line(error)
            self._tell_stalls()
            losses = self._losses()
            if not losses and lost_store_s is not None and time.monotonic() - lost_store_s > GRACE_S:
                keeper = self._states.get(0)
                name = "rank 0" if keeper is None else keeper.name
                losses = [
                    RankLoss(0, f"{name} or its launcher, where all ranks meet, is gone: {store_error}.")
                ]
            with self._lock:
                if losses and self._is_at_work and not self._stop.is_set():
                    self._give_up(losses[0])

    def _beat(self) -> None:
        news = MainThreadWork.of_this_process()._asdict()
        with self._lock:
            self._tell(beat=self._state.beat + 1, **news)

    def _tell_stalls(self) -> None:
        """Say which rank this one has been waiting for, and what that rank does."""
        states = list(self._states.values())
        going = [state for state in states if state.finished < self._number and not state.error]
        for text in self._stalls.look(self._is_at_work and self._state.waits, going):
            logger.warning(text)

    def _tell(self, **news: Any) -> None:
        """Write this rank's sign of life. Where the store is lost, the thread finds that out by itself."""
        with self._lock:
            at = self._state.at
            with suppress(Exception):  # the progress of a run that is being built, or taken apart
                at = self._progress()
            lines = news.pop("lines", None) or self._state.lines
            if not self._state.error and "error" not in news:
                lines = self._tail.lines()
            if "finished" in news:
                news |= {"error": "", "order": 0}
            self._state = replace(self._state, at=at, lines=lines, **news)
            try:
                self._store.set(str(self._state.rank), json.dumps(asdict(self._state)))
            except Exception:
                if threading.current_thread() is self._thread:
                    raise

    def _read(self) -> None:
        """Read the others' signs of life."""
        for rank in self._others:
            if not self._store.check([str(rank)]):
                continue
            state = RankState(**json.loads(self._store.get(str(rank))))
            if state != self._states.get(rank):
                self._last_news_s[rank] = time.monotonic()
            self._states[rank] = state

    def _losses(self, *, at_once: bool = False) -> list[RankLoss]:
        """Ranks that will not finish, the first to fail first; `at_once`: no wait for own errors."""
        losses: list[tuple[int, RankLoss]] = []
        for rank in self._others:
            state = self._states.get(rank)
            if state is None:
                if self._is_silent(rank):
                    losses.append(
                        (0, RankLoss(rank, f"rank {rank} has not come for {self._silence_s:.0f} s."))
                    )
            elif state.finished >= self._number:
                continue
            elif state.failed >= self._number:
                first_s = self._first_seen_s.setdefault((rank, state.failed), time.monotonic())
                if at_once or time.monotonic() - first_s > GRACE_S:
                    losses.append(
                        (state.order, RankLoss(rank, _loss_text(state, f"has failed: {state.error}")))
                    )
            elif state.ended:
                text = (
                    f"has ended its script, while rank {self._state.rank} awaits it {self._state.at}: all "
                    "must call the same methods of the trainer"
                )
                losses.append((0, RankLoss(rank, _loss_text(state, text))))
            elif state.is_gone(self._state.place):
                text = "has died: its process was killed or has crashed"
                losses.append((0, RankLoss(rank, _loss_text(state, text))))
            elif (told := self._told_dead(rank)) is not None:
                losses.append((0, RankLoss(rank, told)))
            elif self._is_silent(rank):
                text = f"has given no sign of life for {self._silence_s:.0f} s (ddp_timeout)"
                losses.append((0, RankLoss(rank, _loss_text(state, text))))
        return [loss for _, loss in sorted(losses)]

    def _is_silent(self, rank: int) -> bool:
        return time.monotonic() - self._last_news_s[rank] > self._silence_s

    def _told_dead(self, rank: int) -> str | None:
        with suppress(Exception):
            key = f"{rank}/dead"
            if self._store.check([key]):
                return str(self._store.get(key).decode())
        return None

    def _give_up(self, loss: RankLoss) -> None:
        """Say who was lost, once on each host in full, and end this process."""
        state, is_first = self._states.get(loss.rank), True
        with suppress(Exception):
            if state is not None and state.is_gone(self._state.place):
                self._store.set(f"{loss.rank}/dead", loss.text)
            is_first = self._store.add(f"told on {self._state.place or self._state.host}", 1) == 1
        text = f"{loss.text}\nThe other ranks end, too. {_ADVICE}" if is_first else loss.text.split("\n")[0]
        os.write(2, f"\n[rank {self._state.rank}] {redacted(text)}\n".encode())
        flushing = threading.Thread(target=sys.stdout.flush, daemon=True)  # its lock may be held for ever
        flushing.start()
        flushing.join(1.0)
        os._exit(1)

    def _end(self) -> None:
        self._stop.set()
        self._thread.join(2 * BEAT_S)
        self._tell(ended=True)


def _loss_text(state: RankState, what: str) -> str:
    at = f" {state.at}" if state.at else ""
    if not state.lines:
        return f"{state.name} {what}{at}. It had written nothing to stderr."
    lines = "\n".join(f"    {line}" for line in state.lines)
    return f"{state.name} {what}{at}. Its last lines:\n{lines}"


def _is_orderly(error: BaseException) -> bool:
    """Whether an exception ends a run that was asked to stop, and has been saved, on all ranks."""
    if isinstance(error, SystemExit):
        return error.code in (None, 0, 128 + signal.SIGTERM)
    return isinstance(error, KeyboardInterrupt) and bool(error.args)


def _place() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _start_of(pid: int) -> str | None:
    """When a process of this machine started, in clock ticks after boot; None: it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


_watch: Watch | None = None


def _watch_of_process(silence_s: float, environment: Mapping[str, str]) -> Watch | None:
    """This process's watch, started at the first call; None: there is one rank, or they meet elsewhere."""
    global _watch
    num_ranks = int(environment.get("WORLD_SIZE", "1"))
    if _watch is not None or num_ranks == 1 or not {"RANK", "MASTER_ADDR", "MASTER_PORT"} <= set(environment):
        return _watch
    address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    try:
        store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=_CONNECT_S))
        attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
        name = f"colocate/watch/{environment.get('TORCHELASTIC_RUN_ID', '')}/{attempt}"
        _watch = Watch(PrefixStore(name, store), int(environment["RANK"]), num_ranks, silence_s)
        _watch.start()
    except RuntimeError as error:
        logger.warning(
            f"No store answers at {address}:{port} ({first_line(error)}): if a rank dies, the others wait "
            "for ddp_timeout and do not say which it was."
        )
    return _watch


def begin_watch(silence_s: float) -> None:
    """Watch from now on, so that the first shared work notices at once a rank that has ended before it, or
    has been silent for `silence_s` seconds."""
    _watch_of_process(silence_s, os.environ)


def watched(
    progress: Callable[[Any], str], *, when: Callable[[Any], bool] = lambda first: True
) -> Callable[[Work], Work]:
    """Decorate work that all ranks do together (`watching`).

    The first argument of the work is the run's configuration, or a trainer or run, which has it as `args`.

    Args:
        progress: given the first argument, says how far the work has come.
        when: given the first argument, says whether all ranks must do it; otherwise one may do it alone.
    """

    def decorate(work: Work) -> Work:
        @functools.wraps(work)
        def watched_work(first: Any, *rest: Any, **named: Any) -> Any:
            if not when(first):
                return work(first, *rest, **named)
            with watching(getattr(first, "args", first).ddp_timeout, lambda: progress(first)):
                return work(first, *rest, **named)

        return watched_work  # type: ignore[return-value]

    return decorate


@contextmanager
def watching(silence_s: float, progress: Callable[[], str]) -> Iterator[None]:
    """Shared work of all ranks, during which each ends if another is lost (`Watch.work`).

    All ranks must come to the same pieces of work in the same order.

    Args:
        silence_s: seconds without a sign of life after which a rank counts as dead.
        progress: how far the work has come, as in "after step 12".
    """
    watch = _watch_of_process(silence_s, os.environ)
    if watch is None:
        yield
        return
    with watch.work(progress):
        yield
