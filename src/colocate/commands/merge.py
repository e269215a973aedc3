"""`colocate merge`: an adapter into the weights of its model."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colocate.commands.arguments import add_base, add_command

if TYPE_CHECKING:
    from colocate.checkpoints.saved_model import SavedModel

SUMMARY = "merge an adapter into the weights of its model"


def add_parser(commands: Any) -> None:
    details = (
        ", file by file: the result is a plain Hugging Face directory in the model's own precision. It needs "
        "the disk space of the model and the memory of one of its files."
    )
    command = add_command(commands, "merge", "ADAPTER OUT [options]", SUMMARY, details)
    command.add_argument(
        "adapter", help="a run that trained an adapter, its checkpoint, or an adapter's directory"
    )
    command.add_argument("out", type=Path, help="the directory to write, which must not exist or be empty")
    add_base(command)


def run(known: argparse.Namespace) -> int:
    """Run the command; returns its exit code."""
    from colocate.checkpoints.saved_model import find_model
    from colocate.checkpoints.sealed import writing_directory

    saved = find_model(known.adapter, known.base)
    if saved.adapter is None:
        raise ValueError(
            f"{known.adapter} is a whole model: there is no adapter to merge. `colocate export` copies a "
            "model."
        )
    with writing_directory(known.out) as directory:
        merge(saved, directory, known.out.name, is_any_base=known.any_base)
    print(f"Model: {known.out}")
    return 0


def merge(saved: SavedModel, directory: Path, name: str, *, is_any_base: bool) -> None:
    """Write the base of an adapter with the adapter's updates added, and say of each file that it is written.

    Args:
        name: what the model's card calls it.
    """
    from colocate.checkpoints.model_card import write_merged_card
    from colocate.weights.adapter_files import read_adapter
    from colocate.weights.merging import merge_adapter

    assert saved.adapter is not None, "there is something to merge"
    adapter = read_adapter(saved.adapter)
    for line in merge_adapter(
        adapter, saved.base, directory, revision=saved.revision, is_any_base=is_any_base
    ):
        print(line, flush=True)
    write_merged_card(Path(saved.adapter), directory, name)
