"""Translation of a run's options into the planner's records, in one place."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn
from transformers.training_args import OptimizerNames

from colocate.config.grpo_config import GRPOConfig
from colocate.engines.native.backends import default_sizes
from colocate.engines.native.decoder import bucket_for
from colocate.engines.native.footprint import decode_bytes
from colocate.engines.native.torch_backend import TorchBackend
from colocate.engines.registry import engine_of
from colocate.memory.workload import Sharding, VLLMDemand, Workload
from colocate.planning.hardware import Cluster, find_gpu
from colocate.planning.memory_plan import CONTEXT_BYTES
from colocate.planning.planner import Case, Constraints, Planner
from colocate.planning.sharding import Shard, ShardingChoice, with_sharding
from colocate.policy.attention import cudnn_attention
from colocate.policy.footprint import MOMENTS_BYTES
from colocate.weights.layouts import has_layout
from colocate.weights.shapes import ModelShapes

if TYPE_CHECKING:
    from colocate.memory.train_plan import ActivationPolicy

ASSUMED_PROMPT_TOKENS = 512
"""Tokens that the longest prompt is assumed to have if `max_prompt_length` is not set."""


def workload_of(
    args: GRPOConfig,
    shapes: ModelShapes,
    parameter_dtype: torch.dtype,
    *,
    is_gpu: bool,
    has_cudnn: bool = False,
) -> Workload:
    """The memory and work that a run with these options asks of one rank's device."""
    if (engine := _planned_as(args.engine)) is None:
        raise ValueError(
            f"engine={args.engine!r} is not planned: the distribution that brings it does not say which "
            "engine's memory it takes (`Engine.planned_as`)."
        )
    assert args.generation_batch_size and args.steps_per_generation, "GRPOConfig derives them"
    rows, page_size = default_sizes("cuda" if is_gpu else "cpu")
    max_num_seqs = args.max_num_seqs or rows
    decode_rows = bucket_for(max_num_seqs) if is_gpu else max_num_seqs
    return Workload(
        parameter_dtype=parameter_dtype,
        prompt_tokens=args.max_prompt_length or ASSUMED_PROMPT_TOKENS,
        completion_tokens=args.max_completion_length,
        num_generations=args.num_generations,
        num_step_sequences=args.per_device_train_batch_size * args.gradient_accumulation_steps,
        num_rollout_sequences=args.generation_batch_size // args.world_size,
        num_iterations=args.num_iterations,
        share_prompts=args.share_prompts,
        is_gpu=is_gpu,
        max_num_seqs=max_num_seqs,
        page_size=args.page_size or page_size,
        kv_cache_tokens=args.kv_cache_tokens,
        rollout_precision=args.rollout_precision,
        sharding=Sharding(decode_shard=args.decode_shard),
        decode_rows=decode_rows,
        decode_scratch_bytes=decode_bytes(shapes, decode_rows) if is_gpu else 0,
        max_prefill_tokens=TorchBackend.max_prefill_tokens,
        optim=OptimizerNames(args.optim).value,
        has_reference=args.beta != 0.0,
        scorers_sleep=args.offload_scorers,
        entropy_gradient=args.has_entropy_bonus,
        has_cudnn=has_cudnn,
        engine=engine,
        vllm=_demand_of_trtllm(args)
        if args.engine == "trtllm"
        else VLLMDemand(
            memory_share=args.vllm_gpu_memory_utilization,
            sleeps=args.vllm_enable_sleep_mode is not False,
            shares_weights=args.vllm_weights != "buckets"
            and args.vllm_tensor_parallel_size == 1
            and args.vllm_model_impl != "transformers"
            and not shapes.has_adapters
            and shapes.four_bit is None,
            is_bounded=args.vllm_max_model_length is not None,
            num_devices=args.vllm_tensor_parallel_size,
        ),
    )


def _planned_as(engine: str) -> Literal["native", "vllm", "rollout_server"] | None:
    return "native" if engine == "auto" else engine_of(engine).planned_as


def _demand_of_trtllm(args: GRPOConfig) -> VLLMDemand:
    return VLLMDemand(
        name="TensorRT-LLM",
        shares_weights=False,
        is_bounded=args.vllm_max_model_length is not None,
        num_devices=args.trtllm_tensor_parallel_size,
    )


