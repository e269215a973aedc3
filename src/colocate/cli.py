"""The command line: `colocate train | plan | report | serve`.

torch and transformers take seconds to load, so each command imports what it needs and `--help` nothing.
"""

from __future__ import annotations

import argparse
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colocate import __version__
from colocate.redaction import redacted

if TYPE_CHECKING:
    from colocate.config import GRPOConfig
    from colocate.run_config import RunConfig

_RUN_USAGE = """[RUN.yaml] [--option value ...]

RUN.yaml holds options as `name: value`; those on the command line win. Options are all of GRPOConfig's
(learning_rate, num_generations, ...) and RunConfig's (model_name_or_path, dataset_name, reward_funcs,
use_peft, lora_r, ...); `colocate train --help` has the list. An option without a value is switched on;
several values make a list."""

_HOW_TO_GO_ON = (
    " --resume_from_checkpoint auto goes on from the last checkpoint in output_dir, if there is one, and "
    "else begins again; a SIGTERM would have saved one first."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, 1 for an error of the user's, 2 for a wrong command line, 3
    for a plan that does not fit, 130 when interrupted."""
    parser = _build_parser()
    # What stands behind "--" is vLLM's, whatever it looks like.
    own, vllm_options = _split_at_dashes(sys.argv[1:] if arguments is None else arguments)
    known, rest = parser.parse_known_args(own)
    if known.command is None:
        parser.print_help()
        return 2
    if known.command == "serve":
        if rest:
            parser.error(f"unrecognized arguments: {' '.join(rest)} (options of vLLM's go behind --)")
        rest = vllm_options
    elif vllm_options or (rest and known.command == "report"):
        parser.error(f"unrecognized arguments: {' '.join([*rest, *vllm_options])}")
    try:
        return {"train": _train, "plan": _plan, "report": _report, "serve": _serve}[known.command](
            known, rest
        )
    except (ValueError, OSError, ImportError, RuntimeError, MemoryError, FloatingPointError) as error:
        if isinstance(error, (RuntimeError, MemoryError)) and not _is_ours(error):
            raise
        if known.debug:
            print(redacted(traceback.format_exc()), file=sys.stderr)
        else:
            message = redacted(str(error))  # also what other libraries say
            print(f"colocate {known.command}: {message}\n(--debug shows where)", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        if known.debug:
            raise
        hint = _HOW_TO_GO_ON if known.command == "train" else ""
        print(f"colocate {known.command}: interrupted.{hint}", file=sys.stderr)
        return 128 + signal.SIGINT


def _is_ours(error: BaseException) -> bool:
    """Whether this package raised it: then its message says what to do, which PyTorch's does not."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and Path(frames[-1].filename).is_relative_to(Path(__file__).parent)


def _split_at_dashes(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """What stands before the first "--", and what behind it."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return list(arguments[:end]), list(arguments[end + 1 :])


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="colocate", description="GRPO for language models, trainer and rollout engine on the same GPUs."
    )
    parser.add_argument("--version", action="version", version=f"colocate {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, summary in (
        ("train", "train a model"),
        ("plan", "show how a run will train and what it will take, without loading anything"),
        ("report", "write the report of a finished or running run"),
    ):
        usage = f"colocate {name} " + ("RUN_DIR" if name == "report" else _RUN_USAGE)
        # No abbreviations: `--p` must not be taken for --plan's own flags but refused as an unknown option.
        command = commands.add_parser(
            name,
            help=summary,
            description=summary,
            usage=usage,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            add_help=name != "train",
            allow_abbrev=False,
        )
        if name == "train":
            command.add_argument(
                "-h", "--help", action=_OptionHelp, nargs=0, help="show this help message and exit"
            )
        command.add_argument("--debug", action="store_true", help="show the traceback of an error")
        if name == "report":
            command.add_argument("run_dir", type=Path, help="the run's output_dir")
        if name == "plan":
            command.epilog = (
                "exit codes: 0 the run fits, or there is no GPU to fit; 3 it does not fit;\n"
                "            1 an error, such as a model that is not found; 2 a wrong command line"
            )
            command.add_argument("--json", action="store_true", help="print JSON instead of words")
            command.add_argument("--verbose", action="store_true", help="print every row of the arithmetic")
            command.add_argument(
                "--device_memory_gib",
                type=_memory_size,
                help="memory of the device to plan for (default: that of --device_name, or of the one here)",
            )
            command.add_argument(
                "--device_name", help="the GPU to plan for, such as H100 (default: the one here)"
            )
    _add_serve(commands)
    return parser


def _memory_size(text: str) -> float:
    size = float(text)
    if not 0 < size < 2**20:
        raise argparse.ArgumentTypeError(f"{text} GiB is no memory of a device")
    return size


class _OptionHelp(argparse.Action):
    """`--help` with all options, which are read from the sources when somebody asks."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from colocate.option_help import option_help

        parser.epilog = option_help()
        parser.print_help()
        parser.exit()


def _add_serve(commands: Any) -> None:
    summary = "run a vLLM server for trainers elsewhere (engine=vllm_server)"
    command = commands.add_parser(
        "serve",
        help=summary,
        description=summary,
        usage="colocate serve MODEL [--host HOST] [--port PORT] [--tensor-parallel-size N] [-- VLLM_OPTIONS]",
        allow_abbrev=False,
    )
    command.add_argument("--debug", action="store_true", help="show the traceback of an error")
    command.add_argument("model", help="the model that is trained: its name, or a directory")
    command.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on (default: %(default)s, for this machine alone; 0.0.0.0: any)",
    )
    command.add_argument("--port", type=int, default=8000, help="port to listen on (default: %(default)s)")
    command.add_argument("--tensor-parallel-size", type=int, default=1, help="GPUs that share the model")


def _read_run(rest: Sequence[str]) -> tuple[RunConfig, dict[str, Any]]:
    """The run that a file and overrides describe, before anything is derived from it."""
    from colocate.run_config import parse_run, read_file, read_overrides

    has_file = bool(rest) and not rest[0].startswith("--")
    values = read_file(Path(rest[0])) if has_file else {}
    return parse_run({**values, **read_overrides(rest[1:] if has_file else rest)})


# ── train ────────────────────────────────────────────────────────────────────────────────────────────────


def _train(known: argparse.Namespace, rest: Sequence[str]) -> int:
    run, options = _read_run(rest)
    _require(run, "model_name_or_path", "dataset_name")
    if not run.reward_funcs and not run.reward_model_name_or_path:
        raise ValueError("reward_funcs is not set: name at least one, e.g. --reward_funcs accuracy_reward")

    from colocate.config import GRPOConfig
    from colocate.data.loading import load_prompts
    from colocate.run_config import RunFileWriter
    from colocate.trainer import GRPOTrainer

    _check_dataset_options(run)
    config = GRPOConfig(**_with_model_options(run, options))
    dataset_name = str(run.dataset_name)
    train_dataset = load_prompts(
        dataset_name, config=run.dataset_config, split=run.dataset_train_split, **run.dataset_options
    )
    eval_dataset = None
    if config.eval_strategy != "no" or config.eval_on_start:
        eval_dataset = load_prompts(
            run.eval_dataset_name or dataset_name,
            config=run.dataset_config,
            split="train" if run.eval_dataset_name else run.dataset_test_split,
            **(run.eval_dataset_options if run.eval_dataset_name else run.dataset_options),
        )
    trainer = GRPOTrainer(
        model=run.model_name_or_path,
        reward_funcs=_reward_functions(run),
        args=config,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        peft_config=_peft_config(run),
        quantization_config=_quantization_config(run, config),
        callbacks=[RunFileWriter(config.run_dir / "config.yaml", run, options)],
    )
    if config.process_index == 0:
        _say_unnecessary(options)
    trainer.train(resume_from_checkpoint=config.resume_from_checkpoint)
    trainer.save_model(str(config.run_dir))
    return 0


def _require(run: RunConfig, *names: str) -> None:
    for name in names:
        if not getattr(run, name):
            raise ValueError(f"{name} is not set: add it to the run file or give --{name}")
    name = str(run.model_name_or_path)
    # A name on the Hub has one slash at most; asked for anything else it answers after many attempts.
    if (name.count("/") > 1 or name.startswith((".", "/", "~"))) and not Path(name).is_dir():
        raise ValueError(
            f"There is no directory {name!r}: model_name_or_path is that of a model, or a name on the Hub"
        )


_OWN_OF_DATASETS = {
    "name": "dataset_name",
    "config": "dataset_config",
    "split": "dataset_train_split or dataset_test_split",
}


def _check_dataset_options(run: RunConfig) -> None:
    for name in ("dataset_options", "eval_dataset_options"):
        for key in getattr(run, name):
            if key in _OWN_OF_DATASETS:
                raise ValueError(f"{name} has {key!r}: set {_OWN_OF_DATASETS[key]} instead")


def _with_model_options(run: RunConfig, options: dict[str, Any]) -> dict[str, Any]:
    """GRPOConfig's arguments with RunConfig's share of `model_init_kwargs`; what the user put there wins."""
    model_options = {"revision": run.model_revision}
    if run.dtype is not None:
        model_options["dtype"] = run.dtype
    if run.attn_implementation is not None:
        model_options["attn_implementation"] = run.attn_implementation
    return {**options, "model_init_kwargs": {**model_options, **(options.get("model_init_kwargs") or {})}}


def _peft_config(run: RunConfig) -> Any:
    if not run.use_peft:
        return None
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise ImportError("use_peft=True needs PEFT: pip install 'peft>=0.18'") from error

    return LoraConfig(
        r=run.lora_r,
        lora_alpha=run.lora_alpha,
        lora_dropout=run.lora_dropout,
        target_modules=run.lora_targets,
        task_type="CAUSAL_LM",
    )


def _quantization_config(run: RunConfig, config: GRPOConfig) -> Any:
    if not run.load_in_4bit:
        return None
    _require_adapters_on_4_bits(run)
    import torch
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=run.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=run.use_bnb_nested_quant,
        # The engine and the trainer multiply in the type of the model's other weights.
        bnb_4bit_compute_dtype=torch.bfloat16 if config.bf16 else torch.float32,
    )


