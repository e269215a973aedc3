"""The use of one device's memory under a plan, phase by phase."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args

from colocate.engines.native.footprint import engine_rows, least_kv_tokens, rollout_rows, useful_kv_tokens
from colocate.engines.vllm.footprint import asleep_row, vllm_rows
from colocate.memory.rows import MemoryRow, Moment, Phase, total_bytes
from colocate.memory.train_plan import TrainPlan
from colocate.memory.workload import Workload
from colocate.policy.footprint import MOMENTS_BYTES, optimizer_rows, train_rows
from colocate.weights.shapes import ModelShapes

CONTEXT_BYTES = int(0.55 * 2**30)
"""Bytes of the CUDA context and of the code of the libraries' kernels."""
CUBLAS_BYTES = 64 * 2**20
"""Bytes of cuBLAS's workspaces: on compute capability 9.0, 32 MiB for each stream with matrix products."""
MARGIN = 0.04
"""Share of the device's memory that training leaves free, because the prediction may be wrong by as much. If
it is wrong by more, a step runs out of memory and is repeated with a smaller plan."""
LEAST_KV_SHARE = 1 / 4
"""Share of a rollout's sequences that the KV cache should hold at least: with fewer, each decode step reads
all weights to generate only a few tokens."""
NCCL_BYTES = 512 * 2**20
"""Bytes that NCCL takes for the buffers of one group of ranks in a node, and with shared weights the memory
through which ranks add up in decode steps: a bound that is yet to be measured."""
FRAGMENTATION = 0.02
"""Memory that PyTorch's allocator holds beyond what tensors ask for, as a share of the latter: it takes
blocks of whole 2 MiB, and gaps remain between tensors that come and go."""


