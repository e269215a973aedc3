"""The work of one device in a run (lengths, batch sizes, optimizer, engine) and how its ranks split it. The
model's shape is in `ModelShapes`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import torch


@dataclass(frozen=True)
class VLLMDemand:
    """Options that decide the memory of vLLM, or an engine planned as vLLM, in turns with the trainer."""

    name: str = "vLLM"
    """The engine's name."""
    memory_share: float | None = None
    """Share of the device that vLLM may use (`vllm_gpu_memory_utilization`); None: most of what is free at
    its start."""
    sleeps: bool = True
    """Whether vLLM gives its memory back while the policy trains."""
    shares_weights: bool = True
    """Whether vLLM reads the trainer's parameters; False: it has a copy of all weights."""
    is_bounded: bool = False
    """Whether `vllm_max_model_length` is set, so that the KV cache can be limited; False: vLLM fills its
    share."""
    num_devices: int = 1
    """Devices that divide vLLM's weights and KV cache among them (`vllm_tensor_parallel_size`)."""


@dataclass(frozen=True)
class Sharding:
    """The two numbers that describe a layout (`parallel.mesh.Mesh`), known before there are any ranks."""

    num_ranks: int = 1
    """The GPUs of the run (N)."""
    num_weight_parts: int = 1
    """The ranks that share one copy of the weights (t)."""
    splits_optimizer: bool = True
    """Whether the ranks split masters, moments and reduced gradients; False: each holds all of them
    (`shard="none"`)."""
    decode_shard: int | None = None
    """The ranks that generate completions together, a divisor t' of t; None: t."""

    @property
    def num_decode_parts(self) -> int:
        """The parts t' of the weights with which completions are generated, one on each rank."""
        return min(self.decode_shard or self.num_weight_parts, self.num_weight_parts)

    @property
    def gathers(self) -> bool:
        """Whether a rank gathers parts of the weights for each rollout."""
        return self.num_decode_parts < self.num_weight_parts

    @property
    def num_replicas(self) -> int:
        """The ranks N / t that hold the same part of the weights."""
        return self.num_ranks // self.num_weight_parts

    @property
    def num_optimizer_parts(self) -> int:
        """The ranks that split the masters of one part of the weights; 1: each rank has them whole."""
        return self.num_replicas if self.splits_optimizer else 1

    @property
    def is_split(self) -> bool:
        """Whether a rank holds less of anything than it would alone."""
        return self.num_weight_parts > 1 or self.num_optimizer_parts > 1


@dataclass(frozen=True)
class Workload:
    """The work of one device in a run, apart from the model's shape."""

    parameter_dtype: torch.dtype
    prompt_tokens: int
    """Tokens of the longest prompt."""
    completion_tokens: int
    """Tokens of the longest completion."""
    num_generations: int = 8
    """Completions per prompt (G)."""
    num_step_sequences: int = 8
    """Samples of one optimizer step on this rank."""
    num_rollout_sequences: int = 8
    """Completions of one rollout on this rank."""
    num_iterations: int = 1
    """The number of optimizer steps that train on each completion."""
    share_prompts: bool = True
    is_gpu: bool = True
    max_num_seqs: int = 512
    """The most sequences that are decoded at the same time."""
    page_size: int = 64
    kv_cache_tokens: int | None = None
    """Tokens that the user wants the KV cache to hold; None: as many as a rollout can use and memory
    allows."""
    rollout_precision: str = "bf16"
    """The bits of the native engine's rollouts: "bf16", "fp8_kv" or "fp8"."""
    decode_rows: int = 512
    """Sequences for which the buffers of a decode step have room, one row each."""
    decode_scratch_bytes: int = 0
    """Bytes of the engine's decode buffers: logits of the decode rows and partial results of attention."""
    max_prefill_tokens: int = 8192
    optim: str = "adamw_torch_fused"
    has_reference: bool = False
    scorers_sleep: bool = False
    """Whether the reference is on the host except while rollouts are scored (`offload_scorers`)."""
    entropy_gradient: bool = False
    """Whether the loss has an entropy bonus, so that the entropy needs a gradient."""
    has_cudnn: bool = False
    """Whether attention runs through cuDNN (`policy.attention.cudnn_attention`)."""
    engine: Literal["native", "vllm", "rollout_server"] = "native"
    """The engine that generates completions; "rollout_server" does so on other devices."""
    vllm: VLLMDemand = VLLMDemand()
    sharding: Sharding = field(default_factory=Sharding)

    @property
    def of_engine(self) -> Workload:
        """The work of a rank's part of an engine: the t' ranks that decode together complete the
        prompts of all of them, each with its part of every matrix and of every head."""
        num_sequences = self.num_rollout_sequences * self.sharding.num_decode_parts
        return replace(self, num_rollout_sequences=num_sequences)

    @property
    def kv_dtype(self) -> torch.dtype:
        """The type of keys and values in the engine's cache."""
        return self.parameter_dtype if self.rollout_precision == "bf16" else torch.uint8

    @property
    def max_sequence_length(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    @property
    def num_running(self) -> int:
        return min(self.max_num_seqs, self.num_rollout_sequences)

    @property
    def step_tokens(self) -> int:
        """The most tokens in one optimizer step, a shared prompt counted once."""
        return self._tokens(self.num_step_sequences)

    def _tokens(self, num_sequences: int) -> int:
        group = self.num_generations if self.share_prompts else 1
        return -(-num_sequences // group) * self.prompt_tokens + num_sequences * self.completion_tokens
