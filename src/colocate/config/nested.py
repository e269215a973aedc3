"""Options that hold options: which entries of `generation_kwargs` and `accelerator_config` are honoured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

from accelerate.utils import GradientAccumulationPlugin
from transformers.trainer_pt_utils import AcceleratorConfig

from colocate.options.requirements import (
    AT_LEAST_ONE,
    BELOW_ONE,
    NOT_NEGATIVE,
    SHARE,
    Requirement,
    check_range,
)
from colocate.options.values import coerce, nearest, shown

_SAMPLING = {name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
_LENGTH = dict.fromkeys(("max_new_tokens", "max_tokens"), "max_completion_length")
OPTIONS_OF_GENERATION = {**_SAMPLING, **_LENGTH}
"""Arguments of transformers' `generate` and of vLLM's `SamplingParams`, and the option that each sets."""

_ANY = Requirement("", lambda v: True)

_OF_MODEL_GENERATE: dict[str, tuple[Any, Any, Requirement]] = {
    "num_beams": (int, 1, AT_LEAST_ONE),
    "length_penalty": (float, 1.0, _ANY),
    "early_stopping": (bool | Literal["never"], False, _ANY),
    "min_new_tokens": (int, 0, NOT_NEGATIVE),
    "no_repeat_ngram_size": (int, 0, NOT_NEGATIVE),
    "typical_p": (float, 1.0, SHARE),
    "top_h": (float, None, SHARE),
    "epsilon_cutoff": (float, 0.0, BELOW_ONE),
    "eta_cutoff": (float, 0.0, BELOW_ONE),
    "bad_words_ids": (list[list[int]], [], _ANY),
    "suppress_tokens": (list[int], [], _ANY),
    "begin_suppress_tokens": (list[int], [], _ANY),
}
"""Arguments that only transformers' `generate` knows: type, the value that asks for nothing, range."""

_FOR_BEAMS = ("length_penalty", "early_stopping")
_NO_GROUPS = "transformers itself has no groups of beams any longer"

_HAPPENS_ANYWAY: dict[str, tuple[Any, str]] = {
    "do_sample": (True, "without sampling all completions of a group are equal and nothing can be learnt"),
    "use_cache": (True, "the engines always keep a KV cache"),
    "num_return_sequences": (1, "set num_generations"),
    "n": (1, "set num_generations"),
    "num_beam_groups": (1, _NO_GROUPS),
    "diversity_penalty": (0.0, _NO_GROUPS),
    "frequency_penalty": (0.0, "no engine here supports it; repetition_penalty is"),
    "presence_penalty": (0.0, "no engine here supports it; repetition_penalty is"),
    "min_tokens": (0, "with engine='transformers' min_new_tokens is"),
}
"""Arguments that may have one value only, which asks for what happens anyway; and why no other is taken."""

_REFUSED = {
    "seed": "each completion has its own, derived from the option seed",
    "max_length": "it counts the prompt, too; set max_new_tokens or max_completion_length",
    "eos_token_id": "set tokenizer.eos_token, or stop_token_ids for more tokens that end a completion",
    "stop": "texts that end a completion are not supported; stop_token_ids are",
    "stop_strings": "texts that end a completion are not supported; stop_token_ids are",
}


def read_generation_kwargs(values: Mapping[str, Any] | None, engine: str) -> dict[str, Any]:
    """The options that `generation_kwargs` sets, by name.

    Args:
        engine: the option of this name.
    """
    options = {}
    arguments = arguments_of_model_generate(values)
    if arguments and engine not in ("auto", "transformers"):
        raise ValueError(
            f"generation_kwargs has {in_words(arguments)}, which engine={engine!r} does not support; "
            "transformers' model.generate does: set engine='transformers'."
        )
    for name, value in (values or {}).items():
        if name in OPTIONS_OF_GENERATION:
            options[OPTIONS_OF_GENERATION[name]] = value
        elif name in _HAPPENS_ANYWAY:
            accepted, reason = _HAPPENS_ANYWAY[name]
            if value is not None and value != accepted:
                raise ValueError(
                    f"generation_kwargs has {name}={shown(value)}; only {accepted} is taken: {reason}."
                )
        elif name == "stop_token_ids":
            stop_token_ids_of(values)
        elif name not in _OF_MODEL_GENERATE:
            known = [*OPTIONS_OF_GENERATION, *_HAPPENS_ANYWAY, *_OF_MODEL_GENERATE, "stop_token_ids"]
            reason = _REFUSED.get(name, f"no engine here supports it{nearest(name, known)}")
            raise ValueError(
                f"generation_kwargs has {shown(name)}: {reason}. It may set "
                f"{', '.join([*OPTIONS_OF_GENERATION, 'stop_token_ids'])} and, with engine='transformers', "
                f"{', '.join(_OF_MODEL_GENERATE)}."
            )
    return options


