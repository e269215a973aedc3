"""The arguments that TensorRT-LLM is started with: the user's, its share of the memory, the model's shape."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from colocate.engines.vllm.arguments import config_directory, memory_share
from colocate.options.redaction import redacted
from colocate.weights.context_length import longest_context

MAX_NUM_SEQS = 512
"""Default number of sequences that are decoded at the same time."""

OWN_ARGUMENTS = {
    **dict.fromkeys(("model", "tokenizer", "skip_tokenizer_init"), "tokens go in and out, by the trainer"),
    **dict.fromkeys(("load_format", "dtype", "quant_config"), "the weights are the trainer's, as they are"),
    **dict.fromkeys(
        ("placement_groups", "placement_bundle_indices", "per_worker_gpu_share", "ray_placement_config"),
        "the workers run beside the ranks",
    ),
    **dict.fromkeys(
        ("orchestrator_type", "ray_worker_extension_cls", "backend", "pipeline_parallel_size"),
        "the engine needs one value of it",
    ),
    **dict.fromkeys(("sleep_config", "enable_sleep"), "the engine sleeps while the trainer works"),
    **dict.fromkeys(("enable_lora", "lora_config"), "the engine generates with the policy's own adapters"),
    "tensor_parallel_size": "set trtllm_tensor_parallel_size",
    "max_seq_len": "set vllm_max_model_length",
    "max_input_len": "set vllm_max_model_length",
    "max_batch_size": "set max_num_seqs",
    "trust_remote_code": "set trust_remote_code",
}
"""Arguments of `AsyncLLM` that a user cannot set, and why."""

_OF_KV_CACHE = {
    "max_tokens": "set kv_cache_tokens",
    "tokens_per_block": "set page_size",
}
"""Fields of `kv_cache_config` that are options of a run, too."""


def check_installed(python: str | None) -> None:
    """Check that the engine can be started.

    TensorRT-LLM has an environment of its own as a rule, since it pins older releases of torch and
    transformers than a run needs.

    Args:
        python: the interpreter of that environment, whose packages are not looked at here; None: this one.

    Raises:
        ImportError: Ray is missing, or TensorRT-LLM in this environment.
        ValueError: `python` is no file.
    """
    if importlib.util.find_spec("ray") is None:
        raise ImportError(
            "engine='trtllm' needs the package ray, which is not installed: pip install 'ray>=2.40'"
        )
    if python is None and importlib.util.find_spec("tensorrt_llm") is None:
        raise ImportError(
            "engine='trtllm' needs TensorRT-LLM, which is not installed here, and which pins older releases "
            "of torch and transformers than colocate needs. Make an environment for it with ray, colocate, "
            "and colocate-trtllm (pip install --no-deps colocate colocate-trtllm, or in a checkout of "
            "colocate pip install --no-deps . ./distributions/trtllm) on every node, and set trtllm_python "
            "to its interpreter. Or set engine='native' (Llama, Mistral and Qwen models) or engine='vllm'."
        )
    if python is not None and not Path(python).is_file():
        raise ValueError(
            f"trtllm_python={python!r} is no file on this node. Set the path of an interpreter, such as "
            "/opt/trtllm/bin/python, that every node has."
        )


def check_engine_kwargs(kwargs: Mapping[str, Any]) -> None:
    """Raises ValueError, with the reason, for an argument that a user cannot set."""
    of_cache = kwargs.get("kv_cache_config") or {}
    if not isinstance(of_cache, Mapping):
        raise ValueError("trtllm_engine_kwargs['kv_cache_config'] must be a mapping of its fields.")
    wrong = [(name, kwargs[name], OWN_ARGUMENTS[name]) for name in kwargs if name in OWN_ARGUMENTS]
    wrong += [(name, of_cache[name], _OF_KV_CACHE[name]) for name in of_cache if name in _OF_KV_CACHE]
    for name, value, reason in wrong:
        raise ValueError(
            f"trtllm_engine_kwargs has {name!r}={redacted(value, name)!r}, which is not for it: {reason}."
        )


def llm_arguments(
    base: Any,
    *,
    max_len: int,
    max_num_seqs: int,
    tensor_parallel_size: int,
    kv_cache_tokens: int | None = None,
    page_size: int | None = None,
    reserve_bytes: int = 0,
    trust_remote_code: bool = False,
    engine_kwargs: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The arguments of `AsyncLLM` for a causal language model of transformers, without placement.

    Args:
        base: the model; its configuration is written where the workers find it on this rank's node.
        max_len: longest prompt + completion in tokens.
        reserve_bytes: memory that the trainer will take later and hold during rollouts.

    Raises:
        ValueError: a user cannot set an argument, or no memory is left for the engine.
    """
    user = dict(engine_kwargs or {})
    check_engine_kwargs(user)
    of_cache = {
        **_fraction(base, reserve_bytes),
        **({} if kv_cache_tokens is None else {"max_tokens": kv_cache_tokens}),
        **({} if page_size is None else {"tokens_per_block": page_size}),
        **user.pop("kv_cache_config", {}),
    }
    return {
        **user,
        "model": str(config_directory(base, older_rope(base.config.to_dict()))),
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "backend": "pytorch",
        "dtype": str(base.get_input_embeddings().weight.dtype).removeprefix("torch."),
        "tensor_parallel_size": tensor_parallel_size,
        "max_seq_len": max_len,
        "max_input_len": max_len,  # else 1,024, whatever max_seq_len is
        "max_batch_size": max_num_seqs,
        "trust_remote_code": trust_remote_code,
        "kv_cache_config": of_cache,
    }


def older_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """The entries by which transformers before 5.0 knows rotary embeddings.

    It is TensorRT-LLM's, and would take the base's default for what it does not find, without a word.

    Args:
        config: the configuration of a model in transformers' present form.

    Raises:
        ValueError: layers have embeddings of several kinds, which each model used to name in its own way.
    """
    rope = config.get("rope_parameters")
    if not rope:
        return {}
    if "rope_theta" not in rope:
        raise ValueError(
            f"TensorRT-LLM cannot be told the rotary embeddings of this model, which are of several kinds "
            f"({', '.join(map(str, rope))}). Set engine='native', 'vllm' or 'transformers'."
        )
    others = {
        name: value for name, value in rope.items() if name not in ("rope_theta", "partial_rotary_factor")
    }
    scaling = None if rope.get("rope_type", "default") == "default" else others
    return {"rope_theta": rope["rope_theta"], "rope_scaling": scaling} | {
        name: rope[name] for name in ("partial_rotary_factor",) if name in rope
    }


def max_len_of(base: Any, asked: int | None) -> int:
    """The longest prompt + completion in tokens: as asked, or as long as the model's positions go.

    Raises:
        ValueError: neither says how long.
    """
    most = asked or longest_context(base.config).num_tokens
    if most is None:
        raise ValueError(
            "TensorRT-LLM must know the longest sequence, and the model's configuration has no "
            "max_position_embeddings. Set vllm_max_model_length."
        )
    return most


def _fraction(base: Any, reserve_bytes: int) -> dict[str, float]:
    """The share of the memory free at the start that the KV cache may fill, which TensorRT-LLM asks for."""
    device = next(base.parameters()).device
    if device.type != "cuda":
        return {}
    free_bytes, _ = torch.cuda.mem_get_info(device)
    share = memory_share(
        free_bytes,
        free_bytes,
        reserve_bytes=reserve_bytes,
        engine="TensorRT-LLM",
        option="trtllm_engine_kwargs={'kv_cache_config': {'free_gpu_memory_fraction': ...}}",
    )
    return {"free_gpu_memory_fraction": share}
