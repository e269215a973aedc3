"""GPUs by name, and how fast a run would be on one: a roofline, before anything has run."""

from __future__ import annotations

import re
from dataclasses import dataclass

from colocate.memory.workload import Workload
from colocate.planning.memory_plan import MemoryPlan
from colocate.planning.planner import OVERHEAD_TOKENS
from colocate.policy.footprint import Microbatch, train_flops_per_token
from colocate.weights.shapes import ModelShapes

TRAIN_EFFICIENCY = 0.5
"""Of a GPU's matrix units over a training step without recomputation: packed layers with log-probs in chunks
reach 0.49 on an H200."""
FORWARD_EFFICIENCY = 0.48
"""Likewise of the matrix products of a decode step, and of prompts."""
BANDWIDTH_EFFICIENCY = 0.77
"""Of the data sheet's bandwidth when a decode step reads keys and values: 3.7 of 4.8 TB/s on an H200."""
LAYER_LATENCY_S = 20e-6
"""Of a layer's kernels in a decode step, one after the other, beyond what they read and compute."""


@dataclass(frozen=True)
class Gpu:
    """What its data sheet says."""

    name: str
    tflops: float
    """10^12 operations a second in bfloat16 with float32 sums, without sparsity."""
    bandwidth_gb_s: float
    """10^9 bytes a second."""
    memory_gib: float
    """As the driver shows it."""
    is_hopper: bool = False


# More particular names before those that they contain.
GPUS = (
    Gpu("H200", 989, 4800, 139.8, is_hopper=True),
    Gpu("H100 PCIe", 756, 2000, 79.1, is_hopper=True),
    Gpu("H100", 989, 3350, 79.1, is_hopper=True),
    Gpu("A100 80GB PCIe", 312, 1935, 79.2),
    Gpu("A100 80GB", 312, 2039, 79.2),  # a driver says A100-SXM4-80GB
    Gpu("A100", 312, 1555, 39.4),
    Gpu("L40S", 362, 864, 44.4),
    Gpu("RTX 4090", 165, 1008, 23.5),
    Gpu("RTX 3090", 71, 936, 23.6),
    Gpu("A10", 125, 600, 22.1),
    Gpu("L4", 121, 300, 22.0),
)
TOO_OLD = ("T4", "V100", "P100", "RTX 20")
"""Older than compute capability 8.0: no bfloat16, and the kernels do not run."""


@dataclass(frozen=True)
class Speed:
    """Expected of one device."""

    rollout_tokens_per_s: float
    """Completion tokens."""
    train_tokens_per_s: float
    """Tokens that training reads, a shared prompt counted once."""


def find_gpu(name: str) -> Gpu | None:
    """The GPU that a driver's or a user's name stands for; None: not in the table.

    Raises:
        ValueError: it is too old.
    """
    words = _words(name)

    def is_named(known: str) -> bool:
        return _words(known) <= words

    for known in TOO_OLD:
        if is_named(known):
            raise ValueError(
                f"{name} is older than compute capability 8.0 (Ampere), which the kernels need; choose one "
                f"of {', '.join(gpu.name for gpu in GPUS)}."
            )
    if gpu := next((gpu for gpu in GPUS if is_named(gpu.name)), None):
        return gpu
    # "4090" can be one only.
    candidates = [gpu for gpu in GPUS if words and words <= _words(gpu.name)]
    return candidates[0] if len(candidates) == 1 else None


def _words(name: str) -> set[str]:
    return set(re.sub(r"[-_ ]|(?<=RTX)(?=[0-9])", " ", name.upper()).split())


def expected_speed(shapes: ModelShapes, workload: Workload, plan: MemoryPlan, gpu: Gpu) -> Speed:
    """What operations and memory traffic take at the efficiencies above."""
    return Speed(_rollout_speed(shapes, workload, plan, gpu), _train_speed(shapes, workload, plan, gpu))


def _rollout_speed(shapes: ModelShapes, workload: Workload, plan: MemoryPlan, gpu: Gpu) -> float:
    rows = max(1, plan.kv_cache_sequences)
    prompts = -(-rows // workload.num_generations)
    weights = shapes.num_projection_weights + shapes.num_head_weights
    # On average a completion is half done; its prompt is read once per group.
    read_kv = rows * workload.completion_tokens // 2 + prompts * workload.prompt_tokens
    # Logits are written and read.
    read = read_kv * plan.kv_bytes_per_token + 2 * rows * shapes.vocab_size * 4
    bytes_per_s = gpu.bandwidth_gb_s * 1e9 * BANDWIDTH_EFFICIENCY
    flops = gpu.tflops * 1e12 * FORWARD_EFFICIENCY
    products_s = max(weights * workload.parameter_dtype.itemsize / bytes_per_s, 2 * weights * rows / flops)
    step_s = products_s + read / bytes_per_s + shapes.num_layers * LAYER_LATENCY_S
    prefill_s = 2 * weights * prompts * workload.prompt_tokens / flops
    return rows * workload.completion_tokens / (prefill_s + workload.completion_tokens * step_s)


def _train_speed(shapes: ModelShapes, workload: Workload, plan: MemoryPlan, gpu: Gpu) -> float:
    per_token = train_flops_per_token(shapes, workload, plan.train_plan.activation_policy)
    tokens = Microbatch.of(workload, plan.train_plan.budget(workload.max_sequence_length)).num_tokens
    return gpu.tflops * 1e12 * TRAIN_EFFICIENCY / (per_token * (1 + OVERHEAD_TOKENS / tokens))
