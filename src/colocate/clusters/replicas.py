"""The replicas of a run on Ray: rollout servers, each started again in its place when it is lost or hangs.

The trainers find them by their addresses, as they find servers that somebody has started by hand, and the
pool of their engines gives a server that is back the weights of now before it gets a request.
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from colocate.clusters.actor import Place
from colocate.clusters.cluster import Ask, nodes_of
from colocate.clusters.process import Ending, Process, hear
from colocate.engines.rollout_server.key import VARIABLE
from colocate.option_values import coerce
from colocate.parallel.slices import cut
from colocate.redaction import redacted
from colocate.run_file import LAUNCH, REPLICAS

MEMORY_SHARE = 0.4
"""Share of a trainer's GPU that a colocated server of vLLM takes while awake, unless vLLM's options say."""
_STEP = "/is_paused"
"""A question that vLLM's engine answers in its loop, between two steps: each answer tells that the loop has
come round again, also where there is nothing to draw. A native server answers with an error if its engine has
ended, or has been in a step for longer than one takes."""
ANSWER_S, PATIENCE = 10.0, 6
"""Seconds for an answer, and how many on end may be missing: a minute. What holds an engine's loop for a
while, such as a piece of the weights, takes seconds."""


def serve_command(ask: Ask, values: Mapping[str, Any], host: str, port: int) -> list[str]:
    """What follows `colocate` to start a server of the model of a run with the options `values`.

    vLLM loads no weights: those of the trainer come before the first request.
    """
    bf16 = coerce("bf16", values.get("bf16"), bool | None)
    dtype = "bfloat16" if (ask.on_gpus if bf16 is None else bf16) else values.get("dtype") or "float32"
    options = ["--dtype", str(dtype)]
    for name, option in (("model_revision", "--revision"), ("vllm_max_model_length", "--max-model-len")):
        options += [option, str(values[name])] if values.get(name) is not None else []
    if coerce("trust_remote_code", values.get("trust_remote_code"), bool | None):
        options.append("--trust-remote-code")
    takes_turns = ask.is_colocated and ask.on_gpus
    options += ["--enable-sleep-mode"] if takes_turns else []
    command = ["rollout-serve", str(values["model_name_or_path"]), "--engine", ask.replica_engine]
    command += ["--host", host, "--port", str(port)]
    if ask.replica_engine == "native":
        return [*command, *options, *([] if ask.on_gpus else ["--use_cpu"])]
    command += ["--tensor-parallel-size", str(ask.replica_size if ask.on_gpus else 1)]
    share = ["--gpu-memory-utilization", str(MEMORY_SHARE)] if takes_turns else []
    return [*command, "--", "--load-format", "dummy", *options, *share]


class Replica(Process):
    """A server. What it says is appended to its log.

    Args:
        gpu_ids: its GPUs, if they are ranks' and not its actor's own.
    """

    num_restarts = 0
    """Since it was last ready."""
    orders: dict[str, Any]
    """What it is started with."""

    def __init__(self, number: int, options: Mapping[str, Any], gpu_ids: Sequence[str], log: Path) -> None:
        super().__init__(f"replica {number}", options, f", of {log}")
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log, self.gpu_ids = log, gpu_ids

    def say(self, number: int, text: str) -> None:
        with self._log.open("a", encoding="utf-8") as log:
            log.write(redacted(text))
        self.tail.write(text)


class Replicas:
    """The servers of a run, at their places. `look`, called often, sees to them.

    Args:
        values: the run's options.
        vllm_options: options of vLLM, which override those that are set here.
        groups: the ranks' placement groups, and `ranks` their places, group by group.
        own_groups: the servers' placement groups, where they have GPUs of their own. Else they are in slices
            of the ranks' bundles, and take nothing of Ray's resources there.
        max_restarts: how often one is started again without having been ready in between.

    Raises:
        ValueError: the ranks' bundles cannot be cut into so many slices.
    """

    def __init__(
        self,
        ask: Ask,
        values: Mapping[str, Any],
        vllm_options: Sequence[str],
        groups: Sequence[Any],
        ranks: Sequence[Place],
        own_groups: Sequence[Any],
        max_restarts: int,
    ) -> None:
        self._ask, self._values, self._vllm_options = ask, values, vllm_options
        self._ranks, self._max_restarts = ranks, max_restarts
        # Only the run knows the servers' key, unless its user has set one.
        self._key = os.environ.get(VARIABLE) or secrets.token_urlsafe(32)
        output_dir = Path(str(values.get("output_dir") or "trainer_output"))
        self.all = [
            Replica(number, *seat, output_dir / f"replica-{number}.log")
            for number, seat in enumerate(_seats(ask, groups, ranks, own_groups))
        ]

    @property
    def variables(self) -> dict[str, str]:
        """What the ranks' environment has, so that they find the servers."""
        urls = ",".join(replica.url for replica in self.all)
        return {REPLICAS: urls, VARIABLE: self._key} if urls else {}

    def start(self) -> None:
        """Start all servers.

        A server measures the memory that is free while it starts, and ranks on its GPUs must not take any
        meanwhile: such servers are waited for.

        Raises:
            RuntimeError: a server has ended.
        """
        addresses = {place.address for place in (*self._ranks, *(replica.place for replica in self.all))}
        for replica in self.all:
            _, address, own, port = replica.place
            host = "127.0.0.1" if len(addresses) == 1 else address
            replica.url = f"http://{host}:{port}"
            # Its own GPUs come first. Those of the node's ranks follow, as weights are read from a rank's.
            beside = [gpu for place in self._ranks if place.address == address for gpu in place.gpu_ids]
            variables = {
                "CUDA_VISIBLE_DEVICES": ",".join(dict.fromkeys((*(replica.gpu_ids or own), *beside))),
                "PYTHONUNBUFFERED": "1",
                VARIABLE: self._key,
                LAUNCH: "a replica",
            }
            replica.orders = dict(
                arguments=[*serve_command(self._ask, self._values, host, port), *self._vllm_options],
                variables=variables,
                health=(replica.url + _STEP, self._key, ANSWER_S, PATIENCE),
            )
            replica.start(**replica.orders)
        is_awaited = self._ask.is_colocated and self._ask.on_gpus
        while is_awaited and not all(replica.is_ready for replica in self.all):
            if (ending := self.look()) is not None:
                raise RuntimeError(ending.text)
            time.sleep(0.05)

    def look(self) -> Ending | None:
        """Hear what the servers have said, and start those again that are lost; does not wait.

        Returns:
            The end of the run, if a server has ended that never was ready: it would end again.
        """
        hear(self.all, 0)
        for replica in self.all:
            if (ending := replica.ending) is None:
                replica.num_restarts *= not replica.is_ready
                continue
            if replica.num_restarts > self._max_restarts:
                continue
            if not replica.was_ready:
                return Ending(1, ending.text)
            replica.num_restarts += 1
            if replica.num_restarts > self._max_restarts:
                follows = "It is given up (--max_restarts); the run goes on while one is left."
            else:
                times = f"{replica.num_restarts} of {self._max_restarts} times"
                follows = f"It is started again in its place ({times})."
                replica.start(**replica.orders)
            print(f"\n{ending.text}\n{follows}", file=sys.stderr, flush=True)
        return None


