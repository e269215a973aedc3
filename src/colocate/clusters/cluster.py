"""Places for ranks in a Ray cluster: one placement group for each node, waited for up to a time limit."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from colocate.redaction import redacted

_PATIENCE_S = 5.0
"""Seconds of waiting after which the terminal says what is waited for."""
_CONNECT_S = 10.0
_STORE_BYTES = 2**27
"""Shared memory of an embedded cluster, which carries lines of text; Ray would take 30 % of all memory."""
_SLICE_S = 0.5
"""Seconds of one wait inside Ray, between which Ctrl-C is heard."""


@dataclass(frozen=True)
class Ask:
    """What a run asks of the cluster: `num_nodes` nodes with `ranks_per_node` ranks each, on GPUs or not."""

    num_nodes: int
    ranks_per_node: int
    on_gpus: bool
    shares: int = 1
    """How many processes share each GPU: the rank, and what it starts beside itself (`RayPlace`)."""
    is_one_actor: bool = False
    """One actor has all that is asked of a node, as for a replica of an engine."""

    @property
    def kind(self) -> str:
        """Ray's name of the resource that each rank has one of."""
        return "GPU" if self.on_gpus else "CPU"

    @property
    def bundles(self) -> list[dict[str, float]]:
        """Ray's resources on one node, a bundle for each actor."""
        of_rank = {"CPU": float(self.shares), "GPU": 1.0} if self.on_gpus else {"CPU": 1.0}
        if not self.is_one_actor:
            return [of_rank] * self.ranks_per_node
        return [{name: number * self.ranks_per_node for name, number in of_rank.items()}]

    @property
    def of_cpus(self) -> Ask:
        """The CPUs that ranks on GPUs take as well, and what they start beside themselves."""
        return Ask(self.num_nodes, self.ranks_per_node * self.shares, on_gpus=False)

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.ranks_per_node

    def fits(self, per_node: Sequence[int]) -> bool:
        """Whether nodes with so many GPUs or CPUs, if all were free, have room for the run."""
        return sum(number // self.ranks_per_node for number in per_node) >= self.num_nodes

    def shortage(self, per_node: Sequence[int]) -> str:
        """The arithmetic of what is asked and what the cluster has, as in "asked 16 GPUs in 2 × 8, Ray sees
        8 + 4"."""
        seen = " + ".join(map(str, sorted(filter(None, per_node), reverse=True))) or "none"
        asked = f"asked {self.num_ranks} {self.kind}s in {self.num_nodes} × {self.ranks_per_node}"
        return f"{asked}, Ray sees {seen}"


@contextmanager
def connected(run_id: str) -> Iterator[bool]:
    """A connection with the cluster that RAY_ADDRESS names, or that runs on this machine, or else with one
    that is started here and ends with the block; yields whether it is such an embedded one.

    Raises:
        ImportError: Ray is not installed.
        RuntimeError: Ray refuses, as it does where its version or Python's is another one in the cluster.
    """
    # Ray asks for its usage to be reported; where nobody has answered, the answer is no.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise ImportError(
            'The launcher "ray" needs the package ray, which is not installed: pip install "ray>=2.40"'
        ) from error
    given = os.environ.get("RAY_ADDRESS")
    if given not in (None, "", "auto", "local"):
        _check_address(given)
    options: dict[str, Any] = dict(
        namespace=f"colocate-{run_id}", log_to_driver=False, logging_level="ERROR", include_dashboard=False
    )
    is_embedded, on_sigterm = given == "local", signal.getsignal(signal.SIGTERM)
    try:
        try:
            try:
                ray.init(address=given or "auto", **options)
            except ConnectionError:
                if given:
                    raise
                is_embedded = True
                ray.init(address="local", object_store_memory=_STORE_BYTES, **options)
        except (RuntimeError, ValueError, OSError) as error:
            where = f"at RAY_ADDRESS={given}" if given else "on this machine"
            raise RuntimeError(f"The Ray cluster {where} cannot be used: {redacted(str(error))}") from error
        yield is_embedded
    finally:
        ray.shutdown()  # it may have come half-way
        if threading.current_thread() is threading.main_thread():  # where Ray installs a handler of its own
            signal.signal(signal.SIGTERM, signal.SIG_DFL if on_sigterm is None else on_sigterm)


