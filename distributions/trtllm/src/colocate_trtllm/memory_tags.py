"""The parts of TensorRT-LLM's memory that are given back and taken again apart: all but the KV cache, and it.

This file runs where TensorRT-LLM is installed.
"""

from __future__ import annotations

from typing import Any


def weight_tags() -> list[str]:
    """The tags of everything but the KV cache: weights, buffers, the sampler's and the drafter's memory.

    Tags that begin with an underscore are TensorRT-LLM's own, for memory that is never given back.
    """
    kinds = _memory_kinds()
    return [kind.value for kind in kinds if kind is not kinds.KV_CACHE and not kind.value.startswith("_")]


def kv_tags() -> list[str]:
    """The tag of the KV cache."""
    return [_memory_kinds().KV_CACHE.value]


def sleep_arguments() -> dict[str, Any]:
    """The arguments of `AsyncLLM` with which memory can be given back.

    The contents of weights and KV cache are not saved: the trainer sends the weights again before they are
    read. Releases before `SleepConfig` have a switch instead, and keep a copy of the weights on the host.
    """
    try:
        from tensorrt_llm.llmapi.llm_args import SleepConfig
    except ImportError:
        return {"enable_sleep": True}
    kinds = _memory_kinds()
    lost = [
        kinds.KV_CACHE,
        *(kind for kind in kinds if kind.value in ("model_weights", "draft_model_weights")),
    ]
    return {"sleep_config": SleepConfig(restore_modes=dict.fromkeys(lost, "NONE"))}


def _memory_kinds() -> Any:
    try:
        from tensorrt_llm.llmapi.llm_args import ExecutorMemoryType
    except ImportError:  # where it was before `SleepConfig`
        from tensorrt_llm._torch.virtual_memory import ExecutorMemoryType
    return ExecutorMemoryType
