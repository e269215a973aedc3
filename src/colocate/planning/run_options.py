"""Translation of a run's options into the planner's records, in one place."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn
from transformers.training_args import OptimizerNames

from colocate.algorithms.objective_params import ObjectiveParams
from colocate.engines.native.backends import default_sizes
from colocate.engines.native.decoder import bucket_for
from colocate.engines.native.footprint import decode_bytes
from colocate.engines.native.options import NativeOptions
from colocate.engines.native.torch_backend import TorchBackend
from colocate.engines.options import SamplingOptions
from colocate.engines.plugged_in import PluggedInOptions
from colocate.engines.registry import engine_of
from colocate.engines.vllm.options import VLLMOptions
from colocate.experience.options import RefillOptions
from colocate.memory.plan_options import PlanOptions
from colocate.memory.workload import Sharding, VLLMDemand, Workload
from colocate.planning.hardware import Cluster, find_gpu
from colocate.planning.memory_plan import CONTEXT_BYTES
from colocate.planning.planner import Case, Constraints, Planner
from colocate.planning.sharding import Shard, ShardingChoice, with_sharding
from colocate.policy.attention import cudnn_attention
from colocate.policy.footprint import MOMENTS_BYTES
from colocate.policy.model.options import ModelOptions
from colocate.weights.layouts import has_layout
from colocate.weights.shapes import ModelShapes

ASSUMED_PROMPT_TOKENS = 512
"""Tokens that the longest prompt is assumed to have if `max_prompt_length` is not set."""


@dataclass(kw_only=True)
class PlannedOptions(
    PlanOptions, RefillOptions, NativeOptions, VLLMOptions, PluggedInOptions,
    ModelOptions, SamplingOptions, ObjectiveParams,
):  # fmt: skip
    """The options on which the memory and the work of a run depend."""

    generation_batch_size: int
    num_iterations: int
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    share_prompts: bool
    offload_scorers: bool
    optim: OptimizerNames | str
    optim_args: str | None
    world_size: int
    device: torch.device


def workload_of(
    options: PlannedOptions,
    shapes: ModelShapes,
    parameter_dtype: torch.dtype,
    *,
    is_gpu: bool,
    has_cudnn: bool = False,
) -> Workload:
    """The memory and work that a run with these options asks of one rank's device."""
    if (planned_as := _planned_as(options.engine)) is None:
        raise ValueError(
            f"engine={options.engine!r} is not planned: the distribution that brings it does not say which "
            "engine's memory it takes (`Engine.planned_as`)."
        )
    rows, page_size = default_sizes("cuda" if is_gpu else "cpu")
    max_num_seqs = options.max_num_seqs or rows
    decode_rows = bucket_for(max_num_seqs) if is_gpu else max_num_seqs
    return Workload(
        parameter_dtype=parameter_dtype,
        prompt_tokens=options.max_prompt_length or ASSUMED_PROMPT_TOKENS,
        completion_tokens=options.max_completion_length,
        num_generations=options.num_generations,
        num_step_sequences=options.per_device_train_batch_size * options.gradient_accumulation_steps,
        num_rollout_sequences=options.generation_batch_size // options.world_size,
        num_iterations=options.num_iterations,
        share_prompts=options.share_prompts,
        is_gpu=is_gpu,
        max_num_seqs=max_num_seqs,
        page_size=options.page_size or page_size,
        kv_cache_tokens=options.kv_cache_tokens,
        rollout_precision=options.rollout_precision,
        sharding=Sharding(decode_shard=options.decode_shard),
        decode_rows=decode_rows,
        decode_scratch_bytes=decode_bytes(shapes, decode_rows) if is_gpu else 0,
        max_prefill_tokens=TorchBackend.max_prefill_tokens,
        optim=OptimizerNames(options.optim).value,
        has_reference=options.beta != 0.0,
        scorers_sleep=options.offload_scorers,
        entropy_gradient=options.has_entropy_bonus,
        has_cudnn=has_cudnn,
        engine=planned_as,
        vllm=_vllm_demand(options, shapes),
    )


def _planned_as(engine: str) -> Literal["native", "vllm", "rollout_server"] | None:
    return "native" if engine == "auto" else engine_of(engine).planned_as


