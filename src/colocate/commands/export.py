"""`colocate export`: a trained model in the format that other programs read."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colocate.commands.arguments import MODEL_HELP, add_base, add_command
from colocate.commands.merge import merge

if TYPE_CHECKING:
    from colocate.checkpoints.saved_model import SavedModel

SUMMARY = "write a trained model as safetensors or GGUF"


def add_parser(commands: Any) -> None:
    details = (
        ". An adapter is merged into its model first. safetensors: a plain Hugging Face directory without "
        "checkpoints, options and completions. gguf: one file for llama.cpp and Ollama."
    )
    command = add_command(commands, "export", "MODEL OUT [options]", SUMMARY, details)
    add = command.add_argument
    add("model", help=MODEL_HELP)
    add("out", type=Path, help="the directory to write, or for gguf the file")
    add("--format", default="safetensors", choices=["safetensors", "gguf"], help="default: %(default)s")
    add(
        "--gguf_type",
        default="auto",
        choices=["auto", "f32", "f16", "bf16", "q8_0"],
        help="type of the weights in a GGUF file (default: the model's own, of 16 bits)",
    )
    add(
        "--converter",
        type=Path,
        help="convert_hf_to_gguf.py of a llama.cpp checkout, in place of the package",
    )
    add_base(command)


def run(known: argparse.Namespace) -> int:
    """Run the command; returns its exit code."""
    from colocate.checkpoints.gguf import check_target, convert, converter_command
    from colocate.checkpoints.saved_model import find_model
    from colocate.checkpoints.sealed import writing_directory

    if known.format == "safetensors":
        saved = find_model(known.model, known.base)
        with writing_directory(known.out) as directory:
            _write_whole(saved, directory, known)
        print(f"Model: {known.out}")
        return 0
    converter = converter_command(known.converter)
    check_target(known.out)
    saved = find_model(known.model, known.base)
    with tempfile.TemporaryDirectory(dir=known.out.parent, prefix=".export-") as whole:
        _write_whole(saved, Path(whole), known)
        convert(converter, Path(whole), known.out, known.gguf_type)
    print(f"Model: {known.out}")
    return 0


def _write_whole(saved: SavedModel, directory: Path, known: argparse.Namespace) -> None:
    from colocate.weights.merging import copy_model

    if saved.adapter is not None:
        merge(saved, directory, known.out.stem, is_any_base=known.any_base)
    else:
        copy_model(saved.base, directory)
