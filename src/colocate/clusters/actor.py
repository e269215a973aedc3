"""The actor of one rank: it starts the rank's process, passes its output on, and ends it.

The rank is a process of its own because a run handles signals, which Python does in the main thread alone.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from colocate.parallel.launcher_variables import without_launchers
from colocate.version import __version__

_CHUNK_BYTES = 2**16
_MAX_CHUNKS = 64
"""Pieces of output that wait for the driver. A rank that writes more waits, as for a slow terminal."""
_FOLLOW_S = 1.0
_DRAIN_S = 1.0
"""Seconds for output that is still in a pipe, which a forgotten child of the rank may keep open."""


class Place(NamedTuple):
    """Where an actor is."""

    host: str
    address: str
    gpu_ids: tuple[str, ...]
    free_port: int
    version: str
    """The version of this package there."""


class News(NamedTuple):
    """What a rank has written since the last question, and how it has ended."""

    chunks: list[tuple[int, bytes]]
    """File descriptor (1: stdout, 2: stderr) and bytes."""
    code: int | None
    """The exit code, minus the signal's number if a signal ended it; None: it goes on."""


class RankActor:
    """Starts one rank and answers the driver's questions about it; several at once."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._output: queue.Queue[tuple[int, bytes]] = queue.Queue(_MAX_CHUNKS)
        self._readers: list[threading.Thread] = []
        self._terminal: int | None = None
        self._held: int | None = None
        """The end of the pipe that ends the rank when it is closed."""

    def place(self, directory: str | None) -> Place:
        """Enter the working directory of the run, and say where this is.

        Args:
            directory: the driver's. None: Ray has unpacked a copy of it (`ray job submit --working-dir`), and
                the actor is in it.

        Raises:
            ValueError: this node does not have the directory.
        """
        import ray

        if directory is not None:
            try:
                os.chdir(directory)
            except OSError as error:
                raise ValueError(
                    f"{socket.gethostname()} cannot enter {directory}, where the run was started: "
                    f"{error.strerror}. Start it in a directory that all nodes share, or with "
                    "`ray job submit --working-dir .`, which copies one to them."
                ) from error
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        gpu_ids = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        return Place(socket.gethostname(), ray.util.get_node_ip_address(), tuple(gpu_ids), port, __version__)

    def checkpoints(self, output_dir: str) -> frozenset[tuple[str, int]]:
        """Name and time of each checkpoint in a run's `output_dir`, as seen from here. Only whole ones have
        such names."""
        paths = Path(output_dir).glob("checkpoint-*")
        return frozenset((path.name, path.stat().st_mtime_ns) for path in paths if path.name[11:].isdigit())

    def start(
        self, arguments: Sequence[str], variables: Mapping[str, str], size: tuple[int, int] | None
    ) -> int:
        """Start the rank's process; returns its id.

        Args:
            arguments: what follows `colocate`.
            variables: what the rank's environment has beside the node's.
            size: columns and rows of the terminal to give the rank, on which it draws its panel; None: pipes.
        """
        environment = without_launchers(os.environ) | dict(variables)
        ours, theirs = os.pipe()
        command = [sys.executable, "-m", "colocate.clusters.child", str(ours), *arguments]
        common: dict[str, Any] = dict(env=environment, pass_fds=(ours,), start_new_session=True)
        if size is None:
            common |= dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            self._process = subprocess.Popen(command, **common)
            out, err = self._process.stdout, self._process.stderr
            assert out is not None and err is not None, "they are pipes"
            streams = {1: out.fileno(), 2: err.fileno()}
        else:
            self._terminal, end = os.openpty()
            self.resize(size)
            self._process = subprocess.Popen(command, stdin=end, stdout=end, stderr=end, **common)
            os.close(end)
            streams = {1: self._terminal}
        os.close(ours)
        self._held = theirs
        for number, descriptor in streams.items():
            reader = threading.Thread(target=self._read, args=(number, descriptor), daemon=True)
            reader.start()
            self._readers.append(reader)
        return self._process.pid

    def follow(self) -> News:
        """Wait for output or the end, a second at most."""
        assert self._process is not None, "start comes first"
        chunks: list[tuple[int, bytes]] = []
        until_s = time.monotonic() + _FOLLOW_S
        while not chunks and time.monotonic() < until_s and self._process.poll() is None:
            with suppress(queue.Empty):
                chunks.append(self._output.get(timeout=0.05))
        code = self._process.poll()
        if code is not None:
            until_s = time.monotonic() + _DRAIN_S
            while any(reader.is_alive() for reader in self._readers) and time.monotonic() < until_s:
                with suppress(queue.Empty):
                    chunks.append(self._output.get(timeout=0.05))
        with suppress(queue.Empty):
            while True:
                chunks.append(self._output.get_nowait())
        return News(chunks, code)

    def signal(self, number: int) -> None:
        """Pass a signal on to the rank, if it has begun and not ended."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def resize(self, size: tuple[int, int]) -> None:
        import fcntl
        import struct
        import termios

        if self._terminal is not None:
            columns, rows = size
            fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def end(self) -> None:
        """Kill the rank and what it has started, and wait until it is gone."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _read(self, number: int, descriptor: int) -> None:
        with suppress(OSError):  # a terminal whose last user has gone
            while chunk := os.read(descriptor, _CHUNK_BYTES):
                self._output.put((number, chunk))
