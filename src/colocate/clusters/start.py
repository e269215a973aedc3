"""One start of a run on Ray: all ranks and servers at their places, until one of them ends it."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from colocate.checkpoints.stop_signals import StopSignals
from colocate.clusters.cluster import nodes_of, seat
from colocate.clusters.process import ANSWER_S, Ending
from colocate.clusters.rank import Rank
from colocate.clusters.replica import Replica
from colocate.http.key import VARIABLE
from colocate.options.run_file import LAUNCH, REPLICAS
from colocate.parallel.ray_cluster import ClusterRequest, RayPlace
from colocate.parallel.slices import cut
from colocate.rollout_server.command_line import serve_command

_LOOK_S = 0.2
"""Seconds after which signals are looked at again."""
GRACE_S = 12.0
"""Seconds for the other ranks after one has ended with an error: they may come to the same error, or tell of
it (`watch.GRACE_S` is shorter)."""


class Start:
    """The processes of one start.

    Args:
        groups: the ranks' placement groups, one for each node.
        own_groups: placement groups of servers that have GPUs of their own. Other servers are in slices of
            the ranks' bundles, and take none of Ray's resources there.

    Raises:
        ValueError: the ranks' bundles cannot be cut into so many slices.
    """

    def __init__(
        self, ask: ClusterRequest, values: Mapping[str, Any], groups: Sequence[Any], own_groups: Sequence[Any]
    ) -> None:
        self._ask, self._values, self._groups = ask, values, groups
        # Only the run knows the servers' key, unless its user has set one.
        self._key = os.environ.get(VARIABLE) or secrets.token_urlsafe(32)
        bundles = product(groups, range(ask.ranks_per_node))
        self.ranks = [Rank(number, seat(*each, 1 / ask.shares)) for number, each in enumerate(bundles)]
        output_dir = Path(str(values.get("output_dir") or "trainer_output"))
        own_seats: list[tuple[Any, list[Rank]]] = [(seat(group, 0, 1), []) for group in own_groups]
        seats = self._seats_beside() if ask.is_colocated else own_seats
        self.replicas = [
            Replica(number, *each, output_dir / f"replica-{number}.log") for number, each in enumerate(seats)
        ]

    def _seats_beside(self) -> list[tuple[dict[str, Any], list[Rank]]]:
        """Ray's options of each colocated replica's actor, and the ranks whose GPUs it has."""
        ask = self._ask
        try:
            slices = cut([*map(nodes_of, self._groups)], ask.replica_size, ask.num_replicas, ask.kinds[0])
        except ValueError as error:
            raise ValueError(
                f"The ranks' nodes have no room for the replicas beside them: {error}. Ask for fewer or "
                "smaller ones, or set --replica_placement own."
            ) from error
        seats = []
        for each in slices:
            (first, number), *_ = each.bundles
            beside = [self.ranks[group * ask.ranks_per_node + bundle] for group, bundle in each.bundles]
            seats.append((seat(self._groups[first], number, 0), beside))
        return seats

    async def run(self, arguments: Sequence[str]) -> Ending:
        """Keep the replicas, and run `colocate <arguments>` as the ranks beside them: whichever ends first,
        ends the run. Ctrl-C a second time raises KeyboardInterrupt."""
        parts = [*self.keep_replicas(), asyncio.create_task(self._run_ranks(arguments))]
        ended, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        return ended.pop().result()

    def keep_replicas(self) -> list[asyncio.Task[Ending]]:
        """Start all servers; returns a task for each (`Replica.keep`)."""
        tasks, of_ranks = [], [rank.place for rank in self.ranks]
        addresses = {place.address for place in (*of_ranks, *(replica.place for replica in self.replicas))}
        for replica in self.replicas:
            place = replica.place
            host = "127.0.0.1" if len(addresses) == 1 else place.address
            replica.url = f"http://{host}:{place.free_port}"
            # Its own GPUs come first. Those of the node's ranks follow, as weights are read from a rank's.
            own = [gpu for each in replica.beside or [replica] for gpu in each.place.gpu_ids]
            others = [gpu for rank in of_ranks if rank.address == place.address for gpu in rank.gpu_ids]
            gpu_ids = ",".join(dict.fromkeys([*own, *others]))
            variables = {"CUDA_VISIBLE_DEVICES": gpu_ids, VARIABLE: self._key, LAUNCH: "a replica"}
            arguments = serve_command(self._ask, self._values, host, place.free_port)
            kept = replica.keep(arguments, variables, self._ask.max_restarts)
            tasks.append(asyncio.create_task(kept))
        return tasks

    async def _run_ranks(self, arguments: Sequence[str]) -> Ending:
        """Start all ranks, and show their output until all have ended, or one has failed. The first Ctrl-C
        and SIGTERM are passed on: the ranks finish and save their step, and end."""
        # A server measures the memory that is free while it starts: ranks must not take any of it meanwhile.
        is_measured = self._ask.is_colocated and self._ask.on_gpus
        while is_measured and not all(replica.is_ready for replica in self.replicas):
            await asyncio.sleep(_LOOK_S)
        going: dict[asyncio.Task[Ending], Rank] = {}
        for number, rank in enumerate(self.ranks):
            going[asyncio.create_task(rank.run(arguments, self.variables(number)))] = rank
        failures: list[Ending] = []
        until_s, num_passed_on = float("inf"), 0
        with StopSignals() as stop:
            while going and time.monotonic() < until_s and not any(each.was_lost for each in failures):
                ended, _ = await asyncio.wait(going, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                failures += [ending for task in ended if (ending := task.result()).code]
                going = {task: rank for task, rank in going.items() if task not in ended}
                if failures and not stop.noted:
                    until_s = min(until_s, time.monotonic() + GRACE_S)
                for signal in stop.noted[num_passed_on:]:
                    num_passed_on += 1
                    for rank in self.ranks:
                        rank.actor.signal.remote(signal)
        for rank in going.values() if failures else ():
            if (silence_s := time.monotonic() - rank.heard_s) > ANSWER_S:
                failures.append(rank.ending(f"is lost: nothing was heard of it for {silence_s:.0f} s"))
        failures.sort(key=lambda failure: failure.order)
        return replace([*failures, Ending(0)][0], was_stopped=bool(stop.noted))

    def variables(self, number: int) -> dict[str, str]:
        """The environment variables of a rank: those that torchrun would set, the GPUs of all ranks of its
        node (LOCAL_RANK is the index of its own), and the servers' addresses."""
        places, per_node = [rank.place for rank in self.ranks], self._ask.ranks_per_node
        first = number - number % per_node
        gpu_ids = [gpu for place in places[first : first + per_node] for gpu in place.gpu_ids]
        urls = ",".join(replica.url for replica in self.replicas)
        return {
            "RANK": str(number),
            "WORLD_SIZE": str(len(places)),
            "LOCAL_RANK": str(number - first),
            "LOCAL_WORLD_SIZE": str(per_node),
            "MASTER_ADDR": places[0].address,
            "MASTER_PORT": str(places[0].free_port),
            "CUDA_VISIBLE_DEVICES": ",".join(sorted(gpu_ids, key=lambda gpu: (len(gpu), gpu))),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            LAUNCH: self._ask.words,
            **({REPLICAS: urls, VARIABLE: self._key} if urls else {}),
            **self._ray_place().as_variable(),
            **{name: os.environ[name] for name in ("TERM", "COLORTERM") if name in os.environ},
        }

    def _ray_place(self) -> RayPlace:
        import ray
        from ray.util.placement_group import placement_group_table

        context = ray.get_runtime_context()
        return RayPlace(
            address=context.gcs_address,
            namespace=context.namespace,
            groups=tuple(placement_group_table(group)["name"] for group in self._groups),
            sizes=(self._ask.ranks_per_node,) * len(self._groups),
            shares=self._ask.shares,
        )
