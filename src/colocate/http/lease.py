"""The lease by which a rollout server belongs to one run, until the run releases it or falls silent."""

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
"""Seconds of silence after which a run loses its server."""
_RENEWALS_PER_LEASE = 4
_JOIN_S = 5.0


@dataclass(frozen=True)
class LeaseHolder:
    """A run that uses a server, and its process that asks.

    Args:
        id: the run's id, equal in all its processes.
        output_dir: the run's directory, for messages.
        host, pid: machine and number of the process.
        process: the `process_identity` of the process.
    """

    id: str
    output_dir: str = ""
    host: str = ""
    pid: int = 0
    process: str = ""


def this_run(run_id: str, output_dir: str) -> LeaseHolder:
    """This process's run, described with this process."""
    return LeaseHolder(run_id, output_dir, socket.gethostname(), os.getpid(), process_identity(os.getpid()))


class ServerHeld(RuntimeError):
    """The server belongs to another run.

    Args:
        holder: the other run, as `Lease.describe` gives it.
    """

    def __init__(self, message: str, holder: dict[str, Any]) -> None:
        super().__init__(message)
        self.holder = holder


class Lease:
    """The server's side of the lease: it knows the holder, and each message of the holder renews it."""

    def __init__(self) -> None:
        self._run: LeaseHolder | None = None
        self._since_s = self._heard_s = 0.0

    @property
    def holder(self) -> LeaseHolder | None:
        """The run that holds the server, None if nobody does."""
        if self._run is not None and time.monotonic() - self._heard_s > LEASE_S:
            logger.warning(
                f"The run of {self._run.output_dir or self._run.id} was silent for {LEASE_S:g} s: the server "
                "is free again."
            )
            self._run = None
        return self._run

    def claim(self, run: LeaseHolder, instead_of: str | None = None) -> None:
        """Take or keep the server for `run`.

        Args:
            instead_of: id of a run that has ended; if it still holds the server, `run` replaces it.

        Raises:
            ServerHeld: another run holds the server.
        """
        holder, now_s = self.holder, time.monotonic()
        if holder is not None and holder.id not in (run.id, instead_of):
            raise ServerHeld("another run holds this server", self.describe() or {})
        if holder is None or holder.id != run.id:
            self._since_s = now_s
        elif not run.process:
            run = holder  # the gate asks for a run and knows only its id: keep the full description
        self._run = run
        self._heard_s = now_s

    def release(self) -> None:
        """End the lease: nobody holds the server any more."""
        self._run = None

    def describe(self) -> dict[str, Any] | None:
        """The holder, and the seconds since it took the server and since its last message; None: nobody."""
        run, now_s = self.holder, time.monotonic()
        if run is None:
            return None
        return {**run.__dict__, "held_s": now_s - self._since_s, "silent_s": now_s - self._heard_s}


class LeaseKeeper:
    """The trainer's side of the lease: renews it in a thread, as a training step may outlast a lease.

    Args:
        renew: asks the server to renew, and may raise. ServerHeld ends the renewals; the next use of the
            server reports it.
        release: tells the server that the run is over.
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
            except Exception as error:  # the server may be restarting, which its next use will report
                logger.debug("The lease was not renewed: %s", error)

    def close(self) -> None:
        """Stop renewing and release the server; nothing happens if the server does not answer."""
        if self._is_over.is_set() or os.getpid() != self._pid:  # a forked child has no lease
            return
        self._is_over.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_S)  # a renewal after the release would take the server back
        with suppress(Exception):
            self._release()


def process_identity(pid: int) -> str:
    """A name of a process that no other process gets: boot id / namespace / number / start time.

    Returns:
        The name; "" if there is no such process, or if /proc does not tell.
    """
    with suppress(OSError, IndexError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # The fields after the program's name, which is in parentheses and may contain anything; see proc(5).
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        state, started = fields[0], fields[19]
        if state not in "ZX":  # zombie or dead: ended, but its parent has not waited for it yet
            return f"{boot}/{os.readlink('/proc/self/ns/pid')}/{pid}/{started}"
    return ""


def has_ended(process: str) -> bool:
    """Whether a process named by `process_identity` has certainly ended; False for another machine's."""
    own, there = process_identity(os.getpid()).split("/"), process.split("/")
    if len(own) != 4 or len(there) != 4 or own[:2] != there[:2]:
        return False
    return process_identity(int(there[2])) != process
