"""The command line: `colocate train | plan | report | serve | rollout-serve | chat | eval | merge | ...`.

torch and transformers take seconds to load, so each command imports what it needs and `--help` nothing.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from colocate.commands import chat, export, merge, plan, report, rollout_serve, serve, train
from colocate.commands import eval as measure
from colocate.commands.vocabulary import TAKE_RUN_OPTIONS, in_words_of
from colocate.options.redaction import redacted
from colocate.parallel.rank_failure import record_failure, say
from colocate.users_code.exits import LoudExits, place_of_exit
from colocate.version import __version__

_COMMANDS = {
    "train": train, "plan": plan, "report": report, "chat": chat, "eval": measure, "merge": merge,
    "export": export, "serve": serve, "rollout-serve": rollout_serve, "vllm-serve": rollout_serve,
}  # fmt: skip
"""The commands in the order of the help; each has a file in `commands/`."""

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
    known.run_options, known.vllm_options = rest, vllm_options
    if unread := _unread(known):
        _refuse_unknown(known.command_parser, unread)
    # bitsandbytes has no fast 4-bit kernel for CPUs and says so in every program that imports PEFT.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    try:
        with LoudExits():
            return _COMMANDS[known.command].run(known)
    except (ValueError, OSError, ImportError, RuntimeError, MemoryError, FloatingPointError) as error:
        if isinstance(error, (RuntimeError, MemoryError)) and not _is_ours(error):
            raise
        message = redacted(_worded(str(error), known))  # errors of other libraries may quote secrets, too
        brief = f"colocate {known.command}: {message}\n(--debug shows where)"
        if type(error).__name__ != "PeerError":  # whose class is PyTorch's to load
            record_failure(error, brief)
        say(redacted(traceback.format_exc()) if known.debug else brief)
        return 1
    except SystemExit as error:
        place = place_of_exit(error)
        if error.code or "argparse.py:" in place:  # which has shown the help
            raise
        say(
            f"colocate {known.command}: {place} called exit(), which ended the command before it was done. "
            "The status would be 0, as of one that has succeeded, and is 1."
        )
        return 1
    except KeyboardInterrupt as error:
        if known.debug:
            raise
        if not error.args:  # else the run has saved its last step and said so
            hint = _HOW_TO_GO_ON if known.command == "train" else "."
            print(f"colocate {known.command}: interrupted{hint}", file=sys.stderr)
        return 128 + signal.SIGINT


def _worded(message: str, known: argparse.Namespace) -> str:
    """An error's message in the words of the command."""
    from colocate.config.run_config import run_options

    own = [option for action in known.command_parser._actions for option in action.option_strings]
    return in_words_of(known.command, message, own, run_options())


def _unread(known: argparse.Namespace) -> list[str]:
    """The arguments that the command does not take."""
    is_server = _COMMANDS[known.command] is rollout_serve
    takes_vllm_options = is_server or (known.command == "train" and known.num_replicas)
    return [
        *([] if known.command in TAKE_RUN_OPTIONS else known.run_options),
        *([] if takes_vllm_options else known.vllm_options),
    ]


def _refuse_unknown(command: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """End with status 2, the usage of the command, and its option that is most like the first word."""
    from colocate.options.values import nearest

    known = [option for action in command._actions for option in action.option_strings]
    hint = nearest(words[0].partition("=")[0], known)
    if command.prog.endswith(" serve") and not hint:
        hint = " (a server for trainers is started by `colocate rollout-serve`)"
    if command.prog.endswith((" rollout-serve", " vllm-serve")):
        hint = " (options for vLLM go after --)"
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
    for command in dict.fromkeys(_COMMANDS.values()):
        command.add_parser(commands)
    for parser_of_command in commands.choices.values():
        parser_of_command.set_defaults(command_parser=parser_of_command)
    return parser


if __name__ == "__main__":
    sys.exit(main())
