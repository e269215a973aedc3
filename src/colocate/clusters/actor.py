"""The actor of one process of a run, a rank or a server: it starts the process, hears it, and ends it.

That is a process of its own because a run handles signals, which Python does in the main thread alone.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
import termios
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from http.client import HTTPException
from typing import NamedTuple

from colocate.parallel.launcher_variables import without_launchers
from colocate.version import __version__

_CHUNK_BYTES = 2**16
_FOLLOW_S = 1.0
_START_S = 1800.0
"""Seconds after which a server hangs that has not answered yet: a large model is loaded in less."""


class Place(NamedTuple):
    """Where an actor is."""

    node_id: str
    """Ray's name of the node."""
    host: str
    address: str
    gpu_ids: tuple[str, ...]
    free_port: int


class ProcessActor:
    """Starts one process at a time and answers the driver's questions about it; several at once."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._output = selectors.DefaultSelector()
        self._terminal: int | None = None
        self._held: int | None = None
        """The end of the pipe that ends the process when it is closed."""

    def place(self, directory: str | None, version: str) -> Place:
        """Say where this is.

        Args:
            directory: the driver's, which the process will be in. None: Ray has unpacked a copy of it
                (`ray job submit --working-dir`), and the actor is in it.
            version: the driver's, of this package.

        Raises:
            ValueError: this node does not have the directory, or has another version.
        """
        import ray

        if version != __version__:
            raise ValueError(
                f"{socket.gethostname()} has colocate {__version__}, and the run was started with {version}: "
                "install one version on all nodes."
            )
        try:
            os.chdir(directory or ".")
        except OSError as error:
            raise ValueError(
                f"{socket.gethostname()} cannot enter {directory}, where the run was started: "
                f"{error.strerror}. Start it in a directory that all nodes share, or with "
                "`ray job submit --working-dir .`, which copies one to them."
            ) from error
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        context = ray.get_runtime_context()
        gpu_ids = tuple(context.get_accelerator_ids().get("GPU", []))
        address = ray.util.get_node_ip_address()
        return Place(context.get_node_id(), socket.gethostname(), address, gpu_ids, port)

    def start(
        self,
        directory: str | None,
        arguments: Sequence[str],
        variables: Mapping[str, str],
        size: tuple[int, int] | None,
    ) -> int:
        """Start the process, after ending what an earlier one has left behind; returns its id.

        Args:
            directory: see `place`.
            arguments: what follows `colocate`.
            variables: what the process's environment has beside the node's.
            size: rows and columns of the terminal to give it, on which it draws its panel; None: pipes.
        """
        self.end()
        ours, self._held = os.pipe()
        command = [sys.executable, "-m", "colocate.clusters.child", str(ours), *arguments]
        if size is None:
            (out, out_end), (err, err_end) = os.pipe(), os.pipe()
            ends, streams = (os.open(os.devnull, os.O_RDONLY), out_end, err_end), {1: out, 2: err}
        else:
            self._terminal, end = os.openpty()
            self.resize(size)
            ends, streams = (end, end, end), {1: self._terminal}
        environment = without_launchers(os.environ) | dict(variables)
        self._process = subprocess.Popen(
            command, -1, None, *ends, cwd=directory, env=environment, pass_fds=(ours,), start_new_session=True
        )
        for descriptor in {ours, *ends}:
            os.close(descriptor)
        for number, descriptor in streams.items():
            self._output.register(descriptor, selectors.EVENT_READ, number)
        return self._process.pid

    def follow(self) -> tuple[list[tuple[int, bytes]], int | None]:
        """Wait for output or the end, a second at most. Who writes faster than this is asked waits, as for a
        slow terminal.

        Returns:
            File descriptors (1: stdout, 2: stderr) and bytes that were written to them, and the exit code,
            minus the signal's number if a signal ended the process; None: it goes on.
        """
        assert self._process is not None, "start comes first"
        chunks: list[tuple[int, bytes]] = []
        for key, _ in self._output.select(_FOLLOW_S if self._output.get_map() else 0):
            with suppress(OSError):  # a terminal whose last user has gone
                if chunk := os.read(key.fd, _CHUNK_BYTES):
                    chunks.append((key.data, chunk))
                    continue
            self._output.unregister(key.fd)
            os.close(key.fd)
        code = None
        if not chunks:  # a child that it has forgotten may keep a pipe open
            with suppress(subprocess.TimeoutExpired):
                code = self._process.wait(0 if self._output.get_map() else _FOLLOW_S)
        return chunks, code

    def answers(self, url: str, key: str, timeout_s: float) -> bool:
        """Ask the process, a server, whether it works."""
        question = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"})
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy does not know it
        with suppress(OSError, HTTPException), opener.open(question, timeout=timeout_s):
            return True
        return False

    def signal(self, number: int) -> None:
        """Pass a signal on to the process, if it has begun and not ended."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def resize(self, size: tuple[int, int]) -> None:
        """Give the process's terminal other rows and columns."""
        if self._terminal is not None:
            termios.tcsetwinsize(self._terminal, size)

    def end(self) -> None:
        """Kill the process and what it has started, and wait until it is gone."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if self._held is not None:
            os.close(self._held)
            self._held = None
