"""The replicas of a run on Ray: vLLM servers in actors, each started again in its place when it is lost.

The trainers find them by their addresses, as they find servers that somebody has started by hand, and the
pool of their engines gives a server that is back the weights of now before it gets a request.
"""

from __future__ import annotations

import os
import secrets
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from colocate.clusters.actor import News, Place, RankActor
from colocate.clusters.cluster import Ask, nodes_of
from colocate.clusters.ranks import Ending, brief, how_it_ended
from colocate.clusters.slices import cut
from colocate.engines.vllm_server.key import VARIABLE
from colocate.option_values import coerce
from colocate.parallel.tail import Tail
from colocate.redaction import redacted
from colocate.run_file import LAUNCH, REPLICAS

MEMORY_SHARE = 0.4
"""Share of a trainer's GPU that a colocated replica takes while it is awake, unless vLLM's options say."""
_START_S = 300.0
_ANSWER_S = 10.0
_READY = "is ready at"
"""What `colocate vllm-serve` prints once its server answers."""


@dataclass(frozen=True)
class ReplicaAsk:
    """What a run asks for: `count` vLLM servers on `size` GPUs each, which compute each pass together."""

    count: int
    size: int
    is_colocated: bool
    """On the ranks' GPUs, in turns with them; else on GPUs of their own."""
    on_gpus: bool
    vllm_options: tuple[str, ...] = ()
    """Options of vLLM, which override those that are set here."""

    @property
    def own(self) -> Ask:
        """What is asked of the cluster for replicas with GPUs of their own."""
        return Ask(self.count, self.size, self.on_gpus, is_one_actor=True)

    @property
    def words(self) -> str:
        """What the command line says to ask for this."""
        where = "colocated" if self.is_colocated else "own"
        asked = f"--num_replicas {self.count} --replica_gpus {self.size} --replica_placement {where}"
        return f"{asked} -- {shlex.join(self.vllm_options)}" if self.vllm_options else asked

    def command(self, values: Mapping[str, Any], host: str, port: int) -> list[str]:
        """What follows `colocate` to start one that serves the model of a run with the options `values`.

        It loads no weights: those of the trainer come before the first request.
        """
        bf16 = coerce("bf16", values.get("bf16"), bool | None)
        dtype = "bfloat16" if (self.on_gpus if bf16 is None else bf16) else values.get("dtype") or "float32"
        options = ["--load-format", "dummy", "--dtype", str(dtype)]
        for name, option in (("model_revision", "--revision"), ("vllm_max_model_length", "--max-model-len")):
            options += [option, str(values[name])] if values.get(name) is not None else []
        if coerce("trust_remote_code", values.get("trust_remote_code"), bool | None):
            options.append("--trust-remote-code")
        if self.is_colocated and self.on_gpus:
            options += ["--enable-sleep-mode", "--gpu-memory-utilization", str(MEMORY_SHARE)]
        return [
            *("vllm-serve", str(values["model_name_or_path"]), "--host", host, "--port", str(port)),
            *("--tensor-parallel-size", str(self.size if self.on_gpus else 1)),
            *("--", *options, *self.vllm_options),
        ]


class Seat(NamedTuple):
    """Where a replica is, and where it is started again after it was lost."""

    options: dict[str, Any]
    """Ray's, of its actor."""
    gpu_ids: tuple[str, ...] | None
    """Its GPUs, which are ranks' as well; None: the actor's own."""