def arguments_of_model_generate(values: Mapping[str, Any] | None) -> dict[str, Any]:
    """Arguments in `generation_kwargs` that only transformers' `generate` knows."""
    arguments = {}
    for name, (hint, nothing, requirement) in _OF_MODEL_GENERATE.items():
        if (value := (values or {}).get(name)) is not None:
            value = coerce(f"generation_kwargs[{name!r}]", value, hint)
            check_range(f"generation_kwargs[{name!r}]", value, requirement)
            if value != nothing:
                arguments[name] = value
    for name in _FOR_BEAMS:
        if name in arguments and "num_beams" not in arguments:
            raise ValueError(
                f"generation_kwargs has {name}={shown(arguments[name])}, which is for beams: set num_beams "
                "to 2 or more, too."
            )
    return arguments


def in_words(arguments: Mapping[str, Any]) -> str:
    """The arguments as text, as they would be written in a call."""
    return ", ".join(f"{name}={shown(value)}" for name, value in arguments.items())


def stop_token_ids_of(values: Mapping[str, Any] | None) -> tuple[int, ...]:
    """The tokens that end a completion besides the tokenizer's and the model's own."""
    given = (values or {}).get("stop_token_ids")
    ids = coerce("generation_kwargs['stop_token_ids']", given, list[int] | None) or []
    if any(token < 0 for token in ids):
        raise ValueError(f"generation_kwargs['stop_token_ids']={shown(ids)} has a negative token id.")
    return tuple(ids)


def check_accelerator_config(value: Any, gradient_accumulation_steps: int) -> None:
    """Refuse entries that would change batches; all others concern data loaders, of which there are none.

    Args:
        value: the option `accelerator_config`: None, a mapping, a file's name or an `AcceleratorConfig`.
    """
    given = _mapping_of(value)
    _check_keys("accelerator_config", given, AcceleratorConfig)
    if given.get("split_batches"):
        raise ValueError(
            "accelerator_config has split_batches=True, which would make per_device_train_batch_size the "
            "batch of all devices: divide that by their number instead, and leave split_batches out."
        )
    accumulation = given.get("gradient_accumulation_kwargs") or {}
    _check_keys(
        "accelerator_config['gradient_accumulation_kwargs']", accumulation, GradientAccumulationPlugin
    )
    num_steps = accumulation.get("num_steps", gradient_accumulation_steps)
    if num_steps != gradient_accumulation_steps:
        raise ValueError(
            f"accelerator_config has gradient_accumulation_kwargs={shown(accumulation)}, but "
            f"gradient_accumulation_steps={gradient_accumulation_steps}: set only the latter."
        )


def _mapping_of(value: Any) -> Mapping[str, Any]:
    if isinstance(value, AcceleratorConfig):
        return vars(value)
    if isinstance(value, str):
        path = Path(value)
        if not path.is_file():
            raise ValueError(
                f"accelerator_config={shown(value)} is neither a mapping nor a file that holds one."
            )
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"accelerator_config={shown(str(path))} is no JSON: {error}") from error
    return value or {}


def _check_keys(name: str, values: Any, record: type) -> None:
    if not isinstance(values, Mapping):
        raise ValueError(f"{name}={shown(values)} is not a mapping.")
    known = [field.name for field in fields(record)]
    for key in values:
        if key not in known:
            raise ValueError(f"{name} has no key {shown(key)}{nearest(key, known) or '.'}")
