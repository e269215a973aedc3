"""The rollout engines by name, and how each is made from a run's options.

`ENGINES` has an entry for each of `engines/names.py`. An engine's own modules are imported
when it is made, so that reading the list loads neither PyTorch nor vLLM.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from colocate.options.redaction import redacted
from colocate.options.run_file import REPLICAS

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import nn

    from colocate.engines.base import RolloutEngine
    from colocate.parallel.mesh import Mesh
    from colocate.types import SamplingParams


class EngineOptions(Protocol):
    """The options of a run that engines are made from; `GRPOConfig` documents each."""

    output_dir: str | None
    offload_optimizer: bool | None
    shard: int | str
    decode_shard: int | None
    trust_remote_code: bool
    generation_batch_size: int | None
    per_device_eval_batch_size: int
    max_num_seqs: int | None
    page_size: int | None
    kv_cache_tokens: int | None
    rollout_precision: str
    vllm_max_model_length: int | None
    vllm_tensor_parallel_size: int
    vllm_gpu_memory_utilization: float | None
    vllm_enable_sleep_mode: bool | None
    vllm_model_impl: str
    vllm_weights: str
    vllm_engine_kwargs: dict[str, Any] | None
    rollout_server_base_url: str | None
    rollout_server_host: str
    rollout_server_port: int
    rollout_server_timeout: float
    vllm_on_server_loss: str
    vllm_group_host: str | None
    vllm_group_port: int
    trtllm_tensor_parallel_size: int
    trtllm_engine_kwargs: dict[str, Any] | None
    trtllm_python: str | None


@dataclass(frozen=True)
class EngineParts:
    """The parts of a run from which its engine is made.

    Attributes:
        model: the policy, possibly inside a PEFT wrapper, on the device to use.
        sampling: how training's completions will be drawn.
        generate_kwargs: arguments that only transformers' `model.generate` knows.
        mesh: which ranks share one copy of the weights; None: each rank has one.
    """

    model: nn.Module
    options: EngineOptions
    accelerator: Accelerator
    sampling: SamplingParams
    generate_kwargs: Mapping[str, Any]
    mesh: Mesh | None = None


def _native(parts: EngineParts) -> RolloutEngine:
    from colocate.engines.native.engine import NativeEngine
    from colocate.engines.native.gathered_engine import GatheredEngine
    from colocate.parallel.decode_mesh import DecodeMesh
    from colocate.parallel.mesh import Mesh

    mesh, decode_shard = parts.mesh or Mesh(None), parts.options.decode_shard
    options: dict[str, Any] = dict(
        max_num_seqs=parts.options.max_num_seqs,
        page_size=parts.options.page_size,
        kv_cache_tokens=parts.options.kv_cache_tokens,
        max_model_len=parts.options.vllm_max_model_length,
        rollout_precision=parts.options.rollout_precision,
    )
    if decode_shard in (None, mesh.num_weight_parts):
        return NativeEngine(parts.model, group=mesh.weight_group, **options)
    return GatheredEngine(parts.model, DecodeMesh.of(mesh, decode_shard), **options)


def _vllm(parts: EngineParts) -> RolloutEngine:
    from colocate.engines.vllm.engine import VLLMEngine
    from colocate.engines.vllm.logprobs_mode import mode_for
    from colocate.weights.context_length import longest_context
    from colocate.weights.layouts import causal_lm

    options, longest = parts.options, longest_context(causal_lm(parts.model).config)
    return VLLMEngine(
        parts.model,
        max_num_seqs=options.max_num_seqs,
        # vLLM chooses longrope's factors by the longest sequence that it may get.
        max_model_len=options.vllm_max_model_length or (longest.num_tokens if longest.is_exact else None),
        tensor_parallel_size=options.vllm_tensor_parallel_size,
        gpu_memory_utilization=options.vllm_gpu_memory_utilization,
        reserve_bytes=0 if options.offload_optimizer else _moments_bytes(parts),
        usable_kv_cache_bytes=_usable_kv_cache_bytes(parts),
        weights=options.vllm_weights,
        logprobs_mode=mode_for(parts.sampling),
        enable_sleep_mode=options.vllm_enable_sleep_mode is not False,
        model_impl=options.vllm_model_impl,
        trust_remote_code=options.trust_remote_code,
        engine_kwargs=options.vllm_engine_kwargs,
    )


def _rollout_server(parts: EngineParts) -> RolloutEngine:
    from accelerate.utils import broadcast_object_list

    from colocate.rollout_server.trainer.engine import MAX_IN_FLIGHT, RolloutServerEngine
    from colocate.rollout_server.trainer.patience import ALONE, patience_among
    from colocate.rollout_server.trainer.pool import EnginePool

    options, accelerator = parts.options, parts.accelerator
    # The launcher that has started servers for this run knows best.
    urls = server_urls(os.environ.get(REPLICAS) or options.rollout_server_base_url) or [
        f"http://{options.rollout_server_host}:{options.rollout_server_port}"
    ]
    is_alone = len(urls) == 1
    # All processes push to one server, under one name.
    (run_id,) = broadcast_object_list([uuid.uuid4().hex])
    engines: list[RolloutServerEngine] = []
    try:
        for number, url in enumerate(urls):
            engine = RolloutServerEngine(
                parts.model,
                base_url=url,
                is_main=accelerator.is_main_process,
                barrier=accelerator.wait_for_everyone if is_alone else lambda: None,
                run_id=run_id,
                output_dir=os.path.abspath(options.output_dir or "."),
                on_server_loss=options.vllm_on_server_loss,  # type: ignore[arg-type]  # the option's range
                server_timeout_s=options.rollout_server_timeout,
                group_host=options.vllm_group_host,
                group_port=options.vllm_group_port and options.vllm_group_port + number,
                max_in_flight=options.max_num_seqs or MAX_IN_FLIGHT,
                patience=ALONE if is_alone else patience_among(len(urls)),
            )
            engines.append(engine)
    except BaseException:
        for engine in engines:
            engine.close()  # lets go of the servers
        raise
    if is_alone:
        return engines[0]
    return EnginePool(
        engines,
        rank=accelerator.process_index,
        barrier=accelerator.wait_for_everyone,
        on_loss=options.vllm_on_server_loss,  # type: ignore[arg-type]  # the option's range
        timeout_s=options.rollout_server_timeout,
    )


def _trtllm(parts: EngineParts) -> RolloutEngine:
    from colocate.engines.trtllm import chunks, ray_server
    from colocate.engines.trtllm.arguments import MAX_NUM_SEQS, check_installed, llm_arguments, max_len_of
    from colocate.engines.trtllm.engine import TRTLLMEngine
    from colocate.engines.vllm.groups import TensorParallelGroup
    from colocate.parallel.ray_place import RayPlace
    from colocate.parallel.verdict import Peers
    from colocate.weights.layouts import causal_lm

    options, device = parts.options, parts.accelerator.device
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
        reserve_bytes=0 if options.offload_optimizer else _moments_bytes(parts),
        trust_remote_code=options.trust_remote_code,
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
            memory=chunks.CudaMemory(device),
        )
    except BaseException:
        server.close()
        raise


def _transformers(parts: EngineParts) -> RolloutEngine:
    from colocate.engines.transformers_engine import TransformersEngine
    from colocate.weights.layouts import causal_lm

    return TransformersEngine(
        parts.model,
        pad_token_id=causal_lm(parts.model).generation_config.pad_token_id,
        max_num_seqs=parts.options.max_num_seqs or 64,
        generation_kwargs=parts.generate_kwargs,
    )


def server_urls(text: str | None) -> list[str]:
    """The addresses in the option `rollout_server_base_url`.

    Raises:
        ValueError: there is none in a text, or one is there twice.
    """
    urls = [url.strip().rstrip("/") for url in (text or "").split(",") if url.strip()]
    if text is not None and not urls:
        raise ValueError(
            f"rollout_server_base_url={text!r} names no server. Set an address such as http://node7:8000, "
            "several with commas between them, or None for rollout_server_host and rollout_server_port."
        )
    for url in urls:
        if urls.count(url) > 1:
            raise ValueError(
                f"rollout_server_base_url names {redacted(url)} {urls.count(url)} times, and a server is "
                "asked once for each sequence. Name every server once."
            )
    return urls


ENGINES: dict[str, Callable[[EngineParts], RolloutEngine]] = {
    "native": _native,
    "vllm": _vllm,
    "rollout_server": _rollout_server,
    "trtllm": _trtllm,
    "transformers": _transformers,
}
"""The function that makes each engine, by its name in the option `engine`; it raises the engine's errors."""


