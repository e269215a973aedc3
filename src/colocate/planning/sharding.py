"""Chooses over how many GPUs of a node the weights of a run are split (t of `memory.sharding.Sharding`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from colocate.engines.native.footprint import decode_bytes
from colocate.memory.workload import Sharding, Workload
from colocate.planning.hardware import Cluster
from colocate.planning.memory_plan import MemoryPlan
from colocate.planning.speed import duration, step_time_of
from colocate.weights.shapes import ModelShapes

Shard = Literal["auto", "none"] | int
"""The option `shard`: a number t, the planner's choice, or every rank holds everything."""
NUM_WEIGHT_PARTS = (1, 2, 4, 8)
WORTH_A_SPLIT = 0.05
"""The share of a step that a larger t must save: whole weights need no messages in forward, backward and
decode steps, and the prediction is no better than that."""


@dataclass(frozen=True)
class Candidate:
    """A way to split a run over its GPUs, with its plan and time."""

    workload: Workload
    plan: MemoryPlan
    step_s: float | None
    """Seconds of a step; None: the GPU is not known."""

    @property
    def sharding(self) -> Sharding:
        return self.workload.sharding

    @property
    def result(self) -> str:
        """Whether it fits, and its time, in a few words."""
        size = f"{self.plan.peak_bytes / 2**30:.2f} GiB"
        if not self.plan.fits:
            return f"takes {size}" if self.plan.fits is None else f"does not fit, {size}"
        tight = "" if self.plan.is_safe else " but tight"
        time = "" if self.step_s is None else f", {duration(self.step_s)} a step"
        return f"fits{tight}, {size}{time}"


@dataclass(frozen=True)
class ShardingChoice:
    """The way that was chosen among those that are possible."""

    chosen: Candidate
    considered: tuple[Candidate, ...]
    impossible: tuple[tuple[int, str], ...] = ()
    """Numbers of parts that this model or engine cannot have, each with the reason."""

    @property
    def sharding(self) -> Sharding:
        return self.chosen.sharding

    @property
    def reason(self) -> str:
        """A sentence about what was compared."""
        ways = [f"shard={way.sharding.num_weight_parts} {way.result}" for way in self.considered]
        ways += [f"shard={parts} is not possible ({reason})" for parts, reason in self.impossible]
        return f"{'; '.join(ways)}."


def choose_sharding(
    shapes: ModelShapes,
    workload: Workload,
    cluster: Cluster,
    shard: Shard,
    plan_of: Callable[[Workload], MemoryPlan],
) -> ShardingChoice:
    """The split with the shortest predicted step among those that fit; a `shard` other than "auto" is kept.

    A plan that fits with `memory_plan.MARGIN` to spare goes before one that fits without. If nothing fits,
    the split that takes least memory is chosen; where the memory or the GPU's speed is unknown, the smallest
    t.

    Args:
        plan_of: the plan of a workload with its sharding.
    """
    if shard == "none":
        only = _candidate(shapes, workload, cluster, Sharding(cluster.num_gpus, 1, False), plan_of)
        return ShardingChoice(only, (only,))
    decode_shard = workload.sharding.decode_shard
    obstacles = {parts: obstacle(shapes, workload, cluster, parts) for parts in NUM_WEIGHT_PARTS}
    possible = [parts for parts, reason in obstacles.items() if reason is None]
    if shard != "auto" and shard not in possible:
        raise ValueError(
            f"shard={shard} splits the weights over {shard} GPUs of a node, which is not possible: "
            f"{obstacle(shapes, workload, cluster, shard)}. Set shard=auto, or one of "
            f"{', '.join(map(str, possible))}."
        )
    considered = tuple(
        _candidate(
            shapes, workload, cluster, Sharding(cluster.num_gpus, parts, decode_shard=decode_shard), plan_of
        )
        for parts in (possible if shard == "auto" else [shard])
    )
    of_node = {parts: why for parts, why in obstacles.items() if cluster.gpus_per_node % parts == 0}
    impossible = tuple((parts, why) for parts, why in of_node.items() if why is not None)
    return ShardingChoice(_best(considered), considered, impossible if shard == "auto" else ())


def with_sharding(shapes: ModelShapes, workload: Workload, sharding: Sharding) -> Workload:
    """The workload of a rank under `sharding`."""
    scratch = workload.decode_scratch_bytes
    if workload.is_gpu:
        scratch = decode_bytes(shapes.part(sharding.num_decode_parts), workload.decode_rows)
    return replace(workload, sharding=sharding, decode_scratch_bytes=scratch)


def obstacle(shapes: ModelShapes, workload: Workload, cluster: Cluster, num_parts: int) -> str | None:
    """Why the weights cannot be split over `num_parts` GPUs; None if they can."""
    return next(_obstacles(shapes, workload, cluster, num_parts), None)


def _obstacles(shapes: ModelShapes, workload: Workload, cluster: Cluster, num_parts: int) -> Iterator[str]:
    if (decode_shard := workload.sharding.decode_shard) is not None and num_parts % decode_shard:
        yield f"decode_shard={decode_shard} does not divide {num_parts}"
    if num_parts == 1:
        return
    if decode_shard is not None and decode_shard < num_parts and shapes.has_adapters:
        yield f"decode_shard={decode_shard} gathers weights, which is not possible beside adapters"
    if cluster.gpus_per_node % num_parts:
        yield f"the {cluster.gpus_per_node} GPUs of a node cannot be divided into groups of {num_parts}"
    if workload.engine != "native":
        yield f"engine={workload.engine} reads whole weights"
    if shapes.four_bit is not None:
        yield "weights in 4 bits are not split"
    if shapes.why_whole is not None:
        yield shapes.why_whole
    sizes = {
        "attention heads": shapes.num_heads,
        "key-value heads": shapes.num_kv_heads,
        "rows of the vocabulary": shapes.vocab_size,
        "columns of the MLP": shapes.mlp_size,
    }
    for what, size in sizes.items():
        if size % num_parts:
            yield f"{size:,} {what} cannot be divided by {num_parts}"


def _candidate(
    shapes: ModelShapes,
    workload: Workload,
    cluster: Cluster,
    sharding: Sharding,
    plan_of: Callable[[Workload], MemoryPlan],
) -> Candidate:
    load = with_sharding(shapes, workload, sharding)
    plan = plan_of(load)
    step = step_time_of(shapes, load, plan, cluster)
    return Candidate(load, plan, None if step is None else step.seconds)


def _best(considered: tuple[Candidate, ...]) -> Candidate:
    fitting = [way for way in considered if way.plan.fits]
    if not fitting:
        # Without a device there is nothing to fit, and no reason to split.
        unknown = considered[0].plan.fits is None
        return considered[0] if unknown else min(considered, key=lambda way: way.plan.peak_bytes)
    safe = [way for way in fitting if way.plan.is_safe] or fitting
    shortest = min(way.step_s or 0.0 for way in safe)
    return next(way for way in safe if (way.step_s or 0.0) <= (1 + WORTH_A_SPLIT) * shortest)
