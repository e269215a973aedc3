"""What a process does with its groups of ranks when the interpreter ends."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

_WAIT_S = 5.0
_LOOK_S = 0.001
_NUM_LOOKS = 3


def leave_process_groups() -> None:
    """Destroy gloo's process groups, and wait until no thread of theirs is at work any more.

    A thread of gloo frees the tensors of a collective some time after the collective has ended, and asks
    Python to do so. Once the interpreter is being taken apart, that aborts the process ("terminate called
    without an active exception"). A group that is destroyed ends its threads; one that a trainer or a mesh
    still holds is not destroyed.

    An NCCL group is left alone: destroying it can wait for ever for a rank that has died.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_backend() == "gloo":
        dist.destroy_process_group()
    until_s, num_idle = time.monotonic() + _WAIT_S, 0
    while num_idle < _NUM_LOOKS and time.monotonic() < until_s:
        states = _states_of_gloo_threads()
        if not states:
            return
        num_idle = 0 if "R" in states else num_idle + 1
        time.sleep(_LOOK_S)  # a thread that waits for the interpreter gets it meanwhile, and then runs


def _states_of_gloo_threads() -> list[str]:
    """Linux's letter for the state of each, "R" if it runs or could; empty where the system does not say."""
    states = []
    for task in Path("/proc/self/task").glob("*"):
        with suppress(OSError):  # the thread has ended
            if (task / "comm").read_text().strip() == "pt_gloo_runloop":
                states.append((task / "stat").read_text().rpartition(")")[2].split()[0])
    return states
