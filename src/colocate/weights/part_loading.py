"""Loads one rank's part of a checkpoint, and reads nothing else.

Loaded whole and then split, a model of 72 billion parameters takes 144 GB of host memory on every rank of a
machine. Here the model is made without memory, its shapes are split, and each matrix's rows or columns are
read from the safetensors files, one matrix at a time. A file is opened twice: for its header and its values.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig

from colocate.weights.layouts import WeightPart, has_layout
from colocate.weights.weight_files import StoredTensor, at, header_of, weight_files
from colocate.weights.weight_parts import Split, empty_parts, split_weights, splits_of

logger = logging.getLogger(__name__)


def load_part(
    name: str,
    config: PretrainedConfig,
    part: WeightPart,
    *,
    dtype: torch.dtype,
    is_stored_so: bool = False,
    revision: str | None = None,
) -> Any | None:
    """A causal language model on the host that holds one part of a checkpoint's weights.

    Args:
        name: the checkpoint's directory, or its name on the Hub.
        config: of a plain causal language model, not quantised.
        dtype: the type that the weights get.
        is_stored_so: read only weights that the files hold in this type.
        revision: branch, tag or commit on the Hub.

    Returns:
        The model; None where its weights must be loaded whole: they are in no safetensors files, under names
        or in shapes that transformers would have to convert, in another type than `is_stored_so` demands, or
        the model has no layout.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if not has_layout(model):
        return None
    shapes = {key: parameter.shape for key, parameter in model.named_parameters()}
    files = weight_files(name, revision)
    stored = {key: tensor for path in files for key, tensor in header_of(path).items()}
    if (reason := _why_not(shapes, stored, dtype if is_stored_so else None)) is not None:
        logger.info(f"{name} is loaded whole on every rank and then split: {reason}.")
        return None
    split_weights(model, part)  # on the meta device only shapes change
    empty_parts(model, config, "cpu")
    splits = splits_of(model)
    parameters = dict(model.named_parameters())
    for path in files:
        with torch.no_grad(), safe_open(path, framework="pt") as file:
            for key, parameter in parameters.items():
                if stored[key].path == path:
                    parameter.copy_(_read(file, key, splits[key]))
    try:
        model.generation_config = GenerationConfig.from_pretrained(name, **at(revision))
    except OSError:  # a checkpoint may have none
        logger.debug(f"{name} has no generation_config.json.")
    return model.eval()


def _why_not(
    shapes: Mapping[str, torch.Size], stored: Mapping[str, StoredTensor], dtype: torch.dtype | None
) -> str | None:
    if not stored:
        return "it has no safetensors files"
    for key, shape in shapes.items():
        if key not in stored:
            return f"its files name no {key!r}"
        if stored[key].shape != tuple(shape):
            return f"{key!r} has the shape {stored[key].shape} in its files and {tuple(shape)} in the model"
        if dtype is not None and stored[key].dtype != dtype:
            return f"{key!r} is of {stored[key].dtype or 'another type'} in its files and not of {dtype}"
    return None


def _read(file: Any, key: str, split: Split) -> Tensor:
    """This rank's part of a tensor of an open file, which is mapped, so no other byte of it is read."""
    whole = file.get_slice(key)
    if split.dim is None:
        return whole[:]
    size = whole.get_shape()[split.dim] // split.part.count
    own = slice(split.part.index * size, (split.part.index + 1) * size)
    return whole[own] if split.dim == 0 else whole[:, own]
