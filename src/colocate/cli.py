"""The command line: `colocate train | plan | report | serve | vllm-serve | chat | eval | merge | export`.

torch and transformers take seconds to load, so each command imports what it needs and `--help` nothing.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import textwrap
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from colocate.commands import chat, export, merge, report, serve
from colocate.commands import eval as measure
from colocate.parallel.last_words import say
from colocate.redaction import redacted
from colocate.train_command import train
from colocate.version import __version__

_COMMANDS = {
    "report": report, "chat": chat, "eval": measure, "merge": merge, "export": export, "serve": serve,
}  # fmt: skip
"""Commands with options of their own; each has a file in `commands/`. Those of a run follow below."""

_RUN_FILE_HELP = (
    "RUN.yaml holds options as `name: value`; an option on the command line replaces the one in the file. "
    "An option without a value is switched on; several values make a list."
)

_HOW_TO_GO_ON = (
    " at once: steps since the last checkpoint are lost. The same command with --resume_from_checkpoint auto "
    "continues from the last checkpoint in output_dir, or begins again if there is none."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        The exit code: 0, or 1 for an error that the user can mend, 2 for a wrong command line, 3 for a plan
        that does not fit, 130 if the user interrupted the command.
    """
    parser = _build_parser()
    # Everything after "--" is for vLLM, even if it looks like an option of ours.
    own, vllm_options = _split_at_dashes(sys.argv[1:] if arguments is None else arguments)
    known, rest = parser.parse_known_args(own)
    if known.command is None:
        parser.print_help()
        return 2
    if known.command == "vllm-serve":
        if rest:
            parser.error(f"unrecognized arguments: {' '.join(rest)} (options for vLLM go after --)")
        rest = vllm_options
    elif known.command == "train" and known.num_replicas:
        known.vllm_options = vllm_options
    elif vllm_options or (rest and known.command not in ("train", "plan")):
        _refuse_unknown(known.command_parser, [*rest, *vllm_options])
    # bitsandbytes has no fast 4-bit kernel for CPUs and says so in every program that imports PEFT.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    try:
        if known.command in _COMMANDS:
            return _COMMANDS[known.command].run(known)
        return {"train": train, "plan": _plan, "vllm-serve": _vllm_serve}[known.command](known, rest)
    except (ValueError, OSError, ImportError, RuntimeError, MemoryError, FloatingPointError) as error:
        if isinstance(error, (RuntimeError, MemoryError)) and not _is_ours(error):
            raise
        message = redacted(str(error))  # errors of other libraries may quote secrets, too
        brief = f"colocate {known.command}: {message}\n(--debug shows where)"
        say(redacted(traceback.format_exc()) if known.debug else brief)
        return 1
    except KeyboardInterrupt as error:
        if known.debug:
            raise
        if not error.args:  # else the run has saved its last step and said so
            hint = _HOW_TO_GO_ON if known.command == "train" else "."
            print(f"colocate {known.command}: interrupted{hint}", file=sys.stderr)
        return 128 + signal.SIGINT