def _vllm_demand(options: PlannedOptions, shapes: ModelShapes) -> VLLMDemand:
    """The memory that vLLM takes, or an engine that is planned as vLLM."""
    if options.engine != "auto" and (engine := engine_of(options.engine)).demand:
        return engine.demand_of(options)
    is_plain = not shapes.has_adapters and shapes.four_bit is None
    is_shared = options.vllm_weights != "buckets" and options.vllm_model_impl != "transformers"
    return VLLMDemand(
        memory_share=options.vllm_gpu_memory_utilization,
        sleeps=options.vllm_enable_sleep_mode is not False,
        shares_weights=is_shared and is_plain and options.vllm_tensor_parallel_size == 1,
        is_bounded=options.vllm_max_model_length is not None,
        num_devices=options.vllm_tensor_parallel_size,
    )


def constraints_of(options: PlannedOptions) -> Constraints:
    """The parts of the plan that the user has set."""
    policy: Any = options.activation_policy
    return Constraints(
        activation_policy=None if policy == "auto" else policy,
        tokens_per_microbatch=options.max_tokens_per_microbatch,
        logprob_chunk_size=options.logprob_chunk_size,
        offload_optimizer=options.offload_optimizer,
        sequences_per_microbatch=options.per_device_train_batch_size,
        shard=_shard_of(options),
    )


def _shard_of(options: PlannedOptions) -> Shard:
    """The option `shard`; "auto" splits no weights where `model.generate` reads them."""
    if options.engine != "transformers" or options.shard in ("none", 1):
        return options.shard  # type: ignore[return-value]  # the option's range
    if options.shard != "auto":
        raise ValueError(
            f"shard={options.shard} splits the weights over {options.shard} GPUs of a node, but "
            "engine='transformers' reads whole weights. Set shard=1, which splits the optimizer alone, or "
            "engine='native'."
        )
    return 1


def cluster_of(options: PlannedOptions) -> Cluster:
    """The GPUs of the run that this process is a rank of, in nodes of torchrun's LOCAL_WORLD_SIZE."""
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", options.world_size))
    gpu = None
    if options.device.type == "cuda":
        with contextlib.suppress(ValueError):  # too old for the kernels, which only the native engine needs
            gpu = find_gpu(torch.cuda.get_device_name(options.device))
    return Cluster(options.world_size, options.world_size // per_node, gpu)


def sharding_choice(
    shapes: ModelShapes, options: PlannedOptions, parameter_dtype: torch.dtype
) -> ShardingChoice:
    """The way in which a run's ranks split the model that will be trained, chosen before it is loaded: every
    rank comes to the same, since it depends on no memory that happens to be free."""
    device, is_gpu = options.device, options.device.type == "cuda"
    has_cudnn = is_gpu and cudnn_attention.has_cudnn(device, parameter_dtype, shapes.head_size)
    workload = workload_of(options, shapes, parameter_dtype, is_gpu=is_gpu, has_cudnn=has_cudnn)
    if workload.optim not in MOMENTS_BYTES:
        workload = replace(workload, optim="adamw_torch_fused")  # few keep more than Adam
    device_bytes = torch.cuda.get_device_properties(device).total_memory if is_gpu else None
    return Case(shapes, workload, device_bytes, constraints_of(options)).sharding_choice(cluster_of(options))


def planner_for(
    model: nn.Module, options: PlannedOptions, sharding: Sharding | None = None
) -> Planner | None:
    """The planner of a loaded model on a GPU; None where nothing can be planned: on a CPU, for a model
    without a layout, and with an optimizer whose state or an engine whose memory is not known."""
    parameter = next(model.parameters())
    if parameter.device.type != "cuda" or not has_layout(model) or _planned_as(options.engine) is None:
        return None
    if OptimizerNames(options.optim).value not in MOMENTS_BYTES or options.optim_args:
        return None  # `optim_args` may add state: momentum to SGD's none
    shapes = ModelShapes.of(model)
    dtype = model.get_input_embeddings().weight.dtype  # type: ignore[operator]
    has_cudnn = cudnn_attention.has_cudnn(parameter.device, dtype, shapes.head_size)
    workload = workload_of(options, shapes, dtype, is_gpu=True, has_cudnn=has_cudnn)
    if sharding is not None:
        sharding = replace(sharding, decode_shard=options.decode_shard)
        workload = with_sharding(shapes, workload, sharding)
    return Planner(shapes, workload, _device_bytes(parameter.device), constraints_of(options))


def _device_bytes(device: torch.device) -> int:
    """Bytes of the device's memory without those that other processes hold."""
    free, total = torch.cuda.mem_get_info(device)
    return min(total, free + torch.cuda.memory_reserved(device) + CONTEXT_BYTES)
