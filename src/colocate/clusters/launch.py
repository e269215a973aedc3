"""`colocate train --launcher ray`: the run's ranks are started, and begun again when one is lost."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from colocate.clusters.cluster import Ask, connected, places
from colocate.clusters.ranks import Ranks


@dataclass(frozen=True)
class LaunchOptions:
    """What the command line says of the launch."""

    ask: Ask
    max_restarts: int
    """How often the ranks are started again after one was lost."""
    timeout_s: float
    """Seconds to wait for the cluster's resources at each start."""


def launch(arguments: Sequence[str], output_dir: str, options: LaunchOptions) -> int:
    """Run `colocate <arguments>` as ranks of a Ray cluster; returns the exit code.

    When a rank's process or node is lost, all ranks are started again and go on from the newest checkpoint
    that this run has written; if there is none, they begin again. An error is taken as a loss if a checkpoint
    was written since the ranks were started: one that comes before would only come again.

    Raises:
        ImportError: Ray is not installed.
        ValueError: the run's directory is not one that all nodes have.
        RuntimeError: a rank has failed for good; the message has its last lines. Or Ray cannot be used.
        TimeoutError: the cluster does not have what is asked.
    """
    run_id = uuid.uuid4().hex[:8]
    with connected(run_id) as is_embedded:
        before: frozenset[tuple[str, int]] | None = None
        for attempt in range(options.max_restarts + 1):
            name = f"{run_id}-{attempt}"
            with places(options.ask, name, options.timeout_s, is_embedded=is_embedded) as groups:
                ranks = Ranks(groups, options.ask, name)
                try:
                    ranks.enter(output_dir)
                    found = ranks.checkpoints(output_dir)
                    before = found if before is None else before
                    # The newest is then this run's. Else it would be one of an earlier run.
                    own = ["--resume_from_checkpoint", "auto"] if found - before else []
                    ranks.start([*arguments, *own])
                    ending = ranks.wait()
                    is_new = ending.code != 0 and bool(ranks.checkpoints(output_dir) - found)
                finally:
                    ranks.end()
            if ending.is_orderly:
                return ending.code
            is_worth_it = (ending.was_lost or is_new) and not ending.was_stopped
            if not is_worth_it or attempt == options.max_restarts:
                again = f" They had been started again {attempt} times (--max_restarts)." if attempt else ""
                raise RuntimeError(f"{ending.text}\nThe other ranks were ended, too.{again}")
            said = f"The ranks are started again ({attempt + 1} of {options.max_restarts} times)."
            print(f"\n{ending.text}\n{said}", file=sys.stderr, flush=True)
    raise AssertionError("the last attempt returns or raises")
