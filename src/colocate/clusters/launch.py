"""`colocate train --launcher ray`: the run's ranks are started, and begun again when one is lost."""

from __future__ import annotations

import asyncio
import signal
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from colocate.checkpoints.sealed import list_checkpoints
from colocate.clusters.cluster import connected, places
from colocate.clusters.process import present, run_directory
from colocate.clusters.start import Start
from colocate.parallel.ray_cluster import ClusterRequest

_STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)
"""Exit codes of a run that was saved when it was asked to stop."""


def launch(arguments: Sequence[str], values: Mapping[str, Any], ask: ClusterRequest) -> int:
    """Run `colocate <arguments>` as ranks of a Ray cluster; returns the exit code.

    Replicas are started and ended with the ranks. One that is lost is started again, while the ranks go on.
    When a rank's process or node is lost, all ranks are started again and go on from the newest checkpoint
    that this run has written; if there is none, they begin again. An error counts as a loss if a checkpoint
    was written since the ranks were started; an earlier one would only come again.

    Raises:
        ImportError: Ray is not installed.
        ValueError: the run's directory is not one that all nodes have, or its replicas do not fit the nodes.
        RuntimeError: a rank has failed for good, or a replica has never been ready; the message has its last
            lines. Or Ray cannot be used.
        TimeoutError: the cluster does not have what is asked.
    """
    run_id, output_dir = uuid.uuid4().hex[:8], Path(str(values.get("output_dir") or "trainer_output"))
    with connected(run_id) as is_embedded:
        if run_directory() is None and not output_dir.is_absolute():
            raise ValueError(
                f"output_dir={str(output_dir)!r} would be in the copy of the working directory that Ray "
                "makes on each node and deletes after the job: set the absolute path of one that all nodes "
                "share."
            )
        before = _checkpoints(output_dir)
        for attempt in range(ask.max_restarts + 1):
            # The newest is this run's if there is a new one. Else it would be one of an earlier run.
            found = _checkpoints(output_dir)
            own = ["--resume_from_checkpoint", "auto"] if found - before else []
            with places(ask, f"{run_id}-{attempt}", is_embedded=is_embedded) as groups:
                start = Start(ask, values, *groups)
                with present([*start.ranks, *start.replicas]):
                    ending = asyncio.run(start.run([*arguments, *own]))
            if ending.code == 0 or (ending.was_stopped and ending.code in _STOPPED):
                return ending.code
            is_new = bool(_checkpoints(output_dir) - found)
            is_worth_it = (ending.was_lost or is_new) and not ending.was_stopped
            if not is_worth_it or attempt == ask.max_restarts:
                again = f" They had been started again {attempt} times (--max_restarts)." if attempt else ""
                raise RuntimeError(f"{ending.text}\nAll other processes of the run were ended, too.{again}")
            said = f"The ranks are started again ({attempt + 1} of {ask.max_restarts} times)."
            print(f"\n{ending.text}\n{said}", file=sys.stderr, flush=True)
    raise AssertionError("the last attempt returns or raises")


def _checkpoints(output_dir: Path) -> set[tuple[Path, int]]:
    """The sealed checkpoints in a run's `output_dir`, each with the time of its last change."""
    return {(path, path.stat().st_mtime_ns) for path in list_checkpoints(output_dir)}
