"""The process of one rank, as its actor starts it: `python -m colocate.clusters.child FD train ...`.

It runs `colocate` as torchrun's processes do, and ends when its actor does, with all that it has started: FD
is a pipe whose other end only the actor has, so that its end is seen however the actor ended. A guard sees
it, which is a process of its own: Ray kills the processes that a dead actor has started, but not theirs.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys


def main() -> None:
    descriptor = int(sys.argv[1])
    # Ray blocks SIGINT in what it starts, and its children inherit that.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if os.fork() == 0:
        _guard(descriptor)
    os.close(descriptor)
    sys.argv = ["colocate", *sys.argv[2:]]
    runpy.run_module("colocate", run_name="__main__", alter_sys=True)


def _guard(descriptor: int) -> None:
    """End the whole process group with the actor. The actor ends the group when the rank has ended."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):  # their readers wait for the last one who could write
        os.dup2(nothing, stream)
    while os.read(descriptor, 1):
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
