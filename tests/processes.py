"""Scripts in processes of their own."""

from __future__ import annotations

import atexit
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

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
"""Before a script: two processes of it."""

SOURCE = Path(__file__).parents[1] / "src"
TRTLLM_SOURCE = SOURCE.parent / "distributions" / "trtllm" / "src"

FORKS = multiprocessing.get_context("forkserver")
"""Starts processes that are forked from a server which has imported everything: a fresh interpreter needs
nine seconds for that."""
FORKS.set_forkserver_preload(["colocate.trainer", "peft", "pytest", "torch.distributed.tensor"])


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


def run_ranks(num_ranks: int, script: Path, *words: str | Path, timeout_s: float) -> None:
    """Run a script in several processes that find one another as torchrun's do; none may fail."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    arguments = [str(script), *map(str, words)]
    with tempfile.NamedTemporaryFile("r", errors="replace") as printed:
        ranks = []
        for rank in range(num_ranks):
            variables = os.environ | _variables(rank, num_ranks, store.port)
            ranks.append(FORKS.Process(target=_run_script, args=(arguments, variables, printed.name)))
            ranks[-1].start()
        deadline = time.monotonic() + timeout_s
        running = list(ranks)
        while running and not any(rank.exitcode for rank in ranks) and time.monotonic() < deadline:
            wait([rank.sentinel for rank in running], timeout=1.0)
            running = [rank for rank in ranks if rank.exitcode is None]
        for rank in running:
            rank.kill()
            rank.join()
        assert [rank.exitcode for rank in ranks] == [0] * num_ranks, printed.read()[-8000:]


def _variables(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """The variables that torchrun sets, whose agent has the store, as the caller has here."""
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    return {name: str(value) for name, value in {**places, **meeting, "OMP_NUM_THREADS": 1}.items()}


def _run_script(arguments: list[str], variables: dict[str, str], printed: str) -> None:
    """Be `python <arguments>`."""
    file = os.open(printed, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.clear()
    os.environ.update(variables)
    torch.set_num_threads(1)
    sys.argv = arguments
    sys.path.insert(0, str(Path(arguments[0]).parent))
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()  # which multiprocessing leaves out
