"""A checkpoint's part for one rank, of which nothing else is read.

Loaded whole and then split, a model of 72 billion parameters takes 144 GB of host memory on every rank of a
machine. Here the model is made without memory, its shapes are split, and each matrix's rows or columns are
read from the safetensors files, one matrix at a time.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig
from transformers.utils import cached_file

from colocate.weights.layouts import WeightPart, has_layout
from colocate.weights.weight_parts import Split, empty_parts, split_weights, splits_of

logger = logging.getLogger(__name__)

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}


def load_part(
    name: str,
    config: PretrainedConfig,
    part: WeightPart,
    *,
    dtype: torch.dtype,
    revision: str | None = None,
) -> Any | None:
    """A causal language model on the host that holds one part of a checkpoint's weights.

    Args:
        name: the checkpoint's directory, or its name on the Hub.
        config: of a plain causal language model, not quantised.
        dtype: which the weights get.
        revision: branch, tag or commit on the Hub.

    Returns:
        The model; None where its weights must be loaded whole: they are in no safetensors files, under names
        or in shapes that transformers would have to convert, or the model has no layout.

    Raises:
        ValueError: as `split_weights`.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if not has_layout(model):
        return None
    shapes = {key: parameter.shape for key, parameter in model.named_parameters()}
    files = _files_of(name, revision)
    if (reason := _why_not(shapes, files)) is not None:
        logger.info(f"{name} is loaded whole on every rank and then split: {reason}.")
        return None
    split_weights(model, part)  # on the meta device only shapes change
    empty_parts(model, config, "cpu")
    splits = splits_of(model)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.copy_(_read(files[key], key, splits[key]))
    try:
        model.generation_config = GenerationConfig.from_pretrained(name, **at(revision))
    except OSError:  # a checkpoint may have none
        logger.debug(f"{name} has no generation_config.json.")
    return model.eval()


def stored_dtypes(name: str, revision: str | None = None) -> set[torch.dtype | None]:
    """The types of a checkpoint's tensors; empty if they are in no safetensors files."""
    found = set()
    for path in set(_files_of(name, revision).values()):
        with safe_open(path, framework="pt") as file:
            found |= {DTYPES.get(file.get_slice(key).get_dtype()) for key in file.keys()}  # noqa: SIM118
    return found


def at(revision: str | None) -> dict[str, Any]:
    """The argument of `from_pretrained` for a revision, if there is one."""
    return {} if revision is None else {"revision": revision}


def _files_of(name: str, revision: str | None) -> dict[str, Path]:
    """The file that each tensor of a checkpoint is in; none if there are no safetensors files."""
    if (index := _found(name, INDEX, revision)) is not None:
        places: Mapping[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        paths = {file: _found(name, file, revision) for file in set(places.values())}
        return {key: path for key, file in places.items() if (path := paths[file]) is not None}
    if (single := _found(name, SINGLE, revision)) is None:
        return {}
    with safe_open(single, framework="pt") as file:
        return dict.fromkeys(file.keys(), single)


def _found(name: str, file: str, revision: str | None) -> Path | None:
    try:
        found = cached_file(name, file, _raise_exceptions_for_missing_entries=False, **at(revision))
    except OSError:
        return None
    return None if found is None else Path(str(found))


def _why_not(shapes: Mapping[str, torch.Size], files: Mapping[str, Path]) -> str | None:
    if not files:
        return "it has no safetensors files"
    if missing := [key for key in shapes if key not in files]:
        return f"its files name no {missing[0]!r}"
    for key, shape in shapes.items():
        with safe_open(files[key], framework="pt") as file:
            stored = tuple(file.get_slice(key).get_shape())
        if stored != tuple(shape):
            return f"{key!r} has the shape {stored} in its files and {tuple(shape)} in the model"
    return None


def _read(path: Path, key: str, split: Split) -> Tensor:
    """This rank's part of a tensor; the file is mapped, so no other byte of it is read."""
    with safe_open(path, framework="pt") as file:
        whole = file.get_slice(key)
        if split.dim is None:
            return whole[:]
        size = whole.get_shape()[split.dim] // split.part.count
        own = slice(split.part.index * size, (split.part.index + 1) * size)
        return whole[own] if split.dim == 0 else whole[:, own]
