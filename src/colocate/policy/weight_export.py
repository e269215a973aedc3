"""Writes a model whose weights are split over ranks as a plain Hugging Face directory.

One parameter at a time is gathered whole, and one file's parameters at a time are on the host; of a model
without a layout, whose files transformers alone knows how to write, all of them on the host of one rank.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import nn
from torch.distributed import ProcessGroup

from colocate.policy.stack.weight_store import gather_full
from colocate.weights.fully_sharded import is_fully_sharded
from colocate.weights.layouts import causal_lm
from colocate.weights.weight_files import INDEX
from colocate.weights.weight_parts import splits_of, whole_tensor


def save_parts(
    model: nn.Module, directory: Path, group: ProcessGroup, *, is_writer: bool, file_size: str = "5GB"
) -> None:
    """Write the whole weights, the configuration and the generation's; all ranks of `group` must call it.

    Tied weights are written once, under the embedding's name, as `save_pretrained` does.

    Args:
        model: a causal language model that holds a part of its weights, without an adapter.
        group: the ranks that hold the other parts.
        is_writer: whether this rank writes; one rank of the group does.
        file_size: the most that one file holds, as transformers writes sizes.
    """
    lm: Any = causal_lm(model)
    if is_fully_sharded(lm):
        _save_fully_sharded(lm, directory, is_writer=is_writer, file_size=file_size)
        return
    parameters, splits = dict(lm.named_parameters()), splits_of(lm)
    wholes = {
        name: torch.empty(splits[name].full_shape(p.shape), dtype=p.dtype, device="meta")
        for name, p in parameters.items()
    }
    files = split_torch_state_dict_into_shards(
        wholes, filename_pattern="model{suffix}.safetensors", max_shard_size=file_size
    )
    if is_writer:
        directory.mkdir(parents=True, exist_ok=True)
    for file, names in files.filename_to_tensors.items():
        tensors = {}
        for name in names:
            whole = gather_full(parameters[name], splits[name], group)
            if is_writer:
                tensors[name] = whole.cpu().contiguous()
            del whole
        if is_writer:
            save_file(tensors, directory / file, metadata={"format": "pt"})
    if not is_writer:
        return
    if files.is_sharded:
        index = {"metadata": files.metadata, "weight_map": files.tensor_to_filename}
        (directory / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    config = copy.deepcopy(lm.config)
    config.architectures = [type(lm).__name__]
    config.dtype = next(iter(parameters.values())).dtype
    config.save_pretrained(directory)
    if lm.can_generate():
        lm.generation_config.save_pretrained(directory)


def _save_fully_sharded(lm: Any, directory: Path, *, is_writer: bool, file_size: str) -> None:
    wholes: dict[int, torch.Tensor] = {}
    """Whole tensors by the parameter's or buffer's id, so that a tied weight stays one tensor."""
    state: dict[str, torch.Tensor] = {}
    for name, tensor in lm.state_dict(keep_vars=True).items():
        if id(tensor) not in wholes:
            whole = whole_tensor(tensor)
            wholes[id(tensor)] = whole.cpu() if is_writer else whole.new_empty(0)
            del whole
        state[name] = wholes[id(tensor)]
    if is_writer:
        # The model's own refuses to write parts, and these are whole.
        type(lm).save_pretrained(lm, directory, state_dict=state, max_shard_size=file_size)
