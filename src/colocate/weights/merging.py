"""Adds a LoRA adapter to the weights of its model, from files to files: one file's weights are on the host
at a time."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from colocate.weights.adapter_files import SavedAdapter, Update
from colocate.weights.file_reading import open_weights, read_object
from colocate.weights.model_files import check_files
from colocate.weights.stored_names import with_stored_names
from colocate.weights.weight_files import INDEX, found_file, header_of, weight_files

CONFIGURATION = ("config.json", "generation_config.json")
TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "vocab.json", "merges.txt", "tokenizer.model"),
)
CARD = "README.md"


def merge_adapter(
    adapter: SavedAdapter,
    base: str,
    directory: Path,
    *,
    revision: str | None = None,
    is_any_base: bool = False,
) -> Iterator[str]:
    """Write the base with the adapter's updates added, as a plain Hugging Face directory.

    A weight becomes W + scaling * B A, added in float32 and rounded once to the type that W has, as PEFT's
    `merge_and_unload` does. Files keep their names and their cut.

    Args:
        base: the model's directory, or its name on the Hub.
        directory: an existing directory to write to.
        is_any_base: see `SavedAdapter.check_fits`.

    Yields:
        A line about each file that is written.
    """
    check_files(base, revision)
    files = _all_files(base, revision, "which is what an adapter is merged into.")
    config = found_file(base, "config.json", revision)
    _check_config(adapter, base, {} if config is None else read_object(config))
    stored = {name: tensor for path in files for name, tensor in header_of(path).items()}
    adapter = with_stored_names(adapter, base, stored, revision=revision)
    adapter.check_fits(base, stored, is_any_base=is_any_base)
    for path in files:
        tensors, num_changed = _merged(path, adapter)
        save_file(tensors, directory / path.name, metadata={"format": "pt"})
        yield f"{path.name}: {num_changed} of {len(tensors)} weights changed"
        del tensors
    copy_description(base, directory, files[0].parent, revision)
    copy_tokenizer(adapter.name, directory)


def copy_model(name: str, directory: Path, *, revision: str | None = None) -> None:
    """Copy a model's weights and its description, and no other files of its directory."""
    remedy = "which from_pretrained and save_pretrained of transformers write: load the model, and save it."
    check_files(name, revision)
    files = _all_files(name, revision, remedy)
    for path in files:
        shutil.copyfile(path, directory / path.name)
    copy_description(name, directory, files[0].parent, revision)


def copy_description(base: str, directory: Path, source: Path, revision: str | None = None) -> None:
    """Copy the description of a model: configuration, tokenizer, index and own code."""
    found = (found_file(base, name, revision) for name in (INDEX, CARD, *CONFIGURATION, *TOKENIZER))
    for file in (*found, *source.glob("*.py")):
        if file is not None:
            shutil.copyfile(file, directory / file.name)


def copy_tokenizer(name: str, directory: Path) -> None:
    """Copy the tokenizer that was saved with a model or an adapter, if one was."""
    for file in (found_file(name, file) for file in TOKENIZER):
        if file is not None:
            shutil.copyfile(file, directory / file.name)


def _all_files(name: str, revision: str | None, remedy: str) -> list[Path]:
    files = weight_files(name, revision)
    if not files:
        raise ValueError(f"{name!r} has no safetensors files, {remedy}")
    return files


def _check_config(adapter: SavedAdapter, base: str, config: Mapping[str, Any]) -> None:
    if config.get("quantization_config"):
        raise ValueError(
            f"The weights of {base!r} are quantised, and an update cannot be added to their codes. Name the "
            "model that they were made from with --base."
        )
    changed = [*adapter.replacements, *(name for name in adapter.updates if name.startswith("lm_head."))]
    if changed and config.get("tie_word_embeddings"):
        raise ValueError(
            f"The adapter {adapter.name} changes {changed[0]!r}, and {base!r} uses one matrix for its "
            "embeddings and its head. Merge it with PEFT: "
            "PeftModel.from_pretrained(base, adapter).merge_and_unload()."
        )


def _merged(path: Path, adapter: SavedAdapter) -> tuple[dict[str, torch.Tensor], int]:
    """A file's tensors with their updates, and how many were changed."""
    tensors: dict[str, torch.Tensor] = {}
    num_changed = 0
    deltas = _Deltas(adapter)
    with open_weights(path) as source, open_weights(adapter.path) as own:
        for name in source.keys():  # noqa: SIM118
            weight = source.get_tensor(name)
            changed = _changed(name, weight, adapter, deltas, own)
            if changed is not weight:
                num_changed += 1
                if not changed.isfinite().all():
                    raise ValueError(
                        f"{name!r} has values that are not finite once {adapter.name} is merged into it. Was "
                        "the adapter saved by a run that had diverged? Take an earlier checkpoint."
                    )
            tensors[name] = changed
    return tensors, num_changed


def _changed(
    name: str, weight: torch.Tensor, adapter: SavedAdapter, deltas: _Deltas, own: Any
) -> torch.Tensor:
    if name in adapter.replacements:
        return own.get_tensor(adapter.replacements[name].key).to(weight.dtype)
    if name not in adapter.updates:
        return weight
    return (weight.float() + deltas.of(name, own)).to(weight.dtype)


class _Deltas:
    """The updates of the tensors of a file. Pieces of a parameter wait for their tensors, since others of the
    same layer come in between."""

    def __init__(self, adapter: SavedAdapter) -> None:
        self._updates = adapter.updates
        self._waiting: dict[str, torch.Tensor] = {}

    def of(self, name: str, own: Any) -> torch.Tensor:
        update = self._updates[name]
        if isinstance(update, Update):
            return update.delta(own)
        if name not in self._waiting:
            self._waiting |= update.convert(update.update.delta(own))
        return self._waiting.pop(name)
