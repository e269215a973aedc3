"""The replicas of a run on Ray: rollout servers, each started again in its place when it is lost or hangs.

The trainers find them by their addresses, as they find servers that somebody has started by hand, and the
pool of their engines gives a server that is back the weights of now before it gets a request.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from colocate.clusters.actor import Place
from colocate.clusters.cluster import seat
from colocate.clusters.process import Ending, Process
from colocate.commands.rollout_serve import serve_command
from colocate.engines.rollout_server.key import VARIABLE
from colocate.parallel.ask import Ask
from colocate.parallel.slices import cut
from colocate.redaction import redacted
from colocate.run_file import LAUNCH, REPLICAS

_STEP = "/is_paused"
"""A question that vLLM's engine answers in its loop, between two steps: each answer tells that the loop has
come round again, also where there is nothing to draw. A native server answers with an error if its engine has
ended, or has been in a step for longer than one takes."""
QUESTION_S, ANSWER_S, PATIENCE = 1.0, 10.0, 6
"""Seconds between an answer and the next question, seconds for an answer, and how many on end may be missing:
a minute. What holds an engine's loop for a while, such as a piece of the weights, takes seconds."""
START_S = 1800.0
"""Seconds after which a server hangs that has not answered yet: a large model is loaded in less."""


class Replica(Process):
    """A server, which is started again when it is lost. What it says is appended to its log.

    Args:
        gpu_ids: its GPUs, if they are ranks' and not its actor's own.
    """

    is_ready = False
    """It has answered since it was last started."""
    _is_hung = False

    def __init__(self, number: int, seat: Mapping[str, Any], gpu_ids: Sequence[str], log: Path) -> None:
        super().__init__(f"replica {number}", seat, f", of {log}")
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log, self.gpu_ids = log, gpu_ids

    def say(self, number: int, text: str) -> None:
        with self._log.open("a", encoding="utf-8") as log:
            log.write(redacted(text))
        self.tail.write(text)

    async def keep(self, arguments: Sequence[str], variables: Mapping[str, str], max_restarts: int) -> Ending:
        """Run the server, and start it again in its place whenever it is lost.

        Args:
            arguments, variables: see `ProcessActor.start`; the variables have the server's key.
            max_restarts: how often it is started again without having been ready in between.

        Returns:
            How it has ended, if it never was ready: it would end again.
        """
        num_restarts, was_ready = 0, False
        while num_restarts <= max_restarts:
            self.is_ready = self._is_hung = False
            watch = asyncio.create_task(self._watch(variables[VARIABLE]))
            ending = await self.run(arguments, variables)
            watch.cancel()
            if self._is_hung:
                late = "did not answer for half an hour, and was killed"
                lost = "did not answer any more, though it ran, and was killed"
                ending = self.ending(lost if self.is_ready else late)
            was_ready = was_ready or self.is_ready
            if not was_ready:
                return Ending(1, ending.text)
            num_restarts = 1 if self.is_ready else num_restarts + 1
            follows = f"It is started again in its place ({num_restarts} of {max_restarts} times)."
            if num_restarts > max_restarts:
                follows = "It is given up (--max_restarts); the run goes on while one is left."
            print(f"\n{ending.text}\n{follows}", file=sys.stderr, flush=True)
        return await asyncio.Future()  # it takes no part any more in how the run ends

    async def _watch(self, key: str) -> None:
        """Find out when the server is ready, and kill it when it hangs."""
        import ray

        begin_s, num_unanswered = time.monotonic(), 0
        with suppress(ray.exceptions.RayError):  # of which `run` tells
            while num_unanswered < PATIENCE:
                await asyncio.sleep(QUESTION_S)
                if await self.actor.answers.remote(self.url + _STEP, key, ANSWER_S):
                    self.is_ready, num_unanswered = True, 0
                else:
                    num_unanswered += self.is_ready or time.monotonic() - begin_s > START_S
            self._is_hung = True
            await self.actor.end.remote()