def _seats(
    ask: Ask, groups: Sequence[Any], ranks: Sequence[Place], own_groups: Sequence[Any]
) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """For each replica Ray's options of its actor, and its GPUs if they are ranks'. See `Replicas`."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    if not ask.is_colocated:
        for group in own_groups:
            (taken,) = group.bundle_specs
            strategy = PlacementGroupSchedulingStrategy(group, 0)
            yield dict(num_cpus=taken["CPU"], num_gpus=taken.get("GPU", 0), scheduling_strategy=strategy), []
        return
    tables = [nodes_of(group) for group in groups]
    try:
        slices = cut(tables, ask.replica_size, ask.num_replicas, ask.kind)
    except ValueError as error:
        raise ValueError(
            f"The ranks' nodes have no room for the replicas beside them: {error}. Ask for fewer or smaller "
            "ones, or set --replica_placement own."
        ) from error
    per_node = len(ranks) // len(groups)
    for each in slices:
        (group, bundle), *_ = each.bundles
        strategy = PlacementGroupSchedulingStrategy(groups[group], bundle)
        gpu_ids = [gpu for group, bundle in each.bundles for gpu in ranks[group * per_node + bundle].gpu_ids]
        yield dict(num_cpus=0, num_gpus=0, scheduling_strategy=strategy), gpu_ids
