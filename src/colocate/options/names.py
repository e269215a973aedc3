"""Options that have another name besides the one they are documented by: an older one, or TRL's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from colocate.options.values import shown

RENAMED: dict[str, str] = {
    "vllm_importance_sampling_cap": "vllm_importance_sampling_clip_max",
    "vllm_max_model_len": "vllm_max_model_length",
    "vllm_guided_decoding_regex": "vllm_structured_outputs_regex",
    "wandb_log_unique_prompts": "log_unique_prompts",
    "warmup_ratio": "warmup_steps",
}
"""Older names, whose use prints a notice, and the present ones."""

OF_TRL: dict[str, str] = {
    f"vllm_server_{what}": f"rollout_server_{what}" for what in ("base_url", "host", "port", "timeout")
}
"""Names of TRL's, whose servers are all vLLM's, and the ones here. Scripts read them, too, so that both names
have one default and one value."""

TWINS: dict[str, str] = OF_TRL | {name: of_trl for of_trl, name in OF_TRL.items()}
"""Pairs of names that have one value, each name to the other."""

ALIASES = RENAMED | OF_TRL
"""All names that stand for another. An alias is itself an option; an older one is None by default, and its
value is moved to the present one."""


OF_FROM_PRETRAINED = {"torch_dtype": "dtype"}
"""Older names of arguments of transformers' `from_pretrained`, and the present ones."""


def override(values: Mapping[str, Any], by: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with those of `by` in their place, also where an option has another name there."""
    replaced = {ALIASES.get(name, name) for name in by}
    return {name: value for name, value in values.items() if ALIASES.get(name, name) not in replaced} | dict(
        by
    )


def resolve(options: Any, defaults: Mapping[str, Any]) -> list[str]:
    """Give options the values of their aliases, and those of TRL the values of their options; returns a line
    for each older name.

    Args:
        options: an object with the options as attributes.
        defaults: the default of each option by name; who has set it to that may as well not have.

    Raises:
        ValueError: an option is set to two values, under two names.
    """
    notices = []
    for alias, name in ALIASES.items():
        value, given = getattr(options, alias), getattr(options, name)
        if value != defaults[alias]:
            if given not in (value, defaults[name]):
                raise ValueError(
                    f"{alias}={shown(value, alias)} and {name}={shown(given, name)} are two names of one "
                    "option with two values. Set one of them."
                )
            setattr(options, name, value)
        if alias in OF_TRL:
            setattr(options, alias, getattr(options, name))
        elif value is not None:
            setattr(options, alias, None)
            notices.append(f"{alias} is an older name: read as {name}={value!r}.")
    return notices


def with_present_names(model_init_kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Arguments of `from_pretrained` under the names that transformers has for them now.

    Raises:
        ValueError: an argument is given twice, by both names, with two values.
    """
    kwargs = dict(model_init_kwargs or {})
    for older, name in OF_FROM_PRETRAINED.items():
        if older not in kwargs:
            continue
        value = kwargs.pop(older)
        if str(kwargs.setdefault(name, value)).removeprefix("torch.") != str(value).removeprefix("torch."):
            raise ValueError(
                f"model_init_kwargs has {older}={shown(value)} and {name}={shown(kwargs[name])}, two names "
                f"of one argument with two values. Set {name} alone."
            )
    return kwargs
