"""What of `vllm.LLM` a user may set, and what the run determines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from colocate.redaction import redacted

OWN_ARGUMENTS = {
    **dict.fromkeys(("model", "tokenizer", "skip_tokenizer_init"), "tokens go in and out, by the trainer"),
    **dict.fromkeys(
        ("load_format", "model_loader_extra_config", "dtype", "quantization"),
        "the weights are the trainer's, as they are",
    ),
    **dict.fromkeys(("runner", "convert", "logprobs_mode", "seed"), "the engine needs one value of it"),
    **dict.fromkeys(
        ("distributed_executor_backend", "data_parallel_size", "pipeline_parallel_size"),
        "the run's launcher has started the processes",
    ),
    **dict.fromkeys(
        ("enable_lora", "max_loras", "max_cpu_loras", "max_lora_rank", "lora_target_modules", "lora_dtype"),
        "the engine generates with the policy's own adapters",
    ),
    "generation_config": "the engine generates with the policy alone",
    "tensor_parallel_size": "set vllm_tensor_parallel_size",
    "gpu_memory_utilization": "set vllm_gpu_memory_utilization",
    "enable_sleep_mode": "set vllm_enable_sleep_mode",
    "model_impl": "set vllm_model_impl",
    "max_model_len": "set vllm_max_model_length",
    "max_num_seqs": "set max_num_seqs",
    "trust_remote_code": "set trust_remote_code",
}
"""Arguments of `vllm.LLM` that are not the user's to give, and why."""


def check_engine_kwargs(kwargs: Mapping[str, Any]) -> None:
    """Raises ValueError, with the reason, for an argument that is not the user's to give."""
    for name in kwargs:
        if name in OWN_ARGUMENTS:
            raise ValueError(
                f"vllm_engine_kwargs has {name!r}={redacted(kwargs[name], name)!r}, which is not for it: "
                f"{OWN_ARGUMENTS[name]}."
            )
