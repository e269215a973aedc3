"""GPUs by name, and how fast a run would be on one: a roofline, before anything has run."""

from __future__ import annotations

from dataclasses import dataclass

from colocate.memory.accounting import Workload
from colocate.memory.memory_plan import MemoryPlan
from colocate.memory.planner import OVERHEAD_TOKENS, relative_work
from colocate.memory.shapes import ModelShapes
from colocate.memory.train_accounting import Microbatch

TRAIN_EFFICIENCY = 0.5
"""Of a GPU's matrix units over a training step without recomputation: packed layers with log-probs in chunks
reach 0.49 on an H200."""
PREFILL_EFFICIENCY = 0.5
"""Likewise of a prompt's forward pass."""
BANDWIDTH_EFFICIENCY = 0.7
"""Of the data sheet's bandwidth in a decode step: a copy reaches 0.9 of it on an H200, and a step 0.79 of what
its reads would take at a copy's rate."""


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


# More particular names before those that they contain.
GPUS = (
    Gpu("H200", 989, 4800, 139.8),
    Gpu("H100 PCIe", 756, 2000, 79.1),
    Gpu("H100", 989, 3350, 79.1),
    Gpu("A100-SXM4-80GB", 312, 2039, 79.2),
    Gpu("A100 80GB PCIe", 312, 1935, 79.2),
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
    words = name.upper().replace("-", " ").replace("_", " ").split()

    def is_named(known: str) -> bool:
        return set(known.upper().replace("-", " ").split()) <= set(words)

    for known in TOO_OLD:
        if is_named(known):
            raise ValueError(
                f"{name} is older than compute capability 8.0 (Ampere), which the kernels need; choose one of "
                f"{', '.join(gpu.name for gpu in GPUS)}."
            )
    return next((gpu for gpu in GPUS if is_named(gpu.name)), None)


def expected_speed(shapes: ModelShapes, workload: Workload, plan: MemoryPlan, gpu: Gpu) -> Speed:
    """The larger of what operations and what memory traffic take, at the efficiencies above."""
    return Speed(_rollout_speed(shapes, workload, plan, gpu), _train_speed(shapes, workload, plan, gpu))


def _rollout_speed(shapes: ModelShapes, workload: Workload, plan: MemoryPlan, gpu: Gpu) -> float:
    rows = max(1, plan.kv_cache_sequences)
    prompts = -(-rows // workload.num_generations)
    weights = shapes.num_projection_weights + shapes.num_head_weights
    # On average a completion is half done; its prompt is read once per group.
    read_kv = rows * workload.completion_tokens // 2 + prompts * workload.prompt_tokens
    read = weights * workload.parameter_dtype.itemsize + read_kv * plan.kv_bytes_per_token
    read += 2 * rows * shapes.vocab_size * 4
    memory_s = read / (gpu.bandwidth_gb_s * 1e9 * BANDWIDTH_EFFICIENCY)
    compute_s = 2 * weights * rows / (gpu.tflops * 1e12 * PREFILL_EFFICIENCY)
    prefill_s = 2 * weights * prompts * workload.prompt_tokens / (gpu.tflops * 1e12 * PREFILL_EFFICIENCY)
    steps_s = workload.completion_tokens * max(memory_s, compute_s)
    return rows * workload.completion_tokens / (prefill_s + steps_s)


def _train_speed(shapes: ModelShapes, workload: Workload, plan: MemoryPlan, gpu: Gpu) -> float:
    policy = plan.train_plan.activation_policy
    weights = shapes.num_projection_weights + shapes.num_head_weights
    attention = 2 * shapes.num_layers * shapes.q_size * workload.max_sequence_length
    per_token = (4 if shapes.has_adapters else 6) * weights + 3.5 * attention
    per_token *= relative_work(shapes, workload, policy)
    tokens = Microbatch.of(workload, plan.train_plan.budget(workload.max_sequence_length)).num_tokens
    seconds = per_token * (1 + OVERHEAD_TOKENS / tokens) / (gpu.tflops * 1e12 * TRAIN_EFFICIENCY)
    return 1 / seconds
