"""The memory that vLLM takes on one device in the trainer's process, as the planner's rows."""

from __future__ import annotations

from colocate.engines.native.footprint import least_kv_tokens, prefill_bytes_per_token
from colocate.engines.vllm.arguments import (
    MEMORY_SHARE,
    MEMORY_SHARE_AWAKE,
    WAKE_UP_BYTES,
    whole_kv_cache_bytes,
)
from colocate.memory.rows import MemoryRow, Phase, total_bytes
from colocate.memory.workload import Workload
from colocate.weights.shapes import ModelShapes


def asleep_row(name: str) -> MemoryRow:
    """The row of memory that vLLM, or an engine planned as vLLM, keeps while it sleeps: CUDA graphs,
    workspaces of libraries."""
    return MemoryRow(f"{name} asleep", "resident", WAKE_UP_BYTES, "a bound of its graphs and workspaces")


def vllm_rows(
    shapes: ModelShapes,
    workload: Workload,
    *,
    room_bytes: int | None = None,
    device_memory_bytes: int | None = None,
) -> tuple[list[MemoryRow], int]:
    """The rows of a vLLM that is awake, and the tokens of its KV cache.

    The rows belong to the rollout, or are resident if vLLM never sleeps. vLLM fills the share of the device
    that it is given: weights and activations come first, and the KV cache has the rest. Without
    `vllm_gpu_memory_utilization` the share is 0.9 of the room, or 0.3 of the device if vLLM never sleeps.

    Args:
        room_bytes: device memory that the rest of the run leaves; None: unknown, and the cache is as large as
            the rollout can use.
        device_memory_bytes: memory of the whole device; None: unknown, as for `room_bytes`.
    """
    b, demand = workload.parameter_dtype.itemsize, workload.vllm
    phase: Phase = "rollout" if demand.sleeps else "resident"
    rows = []
    if not demand.shares_weights:
        copy, how = shapes.num_parameters * b // demand.num_devices, f"{shapes.num_parameters:,} × {b} B"
        of_devices = f", over {demand.num_devices} devices" if demand.num_devices > 1 else ""
        rows.append(MemoryRow(f"{demand.name}'s weights", phase, copy, f"a copy: {how}{of_devices}"))
    tokens, logits = workload.max_prefill_tokens, workload.max_num_seqs * shapes.vocab_size * 4
    activations = tokens * prefill_bytes_per_token(shapes, b) + logits
    how = f"{tokens:,} tokens of a prefill, {workload.max_num_seqs} rows of logits"
    rows.append(MemoryRow(f"{demand.name}'s activations", phase, activations, how))
    per_token = shapes.kv_bytes_per_token(workload.parameter_dtype) // min(
        demand.num_devices, shapes.num_kv_heads
    )
    useful = whole_kv_cache_bytes(workload.num_running, workload.max_sequence_length, per_token)
    kv_bytes, how = useful, "as much as a rollout can use"
    if device_memory_bytes is not None and room_bytes is not None:
        share, whole, of = demand.memory_share, device_memory_bytes, "the device"
        if share is None:
            share, whole, of = MEMORY_SHARE, room_bytes, "what is free"
            if not demand.sleeps:
                share, whole, of = MEMORY_SHARE_AWAKE, device_memory_bytes, "the device"
        left = int(share * whole) - total_bytes(rows)
        if demand.memory_share is not None or not demand.is_bounded or left < useful:
            kv_bytes, how = left, f"the rest of {share} × {whole / 2**30:.2f} GiB, {of}"
    kv_tokens = max(kv_bytes // per_token, least_kv_tokens(workload))
    how = f"{kv_tokens:,} tokens × {per_token:,} B: {how}"
    return [MemoryRow("KV cache", phase, kv_tokens * per_token, how), *rows], kv_tokens
