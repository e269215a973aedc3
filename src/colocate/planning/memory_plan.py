"""Where the memory of one device goes under a plan, phase by phase."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args

from colocate.engines.native.footprint import engine_rows, least_kv_tokens, rollout_rows, useful_kv_tokens
from colocate.memory.rows import Moment, Phase, Row, total_bytes
from colocate.memory.train_plan import ACTIVATION_POLICIES, TrainPlan
from colocate.memory.workload import Workload
from colocate.policy.footprint import MOMENTS_BYTES, optimizer_rows, train_rows
from colocate.weights.shapes import ModelShapes

CONTEXT_BYTES = int(0.55 * 2**30)
"""The CUDA context and the code of the libraries' kernels."""
CUBLAS_BYTES = 64 * 2**20
"""cuBLAS's workspaces: 32 MiB for each stream that multiplies, on compute capability 9.0."""
HOLES = 0.02
"""What PyTorch's allocator holds beyond what tensors ask for, as a share of that: blocks in whole 2 MiB, and
holes between tensors that come and go."""


@dataclass(frozen=True)
class MemoryPlan:
    """How a run trains, and where the memory of one device goes."""

    rows: tuple[Row, ...]
    train_plan: TrainPlan
    num_parameters: int
    num_trained_parameters: int
    kv_bytes_per_token: int
    kv_cache_tokens: int
    kv_cache_sequences: int
    """Of full length that are decoded side by side, their prompts shared."""
    step_tokens: int
    """Of an optimizer step, a shared prompt counted once."""
    device_memory_bytes: int | None
    remedies: tuple[str, ...]
    """What to set, best first, when the run does not fit. Empty when it does or the device is unknown."""
    repeated_prompts: str | None = None
    """The arithmetic of prompts that a step computes several times for their group, and the memory that
    would spare it; None where that is less than a twentieth of the work, or the device is unknown."""

    def phase_bytes(self, phase: Phase) -> int:
        """Of training: its rows and those of its widest moment."""
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
        """What the run needs."""
        return self.phase_bytes("resident") + max(self.phase_bytes("rollout"), self.phase_bytes("train"))

    @property
    def occupied_bytes(self) -> int:
        """What the driver shows at most: more than is needed where there is memory to spare. PyTorch keeps
        training's memory through the next rollout unless the KV cache asks for it, the engine its cache."""
        both = sum(self.phase_bytes(phase) for phase in get_args(Phase))
        return both if self.device_memory_bytes is None else min(both, self.device_memory_bytes)

    @property
    def fits(self) -> bool | None:
        """None when the device is not known."""
        return None if self.device_memory_bytes is None else self.peak_bytes <= self.device_memory_bytes

    @property
    def shortage(self) -> str | None:
        """The arithmetic of why it does not fit; None if it does or the device is unknown."""
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
        correction: measured over predicted, of what grows with a micro-batch's tokens (`Planner.refine`).

    Raises:
        ValueError: the optimizer's state is not known.
    """
    if workload.optim not in MOMENTS_BYTES:
        raise ValueError(f"optim={workload.optim!r}: state size unknown; one of {', '.join(MOMENTS_BYTES)}.")
    resident = resident_rows(shapes, workload, train_plan)
    room = None if device_memory_bytes is None else device_memory_bytes - total_bytes(resident)
    rollout, kv_tokens = rollout_rows(shapes, workload, room)
    rows = (*resident, *rollout, *_train_rows(shapes, workload, train_plan, correction))
    result = MemoryPlan(
        rows=rows,
        train_plan=train_plan,
        num_parameters=shapes.num_parameters,
        num_trained_parameters=shapes.num_trained,
        kv_bytes_per_token=shapes.kv_bytes_per_token(workload.parameter_dtype),
        kv_cache_tokens=kv_tokens,
        kv_cache_sequences=_num_sequences(workload, kv_tokens),
        step_tokens=workload.step_tokens,
        device_memory_bytes=device_memory_bytes,
        remedies=(),
    )
    return replace(result, remedies=tuple(_remedies(result, shapes, workload))) if not result.fits else result


def resident_rows(shapes: ModelShapes, workload: Workload, train_plan: TrainPlan) -> list[Row]:
    """What is there in rollout and in training."""
    b, dtype = workload.parameter_dtype.itemsize, workload.parameter_dtype
    count, projections = shapes.num_parameters, shapes.num_projection_weights
    weights, how = shapes.weight_bytes(dtype), f"{count:,} parameters × {b} B"
    if shapes.four_bit is not None:
        scales = "double quantised" if shapes.four_bit.double_quantized else "float32"
        how = f"{projections:,} × 0.5 B and {scales} scales, {count - projections:,} × {b} B"
    rows = [Row("weights", "resident", weights, how)]
    if shapes.has_adapters:
        # PEFT keeps adapters in float32 whatever the base model's type is, so they need no masters.
        adapters = sum(shapes.adapter_sizes)
        rows.append(Row("LoRA adapters", "resident", adapters * 4, f"{adapters:,} parameters × 4 B"))
    elif workload.has_reference:
        # With LoRA the reference is the base model with its adapters off.
        rows.append(Row("reference", "resident", weights, how))
    if workload.is_gpu:
        context = f"{CONTEXT_BYTES / 2**30:.2f} GiB of context, cuBLAS's workspaces"
        rows += engine_rows(shapes, workload)
        rows.append(Row("CUDA", "resident", CONTEXT_BYTES + CUBLAS_BYTES, context))
    if not train_plan.offload_optimizer:
        rows += optimizer_rows(shapes, workload, "resident")
    return rows + ([_holes(rows, "resident")] if workload.is_gpu else [])


def _train_rows(
    shapes: ModelShapes, workload: Workload, train_plan: TrainPlan, correction: float
) -> list[Row]:
    rows = [
        replace(row, size_bytes=int(row.size_bytes * correction)) if row.is_transient else row
        for row in train_rows(shapes, workload, train_plan)
    ]
    if not workload.is_gpu:
        return rows
    holes = [
        _holes([row for row in rows if row.moment in (None, moment)], "train", moment)
        for moment in get_args(Moment)
    ]
    return rows + holes


def _holes(rows: Iterable[Row], phase: Phase, moment: Moment | None = None) -> Row:
    size_bytes = sum(row.size_bytes for row in rows if row.name != "CUDA")
    how = f"{HOLES:.0%} of what tensors ask for"
    return Row("allocator's holes", phase, int(HOLES * size_bytes), how, moment)


def train_bytes(shapes: ModelShapes, workload: Workload, train_plan: TrainPlan, correction: float) -> int:
    rows = _train_rows(shapes, workload, train_plan, correction)
    of_moments = (total_bytes(row for row in rows if row.moment == moment) for moment in get_args(Moment))
    return total_bytes(row for row in rows if row.moment is None) + max(of_moments)


def _num_sequences(workload: Workload, kv_tokens: int) -> int:
    """Sequences of full length in so many tokens of KV cache, at most those of a rollout."""
    if kv_tokens >= useful_kv_tokens(workload):
        return workload.num_running
    group = workload.num_generations
    of_group = least_kv_tokens(workload) + (group - 1) * workload.completion_tokens
    groups, left = divmod(kv_tokens, of_group)
    more = (left - workload.prompt_tokens) // workload.completion_tokens
    return min(workload.num_running, groups * group + max(0, min(group, more)))


def _remedies(result: MemoryPlan, shapes: ModelShapes, workload: Workload) -> Iterable[str]:
    """What to set when a phase needs more than the resident rows leave."""
    if result.device_memory_bytes is None:
        return
    train_plan, room = result.train_plan, result.device_memory_bytes - result.phase_bytes("resident")
    train, size = result.phase_bytes("train"), {row.name: row.size_bytes for row in result.rows}
    if train > room:
        if train_plan.activation_policy != ACTIVATION_POLICIES[-1]:
            yield "activation_policy='offload': keeps activations in the host's memory"
        if train_plan.budget(workload.max_sequence_length) > workload.max_sequence_length:
            longest = workload.max_sequence_length
            yield f"max_tokens_per_microbatch={longest}: the same gradient in smaller pieces"
    if result.phase_bytes("rollout") > room and workload.kv_cache_tokens is not None:
        yield "kv_cache_tokens=None: a KV cache as large as memory allows"
    if not train_plan.offload_optimizer and result.phase_bytes("rollout") > room:
        yield "offload_optimizer=True: masters and moments on the host during rollout"
    if "reference" in size:
        yield f"beta=0.0: keeps no reference model, {size['reference'] / 2**30:.2f} GiB less"
    if not shapes.has_adapters:
        saved = size.get("float32 masters", 0) + size["moments"] + size["gradients"]
        spared = size["moments"] - sum(map(MOMENTS_BYTES["adamw_bnb_8bit"], shapes.trained_sizes))
        if spared > 0:
            yield f"optim=adamw_bnb_8bit: moments in 8 bits, {spared / 2**30:.2f} GiB less"
        yield f"use_peft=True: LoRA spares most of {saved / 2**30:.2f} GiB of masters, moments and gradients"
    elif shapes.four_bit is None:
        packed = shapes.num_projection_weights // 2
        saved = shapes.num_projection_weights * workload.parameter_dtype.itemsize - packed
        yield f"load_in_4bit=True: frozen weights in 4 bits, about {saved / 2**30:.2f} GiB less"
    if workload.parameter_dtype.itemsize == 4 and shapes.has_adapters:
        yield "dtype=bfloat16: halves the weights"
    if _fits_when_short(result, shapes, workload):
        yield (
            "max_prompt_length and max_completion_length less than the "
            f"{workload.prompt_tokens:,} + {workload.completion_tokens:,} tokens of a sequence now"
        )


def _fits_when_short(result: MemoryPlan, shapes: ModelShapes, workload: Workload) -> bool:
    """Whether sequences of two tokens would fit: where they do not, no length will do."""
    assert result.device_memory_bytes is not None, "it is known not to fit"
    shortest = replace(workload, prompt_tokens=1, completion_tokens=1)
    least = replace(result.train_plan, activation_policy=ACTIVATION_POLICIES[-1], tokens_per_microbatch=2)
    room = result.device_memory_bytes - result.phase_bytes("resident")
    rollout, _ = rollout_rows(shapes, shortest, room)
    return max(total_bytes(rollout), train_bytes(shapes, shortest, least, correction=1.0)) <= room
