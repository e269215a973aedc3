"""Options that have another name beside the one they are documented by: an older one, or TRL's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from colocate.option_values import shown

RENAMED: dict[str, str] = {
    "vllm_importance_sampling_cap": "vllm_importance_sampling_clip_max",
    "vllm_max_model_len": "vllm_max_model_length",
    "vllm_guided_decoding_regex": "vllm_structured_outputs_regex",
    "wandb_log_unique_prompts": "log_unique_prompts",
    "warmup_ratio": "warmup_steps",
}
"""Older names, which are told to whoever uses them, and the present ones."""

OF_TRL: dict[str, str] = {
    f"vllm_server_{what}": f"rollout_server_{what}" for what in ("base_url", "host", "port", "timeout")
}
"""Names of TRL's, whose servers are all vLLM's, and the ones here."""

ALIASES = RENAMED | OF_TRL
"""All of them. An alias is itself an option, None by default, and its value is moved to the other one."""


def override(values: Mapping[str, Any], by: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with those of `by` in their place, also where an option has another name there."""
    replaced = {ALIASES.get(name, name) for name in by}
    return {name: value for name, value in values.items() if ALIASES.get(name, name) not in replaced} | dict(
        by
    )


def resolve(options: Any, defaults: Mapping[str, Any]) -> list[str]:
    """Move the values of aliases to the options that they mean; returns a line for each older name.

    Args:
        options: an object with the options as attributes.
        defaults: the default of each option by name; who has set it to that may as well not have.

    Raises:
        ValueError: an option is set to two values, under two names.
    """
    notices = []
    for alias, name in ALIASES.items():
        if (value := getattr(options, alias)) is None:
            continue
        if (given := getattr(options, name)) not in (value, defaults[name]):
            raise ValueError(
                f"{alias}={shown(value, alias)} and {name}={shown(given, name)} are two names of one option "
                "with two values. Set one of them."
            )
        setattr(options, name, value)
        setattr(options, alias, None)
        if alias in RENAMED:
            notices.append(f"{alias} is an older name: read as {name}={value!r}.")
    return notices
