"""Reads a DeepSpeed configuration, a JSON file or the same as a mapping, as options of a run.

DeepSpeed itself is not used. Each entry of its configuration is translated, compared with the option of the
same meaning ("auto" agrees with anything), known to tune DeepSpeed's own machinery, or refused by name.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from typing import Any

from colocate.config.sharding_request import ACTIVATIONS, ShardingRequest, is_true
from colocate.options.values import nearest, shown

_SHARD_OF_STAGE: dict[int, str | int] = {0: "none", 1: 1, 2: 1, 3: "auto"}

OFFLOAD = (
    "the optimizer's states wait in host memory while completions are generated, and its step runs on the GPU"
)


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_TRANSLATED = _names(
    """
    zero_optimization bf16 bfloat16 fp16 gradient_clipping gradient_accumulation_steps train_batch_size
    train_micro_batch_size_per_gpu optimizer scheduler activation_checkpointing
    """
)
_TUNES_DEEPSPEED = _names(
    """
    steps_per_print wall_clock_breakdown dump_state memory_breakdown zero_allow_untested_optimizer
    zero_force_ds_cpu_optimizer communication_data_type seq_parallel_communication_data_type
    prescale_gradients gradient_predivide_factor sparse_gradients disable_allgather aio
    checkpoint use_node_local_storage torch_autocast data_types
    """
)
"""Entries that say how DeepSpeed works or what it prints, and nothing of the result."""
_MONITORS = _names("tensorboard wandb comet csv_monitor comms_logger flops_profiler")

_ZERO_TRANSLATED = _names("stage offload_optimizer offload_param cpu_offload")
_ZERO_TUNES = _names(
    """
    allgather_partitions allgather_bucket_size overlap_comm reduce_scatter reduce_bucket_size
    contiguous_gradients sub_group_size round_robin_gradients ignore_unused_parameters elastic_checkpoint
    load_from_fp32_weights legacy_stage1 memory_efficient_linear use_multi_rank_bucket_allreduce
    zero_hpz_partition_size log_trace_cache_warnings override_module_apply
    param_persistence_threshold model_persistence_threshold max_live_parameters max_reuse_distance
    prefetch_bucket_size stage3_prefetch_bucket_size stage3_param_persistence_threshold
    stage3_model_persistence_threshold stage3_max_live_parameters stage3_max_reuse_distance
    stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save
    gather_16bit_weights_on_model_save stage3_use_all_reduce_for_fetch_params
    stage3_module_granularity_threshold
    """
)
_PARAMETER_OFFLOAD = (
    "parameters stay on the GPUs, where the engine decodes with them; take the entry out. The weights are "
    "split over GPUs (shard), and load_in_4bit needs a quarter of their memory"
)


def read_deepspeed(source: str, values: Mapping[str, Any], config: Any) -> ShardingRequest:
    """The request of a DeepSpeed configuration.

    Args:
        source: names the configuration in messages.
        values: the content of the JSON file.
        config: the `GRPOConfig` with whose options the configuration must agree.
    """
    for name, value in values.items():
        if name in _MONITORS:
            _refuse_monitor(source, name, value)
        elif name not in _TRANSLATED | _TUNES_DEEPSPEED:
            hint = nearest(name, _TRANSLATED | _TUNES_DEEPSPEED)
            raise ValueError(f"{source} has {name}={shown(value)}, which is not supported{hint or '.'}")
    options, settings = _zero(source, values.get("zero_optimization") or {})
    options |= _precision(source, values)
    _check_sizes(source, values, config)
    _check_optimizer(source, values.get("optimizer"), config)
    _check_scheduler(source, values.get("scheduler"), config)
    remarks = ["DeepSpeed itself is not used", *([OFFLOAD] if options.get("offload_optimizer") else [])]
    if values.get("activation_checkpointing"):
        remarks.append(ACTIVATIONS)
    return ShardingRequest(f"{source} ({settings})", options, tuple(remarks))


def deepspeed_of_launcher(launcher: Mapping[str, str]) -> Mapping[str, Any]:
    """The DeepSpeed configuration that `accelerate launch` spells out in variables, as its JSON would be."""
    prefix = "ACCELERATE_DEEPSPEED_"
    zero: dict[str, Any] = {"stage": int(launcher.get(f"{prefix}ZERO_STAGE", "2"))}  # accelerate's default
    for name in ("offload_optimizer", "offload_param"):
        zero[name] = {"device": launcher.get(f"{prefix}{name.upper()}_DEVICE", "none")}
    sizes = ("gradient_clipping", "gradient_accumulation_steps")
    given = {name: launcher.get(f"ACCELERATE_{name.upper()}") for name in sizes}
    return {"zero_optimization": zero, **{name: _number(v) for name, v in given.items() if v is not None}}


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _zero(source: str, zero: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """The options that the entry `zero_optimization` sets, and what it says as text."""
    for name, value in zero.items():
        if name not in _ZERO_TRANSLATED | _ZERO_TUNES:
            hint = nearest(name, _ZERO_TRANSLATED | _ZERO_TUNES)
            raise ValueError(
                f"{source} has zero_optimization.{name}={shown(value)}, which is not supported{hint or '.'}"
            )
    stage = zero.get("stage", 0)
    if stage not in _SHARD_OF_STAGE:
        raise ValueError(
            f"{source} has zero_optimization.stage={shown(stage)}; ZeRO has stages 0, 1, 2 and 3."
        )
    options: dict[str, Any] = {"shard": _SHARD_OF_STAGE[stage]}
    settings = [f"zero_stage={stage}"]
    to = str((zero.get("offload_param") or {}).get("device") or "none")
    if to != "none":
        raise ValueError(
            f"{source} has offload_param.device={to!r}, which is not supported: {_PARAMETER_OFFLOAD}."
        )
    to = str((zero.get("offload_optimizer") or {}).get("device") or "none")
    if zero.get("cpu_offload"):  # older than offload_optimizer
        to = "cpu"
    if to not in ("none", "cpu"):
        raise ValueError(
            f"{source} has offload_optimizer.device={to!r}, which is not supported: the optimizer's states "
            "can wait in host memory ('cpu'), not on a disk."
        )
    if to == "cpu":
        options["offload_optimizer"] = True
        settings.append("offload_optimizer_device=cpu")
    return options, ", ".join(settings)


def _precision(source: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The option `bf16`, if the configuration says what it is to be."""
    in_16_bits = values.get("bf16", values.get("bfloat16")) or {}
    enabled = {"bf16": in_16_bits.get("enabled"), "fp16": (values.get("fp16") or {}).get("enabled")}
    if enabled["fp16"] not in (None, "auto") and is_true(f"{source}: fp16.enabled", enabled["fp16"]):
        raise ValueError(
            f"{source} has fp16.enabled=true, which is not supported: float16 needs loss scaling, which rare "
            "large gradients upset. Enable bf16 instead."
        )
    if enabled["bf16"] in (None, "auto"):
        return {}
    return {"bf16": is_true(f"{source}: bf16.enabled", enabled["bf16"])}


