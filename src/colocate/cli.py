"""The command line: `colocate train | plan | report`.

torch and transformers take seconds to load, so each command imports what it needs and `--help` nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colocate import __version__

if TYPE_CHECKING:
    from colocate.config import GRPOConfig
    from colocate.memory.planner import MemoryPlan
    from colocate.run_config import RunConfig

_RUN_USAGE = """[RUN.yaml] [--option value ...]

RUN.yaml holds options as `name: value`; those on the command line win. Options are all of GRPOConfig's
(learning_rate, num_generations, ...) and RunConfig's (model_name_or_path, dataset_name, reward_funcs,
use_peft, lora_r, ...). An option without a value is switched on; several values make a list."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, 1 for an error of the user's, 2 for a wrong command line."""
    parser = _build_parser()
    known, rest = parser.parse_known_args(arguments)
    if known.command is None:
        parser.print_help()
        return 2
    if rest and known.command not in ("train", "plan"):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        return {"train": _train, "plan": _plan, "report": _report}[known.command](known, rest)
    except (ValueError, OSError, ImportError) as error:
        if known.debug:
            traceback.print_exc()
        else:
            print(f"colocate {known.command}: {error}\n(--debug shows where)", file=sys.stderr)
        return 1


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="colocate", description="GRPO for language models, trainer and rollout engine on the same GPUs."
    )
    parser.add_argument("--version", action="version", version=f"colocate {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, summary in (
        ("train", "train a model"),
        ("plan", "show the memory that a run will take, without loading anything"),
        ("report", "write the report of a finished or running run"),
    ):
        usage = f"colocate {name} " + ("RUN_DIR" if name == "report" else _RUN_USAGE)
        # No abbreviations: `--p` must not be taken for --plan's own flags but refused as an unknown option.
        command = commands.add_parser(
            name, help=summary, description=summary, usage=usage, allow_abbrev=False
        )
        command.add_argument("--debug", action="store_true", help="show the traceback of an error")
        if name == "report":
            command.add_argument("run_dir", type=Path, help="the run's output_dir")
        if name == "plan":
            command.add_argument("--json", action="store_true", help="print JSON instead of a table")
            command.add_argument(
                "--device_memory_gib",
                type=float,
                help="memory of the device to plan for (default: the one here)",
            )
    return parser


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
    from colocate.run_config import save_run
    from colocate.trainer import GRPOTrainer

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
    )
    if config.process_index == 0:
        save_run(Path(str(config.output_dir)) / "config.yaml", run, options)
    trainer.train(resume_from_checkpoint=config.resume_from_checkpoint)
    trainer.save_model(config.output_dir)
    return 0


def _require(run: RunConfig, *names: str) -> None:
    for name in names:
        if getattr(run, name) is None:
            raise ValueError(f"{name} is not set: add it to the run file or give --{name}")


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
    from peft import LoraConfig

    return LoraConfig(
        r=run.lora_r,
        lora_alpha=run.lora_alpha,
        lora_dropout=run.lora_dropout,
        target_modules=run.lora_targets,
        task_type="CAUSAL_LM",
    )


def _reward_functions(run: RunConfig) -> list[Any]:
    from colocate.rewards import get_reward_function

    models = [run.reward_model_name_or_path] if run.reward_model_name_or_path else []
    return [*models, *(get_reward_function(name) for name in run.reward_funcs)]


# ── plan ─────────────────────────────────────────────────────────────────────────────────────────────────

_ASSUMED_PROMPT_TOKENS = 512


def _plan(known: argparse.Namespace, rest: Sequence[str]) -> int:
    run, options = _read_run(rest)
    _require(run, "model_name_or_path")
    model_name = str(run.model_name_or_path)

    import torch
    from transformers import AutoConfig

    from colocate.config import GRPOConfig
    from colocate.memory.planner import plan

    config = GRPOConfig(**_with_model_options(run, options))
    model_config = AutoConfig.from_pretrained(
        model_name, revision=run.model_revision, trust_remote_code=config.trust_remote_code
    )
    device_bytes = None
    if known.device_memory_gib is not None:
        device_bytes = int(known.device_memory_gib * 2**30)
    elif config.device.type == "cuda":
        device_bytes = torch.cuda.get_device_properties(config.device).total_memory
    workload = _workload(run, config, model_config, "cpu" if device_bytes is None else "cuda")
    result = plan(model_config, workload, device_memory_bytes=device_bytes)
    if known.json:
        print(json.dumps(result.to_dict(), indent=2))
    else:
        _print_plan(result, run, config)
    return 0


