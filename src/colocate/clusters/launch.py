"""`colocate train --launcher ray`: the run's ranks are started, and begun again when one is lost."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from colocate.clusters.cluster import Ask, connected, nodes_of, places
from colocate.clusters.ranks import Ranks, run_directory
from colocate.clusters.replicas import Orders, ReplicaAsk, Replicas, seats
from colocate.run_file import LAUNCH


@dataclass(frozen=True)
class LaunchOptions:
    """What the command line says of the launch."""

    ask: Ask
    max_restarts: int
    """How often the ranks are started again after one was lost."""
    timeout_s: float
    """Seconds to wait for the cluster's resources at each start."""
    replicas: ReplicaAsk | None = None
    """The vLLM servers that are started with the ranks."""

    @property
    def words(self) -> str:
        """What the command line says to ask for ranks and replicas."""
        return self.ask.options if self.replicas is None else f"{self.ask.options} {self.replicas.words}"


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
    run_id, output_dir = uuid.uuid4().hex[:8], str(values.get("output_dir") or "trainer_output")
    with connected(run_id) as is_embedded:
        before: frozenset[tuple[str, int]] | None = None
        for attempt in range(options.max_restarts + 1):
            name = f"{run_id}-{attempt}"
            with ExitStack() as stack:
                groups = stack.enter_context(
                    places(options.ask, name, options.timeout_s, is_embedded=is_embedded)
                )
                ranks = Ranks(groups, options.ask, name)
                stack.callback(ranks.end)
                ranks.enter(directory := run_directory(output_dir))
                found = ranks.checkpoints(output_dir)
                before = found if before is None else before
                # The newest is then this run's. Else it would be one of an earlier run.
                own = ["--resume_from_checkpoint", "auto"] if found - before else []
                replicas = None
                if options.replicas is not None:
                    replicas = stack.enter_context(
                        _replicas(options, values, name, directory, groups, ranks, is_embedded=is_embedded)
                    )
                variables = {LAUNCH: options.words, **(replicas.variables if replicas else {})}
                ranks.start([*arguments, *own], variables)
                ending = ranks.wait(replicas.look) if replicas else ranks.wait()
                is_new = ending.code != 0 and bool(ranks.checkpoints(output_dir) - found)
            if ending.is_orderly:
                return ending.code
            is_worth_it = (ending.was_lost or is_new) and not ending.was_stopped
            if not is_worth_it or attempt == options.max_restarts:
                again = f" They had been started again {attempt} times (--max_restarts)." if attempt else ""
                raise RuntimeError(f"{ending.text}\nThe other ranks were ended, too.{again}")
            said = f"The ranks are started again ({attempt + 1} of {options.max_restarts} times)."
            print(f"\n{ending.text}\n{said}", file=sys.stderr, flush=True)
    raise AssertionError("the last attempt returns or raises")


@contextmanager
def _replicas(
    options: LaunchOptions,
    values: Mapping[str, Any],
    name: str,
    directory: str | None,
    groups: Sequence[Any],
    ranks: Ranks,
    *,
    is_embedded: bool,
) -> Iterator[Replicas]:
    """The run's replicas, started; they end with the block.

    Args:
        groups: the placement groups of the ranks.
        directory: see `RankActor.place`.

    Raises:
        ValueError, RuntimeError, TimeoutError: see `launch`.
    """
    assert options.replicas is not None
    ask, own_groups = options.replicas, []
    with ExitStack() as stack:
        if not ask.is_colocated:
            taken = options.ask.num_ranks
            own_groups = stack.enter_context(
                places(
                    ask.own, f"{name}-replica", options.timeout_s, is_embedded=is_embedded, num_taken=taken
                )
            )
        nodes = {node for group in (*groups, *own_groups) for node in nodes_of(group)}
        orders = Orders(
            ask,
            values,
            ranks.places,
            directory,
            "127.0.0.1" if len(nodes) == 1 else None,
            options.max_restarts,
        )
        replicas = Replicas(orders, seats(ask, groups, ranks.places, own_groups))
        stack.callback(replicas.end)
        replicas.start(are_awaited=ask.is_colocated and ask.on_gpus)
        yield replicas
