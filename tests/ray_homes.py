"""Where tests let Ray write, what its processes have in their environment, and whether any is left."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from processes import SOURCE

FOREIGN = {"SLURM_PROCID": "7", "PMI_RANK": "7", "PMIX_RANK": "7", "OMPI_COMM_WORLD_RANK": "7"}
"""What other launchers leave in an environment."""


@contextmanager
def home_of_ray() -> Iterator[Path]:
    """A directory for what Ray writes; its path is short, as those of its sockets must be.

    Every process that is started here has it in its environment: none may be left.
    """
    directory = Path(tempfile.mkdtemp(prefix="ray"))
    yield directory
    left = wait_for_end(str(directory))
    shutil.rmtree(directory)
    assert left == []


def environment_of_ray(home: Path) -> dict[str, str]:
    """For a driver whose cluster is its own, below `home`, and that another launcher has started."""
    given = {"HOME": str(home), "RAY_TMPDIR": str(home), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    paths = os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")])
    return os.environ | given | FOREIGN | {"PYTHONPATH": paths, "RAY_ADDRESS": "local"}


def wait_for_end(mark: str, seconds: float = 60) -> list[int]:
    """The processes that are left of those with a mark after so long."""
    end_s = time.monotonic() + seconds
    while (left := marked(mark)) and time.monotonic() < end_s:
        time.sleep(0.2)
    return left


def wait_for_number(mark: str, number: int, seconds: float = 30) -> list[int]:
    """The processes with a mark once there are so many of them, or after so long. A process that has just
    begun shows none of its variables until it runs its program."""
    end_s = time.monotonic() + seconds
    while len(found := marked(mark)) != number and time.monotonic() < end_s:
        time.sleep(0.05)
    return found


def marked(mark: str) -> list[int]:
    """Other processes that have inherited a variable with this value, and are not dead."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            is_dead = (path / "stat").read_text().rpartition(")")[2].split()[0] in "ZX"
            if (
                not is_dead
                and path.name != str(os.getpid())
                and mark.encode() in (path / "environ").read_bytes()
            ):
                found.append(int(path.name))
        except OSError:
            continue
    return found
