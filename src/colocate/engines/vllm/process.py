"""What an engine's start asks of this process: its environment for a while, and a free port."""

from __future__ import annotations

import errno
import os
import random
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Set variables of this process's environment for as long as a block lasts."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


PORTS = range(20_000, 32_768)
"""Below those that Linux gives to outgoing connections: one of these could take a port that was found free,
and a vLLM server listens only when it has imported everything."""
NUM_TRIES = 100


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port of this machine's address `host` that nothing listens on now.

    Raises:
        OSError: `host` is not this machine's, or a hundred ports were all taken.
    """
    choose = random.SystemRandom().choice  # not the generator that a training may have seeded
    for _ in range(NUM_TRIES):
        port = choose(PORTS)
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                return port
    raise OSError(
        errno.EADDRINUSE, f"{NUM_TRIES} ports of {host} between {PORTS[0]} and {PORTS[-1]} are taken"
    )
