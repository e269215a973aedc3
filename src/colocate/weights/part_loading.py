"""A checkpoint's part for one rank, of which nothing else is read.

Loaded whole and then split, a model of 72 billion parameters takes 144 GB of host memory on every rank of a
machine. Here the model is made without memory, its shapes are split, and each matrix's rows or columns are
read from the safetensors files, one matrix at a time. A file is opened twice: for its header and its values.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True)
class _Stored:
    """A tensor of a checkpoint, as the header of its file describes it."""

    path: Path
    dtype: torch.dtype | None
    """None: one that no model is trained in."""
    shape: tuple[int, ...]


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
        dtype: which the weights get.
        is_stored_so: whether only weights that the files hold in this type are read.
        revision: branch, tag or commit on the Hub.

    Returns:
        The model; None where its weights must be loaded whole: they are in no safetensors files, under names
        or in shapes that transformers would have to convert, in another type than `is_stored_so` demands, or
        the model has no layout.

    Raises:
        ValueError: as `split_weights`.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if not has_layout(model):
        return None
    shapes = {key: parameter.shape for key, parameter in model.named_parameters()}
    files = _files_of(name, revision)
    stored = {key: tensor for path in files for key, tensor in _header(path).items()}
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


def at(revision: str | None) -> dict[str, Any]:
    """The argument of `from_pretrained` for a revision, if there is one."""
    return {} if revision is None else {"revision": revision}


def _files_of(name: str, revision: str | None) -> list[Path]:
    """The safetensors files of a checkpoint that are there."""
    files = [SINGLE]
    if (index := _found(name, INDEX, revision)) is not None:
        files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    return [path for file in files if (path := _found(name, file, revision)) is not None]


def _header(path: Path) -> dict[str, _Stored]:
    """What a file holds."""
    with safe_open(path, framework="pt") as file:
        slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
        return {
            key: _Stored(path, DTYPES.get(tensor.get_dtype()), tuple(tensor.get_shape()))
            for key, tensor in slices.items()
        }


def _found(name: str, file: str, revision: str | None) -> Path | None:
    try:
        found = cached_file(name, file, _raise_exceptions_for_missing_entries=False, **at(revision))
    except OSError:
        return None
    return None if found is None else Path(str(found))


def _why_not(
    shapes: Mapping[str, torch.Size], stored: Mapping[str, _Stored], dtype: torch.dtype | None
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
