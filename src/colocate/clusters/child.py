"""The process of one rank, as its actor starts it: `python -m colocate.clusters.child FD train ...`.

It runs `colocate` as torchrun's processes do, and ends when its actor does: FD is a pipe whose other end only
the actor has, so that its end is seen however the actor ended.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading


def main() -> None:
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    # Ray blocks SIGINT in what it starts, and its children inherit that.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_actor, args=(descriptor,), daemon=True).start()
    sys.argv = ["colocate", *sys.argv[2:]]
    runpy.run_module("colocate", run_name="__main__", alter_sys=True)


def _end_with_actor(descriptor: int) -> None:
    while os.read(descriptor, 1):
        pass
    os.killpg(0, signal.SIGKILL)  # its own children, such as those that execute completions, too


if __name__ == "__main__":
    main()
