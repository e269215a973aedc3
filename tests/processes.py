"""Scripts in processes of their own."""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing.connection import wait
from pathlib import Path

import torch
from torch.distributed import TCPStore

from colocate.memory import garbage

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
"""Before a script: two processes of it."""

SOURCE = Path(__file__).parents[1] / "src"
TRTLLM_SOURCE = SOURCE.parent / "distributions" / "trtllm" / "src"

FORKS = multiprocessing.get_context("forkserver")
"""Starts processes that are forked from a server which has imported everything: a fresh interpreter needs
nine seconds for that."""
FORKS.set_forkserver_preload(["colocate.trainer", "peft", "pytest", "torch.distributed.tensor"])


class Searches:
    """Python's searches for garbage as `memory/garbage.py` uses them, but that what was left out stays so.

    A run looks through all that there is before it begins, for 0.3 s; there are hundreds of runs.
    """

    collect = staticmethod(gc.collect)
    freeze = staticmethod(gc.freeze)

    @staticmethod
    def unfreeze() -> None:
        """Leave out what was."""


_num_lasting = 0


def leave_out_lasting_objects() -> None:
    """Collect garbage, and leave what exists now out of searches, unless most of it is already."""
    global _num_lasting
    if not 0.9 * _num_lasting < gc.get_freeze_count() < 1.1 * _num_lasting:
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        _num_lasting = gc.get_freeze_count()


def run_python(*words: str | Path, timeout_s: float, **environment: str) -> str:
    """What `python <words>` prints, on one thread each; it must end without an error."""
    paths = [str(SOURCE), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)} | environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    return done.stdout


def run_script(script: Path, *words: str | Path, timeout_s: float, **environment: str) -> str:
    """What a script prints in a process of its own; it may not fail."""
    return _run_forked([script, *words], [environment], timeout_s)


def run_ranks(num_ranks: int, script: Path, *words: str | Path, timeout_s: float, **environment: str) -> str:
    """What a script prints in several processes that find one another as torchrun's do; none may fail."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = [_variables(rank, num_ranks, store.port) | environment for rank in range(num_ranks)]
    return _run_forked([script, *words], variables, timeout_s)


def _run_forked(words: list[str | Path], environments: list[dict[str, str]], timeout_s: float) -> str:
    """What `python <words>` prints in a process with each of these variables."""
    arguments = list(map(str, words))
    with tempfile.NamedTemporaryFile("r", errors="replace") as printed:
        processes = []
        for environment in environments:
            variables = os.environ | {"OMP_NUM_THREADS": "1"} | environment
            processes.append(FORKS.Process(target=_run_script, args=(arguments, variables, printed.name)))
            processes[-1].start()
        deadline = time.monotonic() + timeout_s
        running = list(processes)
        while running and not any(each.exitcode for each in processes) and time.monotonic() < deadline:
            wait([each.sentinel for each in running], timeout=1.0)
            running = [each for each in processes if each.exitcode is None]
        for each in running:
            each.kill()
            each.join()
        text = printed.read()
    assert [each.exitcode for each in processes] == [0] * len(processes), text[-8000:]
    return text


def _variables(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """The variables that torchrun sets, whose agent has the store, as the caller has here."""
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    return {name: str(value) for name, value in {**places, **meeting}.items()}


def _run_script(arguments: list[str], variables: dict[str, str], printed: str) -> None:
    """Be `python <arguments>`."""
    file = os.open(printed, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.clear()
    os.environ.update(variables)
    torch.set_num_threads(1)
    gc.freeze()
    garbage.gc = Searches
    sys.argv = arguments
    sys.path.insert(0, str(Path(arguments[0]).parent))
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()  # which multiprocessing leaves out