def seats(
    ask: ReplicaAsk, groups: Sequence[Any], ranks: Sequence[Place], own_groups: Sequence[Any]
) -> list[Seat]:
    """The replicas' seats, in slices of the ranks' bundles or in groups of their own.

    A server beside ranks takes nothing of Ray's resources. It is bound to the node of its slice.

    Args:
        groups: the ranks' placement groups, and `ranks` their places, group by group.
        own_groups: the replicas' placement groups, where they have GPUs of their own.

    Raises:
        ValueError: the ranks' bundles cannot be cut into so many slices.
    """
    from ray.util.scheduling_strategies import (
        NodeAffinitySchedulingStrategy,
        PlacementGroupSchedulingStrategy,
    )

    if not ask.is_colocated:
        bundle = ask.own.bundles[0]
        resources = dict(num_cpus=bundle["CPU"], num_gpus=bundle.get("GPU", 0))
        strategies = [PlacementGroupSchedulingStrategy(group, 0) for group in own_groups]
        return [Seat({**resources, "scheduling_strategy": strategy}, None) for strategy in strategies]
    tables = [nodes_of(group) for group in groups]
    try:
        slices = cut(tables, ask.size, ask.count, "GPU" if ask.on_gpus else "CPU")
    except ValueError as error:
        raise ValueError(
            f"The ranks' nodes have no room for the replicas beside them: {error}. Ask for fewer or smaller "
            "ones, or set --replica_placement own."
        ) from error
    first = [sum(map(len, tables[:group])) for group in range(len(tables))]
    return [
        Seat(
            dict(
                num_cpus=0,
                num_gpus=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(str(each.node), soft=False),
            ),
            tuple(gpu for group, bundle in each.bundles for gpu in ranks[first[group] + bundle].gpu_ids),
        )
        for each in slices
    ]


@dataclass(frozen=True)
class Orders:
    """What all replicas of a run are started with.

    Args:
        values: the run's options.
        ranks: where the ranks are.
        directory: see `RankActor.place`.
        host: the address to listen on; None: that of each server's node.
        max_restarts: how often one is started again without having been ready in between.
    """

    ask: ReplicaAsk
    values: Mapping[str, Any]
    ranks: Sequence[Place]
    directory: str | None
    host: str | None
    max_restarts: int
    key: str = field(
        repr=False, default_factory=lambda: os.environ.get(VARIABLE) or secrets.token_urlsafe(32)
    )
    """The servers' key, of which only the run knows unless its user has set one."""

    def log(self, number: int) -> Path:
        """The file with all that a replica has written."""
        return Path(str(self.values.get("output_dir") or "trainer_output")) / f"replica-{number}.log"


class Replicas:
    """The servers of a run. `look`, called often, sees to them."""

    def __init__(self, orders: Orders, taken: Sequence[Seat]) -> None:
        self._orders = orders
        orders.log(0).parent.mkdir(parents=True, exist_ok=True)
        self._all = [_Replica(number, seat, orders) for number, seat in enumerate(taken)]
        self._asked = {replica.sit(): replica for replica in self._all}

    @property
    def variables(self) -> dict[str, str]:
        """What the ranks' environment has, so that they find the servers."""
        return {REPLICAS: ",".join(replica.url for replica in self._all), VARIABLE: self._orders.key}

    def start(self, *, are_awaited: bool) -> None:
        """Start all servers.

        Args:
            are_awaited: wait until each is ready. A server measures the memory that is free while it starts,
                and ranks on its GPUs must not take any meanwhile.

        Raises:
            RuntimeError: a server has ended, or its actor does not answer.
        """
        deadline_s = time.monotonic() + _START_S
        while not all(replica.url and (replica.is_ready or not are_awaited) for replica in self._all):
            if (ending := self.look()) is not None:
                raise RuntimeError(ending.text)
            if (late := [each for each in self._all if not each.url]) and time.monotonic() > deadline_s:
                raise RuntimeError(
                    f"{len(late)} of {len(self._all)} replicas could not be started: their actors have not "
                    f"answered for {_START_S:.0f} s."
                )
            time.sleep(0.05)

    def look(self) -> Ending | None:
        """Hear what the servers have said, and start those again that are lost; does not wait.

        Returns:
            The end of the run, if a server has ended that never was ready: it would end again.
        """
        import ray

        ready, _ = (
            ray.wait(list(self._asked), num_returns=len(self._asked), timeout=0) if self._asked else ([], 0)
        )
        for reference in ready:
            replica = self._asked.pop(reference)
            try:
                following, lost = replica.go_on(ray.get(reference)), replica.ended
                begin = replica.clear
            except ray.exceptions.RayError as error:
                following, lost = None, f"is lost with its node or its actor: {brief(error)}"
                begin = replica.sit
            if lost and not replica.was_ready:
                return Ending(1, replica.obituary(lost))
            if lost and self._is_worth_it(replica, lost):
                following = begin()
            if following is not None:
                self._asked[following] = replica
        return None

    def end(self) -> None:
        """Kill all servers with what they have started, and their actors."""
        import ray

        ends = [replica.actor.end.remote() for replica in self._all]
        with suppress(ray.exceptions.RayError):
            ray.wait(ends, num_returns=len(ends), timeout=_ANSWER_S)
        for replica in self._all:
            with suppress(ray.exceptions.RayError):
                ray.kill(replica.actor)

    def _is_worth_it(self, replica: _Replica, lost: str) -> bool:
        """Whether a replica is started again, which is said."""
        replica.num_restarts += 1
        most = self._orders.max_restarts
        is_worth_it = replica.num_restarts <= most
        follows = (
            f"It is started again in its place ({replica.num_restarts} of {most} times)."
            if is_worth_it
            else "It is given up (--max_restarts); the run goes on while one is left."
        )
        print(f"\n{replica.obituary(lost)}\n{follows}", file=sys.stderr, flush=True)
        return is_worth_it