def _require_adapters_on_4_bits(run: RunConfig) -> None:
    if run.load_in_4bit and not run.use_peft:
        raise ValueError("load_in_4bit=True freezes the weights, and nothing is left to train: set use_peft")


def _say_unnecessary(options: dict[str, Any]) -> None:
    """One line for each option whose being set shows only here, where it was read."""
    from colocate.options import UNNECESSARY_WITH_LAYOUT

    for name in sorted(options.keys() & UNNECESSARY_WITH_LAYOUT.keys()):
        reason = UNNECESSARY_WITH_LAYOUT[name]
        print(f"{name}={options[name]!r} is not needed: {reason}.", file=sys.stderr)


def _reward_functions(run: RunConfig) -> list[Any]:
    from colocate.rewards import get_reward_function

    models = [run.reward_model_name_or_path] if run.reward_model_name_or_path else []
    return [*models, *(get_reward_function(name) for name in run.reward_funcs)]


# ── plan ─────────────────────────────────────────────────────────────────────────────────────────────────


def _plan(known: argparse.Namespace, rest: Sequence[str]) -> int:
    run, options = _read_run(rest)
    _require(run, "model_name_or_path")
    _require_adapters_on_4_bits(run)
    from colocate.planning.command import plan_run

    _say_unnecessary(options)
    return plan_run(
        run,
        _with_model_options(run, options),
        device_name=known.device_name,
        device_memory_gib=known.device_memory_gib,
        as_json=known.json,
        is_verbose=known.verbose,
    )


# ── report ───────────────────────────────────────────────────────────────────────────────────────────────


def _report(known: argparse.Namespace, rest: Sequence[str]) -> int:
    if not known.run_dir.is_dir():
        raise ValueError(f"{known.run_dir} is not a directory; give the output_dir of a run")
    from colocate.reporting.report import write_report

    print(write_report(known.run_dir))
    return 0


# ── serve ────────────────────────────────────────────────────────────────────────────────────────────────


def _serve(known: argparse.Namespace, vllm_options: Sequence[str]) -> int:
    from colocate.engines.vllm_server.serve import serve

    return serve(
        known.model,
        host=known.host,
        port=known.port,
        tensor_parallel_size=known.tensor_parallel_size,
        vllm_options=vllm_options,
    )


if __name__ == "__main__":
    sys.exit(main())
