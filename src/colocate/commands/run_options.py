"""The run file and options of `colocate train` and `colocate plan`, and checks of them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colocate.commands.arguments import add_command
from colocate.options.names import with_present_names
from colocate.weights.weight_files import check_no_gguf

if TYPE_CHECKING:
    from colocate.config.run_config import RunConfig

_RUN_FILE_HELP = (
    "RUN.yaml holds options as `name: value`; an option on the command line replaces the one in the file. "
    "An option without a value is switched on; several values make a list."
)


def add_run_parser(commands: Any, name: str, summary: str, **options: Any) -> argparse.ArgumentParser:
    """Add a command that takes a run file and options of a run, which it leaves unread."""
    return add_command(
        commands, name, "[RUN.yaml] [--option value ...]", summary, f". {_RUN_FILE_HELP}", **options
    )


def require(values: Mapping[str, Any], *names: str, hint: str = "") -> None:
    """Raises ValueError where an option is not set, or the model is a directory that is not there."""
    for name in names:
        if not values.get(name):
            raise ValueError(f"{name} is not set: add it to the run file or give --{name}")
    name = str(values["model_name_or_path"])
    check_no_gguf(name)
    # A name on the Hub has at most one slash; the Hub's client tries many times to reach any other name.
    if (name.count("/") > 1 or name.startswith((".", "/", "~"))) and not Path(name).is_dir():
        raise ValueError(
            f"There is no directory {name!r}: set model_name_or_path to a model's directory or its name on "
            f"the Hub"
            f"{hint}"
        )


def with_model_options(run: RunConfig, options: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `GRPOConfig`, with `RunConfig`'s revision, dtype and attention added to
    `model_init_kwargs`; a value that the user has set in `model_init_kwargs` is kept."""
    model_options = {"revision": run.model_revision}
    if run.dtype is not None:
        model_options["dtype"] = run.dtype
    if run.attn_implementation is not None:
        model_options["attn_implementation"] = run.attn_implementation
    given = with_present_names(options.get("model_init_kwargs"))
    return {**options, "model_init_kwargs": {**model_options, **given}}


def require_adapters_on_4_bits(run: RunConfig) -> None:
    """Raises ValueError for 4-bit weights without adapters: they are frozen, so nothing would be trained."""
    if run.load_in_4bit and not run.use_peft:
        raise ValueError("load_in_4bit=True freezes the weights, and nothing is left to train: set use_peft")


_READ_WITH = {
    "use_peft": ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules"),
    "load_in_4bit": ("bnb_4bit_quant_type", "use_bnb_nested_quant"),
}
"""Switches, and the options that are read only where they are on."""


def say_unnecessary(run: RunConfig, options: dict[str, Any]) -> None:
    """Print one line for each option that the user has set and nothing reads, because a switch is off or the
    model is natively supported."""
    from dataclasses import fields

    from colocate.config.honoured import UNNECESSARY_WITH_LAYOUT
    from colocate.options.declared import default_of

    defaults = {field.name: default_of(field) for field in fields(run)}
    for switch, names in _READ_WITH.items():
        unread = [name for name in names if getattr(run, name) != defaults[name]]
        if unread and not getattr(run, switch):
            given = ", ".join(f"{name}={getattr(run, name)!r}" for name in unread)
            print(f"{given}: not read without {switch}. Set {switch}: true.", file=sys.stderr)
    for name in sorted(options.keys() & UNNECESSARY_WITH_LAYOUT.keys()):
        reason = UNNECESSARY_WITH_LAYOUT[name]
        print(f"{name}={options[name]!r} is not needed: {reason}.", file=sys.stderr)