def constraints_of(args: GRPOConfig) -> Constraints:
    """The parts of the plan that the user has set."""
    policy: ActivationPolicy | None = None if args.activation_policy == "auto" else args.activation_policy  # type: ignore[assignment]
    return Constraints(
        activation_policy=policy,
        tokens_per_microbatch=args.max_tokens_per_microbatch,
        logprob_chunk_size=args.logprob_chunk_size,
        offload_optimizer=args.offload_optimizer,
        sequences_per_microbatch=args.per_device_train_batch_size,
        shard=_shard_of(args),
    )


def _shard_of(args: GRPOConfig) -> Shard:
    """The option `shard`; "auto" splits no weights where `model.generate` reads them."""
    if args.engine != "transformers" or args.shard in ("none", 1):
        return args.shard  # type: ignore[return-value]  # the option's range
    if args.shard != "auto":
        raise ValueError(
            f"shard={args.shard} splits the weights over {args.shard} GPUs of a node, but "
            "engine='transformers' reads whole weights. Set shard=1, which splits the optimizer alone, or "
            "engine='native'."
        )
    return 1


def cluster_of(args: GRPOConfig, device: torch.device) -> Cluster:
    """The GPUs of the run that this process is a rank of, in nodes of torchrun's LOCAL_WORLD_SIZE."""
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", args.world_size))
    gpu = None
    if device.type == "cuda":
        with contextlib.suppress(ValueError):  # too old for the kernels, which only the native engine needs
            gpu = find_gpu(torch.cuda.get_device_name(device))
    return Cluster(args.world_size, args.world_size // per_node, gpu)


def sharding_choice(
    shapes: ModelShapes, args: GRPOConfig, parameter_dtype: torch.dtype, device: torch.device
) -> ShardingChoice:
    """The way in which a run's ranks split the model, chosen before it is loaded.

    Every rank comes to the same choice, since it depends on no memory that happens to be free.

    Args:
        shapes: of the model as it will be trained, with adapters and in 4 bits if it will be so.
        parameter_dtype: the type of its weights.
    """
    is_gpu = device.type == "cuda"
    has_cudnn = is_gpu and cudnn_attention.has_cudnn(device, parameter_dtype, shapes.head_size)
    workload = workload_of(args, shapes, parameter_dtype, is_gpu=is_gpu, has_cudnn=has_cudnn)
    if workload.optim not in MOMENTS_BYTES:
        workload = replace(workload, optim="adamw_torch_fused")  # few keep more than Adam
    device_bytes = torch.cuda.get_device_properties(device).total_memory if is_gpu else None
    return Case(shapes, workload, device_bytes, constraints_of(args)).sharding_choice(
        cluster_of(args, device)
    )


def planner_for(model: nn.Module, args: GRPOConfig, sharding: Sharding | None = None) -> Planner | None:
    """The planner of a loaded model on a GPU.

    Args:
        sharding: what the run's ranks split; None: nothing.

    Returns:
        None if nothing can be planned: on a CPU, for a model that is not supported natively, which trains
        padded, and with an optimizer whose state or an engine whose memory is not known.
    """
    parameter = next(model.parameters())
    if parameter.device.type != "cuda" or not has_layout(model) or _planned_as(args.engine) is None:
        return None
    if OptimizerNames(args.optim).value not in MOMENTS_BYTES or args.optim_args:
        return None  # `optim_args` may add state: momentum to SGD's none
    shapes = ModelShapes.of(model)
    dtype = model.get_input_embeddings().weight.dtype  # type: ignore[operator]
    has_cudnn = cudnn_attention.has_cudnn(parameter.device, dtype, shapes.head_size)
    workload = workload_of(args, shapes, dtype, is_gpu=True, has_cudnn=has_cudnn)
    if sharding is not None:
        workload = with_sharding(shapes, workload, sharding)
    return Planner(shapes, workload, _device_bytes(parameter.device), constraints_of(args))


def _device_bytes(device: torch.device) -> int:
    """Bytes of the device's memory without those that other processes hold."""
    free, total = torch.cuda.mem_get_info(device)
    return min(total, free + torch.cuda.memory_reserved(device) + CONTEXT_BYTES)
