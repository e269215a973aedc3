"""How much memory vLLM takes in the trainer's process."""

from __future__ import annotations

MEMORY_SHARE = 0.9
"""Of what is free on the device when the engine starts, beside `reserve_bytes`."""

MEMORY_SHARE_AWAKE = 0.3
"""Of the device, for an engine that never sleeps: training needs the rest. TRL's default."""

SMALLEST_MEMORY_SHARE = 0.01
"""vLLM takes no less than a positive one."""

KV_CACHE_SHARE = 0.5
"""Of what a copy of the weights leaves of vLLM's share: a KV cache up to this size can be given without
asking vLLM, which would measure what its activations, logits and CUDA graphs leave."""

BLOCK_TOKENS = 64
"""Of the largest blocks in vLLM's KV cache; most backends of attention have blocks of 16."""

WAKE_UP_BYTES = 2**30
"""That stay free of the device when vLLM has woken up, for workspaces outside of PyTorch's allocator."""

MAX_NUM_SEQS = 512
"""Sequences that vLLM decodes at the same time on a GPU unless told otherwise: as many as it captures CUDA
graphs for. A step of more is launched kernel by kernel; vLLM's own default is 1,024 on large GPUs."""

CPU_KV_CACHE_BYTES = 2**30
"""KV cache on a CPU, where vLLM would otherwise take most of the machine's memory."""


def whole_kv_cache_bytes(num_seqs: int, num_tokens: int, bytes_per_token: int) -> int:
    """KV cache in which `num_seqs` sequences of `num_tokens` fit at the same time: a larger one is of no use.

    With one block more for each, and one that vLLM keeps for padding.
    """
    num_blocks = num_seqs * (-(-num_tokens // BLOCK_TOKENS) + 1) + 1
    return num_blocks * BLOCK_TOKENS * bytes_per_token


def memory_share(free_bytes: int, total_bytes: int, *, reserve_bytes: int) -> float:
    """vLLM's `gpu_memory_utilization`: (MEMORY_SHARE * free - reserve) / total.

    vLLM counts what it takes itself from here on, so memory in use already is the trainer's share.

    Raises:
        ValueError: nothing is left.
    """
    available = MEMORY_SHARE * free_bytes - reserve_bytes
    if available <= 0:
        raise ValueError(
            f"There is no memory for vLLM: {MEMORY_SHARE} × {free_bytes / 2**30:.2f} GiB free - "
            f"{reserve_bytes / 2**30:.2f} GiB that training will take = {available / 2**30:.2f} GiB. Set "
            "vllm_gpu_memory_utilization, offload_optimizer=True or use_peft=True, or take a smaller model."
        )
    return available / total_bytes
