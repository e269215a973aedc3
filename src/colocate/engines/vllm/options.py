"""The options of vLLM in the trainer's process, and the engine that is made of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from colocate.engines.options import EngineOptions
from colocate.options.requirements import AT_LEAST_ONE, SHARE, Elsewhere, OneOf

if TYPE_CHECKING:
    from colocate.engines.registry import EngineParts
    from colocate.engines.vllm.engine import VLLMEngine


@dataclass
class VLLMOptions(EngineOptions):
    """The options that vLLM alone reads."""

    # ── Rollout by vLLM (engine="vllm"); the native engine has no use for these ──────────────────────────

    vllm_tensor_parallel_size: Annotated[
        int,
        AT_LEAST_ONE,
        Elsewhere(
            "the engine reads the trainer's parameters, which are whole on each device; use 1: each device "
            "generates its own share of the completions, or set engine='vllm'",
            is_refused=True,
        ),
    ] = 1
    """How many consecutive processes run one vLLM together; must divide the number of processes. 1: each
    process has a vLLM of its own."""
    vllm_gpu_memory_utilization: Annotated[
        float | None,
        SHARE,
        Elsewhere("the native engine shares the trainer's weights and memory; nothing to set"),
    ] = None
    """Share of the GPU's memory that vLLM may use. None: nine tenths of what is free when vLLM starts, less
    the optimizer's moments; if `vllm_max_model_length` is set, the KV cache is no larger than a rollout can
    fill. (TRL: 0.3)"""
    vllm_enable_sleep_mode: Annotated[
        bool | None, Elsewhere("the KV cache always gives back before training what training needs")
    ] = None
    """Let vLLM hand its memory to training and get it back in every step. None: True. (TRL: False)"""
    vllm_model_impl: Annotated[
        str,
        OneOf(("auto", "vllm", "transformers")),
        Elsewhere("the native engine runs the trainer's own parameters"),
    ] = "vllm"
    """Which implementation of the model vLLM runs: "vllm" (its own), "transformers" or "auto"."""
    vllm_weights: Annotated[str, OneOf(("auto", "shared", "buckets"))] = "auto"
    """Which weights vLLM reads. "shared": the trainer's own parameters. "buckets": a copy with adapters
    merged, renewed before each rollout. "auto": "shared" where possible (full fine-tuning of Llama, Mistral
    and Qwen models with one GPU per vLLM), else "buckets"."""
    vllm_engine_kwargs: dict[str, Any] | None = None
    """Further arguments of `vllm.LLM`."""


def build(parts: EngineParts) -> VLLMEngine:
    """vLLM in this process.

    Raises:
        ImportError: there is no vLLM that is supported.
    """
    from colocate.engines.vllm.engine import VLLMEngine
    from colocate.engines.vllm.logprobs_mode import mode_for
    from colocate.weights.context_length import longest_context
    from colocate.weights.layouts import causal_lm

    options: VLLMOptions = parts.options
    longest = longest_context(causal_lm(parts.model).config)
    return VLLMEngine(
        parts.model,
        max_num_seqs=options.max_num_seqs,
        # vLLM chooses longrope's factors by the longest sequence that it may get.
        max_model_len=options.vllm_max_model_length or (longest.num_tokens if longest.is_exact else None),
        tensor_parallel_size=options.vllm_tensor_parallel_size,
        gpu_memory_utilization=options.vllm_gpu_memory_utilization,
        reserve_bytes=parts.reserve_bytes,
        usable_kv_cache_bytes=_usable_kv_cache_bytes(parts),
        weights=options.vllm_weights,
        logprobs_mode=mode_for(parts.sampling),
        enable_sleep_mode=options.vllm_enable_sleep_mode is not False,
        model_impl=options.vllm_model_impl,
        trust_remote_code=parts.trust_remote_code,
        engine_kwargs=options.vllm_engine_kwargs,
    )


def _usable_kv_cache_bytes(parts: EngineParts) -> int | None:
    """Bytes of vLLM's KV cache per GPU if a whole rollout decodes at once; None: its lengths are unknown."""
    from colocate.engines.vllm.arguments import MAX_NUM_SEQS, whole_kv_cache_bytes
    from colocate.weights.layouts import has_layout, layout_for

    options: VLLMOptions = parts.options
    if options.vllm_max_model_length is None or not has_layout(parts.model):
        return None
    group = options.vllm_tensor_parallel_size
    num_seqs = min(group * parts.num_seqs, options.max_num_seqs or MAX_NUM_SEQS)
    layout = layout_for(parts.model)
    kv_elements = 2 * len(layout.layers) * layout.num_kv_heads * layout.head_dim
    # The GPUs of a tensor-parallel group divide the key-value heads, down to one head for each GPU.
    per_token = kv_elements * layout.dtype.itemsize // min(group, layout.num_kv_heads)
    return whole_kv_cache_bytes(num_seqs, options.vllm_max_model_length, per_token)