def _refuse_monitor(source: str, name: str, value: Any) -> None:
    if isinstance(value, Mapping) and value.get("enabled"):
        raise ValueError(
            f"{source} enables {name}, which DeepSpeed would write. Take it out and set report_to; "
            "`colocate report` shows a run's time and memory."
        )


def _check_sizes(source: str, values: Mapping[str, Any], config: Any) -> None:
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    micro = config.per_device_train_batch_size
    steps = config.gradient_accumulation_steps
    _check_equal(source, values, "gradient_clipping", "max_grad_norm", config.max_grad_norm)
    _check_equal(source, values, "gradient_accumulation_steps", "gradient_accumulation_steps", steps)
    _check_equal(source, values, "train_micro_batch_size_per_gpu", "per_device_train_batch_size", micro)
    product = "per_device_train_batch_size × processes × gradient_accumulation_steps"
    _check_equal(source, values, "train_batch_size", product, micro * num_ranks * steps)


def _check_equal(
    source: str,
    values: Mapping[str, Any],
    name: str,
    option: str,
    value: Any,
    read: Callable[[Any], Any] = float,
    place: str = "",
) -> None:
    """Raises ValueError where the entry `name` is neither "auto" nor what the option says."""
    entry = values.get(name)
    if entry is None or entry == "auto":
        return
    try:
        is_equal = (
            math.isclose(read(entry), read(value), rel_tol=1e-9)
            if read is float
            else read(entry) == read(value)
        )
    except (TypeError, ValueError):
        is_equal = False
    if not is_equal:
        raise ValueError(
            f"{source} has {place}{name}={shown(entry)}, but {option}={shown(value)}. Set one of them to the "
            f'other\'s value, or {place}{name} to "auto".'
        )


