"""The header of a run, which the terminal shows before the first step: model, engine, data, device, plan."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from colocate.checkpoints import sealed
from colocate.config.grpo_config import GRPOConfig
from colocate.config.nested import arguments_of_model_generate
from colocate.engines.registry import engine_of
from colocate.memory.train_plan import TrainPlan
from colocate.parallel.mesh import Mesh
from colocate.reporting.messages import short_path
from colocate.reporting.run_log import earlier_record
from colocate.run.engine import chosen_engine
from colocate.run.record import Run
from colocate.weights.layouts import causal_lm, why_no_layout
from colocate.weights.weight_parts import sizes_of


def header_rows(run: Run, *, resumes: bool) -> dict[str, str]:
    """The rows of the header, by label; a run that `resumes` goes on with the record that it finds."""
    lm = causal_lm(run.model)
    words = engine_of(chosen_engine(run.args, run.model)).words
    splits_optimizer, decode_shard = run.policy.optimizer.is_split, run.args.decode_shard
    record = None if resumes or not run.accelerator.is_main_process else _earlier_record(run.args)
    shard = shard_row(run.mesh, splits_optimizer=splits_optimizer, decode_shard=decode_shard)
    return {
        "model": lm.config.name_or_path or type(lm).__name__,
        "size": _size(run.model),
        "engine": f"{words}; {_why(run.args, run.model)}",
        "rewards": ", ".join(run.judge.reward_functions.names),
        **({} if run.player.words is None else {"turns": run.player.words}),
        "prompts": _prompts(run.train_dataset, run.eval_dataset),
        "device": _device(run.accelerator),
        **({} if shard is None else {"shard": shard}),
        "plan": _plan(run.policy.plan),
        "steps": _steps(run.args, run.journal.state.max_steps),
        "saves": _saves(run.args),
        "output": short_path(run.args.run_dir),
        **({} if record is None else {"record": record}),
    }


def _earlier_record(args: GRPOConfig) -> str | None:
    """The fate of the record that another run has left; read by the process that prints the header."""
    return earlier_record(args.run_dir, has_checkpoints=bool(sealed.list_checkpoints(args.run_dir)))


def _size(model: nn.Module) -> str:
    sizes = sizes_of(model)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    whole, share = sum(sizes.values()), sum(sizes[name] for name in trained)
    dtype = ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in trained.values()}))
    words = f"{_in_words(whole)} parameters"
    return f"{words} in {dtype}" if share == whole else f"{words}, {_in_words(share)} trained in {dtype}"


def _in_words(count: int) -> str:
    for name, size in (("billion", 1e9), ("million", 1e6)):
        if count >= size:
            return f"{count / size:.3g} {name}"
    return f"{count:,}"


def _why(args: GRPOConfig, model: nn.Module) -> str:
    if args.engine != "auto":
        return f"engine={args.engine!r}"
    if (reason := why_no_layout(model)) is not None:
        return f"engine='auto', and the native engine cannot run this model: {reason}"
    if arguments_of_model_generate(args.generation_kwargs):
        return "engine='auto', and generation_kwargs asks for what only it does"
    return f"engine='auto', and {type(causal_lm(model)).__name__} is known to the native engine"


def _prompts(train_dataset: Any, eval_dataset: Any) -> str:
    parts = eval_dataset if isinstance(eval_dataset, dict) else {"": eval_dataset}
    held_out = [f"{name} {_rows(part)}".strip() for name, part in parts.items() if part is not None]
    return _rows(train_dataset) + (f"; to evaluate on: {', '.join(held_out)}" if held_out else "")


def _rows(dataset: Any) -> str:
    return f"{len(dataset):,} rows" if hasattr(dataset, "__len__") else "a stream"


def _device(accelerator: Accelerator) -> str:
    kind = accelerator.device.type
    name = torch.cuda.get_device_name(accelerator.device) if kind == "cuda" else kind.upper()
    return f"{accelerator.num_processes} x {name}" if accelerator.num_processes > 1 else name


def shard_row(mesh: Mesh, *, splits_optimizer: bool, decode_shard: int | None = None) -> str | None:
    """The row about what ranks split; None: there is one rank."""
    if mesh.num_ranks == 1:
        return None
    if mesh.num_weight_parts == 1:
        weights = f"weights whole on each of {mesh.num_ranks} ranks"
    else:
        groups = "" if mesh.num_replicas == 1 else f", in {mesh.num_replicas} such groups"
        weights = f"{mesh.num_weight_parts} ranks share the weights{groups}"
        if decode_shard is not None and decode_shard < mesh.num_weight_parts:
            together = "each alone" if decode_shard == 1 else f"{decode_shard} together"
            weights += f" and gather them to decode {together}"
    if not splits_optimizer:
        return f"{weights}, and the optimizer's state, too"
    return f"{weights}, optimizer split over {mesh.num_ranks}"


def _plan(plan: TrainPlan) -> str:
    if plan.tokens_per_microbatch is not None:
        size = f"{plan.tokens_per_microbatch:,} tokens"
    else:
        size = f"{plan.sequences_per_microbatch:,} sequences"
    optimizer = "on the host while completions are generated" if plan.offload_optimizer else "on the device"
    return f"micro-batches of {size}, activation_policy={plan.activation_policy}, optimizer {optimizer}"


def _steps(args: GRPOConfig, max_steps: int) -> str:
    assert args.generation_batch_size and args.steps_per_generation, "GRPOConfig derives them"
    per_rollout = args.steps_per_generation * args.num_iterations / args.gradient_accumulation_steps
    feeds = f"; a rollout feeds {per_rollout:g} steps" if per_rollout != 1 else ""
    num_prompts = args.generation_batch_size // args.num_generations
    prompts = "1 prompt" if num_prompts == 1 else f"{num_prompts:,} prompts"
    return f"{max_steps:,}, rollouts of {prompts} x {args.num_generations} completions{feeds}"


def _saves(args: GRPOConfig) -> str:
    strategy = str(getattr(args.save_strategy, "value", args.save_strategy))
    if strategy == "steps":
        steps = args.save_steps
        if steps == 1:
            return "a checkpoint after each step"
        return "a checkpoint every " + (f"{steps:g} steps" if steps > 1 else f"{steps:.0%} of the run")
    saved = {"no": "no checkpoints", "epoch": "a checkpoint after each epoch", "best": "the best checkpoint"}
    return f"{saved[strategy]} (save_strategy={strategy!r})"