@dataclass(frozen=True)
class MemoryPlan:
    """A way to train a run, and the use of one device's memory by it."""

    rows: tuple[MemoryRow, ...]
    train_plan: TrainPlan
    num_parameters: int
    kv_bytes_per_token: int
    kv_cache_tokens: int
    kv_cache_sequences: int
    """Sequences of full length that the KV cache holds at the same time, each prompt stored once for its
    group."""
    step_tokens: int
    """The most tokens in an optimizer step, a shared prompt counted once."""
    num_running: int
    """Sequences that a rollout would decode at the same time if memory allowed."""
    least_kv_tokens: int
    """Tokens of KV cache that one sequence of full length needs."""
    device_memory_bytes: int | None
    repeated_prompts: str | None = None
    """A sentence about groups that are cut, whose prompts a step computes several times: the arithmetic, and
    the memory that would avoid it. None if that is less than a twentieth of the work, or the device is
    unknown."""

    def phase_bytes(self, phase: Phase) -> int:
        """Bytes of a phase. Training frees the memory of one moment before the next, so its largest one
        counts."""
        common = sum(row.size_bytes for row in self.rows if row.phase == phase and row.moment is None)
        return common + (self.moment_bytes(self.widest_moment) if phase == "train" else 0)

    def moment_bytes(self, moment: Moment) -> int:
        return sum(row.size_bytes for row in self.rows if row.moment == moment)

    @property
    def widest_moment(self) -> Moment:
        moments: tuple[Moment, ...] = get_args(Moment)
        return max(moments, key=self.moment_bytes)

    @property
    def peak_bytes(self) -> int:
        """The most bytes that the run needs at one time: resident, and the larger of rollout and training."""
        return self.phase_bytes("resident") + max(self.phase_bytes("rollout"), self.phase_bytes("train"))

    @property
    def occupied_bytes(self) -> int:
        """The most bytes that the driver will show as used, which is more than `peak_bytes` if there is
        memory to spare: PyTorch then keeps the memory of training during the next rollout, and the engine
        keeps its KV cache during training."""
        both = sum(self.phase_bytes(phase) for phase in get_args(Phase))
        return both if self.device_memory_bytes is None else min(both, self.device_memory_bytes)

    @property
    def fits(self) -> bool | None:
        """Whether the run fits the device; None if the device is not known."""
        return None if self.device_memory_bytes is None else self.peak_bytes <= self.device_memory_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes of the device that are free at the peak; if negative, bytes that are missing."""
        if self.device_memory_bytes is None:
            raise ValueError("The device is not known: nothing can be said of its memory.")
        return self.device_memory_bytes - self.peak_bytes

    @property
    def least_bytes(self) -> int:
        """The bytes that the run cannot do without: `peak_bytes` with a KV cache of a single sequence."""
        rollout_rows = (row for row in self.rows if row.phase == "rollout")
        cache = next((row.size_bytes for row in rollout_rows if row.name == "KV cache"), 0)
        least = min(cache, self.least_kv_tokens * self.kv_bytes_per_token)
        rollout = self.phase_bytes("rollout") - cache + least
        return self.phase_bytes("resident") + max(rollout, self.phase_bytes("train"))

    @property
    def is_safe(self) -> bool:
        """Whether the run would fit if the prediction were wrong by `MARGIN` of the device."""
        return self.device_memory_bytes is None or self.least_bytes <= (1 - MARGIN) * self.device_memory_bytes

    @property
    def why_tight(self) -> str | None:
        """Why a run that fits does so only just; None if it fits easily, does not fit, or has no known
        device.

        A full device alone says nothing, since the KV cache takes whatever memory is left. A run is tight if
        less than `MARGIN` of the device would be free with a cache of a single sequence, or if sequences have
        to wait because the cache fills the device or holds less than `LEAST_KV_SHARE` of them.
        """
        if not self.fits:
            return None
        assert self.device_memory_bytes is not None, "it is known to fit"
        if not self.is_safe:
            return (
                f"it cannot do with less than {self.least_bytes / 2**30:.2f} GiB, and the plan may be off by "
                f"{MARGIN:.0%} of the device"
            )
        is_full = self.free_bytes < MARGIN * self.device_memory_bytes
        share = 1.0 if is_full else LEAST_KV_SHARE
        if self.kv_cache_tokens and self.kv_cache_sequences < share * self.num_running:
            return (
                f"the KV cache holds {self.kv_cache_sequences:,} of the {self.num_running:,} sequences that "
                "could be decoded side by side; the others wait"
            )
        return None

    @property
    def shortage(self) -> str | None:
        """The arithmetic of why the run does not fit; None if it fits or the device is unknown."""
        if self.fits in (None, True):
            return None
        assert self.device_memory_bytes is not None, "it is known not to fit"
        sizes = {phase: self.phase_bytes(phase) / 2**30 for phase in get_args(Phase)}
        larger = max(("rollout", "train"), key=lambda phase: sizes[phase])
        return (
            f"resident {sizes['resident']:.2f} GiB + {larger} {sizes[larger]:.2f} GiB = "
            f"{self.peak_bytes / 2**30:.2f} GiB; the device has {self.device_memory_bytes / 2**30:.2f} GiB"
        )

    def to_dict(self) -> dict[str, Any]:
        totals = {f"{phase}_bytes": self.phase_bytes(phase) for phase in get_args(Phase)}
        return {
            **asdict(self),
            **totals,
            "peak_bytes": self.peak_bytes,
            "occupied_bytes": self.occupied_bytes,
            "widest_moment": self.widest_moment,
            "fits": self.fits,
        }


def account(
    shapes: ModelShapes,
    workload: Workload,
    train_plan: TrainPlan,
    device_memory_bytes: int | None = None,
    correction: float = 1.0,
) -> MemoryPlan:
    """The memory of one device under a given plan.

    Args:
        correction: factor on the predicted bytes that grow with a micro-batch's tokens (`Planner.refine`).
    """
    if workload.optim not in MOMENTS_BYTES:
        raise ValueError(f"optim={workload.optim!r}: state size unknown; one of {', '.join(MOMENTS_BYTES)}.")
    resident = resident_rows(shapes, workload, train_plan)
    rollout, kv_tokens = engine_turn(shapes, workload, resident, device_memory_bytes)
    engine, decoded = workload.of_engine, shapes.part(workload.sharding.num_decode_parts)
    rows = (*resident, *rollout, *_train_rows(shapes, workload, train_plan, correction))
    return MemoryPlan(
        rows=rows,
        train_plan=train_plan,
        num_parameters=shapes.num_parameters,
        kv_bytes_per_token=decoded.kv_bytes_per_token(workload.kv_dtype),
        kv_cache_tokens=kv_tokens,
        kv_cache_sequences=_num_sequences(engine, kv_tokens),
        num_running=engine.num_running,
        least_kv_tokens=least_kv_tokens(engine),
        step_tokens=workload.step_tokens,
        device_memory_bytes=device_memory_bytes,
    )


def resident_rows(shapes: ModelShapes, workload: Workload, train_plan: TrainPlan) -> list[MemoryRow]:
    """The rows that take memory in rollout and training alike; those of a vLLM that never sleeps are in
    `engine_turn`."""
    b, dtype, sharding = workload.parameter_dtype.itemsize, workload.parameter_dtype, workload.sharding
    held = shapes.part(sharding.num_weight_parts)
    count, projections = held.num_parameters, shapes.num_projection_weights
    weights, how = held.weight_bytes(dtype), f"{count:,} parameters × {b} B"
    if sharding.num_weight_parts > 1:
        how += f", one of {sharding.num_weight_parts} parts of {shapes.num_parameters:,}"
    if shapes.four_bit is not None:
        scales = "double quantised" if shapes.four_bit.double_quantized else "float32"
        how = f"{projections:,} × 0.5 B and {scales} scales, {count - projections:,} × {b} B"
    rows = [MemoryRow("weights", "resident", weights, how)]
    if shapes.has_adapters:
        # PEFT keeps adapters in float32 whatever the base model's type is, so they need no masters.
        adapters = sum(shapes.adapter_sizes)
        rows.append(MemoryRow("LoRA adapters", "resident", adapters * 4, f"{adapters:,} parameters × 4 B"))
    elif workload.has_reference and not workload.scorers_sleep:
        # With LoRA the reference is the base model with its adapters off.
        rows.append(MemoryRow("reference", "resident", weights, how))
    if workload.is_gpu:
        if workload.engine == "native":
            rows += engine_rows(shapes.part(sharding.num_decode_parts), workload.of_engine)
        elif workload.engine == "vllm":
            rows.append(asleep_row(workload.vllm.name))
        context = f"{CONTEXT_BYTES / 2**30:.2f} GiB of context, cuBLAS's workspaces"
        rows.append(MemoryRow("CUDA", "resident", CONTEXT_BYTES + CUBLAS_BYTES, context))
        of_ranks = [sharding.num_replicas, sharding.num_weight_parts]
        if sharding.gathers:
            of_ranks += [sharding.num_decode_parts, sharding.num_weight_parts // sharding.num_decode_parts]
        groups = [size for size in of_ranks if size > 1]
        if groups:
            sizes = " and of ".join(map(str, groups))
            how = f"{NCCL_BYTES / 2**30:.2f} GiB for each group of ranks: of {sizes}"
            rows.append(MemoryRow("NCCL", "resident", len(groups) * NCCL_BYTES, how))
    if not train_plan.offload_optimizer:
        rows += optimizer_rows(shapes, workload, "resident")
    return rows + ([_fragmentation(rows, "resident")] if workload.is_gpu else [])


def engine_turn(
    shapes: ModelShapes, workload: Workload, resident: Iterable[MemoryRow], device_memory_bytes: int | None
) -> tuple[list[MemoryRow], int]:
    """The rows that the engine adds to the resident ones during a rollout, and the tokens of its KV cache.

    The rows of a vLLM that never sleeps belong to the phase "resident". A server adds none, since it runs on
    other devices.
    """
    if workload.engine == "rollout_server":
        return [], 0
    room = None if device_memory_bytes is None else device_memory_bytes - total_bytes(resident)
    if workload.engine == "vllm" and workload.is_gpu:
        return vllm_rows(shapes, workload, room_bytes=room, device_memory_bytes=device_memory_bytes)
    return rollout_rows(shapes.part(workload.sharding.num_decode_parts), workload.of_engine, room)


def train_room(
    shapes: ModelShapes, workload: Workload, train_plan: TrainPlan, device_memory_bytes: int
) -> int:
    """Bytes that a device has for a training step after the resident rows and the margin of error."""
    resident = resident_rows(shapes, workload, train_plan)
    if workload.engine == "vllm" and not workload.vllm.sleeps:
        resident += engine_turn(shapes, workload, resident, device_memory_bytes)[0]
    return int((1 - MARGIN) * device_memory_bytes) - total_bytes(resident)


def _train_rows(
    shapes: ModelShapes, workload: Workload, train_plan: TrainPlan, correction: float
) -> list[MemoryRow]:
    rows = [
        replace(row, size_bytes=int(row.size_bytes * correction)) if row.is_transient else row
        for row in train_rows(shapes, workload, train_plan)
    ]
    if not workload.is_gpu:
        return rows
    lost = [
        _fragmentation([row for row in rows if row.moment in (None, moment)], "train", moment)
        for moment in get_args(Moment)
        if any(row.moment == moment for row in rows)
    ]
    return rows + lost


def _fragmentation(rows: Iterable[MemoryRow], phase: Phase, moment: Moment | None = None) -> MemoryRow:
    size_bytes = sum(row.size_bytes for row in rows if row.name not in ("CUDA", "NCCL"))
    how = f"{FRAGMENTATION:.0%} of what tensors ask for"
    return MemoryRow("fragmentation", phase, int(FRAGMENTATION * size_bytes), how, moment)


def train_bytes(
    shapes: ModelShapes,
    workload: Workload,
    train_plan: TrainPlan,
    correction: float,
    moments: Sequence[Moment] = get_args(Moment),
) -> int:
    """Bytes of a training step at the largest of some of its moments."""
    rows = _train_rows(shapes, workload, train_plan, correction)
    of_moments = (total_bytes(row for row in rows if row.moment == moment) for moment in moments)
    return total_bytes(row for row in rows if row.moment is None) + max(of_moments)


def _num_sequences(workload: Workload, kv_tokens: int) -> int:
    """Sequences of full length that `kv_tokens` of KV cache hold, at most as many as run in a rollout."""
    if kv_tokens >= useful_kv_tokens(workload):
        return workload.num_running
    group = workload.num_generations
    of_group = least_kv_tokens(workload) + (group - 1) * workload.completion_tokens
    groups, left = divmod(kv_tokens, of_group)
    more = (left - workload.prompt_tokens) // workload.completion_tokens
    return min(workload.num_running, groups * group + max(0, min(group, more)))
