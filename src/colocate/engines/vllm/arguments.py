"""What vLLM is started with: the user's arguments, its share of the memory, the model's configuration."""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from colocate.redaction import redacted

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
"""Arguments of `vllm.LLM` that are not the user's to give, and why."""


def check_engine_kwargs(kwargs: Mapping[str, Any]) -> None:
    """Raises ValueError, with the reason, for an argument that is not the user's to give."""
    for name in kwargs:
        if name in OWN_ARGUMENTS:
            raise ValueError(
                f"vllm_engine_kwargs has {name!r}={redacted(kwargs[name], name)!r}, which is not for it: "
                f"{OWN_ARGUMENTS[name]}."
            )


# ── Memory in the trainer's process ──────────────────────────────────────────────────────────────────────

MEMORY_SHARE = 0.9
"""vLLM's share of the memory that is free when the engine starts; `reserve_bytes` are then taken from it."""

MEMORY_SHARE_AWAKE = 0.3
"""vLLM's share of the device if it never sleeps: training needs the rest. It is TRL's default."""

SMALLEST_MEMORY_SHARE = 0.01
"""The least share to give vLLM, which takes none that is not positive."""

KV_CACHE_SHARE = 0.5
"""The part of vLLM's memory, less its copy of the weights, up to which the KV cache's size is given. For a
larger one vLLM measures what its activations, logits and CUDA graphs leave."""

BLOCK_TOKENS = 64
"""Tokens of the largest blocks in vLLM's KV cache; most backends of attention have blocks of 16."""

WAKE_UP_BYTES = 2**30
"""Memory that stays free when vLLM has woken up, for workspaces outside of PyTorch's allocator."""

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


# ── The model's configuration, where vLLM reads it: on disk, without weights ─────────────────────────────


def config_directory(base: Any) -> Path:
    """A directory with the model's configuration and nothing else, which vLLM takes for the model.

    Its name is a hash of what is in it: vLLM's cache of compiled models goes by the model's path, and would
    never be found again under a path that is new in each run.
    """
    config = type(base.config).from_dict(base.config.to_dict())
    # Weights arrive dequantised. An unset architecture is one that was never saved.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.architectures = [type(base).__name__]
    text = config.to_json_string(use_diff=False)
    name = hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
    root = _private_root()
    directory = root / name
    if not (directory / "config.json").is_file():
        new = Path(tempfile.mkdtemp(dir=root))
        config.save_pretrained(new)
        try:
            new.rename(directory)
        except OSError:  # another process was faster
            shutil.rmtree(new)
    return directory


def _private_root() -> Path:
    """A directory that nobody else can have filled: vLLM takes its files for the model's."""
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
