"""A cluster that Ray manages, described without Ray: the resources that a run requests, the places of its
ranks, and whether its head listens.

Ray itself tries for minutes to reach a head, and reports its loss late, without a way to go on.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from colocate.options.redaction import redacted


@dataclass(frozen=True)
class ClusterRequest:
    """The resources that a run requests of the cluster: `num_nodes` nodes with `ranks_per_node` ranks each,
    on GPUs or not, and `num_replicas` servers, each on `replica_size` GPUs of one node, or CPUs if the ranks
    are on CPUs."""

    num_nodes: int
    ranks_per_node: int
    on_gpus: bool
    shares: int = 1
    """The number of processes that share each GPU: the rank, and those that it starts (`RayPlace`)."""
    num_replicas: int = 0
    replica_size: int = 1
    replica_engine: str = "vllm"
    """The servers' engine: "vllm" or "native"."""
    vllm_options: tuple[str, ...] = ()
    """Options of vLLM's servers, which override those that are set here."""
    is_colocated: bool = True
    """The servers are on the ranks' GPUs, in turns with them; else on GPUs of their own."""
    max_restarts: int = 0
    """How often the ranks are started again after one was lost."""
    timeout_s: float = 0.0
    """Seconds to wait for the cluster's resources at each start."""
    words: str = ""
    """The command line's options of the launcher, to repeat in messages."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """Ray's names of the resources that the run takes; each rank has one of the first."""
        return ("GPU", "CPU") if self.on_gpus else ("CPU",)

    @property
    def bundles(self) -> list[list[dict[str, float]]]:
        """Ray's resources of each placement group's bundles, one for each actor; the ranks' groups first."""
        num_servers = 0 if self.is_colocated else self.num_replicas
        rank = {"CPU": float(self.shares), "GPU": 1.0} if self.on_gpus else {"CPU": 1.0}
        server = {name: number * self.replica_size for name, number in rank.items()}
        return [[rank] * self.ranks_per_node] * self.num_nodes + [[server]] * num_servers

    def sizes(self, kind: str) -> list[int]:
        """The number of GPUs or CPUs that each placement group needs."""
        return [int(sum(bundle.get(kind, 0) for bundle in bundles)) for bundles in self.bundles]

    def shortage(self, per_node: Sequence[int], kind: str) -> str:
        """The arithmetic of asked and present resources, as in "asked 16 GPUs in 2 × 8, Ray sees 8 + 4"."""
        sizes = self.sizes(kind)
        asked = " + ".join(f"{number} × {size}" for size, number in Counter(sizes).items())
        seen = " + ".join(map(str, sorted(filter(None, per_node), reverse=True))) or "none"
        return f"asked {sum(sizes)} {kind}s in {asked}, Ray sees {seen}"


VARIABLE = "COLOCATE_RAY_PLACE"


@dataclass(frozen=True)
class RayPlace:
    """The cluster of a run, and the bundles of its ranks: rank by rank, group by group."""

    address: str
    namespace: str
    groups: tuple[str, ...]
    """The names of the placement groups, one for each node."""
    sizes: tuple[int, ...]
    """The number of each group's bundles, one for each rank."""
    shares: int
    """How many processes share the GPU of each bundle; a rank is one of them."""

    @property
    def tables(self) -> list[list[str]]:
        """Each group's bundles with their node, named after the group; see `slices.cut`."""
        return [[name] * size for name, size in zip(self.groups, self.sizes, strict=True)]

    @property
    def gpu_share(self) -> float:
        """The share of a bundle's GPU that each actor takes."""
        return 1 / self.shares

    def as_variable(self) -> dict[str, str]:
        """The environment variable by which a rank receives this record."""
        return {VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def of_this_rank(cls) -> RayPlace | None:
        """The place that the launcher has given this process; None: it was started in another way."""
        if (text := os.environ.get(VARIABLE)) is None:
            return None
        told = json.loads(text)
        return cls(**told | {"groups": tuple(told["groups"]), "sizes": tuple(told["sizes"])})


LOOK_S = 1.0
_CONNECT_S = 10.0
_NUM_UNANSWERED = 5
"""The number of failed looks in a row after which the loss is reported."""


def check_address(given: str) -> None:
    """Check in seconds whether somebody listens at RAY_ADDRESS; Ray itself would try for minutes."""
    try:
        _knock(given)
    except (OSError, ValueError, OverflowError) as error:
        raise RuntimeError(
            f"No Ray head listens at RAY_ADDRESS={redacted(given)} ({error}). Set its address and port, such "
            "as 10.0.0.1:6379, on one of the cluster's nodes, or unset it for a cluster here. "
            "From elsewhere (ray://) use `ray job submit`."
        ) from error


@contextmanager
def watched(address: str) -> Iterator[None]:
    """Say on stderr, within the block, when nobody listens at the head's address any more, and when somebody
    does.

    It ends nothing: a head whose state is kept elsewhere may come back, and Ray waits for that. If it does
    not, Ray ends the process after a minute, from a thread of its own and without unwinding.
    """
    is_over = threading.Event()
    thread = threading.Thread(target=_watch, args=(address, is_over), name="ray-head", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()


def _watch(address: str, is_over: threading.Event) -> None:
    num_unanswered = 0
    while not is_over.wait(LOOK_S):
        is_there = _listens(address)
        if is_there and num_unanswered >= _NUM_UNANSWERED:
            _say(f"Ray's head at {address} answers again.")
        num_unanswered = 0 if is_there else num_unanswered + 1
        if num_unanswered == _NUM_UNANSWERED and not is_over.is_set():
            _say(
                f"Ray's head at {address} is lost: nobody listens there any more. Unless it comes back "
                "within a minute, Ray ends this command, and the cluster with all that runs on it. Then "
                "start the head again (ray start --head), and the same command with "
                "--resume_from_checkpoint auto: the run goes on from its newest checkpoint."
            )


def _listens(address: str) -> bool:
    try:
        _knock(address)
    except OSError:
        return False
    return True


def _knock(address: str) -> None:
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()


def _say(text: str) -> None:
    print(f"\n{text}", file=sys.stderr, flush=True)
