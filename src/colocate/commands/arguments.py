"""Parsers of commands, and the arguments that several of them have."""

from __future__ import annotations

import argparse
from typing import Any

MODEL_HELP = "a run's directory, a checkpoint, a model's or an adapter's directory, or a name on the Hub"


def add_command(
    commands: Any, name: str, arguments: str, summary: str, details: str = "", **options: Any
) -> argparse.ArgumentParser:
    """Add a command to the command line.

    Args:
        arguments: those of its usage, after its name.
        details: what `--help` says after the summary.
        options: further arguments of its `ArgumentParser`.
    """
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=summary + details,
        usage=f"colocate {name} {arguments}",
        # An option of a run such as `--p` is never taken for the beginning of one of the command's own.
        allow_abbrev=False,
        **options,
    )
    command.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return command


def add_base(command: argparse.ArgumentParser) -> None:
    """Add the arguments that say which model an adapter is put onto."""
    command.add_argument(
        "--base", help="the model that an adapter is for (default: the one it was trained on)"
    )
    command.add_argument(
        "--any_base",
        action="store_true",
        help="accept a base whose weights differ from those that the adapter was trained on",
    )


def add_loading(command: argparse.ArgumentParser) -> None:
    """Add the arguments of loading a model and of its engine."""
    add_base(command)
    add = command.add_argument
    add(
        "--engine",
        default="auto",
        choices=["auto", "native", "vllm", "transformers"],
        help="what generates (default: the native engine where it knows the model, else transformers)",
    )
    add("--load_in_4bit", action="store_true", help="load the base in 4 bits, as QLoRA does")
    add("--trust_remote_code", action="store_true", help="run code that the model brings along")
    add("--use_cpu", action="store_true", help="generate on the CPU even if there is a GPU")
    add("--seed", type=int, default=42, help="seed of the draws (default: %(default)s)")


def loading_options(known: argparse.Namespace) -> dict[str, Any]:
    """The given options, as `inference.loading.load` takes them. The run's options stand for the others."""
    switches = ("load_in_4bit", "trust_remote_code", "use_cpu")
    switched = {name: True for name in switches if getattr(known, name)}
    return {"engine": known.engine, "seed": known.seed, **switched}


def positive(text: str) -> int:
    """A whole number from 1."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


def temperature(text: str) -> float:
    """A temperature: 0 for greedy decoding, or more."""
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(
            f"{text} is not a temperature: 0 is greedy, 1 is as the model was trained"
        )
    return value
