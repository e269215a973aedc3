"""What an engine's start asks of this process: its environment for a while, and a free port."""

from __future__ import annotations

import os
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


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port of this machine's address `host` that nothing listens on now.

    Raises:
        OSError: `host` is not this machine's.
    """
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]
