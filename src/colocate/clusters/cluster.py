"""Places for ranks in a Ray cluster: one placement group for each node, waited for up to a time limit."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from colocate.checkpoints.stop_signals import restore
from colocate.options.redaction import redacted
from colocate.parallel.ray_cluster import ClusterRequest, check_address, watched

_PATIENCE_S = 5.0
"""Seconds of waiting after which the terminal says what is waited for."""
_STORE_BYTES = 2**27
"""Shared memory of an embedded cluster, which carries lines of text; Ray would take 30 % of all memory."""
_LATE = (
    " Ray starts several processes, which do not come up in time on a busy machine or one short of memory: "
    "start the command again, or a cluster first (ray start --head), and then it with RAY_ADDRESS=auto."
)
_OTHER_NODES = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""The variable by which Ray is told whether a cluster may have other nodes than this machine."""
_SLICE_S = 0.5
"""Seconds of one wait inside Ray, between which Ctrl-C is heard."""


@contextmanager
def connected(run_id: str) -> Iterator[bool]:
    """Connect with the cluster that RAY_ADDRESS names, else with one that runs on this machine, else with one
    that is started here and ends with the block. Yields whether it was started here.

    Raises:
        ImportError: Ray is not installed.
        RuntimeError: Ray refuses, as it does if its version or Python's differs from the cluster's.
    """
    # Ray asks for its usage to be reported; where nobody has answered, the answer is no.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise ImportError(
            "The launcher \"ray\" needs the package ray, which is not installed: pip install 'ray>=2.40', or "
            "colocate's extra ray."
        ) from error
    on_sigterm, stack = signal.getsignal(signal.SIGTERM), ExitStack()
    try:
        is_embedded = _connect(os.environ.get("RAY_ADDRESS", ""), f"colocate-{run_id}", stack)
        with watched(ray.get_runtime_context().gcs_address):
            yield is_embedded
    finally:
        ray.shutdown()  # it may have come half-way
        stack.close()
        if threading.current_thread() is threading.main_thread():  # where Ray installs a handler of its own
            restore({signal.SIGTERM: on_sigterm})


def _connect(given: str, namespace: str, stack: ExitStack) -> bool:
    """Connect with the cluster at a RAY_ADDRESS; returns whether it was started here. `stack` undoes the
    settings of a cluster that is started here after its end."""
    import ray

    if given not in ("", "auto", "local"):
        check_address(given)
    options: dict[str, Any] = dict(log_to_driver=False, logging_level="ERROR", include_dashboard=False)
    if given == "local":
        options["object_store_memory"] = _STORE_BYTES
        stack.enter_context(_listening_to_itself())
    try:
        ray.init(address=given or "auto", namespace=namespace, **options)
    except Exception as error:  # Ray raises Exception itself where its processes do not come up in time
        if not given and isinstance(error, ConnectionError):
            return _connect("local", namespace, stack)
        where = "on this machine" if given in ("", "local") else f"at RAY_ADDRESS={given}"
        is_late = not isinstance(error, (RuntimeError, ValueError, OSError))
        told = redacted(str(error)).strip()
        raise RuntimeError(
            f"The Ray cluster {where} cannot be used: {told}{_LATE if is_late else ''}"
        ) from error
    return given == "local"


@contextmanager
def _listening_to_itself() -> Iterator[None]:
    """Let a cluster that Ray starts within the context listen on the loopback address alone, as on Windows
    and macOS. On Linux all its ports are open to other machines, and whoever reaches them runs code here."""
    from ray._private import ray_constants

    before, was_enabled = os.environ.get(_OTHER_NODES), getattr(ray_constants, "ENABLE_RAY_CLUSTER", None)
    os.environ[_OTHER_NODES] = "0"  # for the processes that are started
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        if was_enabled is not None:
            ray_constants.ENABLE_RAY_CLUSTER = was_enabled
        os.environ.pop(_OTHER_NODES)
        if before is not None:
            os.environ[_OTHER_NODES] = before


@contextmanager
def places(ask: ClusterRequest, name: str, *, is_embedded: bool) -> Iterator[tuple[list[Any], list[Any]]]:
    """The placement groups of a run, ready; they are removed after the block. There is one for each node with
    ranks, this machine's first, and one for each server with GPUs of its own.

    Args:
        is_embedded: the cluster is this machine alone. Other clusters may grow, so resources are waited for.

    Raises:
        TimeoutError: the resources did not come; the message has the arithmetic.
    """
    from ray.util.placement_group import placement_group, remove_placement_group

    for kind in ask.kinds if is_embedded else ():
        if sum(seen := _per_node(kind)) < sum(ask.sizes(kind)):
            raise TimeoutError(
                f"The cluster is too small: {ask.shortage(seen, kind)}. It is this machine alone, as no "
                "other was running: set RAY_ADDRESS to a cluster's address, or ask for less."
            )
    groups: list[Any] = []
    try:
        # They are asked for before the nodes are there: that is how Ray's autoscaler learns of the need.
        for number, bundles in enumerate(ask.bundles):
            groups.append(placement_group(bundles, strategy="STRICT_PACK", name=f"{name}-{number}"))
        begin_s, is_said = time.monotonic(), False
        while not all(is_ready := [group.wait(_SLICE_S) for group in groups]):
            waited_s = time.monotonic() - begin_s
            if waited_s > ask.timeout_s:
                raise TimeoutError(
                    f"The cluster had no room within {ask.timeout_s:,.0f} s: {_arithmetic(ask, is_ready)}. "
                    "Ask for less, or set --cluster_timeout to more seconds."
                )
            if waited_s > _PATIENCE_S and not is_said:
                is_said = True
                told = f"Waiting up to {ask.timeout_s:,.0f} s for the cluster: {_arithmetic(ask, is_ready)}."
                print(told, file=sys.stderr, flush=True)
        yield sorted(groups[: ask.num_nodes], key=_order), groups[ask.num_nodes :]
    finally:
        for group in groups:
            with suppress(Exception):  # the cluster may be gone
                remove_placement_group(group)


def _arithmetic(ask: ClusterRequest, is_ready: Sequence[bool]) -> str:
    """A table of resources: asked for, present, and free. Those that the run's ready placement groups hold
    count as free."""
    import ray

    free, parts = ray.available_resources(), []
    for kind in ask.kinds:
        num_free = int(free.get(kind, 0)) + sum(itertools.compress(ask.sizes(kind), is_ready))
        parts.append(f"{ask.shortage(_per_node(kind), kind)} (free: {num_free})")
    return ", and ".join(parts)


def _per_node(kind: str) -> list[int]:
    import ray

    return [int(node["Resources"].get(kind, 0)) for node in ray.nodes() if node["Alive"]]


def seat(group: Any, bundle: int, share: float) -> dict[str, Any]:
    """Ray's options for an actor that takes a share of a bundle of a placement group."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    taken = group.bundle_specs[bundle]
    return dict(
        num_cpus=taken["CPU"] * share,
        num_gpus=taken.get("GPU", 0) * share,
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, bundle),
    )


def nodes_of(group: Any) -> list[str]:
    """The node of each bundle of a placement group; our groups have all bundles on one node."""
    from ray.util.placement_group import placement_group_table

    return list(placement_group_table(group)["bundles_to_node_id"].values())


def _order(group: Any) -> tuple[bool, str, str]:
    """Sorts this machine first, and other nodes by their addresses."""
    import ray

    node_id = nodes_of(group)[0]
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    return node_id != ray.get_runtime_context().get_node_id(), addresses[node_id], node_id
