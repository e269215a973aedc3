"""Reads a configuration of FSDP, accelerate's or transformers', as options of a run.

FSDP itself is not used: what it asks for is how the weights are split, by the table in
`colocate.config.launchers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from colocate.config.sharding_request import ACTIVATIONS, ShardingRequest, is_true, read_mapping
from colocate.options.values import nearest, shown

_SHARD_OF_STRATEGY: dict[str, str | int] = {
    "FULL_SHARD": "auto",
    "SHARD_GRAD_OP": 1,
    "NO_SHARD": "none",
    "HYBRID_SHARD": "auto",
    "HYBRID_SHARD_ZERO2": 1,
}
"""FSDP1's strategies, in the order of PyTorch's numbers for them from 1. Weights are never split beyond a
node here, so that a hybrid strategy means what the other one means."""

_TRANSLATED = (
    "version",
    "reshard_after_forward",
    "cpu_offload",
    "offload_params",
    "activation_checkpointing",
)
_TUNES_FSDP = (
    *("min_num_params", "auto_wrap_policy", "transformer_layer_cls_to_wrap", "backward_prefetch"),
    *("forward_prefetch", "limit_all_gathers", "use_orig_params", "sync_module_states"),
    *("cpu_ram_efficient_loading", "state_dict_type", "ignored_modules", "sharding_strategy"),
    *("activation_checkpointing_offload", "activation_cpu_offload"),
)
"""Entries that say how FSDP wraps, prefetches, loads and saves modules, and nothing of the result."""
_ONLY_XLA = ("xla", "xla_fsdp_v2", "xla_fsdp_settings", "xla_fsdp_grad_ckpt")

_WORDS = {"full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2"}
_PARAMETER_OFFLOAD = (
    "FSDP's offload keeps the parameters in host memory, and the engine decodes with them on the GPU. Take "
    "it out; offload_optimizer=True moves the optimizer's states, six times as many bytes, while completions "
    "are generated"
)
_NOT_SPLIT_SO = ("tp", "cp", "sp")


def fsdp_of_launcher(launcher: Mapping[str, str]) -> ShardingRequest:
    """The request of `accelerate launch` with FSDP."""
    source, version = "accelerate's FSDP configuration", launcher.get("FSDP_VERSION", "1")
    entries: dict[str, Any] = {
        "version": version,
        "offload_params": launcher.get("FSDP_OFFLOAD_PARAMS", "false"),
        "activation_checkpointing": launcher.get("FSDP_ACTIVATION_CHECKPOINTING", "false"),
    }
    # accelerate's FSDP1 reads the strategy only; FSDP2 the other one only.
    name, read_from = ("reshard_after_forward", "FSDP_RESHARD_AFTER_FORWARD")
    if version == "1":
        name, read_from = "sharding_strategy", "FSDP_SHARDING_STRATEGY"
    how = launcher.get(read_from, "FULL_SHARD" if version == "1" else "true")
    settings = [f"fsdp_version={version}", f"fsdp_{name}={how}", *_parallelism(source, launcher)]
    return _request(f"{source} ({', '.join(settings)})", entries, how)


def _parallelism(source: str, launcher: Mapping[str, str]) -> list[str]:
    """The sizes of accelerate's `parallelism_config` that say something, as text."""
    sizes = {
        name: int(launcher.get(f"PARALLELISM_CONFIG_{name.upper()}_SIZE", "1"))
        for name in ("dp_replicate", "dp_shard", *_NOT_SPLIT_SO)
    }
    for name in _NOT_SPLIT_SO:
        if sizes[name] > 1:
            raise ValueError(
                f"{source} has parallelism_config_{name}_size={sizes[name]}, which is not supported: the "
                "weights are split over the GPUs of a node in one way (shard). Set it to 1."
            )
    return [f"{name}_size={size}" for name, size in sizes.items() if size > 1]


def fsdp_of_options(fsdp: Any, fsdp_config: Any) -> ShardingRequest | None:
    """The request of the options `fsdp` and `fsdp_config` of transformers; None: they are not set, or
    `fsdp=False`."""
    text = " ".join(map(str, fsdp)) if isinstance(fsdp, (list, tuple)) else str(fsdp or "")
    words = text.lower().split()
    if words == ["false"] or not words:
        if fsdp_config:
            raise ValueError(
                f"fsdp_config={shown(fsdp_config)} is read only with fsdp=True; set that, or remove it."
            )
        return None
    _, entries = read_mapping("fsdp_config", fsdp_config or {})
    entries = {str(name).removeprefix("fsdp_"): value for name, value in entries.items()}
    for name, value in entries.items():
        if name in _ONLY_XLA and value:
            raise ValueError(f"fsdp_config has {name}={shown(value)}: TPUs are not supported.")
        if name not in (*_TRANSLATED, *_TUNES_FSDP, *_ONLY_XLA):
            raise ValueError(
                f"fsdp_config has no key {shown(name)}{nearest(name, _TRANSLATED + _TUNES_FSDP) or '.'}"
            )
    return _request(*_of_words(words, entries))


def _of_words(words: list[str], entries: Mapping[str, Any]) -> tuple[str, Mapping[str, Any], Any]:
    """The source's name, the entries and how the weights are split, from `fsdp="full_shard auto_wrap"`."""
    for word in words:
        if word not in _WORDS | {"true", "auto_wrap", "offload"}:
            hint = nearest(word, _WORDS | {"true", "auto_wrap", "offload"})
            raise ValueError(f"fsdp has {shown(word)}, which is not supported{hint or '.'}")
    strategies = [word for word in words if word in _WORDS]
    if len(strategies) > 1:
        raise ValueError(f"fsdp={' '.join(words)!r} names {len(strategies)} strategies; name one.")
    if "offload" in words:
        entries = {**entries, "offload_params": True}
    how: Any = strategies[0] if strategies else entries.get("reshard_after_forward", True)
    said = f"fsdp={' '.join(words)}" if strategies else f"fsdp=True, reshard_after_forward={how}"
    return f"The FSDP configuration of the options ({said})", entries, how


def _request(source: str, entries: Mapping[str, Any], how: Any) -> ShardingRequest:
    """The request of one configuration."""
    for name in ("offload_params", "cpu_offload"):
        if is_true(f"{source}: {name}", entries.get(name, False)):
            raise ValueError(f"{source} has {name}=true, which is not supported: {_PARAMETER_OFFLOAD}.")
    remarks = ["FSDP itself is not used"]
    if is_true(f"{source}: activation_checkpointing", entries.get("activation_checkpointing", False)):
        remarks.append(ACTIVATIONS)
    return ShardingRequest(source, {"shard": _shard_of(source, how)}, tuple(remarks))


def _shard_of(source: str, how: Any) -> str | int:
    name = str(how).upper()
    if name.isdigit() and 1 <= int(name) <= len(_SHARD_OF_STRATEGY):
        return list(_SHARD_OF_STRATEGY.values())[int(name) - 1]
    if name in _SHARD_OF_STRATEGY:
        return _SHARD_OF_STRATEGY[name]
    if name in ("TRUE", "FALSE"):
        return "auto" if name == "TRUE" else 1
    raise ValueError(
        f"{source}: the strategy {shown(how)} is unknown; it is one of {', '.join(_SHARD_OF_STRATEGY)}, or "
        "true or false with FSDP2."
    )
