"""A process that holds groups of gloo ends in good order."""

from __future__ import annotations

import sys

from processes import run_python

ENDINGS = """
import atexit, os, sys
import torch
import torch.distributed as dist
from colocate.parallel.collectives import leave_process_groups

def ending(handlers):
    # The exit code of a process whose group's thread has 20,000 tensors to free when the interpreter ends.
    if pid := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.sched_setaffinity(0, list(os.sched_getaffinity(0))[:1])
    for handler in handlers:
        atexit.register(handler)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    globals()["held"] = dist.group.WORLD  # as a trainer holds it
    tensors = [torch.ones(1) for _ in range(20_000)]
    held.allreduce_coalesced(tensors).wait()
    del tensors
    sys.exit(0)

print([ending([]) for _ in range(3)], [ending([leave_process_groups]) for _ in range(3)], sep=";")
"""


def test_the_interpreter_ends_after_threads_of_gloo() -> None:
    """Without waiting for them the process aborts (signal 6): there is something to wait for."""
    without, waiting = run_python("-c", ENDINGS, timeout_s=120).split(";")
    assert "-6" in without
    assert waiting.strip() == "[0, 0, 0]", sys.version