def _refuse_unknown(command: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """End with status 2, the usage of the command, and the option of it that is nearest to the first word."""
    from colocate.option_values import nearest

    known = [option for action in command._actions for option in action.option_strings]
    hint = nearest(words[0].partition("=")[0], known)
    if command.prog.endswith(" serve") and not hint:
        hint = " (a server for trainers is started by `colocate vllm-serve`)"
    command.error(f"unrecognized arguments: {' '.join(words)}{hint}")


def _is_ours(error: BaseException) -> bool:
    """Whether this package raised the error: its own messages say what to do, those of PyTorch do not."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and Path(frames[-1].filename).is_relative_to(Path(__file__).parent)


def _split_at_dashes(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments before the first "--", and those after it."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return list(arguments[:end]), list(arguments[end + 1 :])


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="colocate",
        description="GRPO for language models, trainer and rollout engine on the same GPUs.",
        epilog="`colocate COMMAND --help` explains a command and its options.",
    )
    parser.add_argument("--version", action="version", version=f"colocate {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, summary in (
        ("train", "train a model"),
        ("plan", "show whether a run fits the GPU and how long its steps take, without loading the model"),
    ):
        # No abbreviations: `--p` must not be taken for --plan's own flags but refused as an unknown option.
        command = commands.add_parser(
            name,
            help=summary,
            description=f"{summary}. {_RUN_FILE_HELP}",
            usage=f"colocate {name} [RUN.yaml] [--option value ...]",
            add_help=name != "train",
            allow_abbrev=False,
        )
        if name == "train":
            command.add_argument(
                "-h", "--help", action=_OptionHelp, nargs=0, help="show this help message and exit"
            )
            _add_launcher(command)
        command.add_argument("--debug", action="store_true", help="show the traceback of an error")
        if name == "plan":
            command.epilog = (
                "`colocate train --help` lists the options of a run. Exit codes: 0 the run fits, or there is "
                "no GPU to fit; 3 it does not fit; 1 an error, such as a model that is not found; 2 a wrong "
                "command line."
            )
            command.add_argument("--json", action="store_true", help="print JSON instead of words")
            command.add_argument("--verbose", action="store_true", help="print every row of the arithmetic")
            command.add_argument(
                "--device_memory_gib",
                type=_memory_size,
                help="memory of the device to plan for (default: that of --device_name, or of the one here)",
            )
            command.add_argument(
                "--gpu",
                "--device_name",
                dest="device_name",
                help="the GPU to plan for, such as H100 (default: the one here)",
            )
            command.add_argument(
                "--num_gpus", type=_count, default=1, help="GPUs that train together (default: 1)"
            )
            command.add_argument(
                "--num_nodes", type=_count, help="machines that hold these GPUs (default: one for every 8)"
            )
    for own in _COMMANDS.values():
        own.add_parser(commands)
    _add_vllm_serve(commands)
    for command in commands.choices.values():
        command.set_defaults(command_parser=command)
    return parser


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of GPUs or machines")
    return int(text)


def _memory_size(text: str) -> float:
    size = float(text)
    if not 0 < size < 2**20:
        raise argparse.ArgumentTypeError(f"{text} GiB is not the memory of a device")
    return size


class _OptionHelp(argparse.Action):
    """Prints the help with all options, which are read from the sources only when somebody asks for help."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from colocate.option_help import help_width, option_help

        about = textwrap.fill(str(parser.description), help_width())
        parser.description = f"{about}\n\n{option_help()}"
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        parser.print_help()
        parser.exit()


def _add_launcher(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("ranks (one process per GPU) that Ray starts")
    group.add_argument("--launcher", choices=["ray"], help="start the ranks on a Ray cluster")
    group.add_argument("--num_nodes", type=_count, help="nodes to train on (default: 1)")
    group.add_argument("--gpus_per_node", type=_count, help="GPUs of each node, one rank on each")
    group.add_argument("--ranks_per_node", type=_count, help="ranks of each node without GPUs")
    group.add_argument(
        "--max_restarts", type=_whole, help="starts again from the last checkpoint, at most (default: 3)"
    )
    group.add_argument(
        "--cluster_timeout", type=_whole, help="seconds to wait for the cluster to have room (default: 600)"
    )
    group.add_argument(
        "--num_replicas", type=_count, help="vLLM servers to start for the run; vLLM's options go after --"
    )
    group.add_argument(
        "--replica_gpus", type=_count, help="GPUs of each server, tensor parallel over them (default: 1)"
    )
    group.add_argument(
        "--replica_placement",
        choices=["colocated", "own"],
        help="servers on the ranks' GPUs, in turns with them (the default), or on GPUs of their own",
    )


def _whole(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text} is not a whole number")
    return int(text)


def _add_vllm_serve(commands: Any) -> None:
    summary = "run a vLLM server for trainers elsewhere (engine=vllm_server)"
    command = commands.add_parser(
        "vllm-serve",
        help=summary,
        description=summary,
        usage="colocate vllm-serve MODEL [options] [-- VLLM_OPTIONS]",
        allow_abbrev=False,
    )
    command.add_argument("--debug", action="store_true", help="show the traceback of an error")
    command.add_argument("model", help="the model that is trained: its name on the Hub, or its directory")
    command.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on (default: %(default)s, for this machine alone; 0.0.0.0: any)",
    )
    command.add_argument("--port", type=int, default=8000, help="port to listen on (default: %(default)s)")
    command.add_argument("--tensor-parallel-size", type=int, default=1, help="GPUs that share the model")


# ── plan ─────────────────────────────────────────────────────────────────────────────────────────────────


def _plan(known: argparse.Namespace, rest: Sequence[str]) -> int:
    from colocate.run_file import read_values
    from colocate.train_command import (
        require,
        require_adapters_on_4_bits,
        say_unnecessary,
        with_model_options,
    )

    _, values = read_values(rest)
    require(values, "model_name_or_path")

    from colocate.planning.command import plan_run
    from colocate.run_config import parse_run

    run, options = parse_run(values)
    require(vars(run), "model_name_or_path")
    require_adapters_on_4_bits(run)
    say_unnecessary(options)
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


# ── vllm-serve ───────────────────────────────────────────────────────────────────────────────────────────


def _vllm_serve(known: argparse.Namespace, vllm_options: Sequence[str]) -> int:
    from colocate.engines.vllm_server.serve import serve as serve_vllm

    return serve_vllm(
        known.model,
        host=known.host,
        port=known.port,
        tensor_parallel_size=known.tensor_parallel_size,
        vllm_options=vllm_options,
    )


if __name__ == "__main__":
    sys.exit(main())
