"""What a run asks of one device, beside the model's shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True)
class VLLMDemand:
    """What bears on the memory of a vLLM in the trainer's process."""

    memory_share: float | None = None
    """`vllm_gpu_memory_utilization`; None: most of what is free when vLLM starts."""
    sleeps: bool = True
    """Whether vLLM gives its memory to training."""
    shares_weights: bool = True
    """Whether vLLM reads the trainer's parameters; False: it has a copy of all weights."""
    is_bounded: bool = False
    """Whether `vllm_max_model_length` says how much KV cache is of use; False: vLLM fills its share."""
    num_devices: int = 1
    """Over which a copy of the weights, and the KV cache, are divided (`vllm_tensor_parallel_size`)."""


@dataclass(frozen=True)
class Workload:
    """What a run asks of one device, beside the model's shape."""

    parameter_dtype: torch.dtype
    prompt_tokens: int
    """Of the longest prompt."""
    completion_tokens: int
    """Of the longest completion."""
    num_generations: int = 8
    """G, completions per prompt."""
    num_step_sequences: int = 8
    """Samples of one optimizer step on this rank."""
    num_rollout_sequences: int = 8
    """Completions of one rollout on this rank."""
    share_prompts: bool = True
    is_gpu: bool = True
    max_num_seqs: int = 512
    """Sequences decoded side by side at most."""
    page_size: int = 64
    kv_cache_tokens: int | None = None
    """None: what the rollout can use, or as much of that as fits."""
    decode_rows: int = 512
    """Rows that decode steps have room for."""
    decode_scratch_bytes: int = 0
    """The engine's own buffers in the arena: logits of these rows, partial results of attention."""
    max_prefill_tokens: int = 8192
    optim: str = "adamw_torch_fused"
    has_reference: bool = False
    entropy_gradient: bool = False
    """Whether the loss has an entropy bonus."""
    has_cudnn: bool = False
    """Whether attention runs through cuDNN (`policy.cudnn_attention`)."""
    engine: Literal["native", "vllm", "vllm_server"] = "native"
    """Where completions come from; a server has devices of its own."""
    vllm: VLLMDemand = VLLMDemand()

    @property
    def max_sequence_length(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    @property
    def num_running(self) -> int:
        return min(self.max_num_seqs, self.num_rollout_sequences)

    @property
    def step_tokens(self) -> int:
        """Of one optimizer step, a shared prompt counted once."""
        return self._tokens(self.num_step_sequences)

    def _tokens(self, num_sequences: int) -> int:
        group = self.num_generations if self.share_prompts else 1
        return -(-num_sequences // group) * self.prompt_tokens + num_sequences * self.completion_tokens