def build_engine(name: str, parts: EngineParts) -> RolloutEngine:
    """Make the engine called `name` in `ENGINES`. It is asleep.

    Raises:
        ImportError: `name` is "vllm" without a vLLM that is supported, or "trtllm" without TensorRT-LLM.
        ValueError: another engine than the native one would have to read weights that ranks share, or these
            cannot decode as `decode_shard` says.
    """
    from colocate.parallel.decode_mesh import check_decode_parts
    from colocate.weights.fully_sharded import is_fully_sharded

    num_parts = 1 if parts.mesh is None else parts.mesh.num_weight_parts
    if (decode_shard := parts.options.decode_shard) is not None and decode_shard != num_parts:
        check_decode_parts(num_parts, decode_shard)
    if num_parts > 1 and is_fully_sharded(parts.model) and decode_shard not in (None, 1):
        raise ValueError(
            f"decode_shard={decode_shard} lets {decode_shard} processes decode together, which needs a model "
            "with a layout; weights that FSDP2 splits are gathered, and every process generates alone. Set "
            "decode_shard=1 or None."
        )
    if num_parts > 1 and is_fully_sharded(parts.model) and name == "rollout_server":
        raise ValueError(
            f"engine={name!r} cannot be sent weights that {num_parts} processes share by FSDP2 "
            f"(shard={num_parts}). Set engine='vllm' or 'transformers', or shard=1, with which every process "
            "has a copy."
        )
    if num_parts > 1 and not is_fully_sharded(parts.model) and name != "native":
        raise ValueError(
            f"engine={name!r} cannot generate where {num_parts} processes share one copy of the weights "
            f"(shard={num_parts}); the native engine can. Set engine='native', or shard=1, with which every "
            "process has a copy."
        )
    return ENGINES[name](parts)


