"""Configurations of DeepSpeed and FSDP, as people have them, read as colocate's own options.

They arrive in the environment that `accelerate launch` sets, and in transformers' options `deepspeed`, `fsdp`
and `fsdp_config`. What they ask for is a sharded optimizer, split weights, or optimizer states on the host.
colocate does these things itself, without either library: `translate` sets the options, and a line says what
became what. What cannot be done is refused by name.

    asked for                                                            shard
    ZeRO-3; FULL_SHARD, HYBRID_SHARD; FSDP2 with reshard_after_forward   "auto": the weights may be split
    ZeRO-1, ZeRO-2; SHARD_GRAD_OP, HYBRID_SHARD_ZERO2; FSDP2 without it  1
    ZeRO-0; NO_SHARD                                                     "none"
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import replace
from typing import Any

from colocate.config.deepspeed import deepspeed_of_launcher, read_deepspeed
from colocate.config.fsdp import fsdp_of_launcher, fsdp_of_options
from colocate.config.sharding_request import ShardingRequest, read_mapping
from colocate.options.values import shown

_VARIABLES: dict[str, tuple[str, ...]] = {
    "ACCELERATE_USE_DEEPSPEED": ("ACCELERATE_DEEPSPEED_", "ACCELERATE_CONFIG_DS_", "ACCELERATE_GRADIENT_"),
    "ACCELERATE_USE_FSDP": ("FSDP_",),
    "ACCELERATE_USE_PARALLELISM_CONFIG": ("PARALLELISM_CONFIG_",),
    "ACCELERATE_USE_MEGATRON_LM": ("MEGATRON_LM_",),
}
"""The variable by which accelerate switches a library on, and how the names of its other ones begin."""

_taken: dict[str, str] = {}
"""Variables that `take_from` has moved here from this process's environment."""


def translate(config: Any, environment: MutableMapping[str, str]) -> list[str]:
    """Set the options of a `GRPOConfig` that a configuration of DeepSpeed or FSDP asks for, and clear those
    that held it; returns a line for each such configuration.

    Args:
        config: with its values as given; `shard="auto"`, `offload_optimizer=None` and `bf16=None` count as
            not given.
        environment: `os.environ`; it loses the launcher's variables (`take_from`).
    """
    requests = list(_requests(config, take_from(environment)))
    asked: dict[str, tuple[str, Any]] = {}
    for request in requests:
        for name, value in request.options.items():
            _set_option(config, name, value, request.source, asked)
    # transformers would set the libraries up.
    config.deepspeed = config.fsdp = config.fsdp_config = None
    return [request.line for request in requests]


def take_from(environment: MutableMapping[str, str]) -> Mapping[str, str]:
    """The launcher's settings of DeepSpeed and FSDP; its variables are removed from `environment`.

    They must not stay there: `PartialState()` and `Accelerator()` import DeepSpeed because of them and make
    plugins that want to wrap the model and the optimizer, and transformers' `from_pretrained` leaves the
    weights of all ranks but one empty. They are remembered, so that each further configuration that this
    process makes is translated like the first.
    """
    for flag, prefixes in _VARIABLES.items():
        if environment.get(flag, "false").lower() in ("1", "true"):
            for name in [name for name in environment if name == flag or name.startswith(prefixes)]:
                _taken[name] = environment.pop(name)
            _taken["ACCELERATE_MIXED_PRECISION"] = environment.get("ACCELERATE_MIXED_PRECISION", "no")
    return _taken


def _requests(config: Any, launcher: Mapping[str, str]) -> Iterator[ShardingRequest]:
    if "ACCELERATE_USE_MEGATRON_LM" in launcher:
        raise ValueError(
            "The launcher asks for Megatron-LM (use_megatron_lm), which is not supported: colocate splits "
            "the weights itself (shard). Take it out of accelerate's configuration."
        )
    if "ACCELERATE_USE_DEEPSPEED" in launcher:
        file = launcher.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
        if file == "none":
            source, values = "accelerate's DeepSpeed configuration", deepspeed_of_launcher(launcher)
        else:
            source, values = read_mapping("deepspeed_config_file", file)
        yield _with_precision(read_deepspeed(source, values, config), launcher)
    if "ACCELERATE_USE_FSDP" in launcher:
        yield _with_precision(fsdp_of_launcher(launcher), launcher)
    if config.deepspeed:
        yield read_deepspeed(*read_mapping("deepspeed", config.deepspeed), config)
    of_options = fsdp_of_options(config.fsdp, config.fsdp_config)
    if of_options is not None:
        yield of_options


def _with_precision(request: ShardingRequest, launcher: Mapping[str, str]) -> ShardingRequest:
    """The request with the launcher's `mixed_precision`, of which "no" may be a mere default."""
    precision = launcher.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision not in ("no", "bf16"):
        raise ValueError(
            f"{request.source} has mixed_precision={precision!r}, which is not supported: parameters are in "
            "bfloat16 or float32. Set mixed_precision to 'bf16' or 'no'."
        )
    if precision == "no":
        return request
    if request.options.get("bf16") is False:
        raise ValueError(
            f"{request.source} has bf16.enabled=false, but accelerate's mixed_precision='bf16'. Set one of "
            "them to what the other says."
        )
    return replace(request, options={**request.options, "bf16": True})


def _set_option(config: Any, name: str, value: Any, source: str, asked: dict[str, tuple[str, Any]]) -> None:
    """Set an option as a configuration asks, unless it has a value that already does."""
    given = getattr(config, name)
    by, before = asked.get(name, (None, None))
    is_given = given is not None and str(given) != "auto"
    if by is not None and before != value:
        other = f"{by} for {_words(name, before)}"
    elif by is None and is_given and not _agrees(name, given, value):
        other = f"the option {name}={shown(given)} was set"
    else:
        asked[name] = source, value
        if not is_given:
            setattr(config, name, value)
        return
    raise ValueError(
        f"{source} asks for {_words(name, value)}, and {other}. Change one of the two; without the option "
        f"{name}, the configuration decides."
    )


def _words(name: str, value: Any) -> str:
    return "weights that may be split" if (name, value) == ("shard", "auto") else f"{name}={value!r}"


def _agrees(name: str, given: Any, asked: Any) -> bool:
    if name == "shard" and asked == "auto":
        return str(given) not in ("1", "none")
    return str(given) == str(asked)
