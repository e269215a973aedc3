"""Ends forked copies of the run's process that return from a user's function."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from colocate.users_code.exits import EXIT_CODE


@contextmanager
def ended_forks(function: str) -> Iterator[None]:
    """End the child of a fork that leaves the block: it would train as a second run, and write into the files
    of the first.

    Args:
        function: what the block calls, for the message, such as "The tool 'add'".
    """
    process_id = os.getpid()
    try:
        yield
    finally:
        if os.getpid() != process_id:
            message = (
                f"{function} has forked, and the child process returned from it. That process, "
                f"{os.getpid()}, is ended, and the run goes on in process {process_id}. Let a child end with "
                "os._exit().\n"
            )
            os.write(2, message.encode(errors="replace"))
            os._exit(EXIT_CODE)  # nothing of the parent's is flushed or cleaned up a second time
