"""The arguments that vLLM is started with: the user's, its share of the memory, the model's configuration."""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from colocate.options.redaction import redacted

logger = logging.getLogger(__name__)

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
"""Arguments of `vllm.LLM` that a user cannot set, and why."""


def check_engine_kwargs(kwargs: Mapping[str, Any]) -> None:
    """Raises ValueError, with the reason, for an argument that a user cannot set."""
    for name in kwargs:
        if name in OWN_ARGUMENTS:
            raise ValueError(
                f"vllm_engine_kwargs has {name!r}={redacted(kwargs[name], name)!r}, which is not for it: "
                f"{OWN_ARGUMENTS[name]}."
            )


# ── Memory in the trainer's process ──────────────────────────────────────────────────────────────────────

MEMORY_SHARE = 0.9
"""vLLM's share of the memory that is free when the engine starts, before `reserve_bytes` are subtracted."""

MEMORY_SHARE_AWAKE = 0.3
"""vLLM's share of the device if it never sleeps, which is TRL's default; training needs the rest."""

SMALLEST_MEMORY_SHARE = 0.01
"""Smallest share to give vLLM, which refuses a share of 0."""

KV_CACHE_SHARE = 0.5
"""vLLM is told the size of its KV cache if that is below this part of its memory without its copy of the
weights. Otherwise vLLM measures how much its activations, logits and CUDA graphs leave for the cache."""

BLOCK_TOKENS = 64
"""Tokens of the largest blocks that vLLM's KV cache can have; with most attention backends they have 16."""

WAKE_UP_BYTES = 2**30
"""Memory to leave free when vLLM wakes up, for workspaces that PyTorch's allocator does not hold."""

MAX_NUM_SEQS = 512
"""Default number of sequences that vLLM decodes at the same time on a GPU. vLLM captures CUDA graphs up to
this number, and launches larger steps kernel by kernel; its own default is 1,024 on large GPUs."""

CPU_KV_CACHE_BYTES = 2**30
"""Size of the KV cache on a CPU, where vLLM would otherwise take most of the machine's memory."""


def whole_kv_cache_bytes(num_seqs: int, num_tokens: int, bytes_per_token: int) -> int:
    """Bytes of a KV cache in which `num_seqs` sequences of `num_tokens` fit at once; more would be unused.

    Each sequence has one block more than its tokens need, and vLLM keeps one block for padding.
    """
    num_blocks = num_seqs * (-(-num_tokens // BLOCK_TOKENS) + 1) + 1
    return num_blocks * BLOCK_TOKENS * bytes_per_token


def memory_share(
    free_bytes: int,
    total_bytes: int,
    *,
    reserve_bytes: int,
    engine: str = "vLLM",
    option: str = "vllm_gpu_memory_utilization",
) -> float:
    """vLLM's `gpu_memory_utilization`: (MEMORY_SHARE * free - reserve) / total.

    vLLM counts only memory that it takes after its start, so memory in use before is the trainer's.

    Args:
        engine, option: the use of the memory, and the option that sets the share instead.

    Raises:
        ValueError: no memory is left for the engine.
    """
    available = MEMORY_SHARE * free_bytes - reserve_bytes
    if available <= 0:
        raise ValueError(
            f"There is no memory for {engine}: {MEMORY_SHARE} × {free_bytes / 2**30:.2f} GiB free - "
            f"{reserve_bytes / 2**30:.2f} GiB that training will take = {available / 2**30:.2f} GiB. Set "
            f"{option}, offload_optimizer=True or use_peft=True, or take a smaller model."
        )
    return available / total_bytes


# ── The model's configuration, where vLLM reads it: on disk, without weights ─────────────────────────────


def config_directory(base: Any, also: Mapping[str, Any] | None = None) -> Path:
    """A directory with only the model's configuration, which an engine is given as the model.

    The directory's name is a hash of its contents. vLLM finds compiled models in its cache by the path of the
    model, so a path that is new in each run would make it compile the model again.

    Args:
        also: entries that the configuration has besides its own.
    """
    config = type(base.config).from_dict(base.config.to_dict())
    # Weights arrive dequantised. Architectures are unset in a configuration that was never saved.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.architectures = [type(base).__name__]
    text = config.to_json_string(use_diff=False) + json.dumps(also or {})
    name = hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
    root = _private_root()
    directory = root / name
    if not (directory / "config.json").is_file():
        new = Path(tempfile.mkdtemp(dir=root))
        config.save_pretrained(new)
        if also:
            file = new / "config.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | dict(also), indent=2))
        try:
            new.rename(directory)
        except OSError:  # another process was faster
            shutil.rmtree(new)
    return directory


def _private_root() -> Path:
    """A directory that only this user can write to, because vLLM trusts its files as the model's."""
    root = Path(tempfile.gettempdir()) / f"colocate-vllm-{os.getuid()}"
    with suppress(FileExistsError):
        root.mkdir(mode=0o700)
    status = root.lstat()
    if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077:
        return root
    fresh = Path(tempfile.mkdtemp(prefix="colocate-vllm-"))
    atexit.register(shutil.rmtree, fresh, ignore_errors=True)
    logger.warning(
        f"{root} is not a directory of this user's that nobody else can enter (it is uid {status.st_uid}'s, "
        f"mode {stat.S_IMODE(status.st_mode):04o}); {fresh} is used instead, and vLLM's cache of compiled "
        "models is of no use. Remove it."
    )
    return fresh
