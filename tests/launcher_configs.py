"""Configurations of accelerate and DeepSpeed as people have them, and the environment they lead to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

_COMMON = {
    "compute_environment": "LOCAL_MACHINE",
    "debug": False,
    "downcast_bf16": "no",
    "machine_rank": 0,
    "main_training_function": "main",
    "mixed_precision": "bf16",
    "num_machines": 1,
    "num_processes": 2,
    "rdzv_backend": "static",
    "same_network": True,
    "use_cpu": False,
}

ZERO3 = _COMMON | {
    "distributed_type": "DEEPSPEED",
    "deepspeed_config": {
        "deepspeed_multinode_launcher": "standard",
        "offload_optimizer_device": "none",
        "offload_param_device": "none",
        "zero3_init_flag": True,
        "zero3_save_16bit_model": True,
        "zero_stage": 3,
    },
}
"""TRL's `accelerate_configs/deepspeed_zero3.yaml`, for two processes."""

FSDP1 = _COMMON | {
    "distributed_type": "FSDP",
    "fsdp_config": {
        "fsdp_activation_checkpointing": False,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_backward_prefetch": "BACKWARD_PRE",
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_forward_prefetch": True,
        "fsdp_offload_params": False,
        "fsdp_reshard_after_forward": "FULL_SHARD",
        "fsdp_state_dict_type": "FULL_STATE_DICT",
        "fsdp_sync_module_states": True,
        "fsdp_use_orig_params": True,
        "fsdp_version": 1,
    },
}
FSDP2 = _COMMON | {
    "distributed_type": "FSDP",
    "fsdp_config": {
        "fsdp_activation_checkpointing": False,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_offload_params": False,
        "fsdp_reshard_after_forward": True,
        "fsdp_state_dict_type": "FULL_STATE_DICT",
        "fsdp_version": 2,
    },
}
"""TRL's `fsdp1.yaml` and `fsdp2.yaml`, for two processes."""

DEEPSPEED_JSON: dict[str, Any] = {
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "none"},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
}
"""The file of transformers' DeepSpeed guide, with the co-located 72B run's settings."""


def with_entries(configuration: dict[str, Any], section: str = "", **entries: Any) -> dict[str, Any]:
    """A copy of a configuration in which a section (none: the top) has other entries; None removes one."""
    old = configuration[section] if section else configuration
    new = {name: value for name, value in (old | entries).items() if value is not None}
    return {**configuration, section: new} if section else new


def environment_of(configuration: dict[str, Any], directory: Path, *words: str) -> dict[str, str]:
    """The environment in which `accelerate launch --config_file` starts its processes: accelerate's own code
    reads the file and sets it."""
    file = directory / "accelerate.yaml"
    file.write_text(yaml.safe_dump(configuration))
    arguments = ["--config_file", str(file), "--main_process_port", "0", *words, "train.py"]
    args, defaults, _ = _validate_launch_command(launch_command_parser().parse_args(arguments))
    if args.use_deepspeed:
        args.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
        return prepare_deepspeed_cmd_env(args)[1]
    return prepare_multi_gpu_env(args)
