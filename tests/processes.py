"""Scripts in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
"""Before a script: two processes of it."""

SOURCE = Path(__file__).parents[1] / "src"


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
