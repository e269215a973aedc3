"""Seconds that the GPUs of a run spend on one another: gradients, weights and a decode step's sums.

To reduce or to gather a message of n bytes among R ranks, each rank sends and receives n · (R - 1) / R bytes;
to do both, twice as many (a ring, Patarasuk and Yuan 2009).
"""

from __future__ import annotations

import math

from colocate.memory.rows import total_bytes
from colocate.memory.workload import Workload
from colocate.planning.hardware import Cluster, Gpu
from colocate.planning.memory_plan import MemoryPlan
from colocate.policy.footprint import head_is_trained, optimizer_rows
from colocate.weights.shapes import ModelShapes

LINK_EFFICIENCY = {2: 0.73, 4: 0.79, 8: 0.80}
"""Share of the data sheet's bandwidth that NCCL reaches for large messages, by the number of GPUs: on H100s
329, 355 and 361 of 450 GB/s for an all-reduce of 1 GiB without multicast."""
NETWORK_GB_S = 45.0
"""10^9 bytes a second, each way, between a GPU and those of other nodes: 90 % of a card of 400 Gbit/s for
each GPU."""
HOST_GB_S = 25.0
"""10^9 bytes a second between a GPU and pinned memory of the host while all GPUs of the node copy: 80 % of 16
lanes of PCI Express 4."""
SMALL_EFFICIENCY = 0.65
"""Share of the data sheet's bandwidth that the all-reduces of decode steps reach: on two H200s 293 of 450
GB/s."""
EXPOSED_SHARE = 0.7
"""Share of the time of gathers and gradients' messages that lengthens a micro-batch, although they run at the
same time as its products, since both use the GPU's memory and processors. On two H200s a step of 7B with
split weights takes 1.024 times as long as one with whole weights, whose gradients are exchanged at its end.
FSDP2, which copies what it gathers and reduces in float32, adds 1.0 to 1.3 times its messages' time there."""


def link_bytes_per_s(gpu: Gpu, num_ranks: int) -> float:
    """Bytes per second, each way, of a group of GPUs of one node for large messages."""
    at_least = min((size for size in LINK_EFFICIENCY if size >= num_ranks), default=max(LINK_EFFICIENCY))
    return gpu.link_gb_s * 1e9 * LINK_EFFICIENCY[at_least]


def exchange_s(shapes: ModelShapes, workload: Workload, plan: MemoryPlan, cluster: Cluster) -> float:
    """Seconds of an optimizer step for exchange: ranks with the same part of the weights reduce its gradients
    and gather the updated weights, and the optimizer's state comes from the host and returns.

    That is 0.0 for one GPU, where the state travels during other work, and for GPUs whose speed is unknown.
    """
    sharding, gpu = workload.sharding, cluster.gpu
    if gpu is None or cluster.num_gpus == 1:
        return 0.0
    seconds, num_replicas = 0.0, sharding.num_replicas
    if num_replicas > 1:
        num_trained = shapes.part(sharding.num_weight_parts).num_trained
        gathered = 4 if shapes.has_adapters else workload.parameter_dtype.itemsize
        # An all-reduce of float32 gradients is a reduction and a gathering of them.
        per_weight = 4 + (gathered if sharding.splits_optimizer else 4)
        sent_bytes = per_weight * num_trained * (num_replicas - 1) / num_replicas
        seconds += sent_bytes / _replicas_bytes_per_s(sharding.num_weight_parts, cluster, gpu)
    if plan.train_plan.offload_optimizer and sharding.is_split:
        seconds += 2 * total_bytes(optimizer_rows(shapes, workload, "train")) / (HOST_GB_S * 1e9)
    return seconds


def _replicas_bytes_per_s(num_weight_parts: int, cluster: Cluster, gpu: Gpu) -> float:
    """Bytes per second between ranks that hold the same part of the weights, which are in all nodes."""
    in_node = max(1, cluster.gpus_per_node // num_weight_parts)
    within = link_bytes_per_s(gpu, in_node) if in_node > 1 else math.inf
    # Rings through a node leave it by the cards of all their ranks there.
    return min(within, in_node * NETWORK_GB_S * 1e9) if cluster.num_nodes > 1 else within


def gathers_s(shapes: ModelShapes, workload: Workload, gpu: Gpu) -> float:
    """Seconds of a micro-batch's messages between ranks that share the weights: each matrix is gathered for
    the forward and for the backward pass, and its gradient is sent in the weights' type.

    That is 0.0 if each rank has the weights whole.
    """
    parts = workload.sharding.num_weight_parts
    if parts == 1:
        return 0.0
    per_weight = (3 if head_is_trained(shapes) else 2) * workload.parameter_dtype.itemsize
    num_weights = shapes.num_projection_weights + shapes.num_head_weights * (1 if shapes.has_tied_head else 2)
    return per_weight * num_weights * (parts - 1) / parts / link_bytes_per_s(gpu, parts)


def gathered_s(decoded: ModelShapes, workload: Workload, gpu: Gpu) -> float:
    """Seconds in which a rank gathers the weights that it decodes with, before each rollout; 0.0 where these
    are the weights that it trains with.

    Args:
        decoded: the part of the model that a rank decodes with.
    """
    if not workload.sharding.gathers:
        return 0.0
    num_together = workload.sharding.num_weight_parts // workload.sharding.num_decode_parts
    received = decoded.weight_bytes(workload.parameter_dtype) * (num_together - 1) / num_together
    return received / link_bytes_per_s(gpu, num_together)


def exposed_s(messages_s: float, compute_s: float) -> float:
    """Seconds that messages add to the computation during which they run."""
    return max(0.0, messages_s - compute_s) + EXPOSED_SHARE * min(messages_s, compute_s)


def all_reduce_s(size_bytes: float, num_ranks: int, gpu: Gpu) -> float:
    """Seconds of an all-reduce of a decode step's size: a latency that grows with the number of GPUs, plus
    the time of the bytes.

    On two H200s it is within 5 % of the measured time of 0.4 to 5 MiB through shared memory. Published tables
    have 30 µs for 4 MiB on four GPUs and 37 µs on eight.
    """
    if num_ranks == 1:
        return 0.0
    sent_bytes = 2 * size_bytes * (num_ranks - 1) / num_ranks
    return (4 + 2 * math.log2(num_ranks)) * 1e-6 + sent_bytes / (gpu.link_gb_s * 1e9 * SMALL_EFFICIENCY)