@dataclass(eq=False)
class _Replica:
    """One server and what is known of it. Methods that ask its actor return what Ray's answer is found by."""

    number: int
    seat: Seat
    orders: Orders
    actor: Any = None
    url: str = ""
    ended: str = ""
    """How the server has ended; empty: it runs, or is about to."""
    is_ready: bool = False
    was_ready: bool = False
    num_restarts: int = 0
    """Since it was last ready."""
    _place: Place | None = None
    _port: int = 0
    _pid: int = 0
    _tail: Tail = field(default_factory=lambda: Tail(None))
    _heard: str = ""
    """The end of what it has said, until it is ready."""

    def sit(self) -> Any:
        """Take the seat, with a new actor."""
        import ray

        remote: Any = ray.remote(RankActor)
        limits = dict(max_restarts=0, max_task_retries=0, max_concurrency=4)
        self.actor, self.ended = remote.options(**self.seat.options, **limits).remote(), ""
        return self.actor.place.remote(self.orders.directory)

    def clear(self) -> Any:
        """End what a server that has ended has left behind."""
        self.ended = ""
        return self.actor.end.remote()

    def go_on(self, answer: Place | int | News | None) -> Any:
        """Take the actor's answer to the last question, and ask the next one; None: the server has ended."""
        if isinstance(answer, News):
            self._hear(answer)
            if answer.code is not None:
                self.ended = how_it_ended(answer.code)
                return None
            return self.actor.follow.remote()
        if isinstance(answer, int):
            self._pid, self.is_ready = answer, False
            return self.actor.follow.remote()
        if answer is not None:
            self._place = answer
            self._port = self._port or answer.free_port  # the trainers know the address
            self.url = f"http://{self._host}:{self._port}"
        command = self.orders.ask.command(self.orders.values, self._host, self._port)
        return self.actor.start.remote(command, self._variables(), None)

    def obituary(self, lost: str) -> str:
        where = f" ({self._place.host}, pid {self._pid}, {self.url})" if self._place and self._pid else ""
        lines = "".join(f"\n    {redacted(line)}" for line in self._tail.lines())
        said = (
            f" Its last lines, of {self.orders.log(self.number)}:{lines}"
            if lines
            else " It had said nothing."
        )
        return f"replica {self.number}{where} {lost}.{said}"

    @property
    def _host(self) -> str:
        assert self._place is not None, "its actor has told where it is"
        return self.orders.host or self._place.address

    def _variables(self) -> dict[str, str]:
        """Its own GPUs come first. Those of the node's ranks follow, as weights are read from a rank's."""
        assert self._place is not None
        own = self._place.gpu_ids if self.seat.gpu_ids is None else self.seat.gpu_ids
        ranks = [rank for rank in self.orders.ranks if rank.address == self._place.address]
        return {
            "CUDA_VISIBLE_DEVICES": ",".join(
                dict.fromkeys((*own, *(i for rank in ranks for i in rank.gpu_ids)))
            ),
            "PYTHONUNBUFFERED": "1",
            VARIABLE: self.orders.key,
            LAUNCH: self.orders.ask.words,
        }

    def _hear(self, news: News) -> None:
        text = b"".join(chunk for _, chunk in news.chunks).decode(errors="replace")
        if not text:
            return
        with self.orders.log(self.number).open("a", encoding="utf-8") as log:
            log.write(redacted(text))
        self._tail.write(text)
        self._heard += text
        if not self.is_ready and _READY in self._heard:
            self.is_ready, self.was_ready, self.num_restarts = True, True, 0
        self._heard = self._heard[-len(_READY) :]
