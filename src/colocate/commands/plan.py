"""`colocate plan`: whether a run fits a device, and how long its steps take."""

from __future__ import annotations

import argparse
from typing import Any

from colocate.commands.arguments import positive
from colocate.commands.run_options import (
    add_run_parser,
    require,
    require_adapters_on_4_bits,
    say_unnecessary,
    with_model_options,
)
from colocate.config.run_config import read_options, read_values, split_options

SUMMARY = "show whether a run fits the GPU and how long its steps take, without loading the model"
_EPILOG = (
    "`colocate train --help` lists the options of a run. Exit codes: 0 the run fits, or there is no GPU to "
    "fit; 3 it does not fit; 1 an error, such as a model that is not found; 2 a wrong command line."
)


def add_parser(commands: Any) -> None:
    """Add the command to the command line."""
    command = add_run_parser(commands, "plan", SUMMARY, epilog=_EPILOG)
    add = command.add_argument
    add("--json", action="store_true", help="print JSON instead of words")
    add("--verbose", action="store_true", help="print every row of the arithmetic")
    add(
        "--device_memory_gib",
        type=_memory_size,
        help="memory of the device to plan for (default: that of --device_name, or of the one here)",
    )
    add(
        "--gpu",
        "--device_name",
        dest="device_name",
        help="the GPU to plan for, such as H100 (default: the one here)",
    )
    add("--num_gpus", type=positive, default=1, help="GPUs that train together (default: 1)")
    add("--num_nodes", type=positive, help="machines that hold these GPUs (default: one for every 8)")


def _memory_size(text: str) -> float:
    size = float(text)
    if not 0 < size < 2**20:
        raise argparse.ArgumentTypeError(f"{text} GiB is not the memory of a device")
    return size


def run(known: argparse.Namespace) -> int:
    """Run the command; returns its exit code."""
    _, values = read_values(known.run_options)
    values = read_options(values)
    require(values, "model_name_or_path")

    from colocate.planning.command import plan_run

    run, options = split_options(values)
    require_adapters_on_4_bits(run)
    say_unnecessary(run, options)
    return plan_run(
        run,
        with_model_options(run, options),
        device_name=known.device_name,
        device_memory_gib=known.device_memory_gib,
        num_gpus=known.num_gpus,
        num_nodes=known.num_nodes,
        as_json=known.json,
        is_verbose=known.verbose,
    )
