"""The command line: `colocate train | plan | report | serve`.

torch and transformers take seconds to load, so each command imports what it needs and `--help` nothing.
"""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from colocate import __version__
from colocate.redaction import redacted
from colocate.train_command import train

if TYPE_CHECKING:
    from colocate.config import GRPOConfig
    from colocate.planning.hardware import Gpu, Speed
    from colocate.planning.memory_plan import MemoryPlan
    from colocate.run_config import RunConfig

_RUN_USAGE = """[RUN.yaml] [--option value ...]

RUN.yaml holds options as `name: value`; those on the command line win. Options are all of GRPOConfig's
(learning_rate, num_generations, ...) and RunConfig's (model_name_or_path, dataset_name, reward_funcs,
use_peft, lora_r, ...); `colocate train --help` has the list. An option without a value is switched on;
several values make a list."""

_HOW_TO_GO_ON = (
    " at once: steps since the last checkpoint are lost. The same command with --resume_from_checkpoint auto "
    "goes on from the last checkpoint in output_dir, if there is one, and else begins again."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, 1 for an error of the user's or a plan that does not fit, 2
    for a wrong command line, 130 when interrupted."""
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
    # It has no faster kernel for 4 bits on a CPU, and says so in every program that imports PEFT.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    try:
        return {"train": train, "plan": _plan, "report": _report, "serve": _serve}[known.command](known, rest)
    except (ValueError, OSError, ImportError, RuntimeError, MemoryError, FloatingPointError) as error:
        if isinstance(error, (RuntimeError, MemoryError)) and not _is_ours(error):
            raise
        if known.debug:
            print(redacted(traceback.format_exc()), file=sys.stderr)
        else:
            message = redacted(str(error))  # also what other libraries say
            print(f"colocate {known.command}: {message}\n(--debug shows where)", file=sys.stderr)
        return 1
    except KeyboardInterrupt as error:
        if known.debug:
            raise
        if not error.args:  # else the run has saved its last step and said so
            hint = _HOW_TO_GO_ON if known.command == "train" else "."
            print(f"colocate {known.command}: interrupted{hint}", file=sys.stderr)
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
            command.add_argument("--json", action="store_true", help="print JSON instead of a table")
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


# ── plan ─────────────────────────────────────────────────────────────────────────────────────────────────


def _plan(known: argparse.Namespace, rest: Sequence[str]) -> int:
    from colocate.run_file import read_values
    from colocate.train_command import quantization_config, require, say_unnecessary, with_model_options

    _, values = read_values(rest)
    require(values, "model_name_or_path")

    from transformers import AutoConfig

    from colocate.planning.hardware import expected_speed
    from colocate.planning.planner import plan
    from colocate.planning.run_options import wishes_of, workload_of
    from colocate.planning.shapes import FourBit, Lora, ModelShapes
    from colocate.policy.cudnn_attention import hopper_has_cudnn
    from colocate.run_config import parse_run

    run, options = parse_run(values)
    require(vars(run), "model_name_or_path")
    config = _config_to_plan_for(known, with_model_options(run, options))
    quantization_config(run, config)
    model_config = AutoConfig.from_pretrained(
        str(run.model_name_or_path), revision=run.model_revision, trust_remote_code=config.trust_remote_code
    )
    shapes = ModelShapes.of_config(
        model_config,
        lora=Lora(run.lora_r, run.lora_targets) if run.use_peft else None,
        four_bit=FourBit(double_quantized=run.use_bnb_nested_quant) if run.load_in_4bit else None,
    )
    gpu, device_bytes = _device_to_plan_for(known, config)
    dtype = _dtype(run, config, model_config)
    has_cudnn = gpu is not None and gpu.is_hopper and hopper_has_cudnn(dtype, shapes.head_size)
    workload = workload_of(config, shapes, dtype, is_gpu=device_bytes is not None, has_cudnn=has_cudnn)
    result = plan(shapes, workload, device_memory_bytes=device_bytes, wishes=wishes_of(config))
    speed = None if gpu is None else expected_speed(shapes, workload, result, gpu)
    say_unnecessary(options)
    if known.json:
        print(json.dumps({**result.to_dict(), "expected": None if speed is None else vars(speed)}, indent=2))
    else:
        _print_plan(result, run, config, gpu, speed)
    return int(result.fits is False)


def _config_to_plan_for(known: argparse.Namespace, options: dict[str, Any]) -> GRPOConfig:
    """The run's configuration; for a GPU that is not here, with the precision it would have there."""
    from colocate.config import GRPOConfig

    if known.device_memory_gib is None and known.device_name is None:
        return GRPOConfig(**options)
    # transformers refuses bf16=True where there is no GPU, and None would mean False.
    bf16 = options.pop("bf16", None)
    config = GRPOConfig(**options)
    config.bf16 = not config.use_cpu if bf16 is None else bf16
    return config


def _device_to_plan_for(known: argparse.Namespace, config: GRPOConfig) -> tuple[Gpu | None, int | None]:
    """What is known of the device: its data sheet, and its memory."""
    import torch

    from colocate.planning.hardware import GPUS, find_gpu

    name = known.device_name
    if name is None and known.device_memory_gib is None and config.device.type == "cuda":
        name = torch.cuda.get_device_name(config.device)
    gpu = None if name is None else find_gpu(name)
    if known.device_memory_gib is not None:
        return gpu, int(known.device_memory_gib * 2**30)
    if known.device_name is not None:
        if gpu is None:
            raise ValueError(
                f"--device_name {name} is not in the table of {', '.join(g.name for g in GPUS)}: give "
                "--device_memory_gib to plan for its memory"
            )
        return gpu, int(gpu.memory_gib * 2**30)
    if config.device.type == "cuda":
        return gpu, torch.cuda.get_device_properties(config.device).total_memory
    return None, None


def _dtype(run: RunConfig, config: GRPOConfig, model_config: Any) -> Any:
    import torch

    if run.dtype == "auto":
        return torch.bfloat16 if config.bf16 else model_config.dtype or torch.float32
    return getattr(torch, run.dtype) if run.dtype else torch.bfloat16 if config.bf16 else torch.float32


def _print_plan(
    result: MemoryPlan, run: RunConfig, config: GRPOConfig, gpu: Gpu | None, speed: Speed | None
) -> None:
    from rich.console import Console
    from rich.table import Table

    from colocate.planning.accounting import Moment
    from colocate.planning.run_options import ASSUMED_PROMPT_TOKENS

    table = Table(title=f"Memory of one device: {run.model_name_or_path}", title_justify="left")
    for column in ("phase", "what", "memory", "how"):
        table.add_column(column, justify="right" if column == "memory" else "left", no_wrap=column != "how")
    for phase in ("resident", "rollout", "train"):
        for row in (row for row in result.rows if row.phase == phase):
            # Of the moments of training the widest is shown row by row.
            if row.size_bytes and row.moment in (None, result.widest_moment):
                table.add_row(phase, row.name, _shown(row.size_bytes), row.how)
        if phase == "train":
            others = [m for m in get_args(Moment) if m != result.widest_moment]
            sizes = ", ".join(f"{m} {_shown(result.moment_bytes(m))}" for m in others)
            table.add_row(phase, f"(moment: {result.widest_moment})", "", f"the widest; others: {sizes}")
        table.add_row(phase, "total", _shown(result.phase_bytes(phase)), "", style="bold", end_section=True)
    console = Console()
    console.print(table)
    console.print(f"Peak {_shown(result.peak_bytes)} = resident + the larger of rollout and train.")
    for line in _decisions(result, config, gpu, speed):
        console.print(line, highlight=False)
    if config.max_prompt_length is None:
        console.print(
            f"Prompts are taken to have at most {ASSUMED_PROMPT_TOKENS} tokens: set max_prompt_length."
        )
    if result.device_memory_bytes is None:
        console.print("No GPU here: give --device_name or --device_memory_gib to plan for one.")
    elif result.fits:
        console.print(f"Fits in {_shown(result.device_memory_bytes)}.", style="green")
    else:
        console.print(f"Does not fit: {result.shortage}. Set", style="red")
        for remedy in result.remedies:
            console.print(f"  {remedy}", highlight=False)


def _decisions(result: MemoryPlan, config: GRPOConfig, gpu: Gpu | None, speed: Speed | None) -> Iterator[str]:
    """What the plan comes to, beside bytes; of one that does not fit, how it would train."""
    plan, sequences = result.train_plan, config.per_device_train_batch_size
    tokens = (
        f"{plan.tokens_per_microbatch:,} tokens" if plan.tokens_per_microbatch else f"{sequences} sequences"
    )
    yield (
        f"Training: micro-batches of {tokens} (a step has up to {result.step_tokens:,}), "
        f"activation_policy={plan.activation_policy}, log-probs of {plan.logprob_chunk_size:,} tokens at a "
        f"time{' with their softmax kept for backward' if plan.keep_softmax else ''}; optimizer "
        f"{'on the host in rollout' if plan.offload_optimizer else 'on the device'}."
    )
    if result.fits is False:
        return
    if result.repeated_prompts is not None:
        yield result.repeated_prompts
    yield (
        f"Rollout: the KV cache holds {result.kv_cache_tokens:,} tokens, {result.kv_cache_sequences:,} "
        "sequences of full length side by side."
    )
    if gpu is None or speed is None:
        yield "Speed: unknown, as no GPU in the table is named."
    else:
        yield (
            f"Speed expected of one {gpu.name}: {speed.rollout_tokens_per_s:,.0f} tokens/s in rollout, "
            f"{speed.train_tokens_per_s:,.0f} in training."
        )


def _shown(size_bytes: int) -> str:
    if size_bytes >= 2**28:
        return f"{size_bytes / 2**30:.2f} GiB"
    return f"{size_bytes / 2**20:.2f} MiB"


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