_Readings = dict[str, tuple[str, Any, Callable[[Any], Any]]]
"""The option that each entry must equal, by the entry's name, with its value and how both are read."""


def _check_params(source: str, place: str, params: Mapping[str, Any], read: _Readings) -> None:
    """Raises ValueError where an entry is not supported, or is not what the option says."""
    for name in params:
        if name not in read:
            raise ValueError(
                f"{source} has {place}{name}={shown(params[name])}, which is not supported"
                f"{nearest(name, read) or '.'}"
            )
        option, value, reader = read[name]
        _check_equal(source, params, name, option, value, reader, place=place)


def _check_optimizer(source: str, section: Any, config: Any) -> None:
    """Refuse an entry `optimizer` that is not the optimizer of the options."""
    if not section:
        return
    kind, params = str(section.get("type", "AdamW")), section.get("params") or {}
    optim = str(getattr(config.optim, "value", config.optim))
    if kind.lower() not in ("adamw", "adam") or not optim.startswith("adamw_torch"):
        raise ValueError(
            f"{source} has optimizer.type={kind!r}, but optim={optim!r}. DeepSpeed's optimizers are not "
            "used: set optim to the one that you want, and take the entry `optimizer` out."
        )
    read: _Readings = {
        "lr": ("learning_rate", config.learning_rate, float),
        "betas": ("(adam_beta1, adam_beta2)", (config.adam_beta1, config.adam_beta2), _floats),
        "eps": ("adam_epsilon", config.adam_epsilon, float),
        "weight_decay": ("weight_decay", config.weight_decay, float),
        "torch_adam": ("torch_adam", params.get("torch_adam"), bool),
        "adam_w_mode": ("AdamW's weight decay", True, bool),
    }
    _check_params(source, "optimizer.params.", params, read)


_SCHEDULERS = {"WarmupLR": "constant_with_warmup", "WarmupDecayLR": "linear"}
"""DeepSpeed's schedulers and the `lr_scheduler_type` of the same shape (transformers' own table)."""


def _check_scheduler(source: str, section: Any, config: Any) -> None:
    """Refuse an entry `scheduler` that is not the schedule of the options."""
    if not section:
        return
    kind, params = str(section.get("type")), section.get("params") or {}
    ours = str(getattr(config.lr_scheduler_type, "value", config.lr_scheduler_type))
    if _SCHEDULERS.get(kind) != ours:
        same = (
            f"lr_scheduler_type={_SCHEDULERS[kind]!r} is the same" if kind in _SCHEDULERS else "set that one"
        )
        raise ValueError(
            f"{source} has scheduler.type={kind!r}, but lr_scheduler_type={ours!r}. DeepSpeed's schedulers "
            f"are not used: {same}; take the entry `scheduler` out."
        )
    read: _Readings = {
        "warmup_min_lr": ("the rate before the warm-up", 0.0, float),
        "warmup_max_lr": ("learning_rate", config.learning_rate, float),
        "warmup_num_steps": ("warmup_steps", config.warmup_steps, float),
        "total_num_steps": ("max_steps", config.max_steps, float),
        "warmup_type": ("the warm-up's shape", "linear", str),
    }
    _check_params(source, "scheduler.params.", params, read)


def _floats(values: Any) -> tuple[float, ...]:
    return tuple(float(value) for value in values)
