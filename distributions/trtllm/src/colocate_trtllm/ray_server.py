"""A `TRTLLMServer` as a Ray actor: started by the first rank of its group, and called by all of them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from colocate.engines.base import EngineLost
from colocate.engines.vllm.groups import TensorParallelGroup
from colocate.options.redaction import redacted
from colocate.parallel.ray_cluster import RayPlace
from colocate.parallel.slices import cut
from colocate.parallel.verdict import PeerError, first_line
from colocate_trtllm.server import Started, TRTLLMServer

START_S = 1800.0
"""Seconds for the engine to start: it may have to tune kernels and capture graphs."""
VARIABLES = {
    # The workers find their GPUs by the numbers that these have on the node.
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
    # Weights come in a buffer that is filled anew; the loader's threads would copy them on other streams.
    "TRT_LLM_DISABLE_LOAD_WEIGHTS_IN_PARALLEL": "True",
}
"""Variables of the server's process, which its engine's workers inherit."""


@dataclass(frozen=True)
class Placement:
    """The bundles of an engine's workers, worker by worker in the order of their tensor-parallel ranks.

    Attributes:
        groups: Ray's placement groups that the engine has bundles of, one for each node.
        bundle_indices: the numbers of its bundles in each of `groups`.
        gpu_share: the share of its bundle's GPU that each worker takes, above 0 and at most 1.

    Raises:
        ValueError: the lists do not fit each other, a bundle has a negative number or is there twice, or the
            share is none.
    """

    groups: Sequence[Any]
    bundle_indices: Sequence[Sequence[int]]
    gpu_share: float

    def __post_init__(self) -> None:
        if not self.groups or len(self.groups) != len(self.bundle_indices):
            raise ValueError(
                f"{len(self.groups)} placement groups came with {len(self.bundle_indices)} lists of bundles; "
                "there must be one list for each group, and at least one group."
            )
        for number, bundles in enumerate(self.bundle_indices):
            if not bundles or min(bundles) < 0 or len(set(bundles)) != len(bundles):
                raise ValueError(
                    f"The bundles of placement group {number} are {list(bundles)}; an engine needs at least "
                    "one of each group, by its number from 0, and none twice."
                )
        if not 0 < self.gpu_share <= 1:
            raise ValueError(
                f"gpu_share={self.gpu_share} of a GPU for each worker, but it must be above 0 and at most 1."
            )

    @property
    def num_workers(self) -> int:
        return sum(len(bundles) for bundles in self.bundle_indices)

    def arguments(self) -> dict[str, Any]:
        """The arguments of `AsyncLLM`. They are its own and must be named: it overwrites a
        `ray_placement_config`, and its other arguments follow them by position."""
        return {
            "placement_groups": list(self.groups),
            "placement_bundle_indices": [list(bundles) for bundles in self.bundle_indices],
            "per_worker_gpu_share": self.gpu_share,
        }


class Server(Protocol):
    """How a rank reaches the `TRTLLMServer` of its group."""

    def call(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        """The result of a method of `TRTLLMServer`.

        Raises:
            EngineLost: the server is gone, or has not answered within `timeout_s` seconds.
            Exception: what the method has raised, as its type or a RuntimeError.
        """
        ...

    def close(self) -> None:
        """End the server, if this rank has started it."""
        ...


class RayServer:
    """The actor.

    Args:
        is_owner: this rank has started it.
    """

    def __init__(self, actor: Any, *, is_owner: bool) -> None:
        self._actor = actor
        self._is_owner = is_owner

    def call(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        """Do as `Server.call` does."""
        import ray

        try:
            return ray.get(getattr(self._actor, method).remote(*arguments), timeout=timeout_s)
        except ray.exceptions.GetTimeoutError as error:
            raise EngineLost(
                f"TensorRT-LLM has not answered {method!r} for {timeout_s:,.0f} s. Its workers' output is in "
                "Ray's logs of the node."
            ) from error
        except ray.exceptions.RayTaskError as error:
            kind = type(error.cause) if isinstance(error.cause, ImportError | ValueError) else RuntimeError
            raise kind(redacted(str(error.cause))) from error
        except ray.exceptions.RayError as error:
            raise EngineLost(f"TensorRT-LLM's server is gone: {redacted(str(error))}") from error

    def close(self) -> None:
        """Do as `Server.close` does."""
        import ray

        if self._is_owner:
            with suppress(Exception):  # it may be gone, with its workers or its node
                self.call("close", timeout_s=60.0)
            with suppress(Exception):
                ray.kill(self._actor)


def start(
    place: RayPlace,
    group: TensorParallelGroup,
    arguments: Mapping[str, Any],
    *,
    python: str | None,
) -> tuple[RayServer, Started]:
    """Start a server for a group of ranks, which call this together, in the bundles of its ranks.

    Args:
        arguments: see `TRTLLMServer.start`.
        python: the interpreter of the actor and of the engine's workers; None: the ranks' own.

    Raises:
        ImportError: TensorRT-LLM is not installed there.
        PeerError: the first rank of the group could not start it.
    """
    import ray

    ray.init(
        address=place.address,
        namespace=place.namespace,
        log_to_driver=False,
        logging_level=logging.ERROR,
        ignore_reinit_error=True,
    )
    name, server, started, error = f"{place.groups[0]}-trtllm-{group.index}", None, None, None
    if group.leads:
        try:
            server = RayServer(_actor(place, group, name, python), is_owner=True)
            placed = _placement(place, group).arguments()
            started = server.call("start", dict(arguments), placed, timeout_s=START_S)
        except Exception as caught:
            error = caught
            if server is not None:
                server.close()
    told, failure = group.gather((started, None if error is None else first_line(error)))[0]
    if error is not None:
        raise error
    if failure is not None:
        raise PeerError(f"TensorRT-LLM was not started by the first rank of this group: {failure}")
    assert told is not None
    if server is None:
        server = RayServer(ray.get_actor(name, namespace=place.namespace), is_owner=False)
    return server, told


def _placement(place: RayPlace, group: TensorParallelGroup) -> Placement:
    import ray

    slices = cut(place.tables, group.size, group.index + 1, may_cross_nodes=True)
    bundles = slices[group.index].by_group
    return Placement(
        groups=[ray.util.get_placement_group(place.groups[number]) for number in bundles],
        bundle_indices=list(bundles.values()),
        gpu_share=place.gpu_share,
    )


def _actor(place: RayPlace, group: TensorParallelGroup, name: str, python: str | None) -> Any:
    """The server's actor, on the node of the group's first bundle, which is this rank's."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    runtime_env: dict[str, Any] = {"env_vars": VARIABLES}
    if python is not None:
        runtime_env["py_executable"] = python
    remote: Any = ray.remote(TRTLLMServer)
    return remote.options(
        name=name,
        num_cpus=0,
        num_gpus=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False
        ),
        max_restarts=0,
        max_task_retries=0,
        runtime_env=runtime_env,
    ).remote()