def _workload(run: RunConfig, config: GRPOConfig, model_config: Any, device_type: str) -> Any:
    import torch
    from transformers.training_args import OptimizerNames

    from colocate.engines.native.backends import default_sizes
    from colocate.engines.native.decoder import bucket_for
    from colocate.engines.native.prefixes import num_partial_results
    from colocate.memory.planner import Workload

    if run.dtype == "auto":
        dtype = model_config.dtype or torch.float32
    else:
        dtype = getattr(torch, run.dtype) if run.dtype else torch.bfloat16 if config.bf16 else torch.float32
    longest = (config.max_prompt_length or _ASSUMED_PROMPT_TOKENS) + config.max_completion_length
    max_num_seqs, page_size = default_sizes(device_type)
    max_num_seqs = config.max_num_seqs or max_num_seqs
    decode_rows, partials_bytes = None, 0
    if device_type == "cuda":
        text = model_config.get_text_config()
        heads = text.num_attention_heads
        head_size = getattr(text, "head_dim", None) or text.hidden_size // heads
        decode_rows = bucket_for(max_num_seqs)
        num_partials = num_partial_results(
            decode_rows, heads, getattr(text, "num_key_value_heads", None) or heads
        )
        partials_bytes = num_partials * heads * (head_size + 1) * 4
    if config.generation_batch_size and config.max_num_seqs is None:
        # A rollout has no more sequences to keep in the cache; room to decode is made for all rows.
        max_num_seqs = min(max_num_seqs, config.generation_batch_size)
    return Workload(
        parameter_dtype=dtype,
        max_sequence_length=longest,
        tokens_per_microbatch=config.max_tokens_per_microbatch
        or config.per_device_train_batch_size * longest,
        max_num_seqs=max_num_seqs,
        page_size=config.page_size or page_size,
        kv_cache_tokens=config.kv_cache_tokens,
        decode_rows=decode_rows,
        decode_partials_bytes=partials_bytes,
        logprob_chunk_size=config.logprob_chunk_size,
        gradient_checkpointing=bool(config.gradient_checkpointing),
        optim=OptimizerNames(config.optim).value,
        has_reference=config.beta != 0.0,
        lora_rank=run.lora_r if run.use_peft else None,
        lora_target_modules=run.lora_targets,
    )


def _print_plan(result: MemoryPlan, run: RunConfig, config: GRPOConfig) -> None:
    from rich.console import Console
    from rich.table import Table

    def shown(size: int) -> str:
        return f"{size / 2**30:.2f} GiB" if size >= 2**28 else f"{size / 2**20:.2f} MiB"

    table = Table(title=f"Memory of one device: {run.model_name_or_path}", title_justify="left")
    for column in ("phase", "what", "memory", "how"):
        table.add_column(column, justify="right" if column == "memory" else "left", no_wrap=column != "how")
    for phase in ("resident", "rollout", "train"):
        for row in (row for row in result.rows if row.phase == phase):
            table.add_row(phase, row.name, shown(row.size_bytes), row.how)
        table.add_row(phase, "total", shown(result.phase_bytes(phase)), "", style="bold", end_section=True)
    console = Console()
    console.print(table)
    console.print(f"Peak {shown(result.peak_bytes)} = resident + the larger of rollout and train.")
    if config.max_prompt_length is None:
        console.print(
            f"Prompts are taken to have at most {_ASSUMED_PROMPT_TOKENS} tokens: set max_prompt_length."
        )
    if result.device_memory_bytes is None:
        console.print("No GPU here: give --device_memory_gib to see whether the run fits.")
    elif result.fits:
        console.print(f"Fits in {shown(result.device_memory_bytes)}.", style="green")
    else:
        short = result.peak_bytes - result.device_memory_bytes
        console.print(
            f"Does not fit: {shown(result.device_memory_bytes)}, {shown(short)} short. Set", style="red"
        )
        for remedy in result.remedies:
            console.print(f"  {remedy}", highlight=False)


# ── report ───────────────────────────────────────────────────────────────────────────────────────────────


def _report(known: argparse.Namespace, rest: Sequence[str]) -> int:
    if not known.run_dir.is_dir():
        raise ValueError(f"{known.run_dir} is not a directory; give the output_dir of a run")
    from colocate.reporting.report import write_report

    print(write_report(known.run_dir))
    return 0


if __name__ == "__main__":
    sys.exit(main())
