"""`colocate train --launcher ray`: the run's ranks are started, and begun again when one is lost."""

from __future__ import annotations

import asyncio
import signal
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colocate.clusters.cluster import Ask, connected, places
from colocate.clusters.process import Ending, present, run_directory
from colocate.clusters.ranks import Ranks
from colocate.clusters.replicas import Replicas
from colocate.run_file import LAUNCH

_STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)
"""Exit codes of a run that was saved when it was asked to stop."""


@dataclass(frozen=True)
class LaunchOptions:
    """What the command line says of the launch."""

    ask: Ask
    max_restarts: int
    """How often the ranks are started again after one was lost."""
    timeout_s: float
    """Seconds to wait for the cluster's resources at each start."""
    words: str
    """What the command line says of all this, for the command to go on."""


def launch(arguments: Sequence[str], values: Mapping[str, Any], options: LaunchOptions) -> int:
    """Run `colocate <arguments>` as ranks of a Ray cluster; returns the exit code.

    Replicas are started and ended with the ranks. One that is lost is started again, while the ranks go on.

    When a rank's process or node is lost, all ranks are started again and go on from the newest checkpoint
    that this run has written; if there is none, they begin again. An error is taken as a loss if a checkpoint
    was written since the ranks were started: one that comes before would only come again.

    Args:
        values: the run's options, as run file and command line give them.

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
        for attempt in range(options.max_restarts + 1):
            # The newest is this run's if there is a new one. Else it would be one of an earlier run.
            found = _checkpoints(output_dir)
            own = ["--resume_from_checkpoint", "auto"] if found - before else []
            name = f"{run_id}-{attempt}"
            with processes(options, values, name, is_embedded=is_embedded) as (ranks, replicas):
                ending = asyncio.run(_run(ranks, replicas, [*arguments, *own], options))
            if ending.code == 0 or (ending.was_stopped and ending.code in _STOPPED):
                return ending.code
            is_new = bool(_checkpoints(output_dir) - found)
            is_worth_it = (ending.was_lost or is_new) and not ending.was_stopped
            if not is_worth_it or attempt == options.max_restarts:
                again = f" They had been started again {attempt} times (--max_restarts)." if attempt else ""
                raise RuntimeError(f"{ending.text}\nThe other ranks were ended, too.{again}")
            said = f"The ranks are started again ({attempt + 1} of {options.max_restarts} times)."
            print(f"\n{ending.text}\n{said}", file=sys.stderr, flush=True)
    raise AssertionError("the last attempt returns or raises")


@contextmanager
def processes(
    options: LaunchOptions, values: Mapping[str, Any], name: str, *, is_embedded: bool
) -> Iterator[tuple[Ranks, Replicas]]:
    """The places of a run's ranks and replicas, with an actor at each; all end with the block.

    Args:
        name: what the names of the placement groups begin with.

    Raises:
        ValueError, RuntimeError, TimeoutError: see `launch`.
    """
    ask = options.ask
    with places(ask, name, options.timeout_s, is_embedded=is_embedded) as groups:
        of_ranks, own = groups[: ask.num_nodes], groups[ask.num_nodes :]
        ranks = Ranks(of_ranks, ask)
        with present(ranks.all):
            replicas = Replicas(ask, values, of_ranks, ranks.places, own)
            with present(replicas.all):
                yield ranks, replicas


async def _run(ranks: Ranks, replicas: Replicas, arguments: Sequence[str], options: LaunchOptions) -> Ending:
    """Keep the replicas, and run the ranks beside them: the first of all these that ends, ends the run."""
    kept = replicas.keep(options.max_restarts)

    async def run_ranks() -> Ending:
        await replicas.started()
        return await ranks.run(arguments, {LAUNCH: options.words, **replicas.variables})

    ended, _ = await asyncio.wait(
        [asyncio.create_task(run_ranks()), *kept], return_when=asyncio.FIRST_COMPLETED
    )
    return ended.pop().result()


def _checkpoints(output_dir: Path) -> set[tuple[str, int]]:
    """Name and time of each checkpoint in a run's `output_dir`. Only whole ones have such names."""
    paths = output_dir.glob("checkpoint-*")
    return {(path.name, path.stat().st_mtime_ns) for path in paths if path.name[11:].isdigit()}
