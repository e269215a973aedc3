"""Which run a vLLM server belongs to: one at a time, until it lets go or falls silent."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

LEASE_S = 60.0
"""A run that was silent for so long holds its server no more."""
_RENEWALS_PER_LEASE = 4
_JOIN_S = 5.0


@dataclass(frozen=True)
class Run:
    """A run that uses a server.

    Args:
        id: its own, equal in all its processes.
        output_dir: where it writes, for people.
        host, pid: of the process that asks.
        process: identifies that process on its machine; see `process_identity`.
    """

    id: str
    output_dir: str = ""
    host: str = ""
    pid: int = 0
    process: str = ""


def this_run(run_id: str, output_dir: str) -> Run:
    """The run that this process belongs to."""
    return Run(run_id, output_dir, socket.gethostname(), os.getpid(), process_identity(os.getpid()))


class ServerHeld(RuntimeError):
    """The server belongs to another run.

    Args:
        holder: what `Lease.describe` says of it.
    """

    def __init__(self, message: str, holder: dict[str, Any]) -> None:
        super().__init__(message)
        self.holder = holder


class Lease:
    """The server's side: who holds it. Every message of the holder renews it."""

    def __init__(self) -> None:
        self._run: Run | None = None
        self._since_s = self._heard_s = 0.0

    @property
    def holder(self) -> Run | None:
        """The run that holds the server, None if nobody does."""
        if self._run is not None and time.monotonic() - self._heard_s > LEASE_S:
            logger.warning(
                f"The run of {self._run.output_dir or self._run.id} was silent for {LEASE_S:g} s: the server "
                "is free again."
            )
            self._run = None
        return self._run

    def claim(self, run: Run, instead_of: str | None = None) -> None:
        """Take or keep the server for `run`.

        Args:
            instead_of: id of a run that has ended, whose place this one takes.

        Raises:
            ServerHeld: another run holds it.
        """
        holder, now_s = self.holder, time.monotonic()
        if holder is not None and holder.id not in (run.id, instead_of):
            raise ServerHeld("another run holds this server", self.describe() or {})
        if holder is None or holder.id != run.id:
            self._since_s = now_s
        elif not run.process:
            run = holder  # the gate asks for a run of which it knows nothing but the id
        self._run = run
        self._heard_s = now_s

    def release(self) -> None:
        """Nobody holds the server any more."""
        self._run = None

    def describe(self) -> dict[str, Any] | None:
        """The holder, for how long it has been that, and since when it is silent; None if there is none."""
        run, now_s = self.holder, time.monotonic()
        if run is None:
            return None
        return {**run.__dict__, "held_s": now_s - self._since_s, "silent_s": now_s - self._heard_s}


class LeaseKeeper:
    """The trainer's side: renews a lease in the background, for training may take longer than a lease.

    Args:
        renew: asks the server to renew; may raise anything. ServerHeld ends it: the next use says so.
        release: lets go.
    """

    def __init__(self, renew: Callable[[], object], release: Callable[[], object]) -> None:
        self._renew, self._release = renew, release
        self._is_over = threading.Event()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._keep, daemon=True, name="vllm-lease")
        self._thread.start()

    def _keep(self) -> None:
        while not self._is_over.wait(LEASE_S / _RENEWALS_PER_LEASE):
            try:
                self._renew()
            except ServerHeld:
                return
            except Exception as error:  # the server may be restarting: whoever needs it next says so
                logger.debug("The lease was not renewed: %s", error)

    def close(self) -> None:
        """Stop renewing and let go of the server, if it is there to be told."""
        if self._is_over.is_set() or os.getpid() != self._pid:  # a forked child holds nothing
            return
        self._is_over.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_S)  # a renewal behind the release would take the server back
        with suppress(Exception):
            self._release()


def process_identity(pid: int) -> str:
    """Names a process for as long as its machine runs: start of the machine, namespace, number, start.

    Returns:
        An empty text where there is no such process, or Linux does not tell.
    """
    with suppress(OSError, IndexError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # What follows the name in parentheses, which may contain anything; see proc(5).
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        state, started = fields[0], fields[19]
        if state not in "ZX":  # ended, but its parent has not asked yet
            return f"{boot}/{os.readlink('/proc/self/ns/pid')}/{pid}/{started}"
    return ""


def has_ended(process: str) -> bool:
    """Whether a process named by `process_identity` is certainly over: it was one of this machine's."""
    own, there = process_identity(os.getpid()).split("/"), process.split("/")
    if len(own) != 4 or len(there) != 4 or own[:2] != there[:2]:
        return False
    return process_identity(int(there[2])) != process
