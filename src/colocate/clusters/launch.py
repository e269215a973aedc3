"""`colocate train --launcher ray`: the run's ranks are started, and begun again when one is lost."""

from __future__ import annotations

import os
import signal
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from colocate.clusters.cluster import Ask, connected, places
from colocate.clusters.process import present
from colocate.clusters.ranks import Ranks
from colocate.clusters.replicas import ReplicaAsk, Replicas
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
    """What the command line says of ranks and replicas, for the command to go on."""
    replicas: ReplicaAsk = field(default_factory=ReplicaAsk)
    """The vLLM servers that are started with the ranks."""


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
        directory, before = run_directory(output_dir), _checkpoints(output_dir)
        for attempt in range(options.max_restarts + 1):
            # The newest is this run's if there is a new one. Else it would be one of an earlier run.
            found = _checkpoints(output_dir)
            own = ["--resume_from_checkpoint", "auto"] if found - before else []
            name = f"{run_id}-{attempt}"
            with processes(options, values, name, directory, is_embedded=is_embedded) as (ranks, replicas):
                ranks.start([*arguments, *own], {LAUNCH: options.words, **replicas.variables})
                ending = ranks.wait(replicas.look)
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
    options: LaunchOptions, values: Mapping[str, Any], name: str, directory: str | None, *, is_embedded: bool
) -> Iterator[tuple[Ranks, Replicas]]:
    """A run's ranks at their places, and its replicas, started; all end with the block.

    Args:
        name: what the names of the placement groups begin with.
        directory: see `ProcessActor.place`.

    Raises:
        ValueError, RuntimeError, TimeoutError: see `launch`.
    """
    ask, wanted = options.ask, options.replicas
    with ExitStack() as stack:
        find = partial(places, timeout_s=options.timeout_s, is_embedded=is_embedded)
        groups = stack.enter_context(find(ask, name))
        ranks = Ranks(groups, ask, directory)
        stack.enter_context(present(ranks.all))
        own = []
        if not wanted.is_colocated:
            beside = find(wanted.own, f"{name}-replica", num_taken=ask.num_ranks)
            own = stack.enter_context(beside)
        replicas = Replicas(wanted, values, groups, ranks.places, own, directory, options.max_restarts)
        stack.enter_context(present(replicas.all))
        replicas.start()
        yield ranks, replicas


def run_directory(output_dir: Path) -> str | None:
    """The directory that the run's processes enter; see `ProcessActor.place`.

    Raises:
        ValueError: Ray has copied the working directory, and `output_dir` would be in the copy.
    """
    import ray

    if "working_dir" not in ray.get_runtime_context().runtime_env:
        return os.getcwd()
    if not output_dir.is_absolute():
        raise ValueError(
            f"output_dir={str(output_dir)!r} would be in the copy of the working directory that Ray makes on "
            "each node and deletes after the job: set the absolute path of one that all nodes share."
        )
    return None


def _checkpoints(output_dir: Path) -> set[tuple[str, int]]:
    """Name and time of each checkpoint in a run's `output_dir`. Only whole ones have such names."""
    paths = output_dir.glob("checkpoint-*")
    return {(path.name, path.stat().st_mtime_ns) for path in paths if path.name[11:].isdigit()}