class Replicas:
    """The servers of a run, at their places.

    Args:
        values: the run's options.
        ranks: the ranks' places, and `groups` their placement groups, both node by node.
        own_groups: the servers' placement groups, where they have GPUs of their own. Else they are in slices
            of the ranks' bundles, and take nothing of Ray's resources there.

    Raises:
        ValueError: the ranks' bundles cannot be cut into so many slices.
    """

    def __init__(
        self,
        ask: Ask,
        values: Mapping[str, Any],
        ranks: Sequence[Place],
        groups: Sequence[Any],
        own_groups: Sequence[Any],
    ) -> None:
        self._ask, self._values, self._ranks = ask, values, ranks
        # Only the run knows the servers' key, unless its user has set one.
        self._key = os.environ.get(VARIABLE) or secrets.token_urlsafe(32)
        output_dir = Path(str(values.get("output_dir") or "trainer_output"))
        seats = _seats_beside(ask, ranks, groups) if ask.is_colocated else map(_seat_of, own_groups)
        self.all = [
            Replica(number, *seat, output_dir / f"replica-{number}.log") for number, seat in enumerate(seats)
        ]

    @property
    def variables(self) -> dict[str, str]:
        """What the ranks' environment has, so that they find the servers."""
        urls = ",".join(replica.url for replica in self.all)
        return {REPLICAS: urls, VARIABLE: self._key} if urls else {}

    def keep(self) -> list[asyncio.Task[Ending]]:
        """Start all servers; returns what keeps each of them (`Replica.keep`)."""
        tasks = []
        addresses = {place.address for place in (*self._ranks, *(replica.place for replica in self.all))}
        for replica in self.all:
            place = replica.place
            host = "127.0.0.1" if len(addresses) == 1 else place.address
            replica.url = f"http://{host}:{place.free_port}"
            # Its own GPUs come first. Those of the node's ranks follow, as weights are read from a rank's.
            beside = [gpu for rank in self._ranks if rank.address == place.address for gpu in rank.gpu_ids]
            gpu_ids = dict.fromkeys((*(replica.gpu_ids or place.gpu_ids), *beside))
            variables = {
                "CUDA_VISIBLE_DEVICES": ",".join(gpu_ids),
                "PYTHONUNBUFFERED": "1",
                VARIABLE: self._key,
                LAUNCH: "a replica",
            }
            arguments = serve_command(self._ask, self._values, host, place.free_port)
            kept = replica.keep(arguments, variables, self._ask.max_restarts)
            tasks.append(asyncio.create_task(kept))
        return tasks

    async def started(self) -> None:
        """Wait until ranks can be started beside the servers.

        A server measures the memory that is free while it starts, and ranks on its GPUs must not take any
        meanwhile: such servers must be ready.
        """
        is_awaited = self._ask.is_colocated and self._ask.on_gpus
        while is_awaited and not all(replica.is_ready for replica in self.all):
            await asyncio.sleep(0.05)


def _seat_of(group: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Ray's options of the actor of a replica that has a placement group; its GPUs are the actor's."""
    (taken,) = group.bundle_specs
    return seat(group, 0, taken["CPU"], taken.get("GPU", 0)), ()


def _seats_beside(
    ask: Ask, ranks: Sequence[Place], groups: Sequence[Any]
) -> Iterator[tuple[dict[str, Any], tuple[str, ...]]]:
    """For each colocated replica Ray's options of its actor, and its GPUs, which are ranks'."""
    size = ask.ranks_per_node
    nodes = [ranks[first : first + size] for first in range(0, len(ranks), size)]
    tables = [[place.node_id for place in node] for node in nodes]
    try:
        slices = cut(tables, ask.replica_size, ask.num_replicas, ask.kinds[0])
    except ValueError as error:
        raise ValueError(
            f"The ranks' nodes have no room for the replicas beside them: {error}. Ask for fewer or smaller "
            "ones, or set --replica_placement own."
        ) from error
    for each in slices:
        (first, bundle), *_ = each.bundles
        gpu_ids = tuple(gpu for node, bundle in each.bundles for gpu in nodes[node][bundle].gpu_ids)
        yield seat(groups[first], bundle, 0, 0), gpu_ids
