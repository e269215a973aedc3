"""The number of ranks that split a run's weights, chosen before its model is loaded (`shard="auto"`)."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from colocate.config.nested import arguments_of_model_generate, in_words
from colocate.parallel.verdict import first_line
from colocate.planning.run_options import PlannedOptions, sharding_choice
from colocate.policy.model.loading import model_on_meta
from colocate.policy.model.precision import DTYPES
from colocate.weights.layouts import causal_lm, layout_for
from colocate.weights.shapes import ModelShapes
from colocate.weights.weight_parts import why_not_split


def choose_weight_parts(
    options: PlannedOptions,
    model: Any,
    quantization_config: Any = None,
    peft_config: Any = None,
) -> tuple[int, str]:
    """The number of ranks that share one copy of the weights, and why, as a sentence: 1 where they cannot be
    split, or where the sizes of the model, which may be a name, are not known before it is loaded."""
    if (reason := _why_engine_reads_whole_weights(options)) is not None:
        return 1, f"{reason}."
    if quantization_config is not None:
        return 1, "quantized weights are not split."
    try:
        sized = _sized(model, options, peft_config)
        layout, shapes = layout_for(sized), ModelShapes.of(sized)
    except (OSError, ValueError, TypeError, ImportError) as error:
        return 1, f"the model cannot be planned before it is loaded ({first_line(error)})."
    if getattr(causal_lm(sized).config, "quantization_config", None) is not None:
        return 1, "quantized weights are not split."
    choice = sharding_choice(shapes, options, _dtype(sized, options, is_loaded=sized is model))
    parts = choice.sharding.num_weight_parts
    if parts > 1 and (refusal := why_not_split(layout, parts)) is not None:
        return 1, f"{refusal}."
    return parts, choice.reason


def _why_engine_reads_whole_weights(options: PlannedOptions) -> str | None:
    if options.engine not in ("auto", "native"):
        return f"engine={options.engine!r} reads whole weights"
    if arguments := arguments_of_model_generate(options.generation_kwargs):
        return f"generation_kwargs asks for {in_words(arguments)}, and model.generate reads whole weights"
    return None


def _sized(model: Any, options: PlannedOptions, peft_config: Any) -> nn.Module:
    """A model with the shapes that the run's model will have: the loaded one, or one on the meta device."""
    if isinstance(model, nn.Module):
        if peft_config is None:
            return model
        sized = model_on_meta("", {"config": copy.deepcopy(causal_lm(model).config)})
    else:
        kwargs = {"trust_remote_code": options.trust_remote_code, **(options.model_init_kwargs or {})}
        sized = model_on_meta(model, kwargs)
    if peft_config is None:
        return sized
    from peft import get_peft_model

    # PEFT writes what it finds into the configuration.
    return get_peft_model(sized, copy.deepcopy(peft_config), low_cpu_mem_usage=True)


def _dtype(sized: nn.Module, options: PlannedOptions, *, is_loaded: bool) -> torch.dtype:
    """The type that the weights will have in training (`policy.model.loading.load_model`)."""
    if options.bf16:
        return torch.bfloat16
    if is_loaded:
        return sized.get_input_embeddings().weight.dtype  # type: ignore[operator]
    asked = (options.model_init_kwargs or {}).get("dtype", "float32")
    if isinstance(asked, torch.dtype):
        return asked
    return DTYPES.get(asked) or causal_lm(sized).config.dtype or torch.float32
