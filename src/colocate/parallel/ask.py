"""What a run asks of a cluster, as the command line says it: arithmetic, without Ray."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Ask:
    """What a run asks of the cluster: `num_nodes` nodes with `ranks_per_node` ranks each, on GPUs or not, and
    `num_replicas` servers, each on `replica_size` GPUs of one node, or CPUs if the ranks are on CPUs."""

    num_nodes: int
    ranks_per_node: int
    on_gpus: bool
    shares: int = 1
    """How many processes share each GPU: the rank, and what it starts beside itself (`RayPlace`)."""
    num_replicas: int = 0
    replica_size: int = 1
    replica_engine: str = "vllm"
    """What the servers draw with: "vllm" or "native"."""
    vllm_options: tuple[str, ...] = ()
    """Options of vLLM's servers, which override those that are set here."""
    is_colocated: bool = True
    """The servers are on the ranks' GPUs, in turns with them; else on GPUs of their own."""
    max_restarts: int = 0
    """How often the ranks are started again after one was lost."""
    timeout_s: float = 0.0
    """Seconds to wait for the cluster's resources at each start."""
    words: str = ""
    """What the command line says of all this, for the command to go on."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """Ray's names of the resources that the run takes; each rank has one of the first."""
        return ("GPU", "CPU") if self.on_gpus else ("CPU",)

    @property
    def bundles(self) -> list[list[dict[str, float]]]:
        """For each placement group, the ranks' first, Ray's resources of its bundles, one for each actor."""
        num_servers = 0 if self.is_colocated else self.num_replicas
        rank = {"CPU": float(self.shares), "GPU": 1.0} if self.on_gpus else {"CPU": 1.0}
        server = {name: number * self.replica_size for name, number in rank.items()}
        return [[rank] * self.ranks_per_node] * self.num_nodes + [[server]] * num_servers

    def sizes(self, kind: str) -> list[int]:
        """How many GPUs or CPUs each placement group needs."""
        return [int(sum(bundle.get(kind, 0) for bundle in bundles)) for bundles in self.bundles]

    def shortage(self, per_node: Sequence[int], kind: str) -> str:
        """The arithmetic of what is asked and what the cluster has, as in "asked 16 GPUs in 2 × 8, Ray sees
        8 + 4"."""
        sizes = self.sizes(kind)
        asked = " + ".join(f"{number} × {size}" for size, number in Counter(sizes).items())
        seen = " + ".join(map(str, sorted(filter(None, per_node), reverse=True))) or "none"
        return f"asked {sum(sizes)} {kind}s in {asked}, Ray sees {seen}"
