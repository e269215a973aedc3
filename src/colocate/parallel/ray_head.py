"""Whether anybody listens at the address of a Ray cluster's head. Ray itself tries for minutes, and tells of
a loss late and not how to go on."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from colocate.options.redaction import redacted

LOOK_S = 1.0
_CONNECT_S = 10.0
_NUM_UNANSWERED = 5
"""How many looks in a row find nobody when it is said."""


def check_address(given: str) -> None:
    """Find out in seconds what Ray tries for minutes: whether somebody listens at RAY_ADDRESS.

    Raises:
        RuntimeError: nobody does, or it is the address of something else than a cluster's head.
    """
    try:
        _knock(given)
    except (OSError, ValueError, OverflowError) as error:
        raise RuntimeError(
            f"No Ray head listens at RAY_ADDRESS={redacted(given)} ({error}). Set its address and port, such "
            "as 10.0.0.1:6379, on one of the cluster's nodes, or unset it for a cluster here. "
            "From elsewhere (ray://) use `ray job submit`."
        ) from error


@contextmanager
def watched(address: str) -> Iterator[None]:
    """Within, says on stderr when nobody listens at the head's address any more, and when somebody does.

    It ends nothing: a head whose state is kept elsewhere may come back, and Ray waits for that. If it does
    not, Ray ends the process after a minute, from a thread of its own and without unwinding.
    """
    is_over = threading.Event()
    thread = threading.Thread(target=_watch, args=(address, is_over), name="ray-head", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()


def _watch(address: str, is_over: threading.Event) -> None:
    num_unanswered = 0
    while not is_over.wait(LOOK_S):
        is_there = _listens(address)
        if is_there and num_unanswered >= _NUM_UNANSWERED:
            _say(f"Ray's head at {address} answers again.")
        num_unanswered = 0 if is_there else num_unanswered + 1
        if num_unanswered == _NUM_UNANSWERED and not is_over.is_set():
            _say(
                f"Ray's head at {address} is lost: nobody listens there any more. Unless it comes back "
                "within a minute, Ray ends this command, and the cluster with all that runs on it. Then "
                "start the head again (ray start --head), and the same command with "
                "--resume_from_checkpoint auto: the run goes on from its newest checkpoint."
            )


def _listens(address: str) -> bool:
    try:
        _knock(address)
    except OSError:
        return False
    return True


def _knock(address: str) -> None:
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()


def _say(text: str) -> None:
    print(f"\n{text}", file=sys.stderr, flush=True)