def engine_of_auto(
    model: nn.Module, *, use_vllm: bool, generate_arguments: str = ""
) -> tuple[str, str | None]:
    """The engine that engine="auto" chooses for a model, and the reason if it is not the native engine.

    Args:
        use_vllm: prefer an installed vLLM to `model.generate` where the model has no layout.
        generate_arguments: the arguments asked for that only `model.generate` knows, in words.
    """
    from colocate.engines.vllm.environment import installed_version
    from colocate.weights.layouts import why_no_layout

    if generate_arguments:
        return "transformers", (
            f"generation_kwargs asks for {generate_arguments}, which the native engine does not support (it "
            "samples from the policy, without beams): completions come from transformers' model.generate, "
            "which is slower and tells no log-probs."
        )
    if (reason := why_no_layout(model)) is None:
        return "native", None
    name = "vllm" if use_vllm and installed_version() is not None else "transformers"
    return name, (
        f"The native engine cannot run this model ({reason}): completions come from "
        + ("vLLM, which is started." if name == "vllm" else "model.generate, which is slower.")
    )


def _moments_bytes(parts: EngineParts) -> int:
    """Bytes of Adam's two float32 moments, which exist from the first step on and stay during rollouts."""
    from colocate.weights.weight_parts import local_part

    trained = (parameter for parameter in parts.model.parameters() if parameter.requires_grad)
    num_trained = sum(local_part(parameter).numel() for parameter in trained)
    is_split = parts.mesh is not None and parts.options.shard != "none"
    return 8 * num_trained // (parts.mesh.num_replicas if parts.mesh and is_split else 1)


def _usable_kv_cache_bytes(parts: EngineParts) -> int | None:
    """Bytes of vLLM's KV cache per GPU if a whole rollout decodes at once; None: its lengths are unknown."""
    from colocate.engines.vllm.arguments import MAX_NUM_SEQS, whole_kv_cache_bytes
    from colocate.weights.layouts import has_layout, layout_for

    options = parts.options
    assert options.generation_batch_size, "GRPOConfig derives it"
    if options.vllm_max_model_length is None or not has_layout(parts.model):
        return None
    group = options.vllm_tensor_parallel_size
    own_seqs = options.generation_batch_size // parts.accelerator.num_processes
    num_seqs = group * max(own_seqs, options.per_device_eval_batch_size)
    num_seqs = min(num_seqs, options.max_num_seqs or MAX_NUM_SEQS)
    layout = layout_for(parts.model)
    kv_elements = 2 * len(layout.layers) * layout.num_kv_heads * layout.head_dim
    # The GPUs of a tensor-parallel group divide the key-value heads, down to one head for each GPU.
    per_token = kv_elements * layout.dtype.itemsize // min(group, layout.num_kv_heads)
    return whole_kv_cache_bytes(num_seqs, options.vllm_max_model_length, per_token)