def _check_address(given: str) -> None:
    """Find out in seconds what Ray tries for minutes: whether somebody listens at RAY_ADDRESS.

    Raises:
        RuntimeError: nobody does, or it is the address of something else than a cluster's head.
    """
    host, _, port = given.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except (OSError, ValueError, OverflowError) as error:
        raise RuntimeError(
            f"No Ray head listens at RAY_ADDRESS={redacted(given)} ({error}). Set its address and port, such "
            "as 10.0.0.1:6379, on one of the cluster's nodes, or unset it for a cluster here. "
            "From elsewhere (ray://) use `ray job submit`."
        ) from error


@contextmanager
def places(
    ask: Ask, name: str, timeout_s: float, *, is_embedded: bool, num_taken: int = 0
) -> Iterator[list[Any]]:
    """The placement groups of a run, one for each node, ready, in the order of the nodes' addresses; they are
    removed after the block.

    Args:
        name: what the groups' names begin with.
        timeout_s: how long to wait. A cluster that scales adds nodes meanwhile; an embedded one never does,
            and is not waited for.
        num_taken: how many GPUs or CPUs the run has already.

    Raises:
        TimeoutError: the resources did not come; the message has the arithmetic.
    """
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    groups: list[Any] = []
    try:
        nodes = [number - num_taken for number in _per_node(ask.kind)] if is_embedded else []
        if is_embedded and not ask.fits(nodes):
            beside = f" beside the {num_taken} of the ranks" if num_taken else ""
            raise TimeoutError(
                f"The cluster is too small: {ask.shortage(nodes)}{beside}. It is this machine alone, as no "
                "other was running: set RAY_ADDRESS to a cluster's address, or ask for less."
            )
        # They are asked for before the nodes are there: that is how Ray's autoscaler learns of the need.
        for number in range(ask.num_nodes):
            groups.append(placement_group(ask.bundles, strategy="STRICT_PACK", name=f"{name}-node{number}"))
        begin_s, pending, is_said = time.monotonic(), list(groups), False
        while pending := [group for group in pending if not group.wait(_SLICE_S)]:
            waited_s = time.monotonic() - begin_s
            if waited_s > timeout_s:
                raise TimeoutError(_absence(ask, len(groups) - len(pending), timeout_s, num_taken))
            if waited_s > _PATIENCE_S and not is_said:
                is_said = True
                shortage = ask.shortage(_per_node(ask.kind))
                print(
                    f"Waiting up to {timeout_s:,.0f} s for the cluster: {shortage}.",
                    file=sys.stderr,
                    flush=True,
                )
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        yield sorted(groups, key=lambda group: (addresses[nodes_of(group)[0]], nodes_of(group)))
    finally:
        for group in groups:
            with suppress(Exception):  # the cluster may be gone
                remove_placement_group(group)


def _absence(ask: Ask, num_ready: int, timeout_s: float, num_taken: int) -> str:
    import ray

    per_node = _per_node(ask.kind)
    text = f"The cluster had no room within {timeout_s:,.0f} s: {ask.shortage(per_node)}"
    if ask.fits(per_node):
        free = int(ray.available_resources().get(ask.kind, 0)) + num_ready * ask.ranks_per_node
        whose = f"the ranks have {num_taken}, other jobs" if num_taken else "other jobs have"
        text += f", of which {free} are free: {whose} the rest"
        if ask.on_gpus and not (ranks := ask.of_cpus).fits(cpus := _per_node("CPU")):
            text += f", or the CPUs are missing that ranks take, too: {ranks.shortage(cpus)}"
    return f"{text}. Ask for less, or set --cluster_timeout to more seconds."


def _per_node(kind: str) -> list[int]:
    import ray

    return [int(node["Resources"].get(kind, 0)) for node in ray.nodes() if node["Alive"]]


def nodes_of(group: Any) -> list[str]:
    """The node of each bundle of a placement group, by the bundle's number."""
    from ray.util.placement_group import placement_group_table

    table = placement_group_table(group)["bundles_to_node_id"]
    return [table[number] for number in sorted(table)]
