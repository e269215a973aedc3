"""The actor of one process of a run, a rank or a server: it starts the process, hears it, and ends it.

The run is a process of its own because it handles signals, which Python does in the main thread alone.
"""

from __future__ import annotations

import os
import selectors
import socket
import subprocess
import sys
import tempfile
import termios
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from colocate.http.connection import answers
from colocate.parallel.launching import free_port, without_launchers
from colocate.parallel.process_group import ProcessGroup
from colocate.parallel.rank_failure import VARIABLE, Failure, read_failure
from colocate.version import __version__

_CHUNK_BYTES = 2**16
_FOLLOW_S = 1.0

Size = tuple[int, int] | None
"""Rows and columns of a terminal; None: there is none."""


class Place(NamedTuple):
    """Where an actor is."""

    host: str
    address: str
    gpu_ids: tuple[str, ...]
    free_port: int


class ProcessActor:
    """Starts one process at a time and answers questions about it, also several at the same time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._output = selectors.DefaultSelector()
        self._terminal: int | None = None
        self._error_file = Path()

    def place(self, directory: str | None, version: str) -> Place:
        """Enter the directory, and return host, address, GPUs and a free port. Raises ValueError if this node
        lacks the directory or has another version.

        Args:
            directory: the driver's, which the process will be in. None: Ray has unpacked a copy of it
                (`ray job submit --working-dir`), and the actor is in it.
            version: the driver's version of this package.
        """
        import ray

        host = socket.gethostname()
        if version != __version__:
            raise ValueError(
                f"{host} has colocate {__version__}, and the run was started with {version}: install one "
                "version on all nodes."
            )
        try:
            os.chdir(directory or ".")
        except OSError as error:
            raise ValueError(
                f"{host} cannot enter {directory}, where the run was started: {error.strerror}. Start it in "
                "a directory that all nodes share, or with `ray job submit --working-dir .`, which copies "
                "one to them."
            ) from error
        gpu_ids = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        return Place(host, ray.util.get_node_ip_address(), tuple(gpu_ids), free_port(""))

    def start(
        self, directory: str | None, arguments: Sequence[str], variables: Mapping[str, str], size: Size
    ) -> int:
        """Start the process, after ending any left over from an earlier one; returns its id.

        Args:
            arguments: the words after `colocate`.
            variables: environment variables to add to the node's.
            size: size of the terminal that it gets; None: it gets pipes.
        """
        self.end()
        pairs = [os.pipe(), os.pipe()] if size is None else [os.openpty()]
        self._terminal = None if size is None else pairs[0][0]
        self._resize(size)
        self._error_file = Path(tempfile.gettempdir(), f"colocate-error-{uuid.uuid4().hex}.json")
        own = {"PYTHONUNBUFFERED": "1", VARIABLE: str(self._error_file)}
        self._process = ProcessGroup(
            [sys.executable, "-m", "colocate", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=pairs[0][1],
            stderr=pairs[-1][1],
            cwd=directory,
            env=without_launchers(os.environ) | own | dict(variables),
        )
        for number, (ours, its) in enumerate(pairs, start=1):
            os.close(its)
            self._output.register(ours, selectors.EVENT_READ, number)
        return self._process.pid

    def follow(self, size: Size) -> tuple[list[tuple[int, bytes]], int | None]:
        """Wait for output or the end, a second at most; `size` is that of the terminal by now.

        Returns:
            File descriptors (1: stdout, 2: stderr) and bytes that were written to them, and the exit code:
            None while the process runs, negative if a signal of that number ended it.
        """
        assert self._process is not None, "start comes first"
        self._resize(size)
        chunks: list[tuple[int, bytes]] = []
        for key, _ in self._output.select(_FOLLOW_S if self._output.get_map() else 0):
            with suppress(OSError):  # a terminal whose last user has gone
                if chunk := os.read(key.fd, _CHUNK_BYTES):
                    chunks.append((key.data, chunk))
                    continue
            self._output.unregister(key.fd)
            os.close(key.fd)
            self._terminal = None
        code = None
        if not chunks:  # a child that it has forgotten may keep a pipe open
            with suppress(subprocess.TimeoutExpired):
                code = self._process.wait(0 if self._output.get_map() else _FOLLOW_S)
        return chunks, code

    def _resize(self, size: Size) -> None:
        if self._terminal is not None and size is not None:
            termios.tcsetwinsize(self._terminal, size)

    answers = staticmethod(answers)
    """Asks the process, a server, whether it works."""

    def failure(self) -> Failure | None:
        """Read the error that the process has noted; None: it has noted none."""
        found = read_failure(self._error_file)
        self._error_file.unlink(missing_ok=True)
        return found

    def signal(self, number: int) -> None:
        """Pass a signal on to the process, if it has begun and not ended."""
        if self._process is not None:
            self._process.send_signal(number)

    def end(self) -> None:
        """Kill the process and its children, and wait until it is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
