"""GPUs by name, and how fast a run would be on one of them, estimated before anything has run.

The estimate is a roofline: each part of a step takes its operations over the GPU's operations per second, or
its bytes over the bytes per second of the GPU's memory, whichever is longer, at the efficiencies below.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from colocate.memory.workload import Workload
from colocate.planning.memory_plan import MemoryPlan
from colocate.planning.planner import OVERHEAD_TOKENS
from colocate.policy.footprint import Microbatch, train_flops_per_token
from colocate.weights.shapes import ModelShapes

TRAIN_EFFICIENCY = 0.5
"""Share of a GPU's peak operations per second that a training step without recomputation reaches: on an H200
packed layers and log-probs in chunks reach 0.49."""
FORWARD_EFFICIENCY = 0.48
"""Share of a GPU's peak operations per second that the matrix products of decode steps and of prefill
reach."""
BANDWIDTH_EFFICIENCY = 0.77
"""Share of the data sheet's bandwidth that a decode step reaches when it reads keys and values: on an H200
3.7 of 4.8 TB/s."""
LAYER_LATENCY_S = 20e-6
"""Seconds that the kernels of one layer take in a decode step beyond their reading and computing, since each
waits for the one before it."""


@dataclass(frozen=True)
class Gpu:
    """A GPU as its data sheet describes it."""

    name: str
    tflops: float
    """10^12 operations a second in bfloat16 with float32 sums, without sparsity."""
    bandwidth_gb_s: float
    """10^9 bytes a second."""
    memory_gib: float
    """Memory in GiB as the driver shows it."""
    is_hopper: bool = False


# More particular names before those that they contain.
GPUS = (
    Gpu("B200", 2250, 8000, 178.3),
    Gpu("H200", 989, 4800, 139.8, is_hopper=True),
    Gpu("H100 PCIe", 756, 2000, 79.1, is_hopper=True),
    Gpu("H100", 989, 3350, 79.1, is_hopper=True),
    Gpu("H20 3e", 148, 4800, 139.8, is_hopper=True),
    Gpu("H20", 148, 4000, 95.0, is_hopper=True),
    Gpu("RTX PRO 6000", 503, 1792, 94.9),  # Blackwell; the driver names the edition behind it
    Gpu("A100 80GB PCIe", 312, 1935, 79.2),
    Gpu("A100 80GB", 312, 2039, 79.2),  # a driver says A100-SXM4-80GB
    Gpu("A100", 312, 1555, 39.4),
    Gpu("L40S", 362, 864, 44.4),
    Gpu("RTX 5090", 209, 1792, 31.3),
    Gpu("RTX 4090", 165, 1008, 23.5),
    Gpu("RTX 3090", 71, 936, 23.6),
    Gpu("RTX 5080", 112, 960, 15.4),
    Gpu("RTX 5070 Ti", 87, 896, 15.4),
    Gpu("RTX 5070", 61, 672, 11.4),
    Gpu("A10", 125, 600, 22.1),
    Gpu("L4", 121, 300, 22.0),
)
TOO_OLD = ("T4", "V100", "P100", "RTX 20")
"""GPUs older than compute capability 8.0: they have no bfloat16, and the kernels do not run on them."""


@dataclass(frozen=True)
class Speed:
    """The speed that is expected of one device."""

    rollout_tokens_per_s: float | None
    """Completion tokens generated per second; None: a server on other devices generates them."""
    train_tokens_per_s: float
    """Tokens trained on per second, a shared prompt counted once."""


@dataclass(frozen=True)
class StepTime:
    """Seconds expected of one optimizer step if prompts and completions are as long as the run allows."""

    rollout_s: float
    train_s: float
    """Seconds of forward and backward, and of the reference's forward if there is a reference."""

    @property
    def seconds(self) -> float:
        return self.rollout_s + self.train_s


def find_gpu(name: str) -> Gpu | None:
    """The GPU in the table that a name given by a driver or a user stands for; None if it is not there.

    Raises:
        ValueError: the GPU is too old.
    """
    words = _words(name)
    if "LAPTOP" in words:
        return None  # a smaller chip under the name of a larger one

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
    # A part of a name, such as "4090", is enough if only one GPU has it.
    candidates = [gpu for gpu in GPUS if words and words <= _words(gpu.name)]
    return candidates[0] if len(candidates) == 1 else None


def _words(name: str) -> set[str]:
    return set(re.sub(r"[-_ ]|(?<=RTX)(?=[0-9])", " ", name.upper()).split())


def expected_speed(shapes: ModelShapes, workload: Workload, plan: MemoryPlan, gpu: Gpu) -> Speed:
    """Tokens per second of rollout and training, from operations and memory traffic at the efficiencies
    above."""
    on_server = workload.engine == "vllm_server"
    rollout = None if on_server else _rollout_speed(shapes, workload, plan, gpu)
    return Speed(rollout, _train_speed(shapes, workload, plan, gpu))


def step_time(shapes: ModelShapes, workload: Workload, speed: Speed, num_iterations: int) -> StepTime:
    """Seconds of one optimizer step.

    Args:
        num_iterations: how many times each completion is trained on; the rollout's time is divided among
            these.
    """
    train_s = workload.step_tokens / speed.train_tokens_per_s
    if workload.has_reference:
        # A forward pass is a third of a step of the whole model, a half of one with frozen weights.
        train_s *= 1 + (1 / 2 if shapes.has_adapters else 1 / 3)
    generated = workload.num_step_sequences * workload.completion_tokens / num_iterations
    return StepTime(generated / speed.rollout_tokens_per_s if speed.rollout_tokens_per_s else 0.0, train_s)


def _rollout_speed(shapes: ModelShapes, workload: Workload, plan: MemoryPlan, gpu: Gpu) -> float:
    rows = max(1, plan.kv_cache_sequences)
    prompts = -(-rows // workload.num_generations)
    weights = shapes.num_projection_weights + shapes.num_head_weights
    # Averaged over a rollout, completions have half their length; a prompt is read once for its group.
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
