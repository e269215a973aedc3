"""The speed of a run on a GPU, or on many, estimated before anything has run.

The estimate is a roofline: each part of a step takes its operations over the GPU's operations per second, or
its bytes over the bytes per second of the GPU's memory, whichever is longer, at the efficiencies below.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from colocate.memory.train_plan import OVERHEAD_TOKENS
from colocate.memory.workload import Workload
from colocate.planning.communication import all_reduce_s, exchange_s, exposed_s, gathered_s, gathers_s
from colocate.planning.hardware import Cluster, Gpu
from colocate.planning.memory_plan import MemoryPlan
from colocate.policy.footprint import Microbatch, train_flops_per_token
from colocate.weights.shapes import ModelShapes

TRAIN_EFFICIENCY = 0.54
"""Share of a GPU's peak operations per second that a training step without recomputation reaches: on an H200
with cuDNN's attention 0.54 with 1.5B and 0.6 with 7B."""
FORWARD_EFFICIENCY = 0.48
"""Share of a GPU's peak operations per second that the matrix products of decode steps and of prefill
reach."""
BANDWIDTH_EFFICIENCY = 0.77
"""Share of the data sheet's bandwidth that a decode step reaches when it reads keys and values: on an H200
3.7 of 4.8 TB/s."""
EIGHT_BIT_EFFICIENCY = 0.3
"""Share of twice a GPU's bfloat16 peak that a decode step's 8-bit products reach, with the rounding of their
inputs: on an H100 0.34 with 7B and 256 sequences, 0.26 with 1.5B and 512."""
LAYER_LATENCY_S = 20e-6
"""Seconds that the kernels of one layer take in a decode step beyond their reading and computing, since each
waits for the one before it."""


@dataclass(frozen=True)
class Speed:
    """The speed that is expected of one GPU, which may be one of many."""

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
    exchange_s: float = 0.0
    """Seconds in which GPUs exchange gradients and weights after the last micro-batch (`exchange_s`)."""

    @property
    def seconds(self) -> float:
        return self.rollout_s + self.train_s + self.exchange_s


def expected_speed(shapes: ModelShapes, workload: Workload, plan: MemoryPlan, gpu: Gpu) -> Speed:
    """Tokens per second of rollout and training, from operations and memory traffic at the efficiencies
    above."""
    on_server = workload.engine == "rollout_server"
    rollout = None if on_server else _rollout_speed(shapes, workload, plan, gpu)
    return Speed(rollout, _train_speed(shapes, workload, plan, gpu))


def step_time_of(
    shapes: ModelShapes, workload: Workload, plan: MemoryPlan, cluster: Cluster
) -> StepTime | None:
    """Seconds of one optimizer step of all GPUs; None if their speed is unknown."""
    if cluster.gpu is None:
        return None
    speed = expected_speed(shapes, workload, plan, cluster.gpu)
    alone = step_time(shapes, workload, speed, workload.num_iterations)
    return replace(alone, exchange_s=exchange_s(shapes, workload, plan, cluster))


def step_time(shapes: ModelShapes, workload: Workload, speed: Speed, num_iterations: int) -> StepTime:
    """Seconds of one optimizer step, without the exchange between GPUs after the last micro-batch.

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


def _rollout_speed(whole: ModelShapes, workload: Workload, plan: MemoryPlan, gpu: Gpu) -> float:
    parts = workload.sharding.num_decode_parts
    shapes = whole.part(parts)
    rows = max(1, plan.kv_cache_sequences)
    prompts = -(-rows // workload.num_generations)
    weights = shapes.num_projection_weights + shapes.num_head_weights
    # Averaged over a rollout, completions have half their length; a prompt is read once for its group.
    read_kv = rows * workload.completion_tokens // 2 + prompts * workload.prompt_tokens
    # Logits are written and read.
    read = read_kv * plan.kv_bytes_per_token + 2 * rows * shapes.vocab_size * 4
    bytes_per_s = gpu.bandwidth_gb_s * 1e9 * BANDWIDTH_EFFICIENCY
    flops = gpu.tflops * 1e12 * FORWARD_EFFICIENCY
    in_8bit = shapes.num_8bit_weights if workload.rollout_precision == "fp8" else 0
    others, flops_8bit = weights - in_8bit, 2 * gpu.tflops * 1e12 * EIGHT_BIT_EFFICIENCY
    products_s = max(others * workload.parameter_dtype.itemsize / bytes_per_s, 2 * others * rows / flops)
    products_s += max(in_8bit / bytes_per_s, 2 * in_8bit * rows / flops_8bit)
    step_s = products_s + read / bytes_per_s + shapes.num_layers * LAYER_LATENCY_S
    prefill_s = 2 * weights * prompts * workload.prompt_tokens / flops
    # Ranks that share the weights add up what attention and MLP of each layer have given, and the embedding.
    token_bytes, sums = shapes.hidden_size * workload.parameter_dtype.itemsize, 2 * shapes.num_layers + 1
    step_s += sums * all_reduce_s(rows * token_bytes, parts, gpu)
    prefill_s += sums * all_reduce_s(prompts * workload.prompt_tokens * token_bytes, parts, gpu)
    rollout_s = prefill_s + workload.completion_tokens * step_s + gathered_s(shapes, workload, gpu)
    return rows * workload.completion_tokens / rollout_s / parts


def _train_speed(shapes: ModelShapes, workload: Workload, plan: MemoryPlan, gpu: Gpu) -> float:
    per_token = train_flops_per_token(shapes, workload, plan.train_plan.activation_policy)
    tokens = Microbatch.of(workload, plan.train_plan.budget(workload.max_sequence_length)).num_tokens
    alone = gpu.tflops * 1e12 * TRAIN_EFFICIENCY / (per_token * (1 + OVERHEAD_TOKENS / tokens))
    compute_s = tokens / alone
    return alone / (1 + exposed_s(gathers_s(shapes, workload, gpu), compute_s) / compute_s)


def duration(seconds: float) -> str:
    """Seconds in words, in the unit that suits them."""
    units = ((120, 1, "s"), (2 * 3600, 60, "min"), (48 * 3600, 3600, "h"), (float("inf"), 86400, "days"))
    size, name = next((size, name) for limit, size, name in units if seconds < limit)
    value = seconds / size
    return f"{value:.1f} {name}" if value < 10 else f"{value:,.0f} {name}"
