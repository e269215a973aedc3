"""TensorRT-LLM as the entry point `colocate.engines` names it: its options, and the engine made of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from colocate.engines.options import EngineOptions
from colocate.engines.registry import Engine, EngineParts
from colocate.options.requirements import AT_LEAST_ONE

if TYPE_CHECKING:
    from colocate.memory.workload import VLLMDemand
    from colocate_trtllm.engine import TRTLLMEngine

ENGINE = Engine(
    "trtllm",
    build="colocate_trtllm.options:build",
    options="colocate_trtllm.options:TRTLLMOptions",
    words="TensorRT-LLM beside the ranks",
    planned_as="vllm",
    demand="colocate_trtllm.options:demand",
    gpu_shares=2,
    unread="only TensorRT-LLM reads it; set engine='trtllm' to generate with it",
    replaced={
        "vllm_tensor_parallel_size": "trtllm_tensor_parallel_size",
        "vllm_gpu_memory_utilization": "trtllm_engine_kwargs={'kv_cache_config': "
        "{'free_gpu_memory_fraction': ...}}",
        "vllm_engine_kwargs": "trtllm_engine_kwargs",
    },
)


@dataclass
class TRTLLMOptions(EngineOptions):
    """The options that TensorRT-LLM alone reads."""

    # ── Rollout by TensorRT-LLM (engine="trtllm") ────────────────────────────────────────────────────────

    trtllm_tensor_parallel_size: Annotated[int, AT_LEAST_ONE] = 1
    """How many consecutive ranks have one TensorRT-LLM together; must divide the number of ranks."""
    trtllm_engine_kwargs: dict[str, Any] | None = None
    """Further arguments of `tensorrt_llm.AsyncLLM`."""
    trtllm_python: str | None = None
    """The interpreter of an environment that has TensorRT-LLM, colocate, colocate-trtllm and Ray, on every
    node. None: the ranks' own."""


def demand(options: TRTLLMOptions) -> VLLMDemand:
    """The memory that TensorRT-LLM takes, which is planned as vLLM's with a copy of the weights."""
    from colocate.memory.workload import VLLMDemand

    return VLLMDemand(
        name="TensorRT-LLM",
        shares_weights=False,
        is_bounded=options.vllm_max_model_length is not None,
        num_devices=options.trtllm_tensor_parallel_size,
    )


def build(parts: EngineParts) -> TRTLLMEngine:
    """TensorRT-LLM, started beside the ranks of a Ray cluster.

    Raises:
        ImportError: TensorRT-LLM or Ray is not installed.
        ValueError: this rank was not started by Ray.
    """
    from colocate.engines.vllm.groups import TensorParallelGroup
    from colocate.parallel.ray_cluster import RayPlace
    from colocate.parallel.verdict import Peers
    from colocate.weights.layouts import causal_lm
    from colocate_trtllm import ray_server, shared_memory
    from colocate_trtllm.arguments import MAX_NUM_SEQS, check_installed, llm_arguments, max_len_of
    from colocate_trtllm.engine import TRTLLMEngine

    options: TRTLLMOptions = parts.options
    device = parts.accelerator.device
    check_installed(options.trtllm_python)
    if (place := RayPlace.of_this_rank()) is None:
        raise ValueError(
            "engine='trtllm' starts TensorRT-LLM's workers beside the ranks in a Ray cluster, and this rank "
            "was not started in one. Start the run with --launcher ray."
        )
    size = options.trtllm_tensor_parallel_size
    group = TensorParallelGroup(size, option="trtllm_tensor_parallel_size")
    base = causal_lm(parts.model)
    max_len = max_len_of(base, options.vllm_max_model_length)
    arguments = llm_arguments(
        base,
        max_len=max_len,
        max_num_seqs=options.max_num_seqs or MAX_NUM_SEQS,
        tensor_parallel_size=size,
        kv_cache_tokens=options.kv_cache_tokens,
        page_size=options.page_size,
        reserve_bytes=parts.reserve_bytes,
        trust_remote_code=parts.trust_remote_code,
        engine_kwargs=options.trtllm_engine_kwargs,
    )
    server, started = ray_server.start(place, group, arguments, python=options.trtllm_python)
    try:
        return TRTLLMEngine(
            parts.model,
            server,
            started,
            max_len=max_len,
            group=group,
            everyone=Peers.all(device),
            memory=shared_memory.CudaMemory(device),
        )
    except BaseException:
        server.close()
        raise
