"""A plan as text: first whether the run fits, then the time of a step, then the arithmetic of its memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from colocate.config.grpo_config import GRPOConfig
from colocate.kernels.checks.fallbacks import Fallback
from colocate.memory.rows import Moment, Phase, total_bytes
from colocate.planning.hardware import GPUS, Cluster, Gpu
from colocate.planning.memory_plan import MemoryPlan
from colocate.planning.planner import Case
from colocate.planning.remedies import Remedy, enough_gpus, find_remedies, needed_bytes, with_adapters
from colocate.planning.run_options import ASSUMED_PROMPT_TOKENS
from colocate.planning.sharding import ShardingChoice
from colocate.planning.speed import Speed, StepTime, duration, expected_speed, step_time_of
from colocate.policy.footprint import optimizer_rows

_LARGEST_ROWS = 3
"""Rows of each phase that the short table names."""


@dataclass(frozen=True)
class PlanReport:
    """The report of `colocate plan`, with the run and the device that it was asked about."""

    model_name: str
    case: Case
    cluster: Cluster
    choice: ShardingChoice
    config: GRPOConfig
    slower: Sequence[Fallback] | None
    """The fast kernels that the run does without; None if it is unknown which GPU it will have."""

    @property
    def plan(self) -> MemoryPlan:
        return self.choice.chosen.plan

    @property
    def gpu(self) -> Gpu | None:
        return self.cluster.gpu

    @property
    def speed(self) -> Speed | None:
        """The speed of one GPU; None if it is unknown."""
        if self.gpu is None:
            return None
        return expected_speed(self.case.shapes, self.choice.chosen.workload, self.plan, self.gpu)

    @property
    def verdict(self) -> str:
        if self.plan.fits is None:
            return "no device"
        if not self.plan.fits:
            return "does not fit"
        return "fits" if self.plan.why_tight is None else "fits tightly"

    @property
    def method(self) -> str:
        shapes = self.case.shapes
        return "full fine-tuning" if not shapes.has_adapters else "QLoRA" if shapes.four_bit else "LoRA"

    @property
    def step_time(self) -> StepTime | None:
        """The time of a step; None if the GPU is unknown."""
        chosen = self.choice.chosen
        return step_time_of(self.case.shapes, chosen.workload, chosen.plan, self.cluster)

    def to_dict(self) -> dict[str, Any]:
        step, remedies = self.step_time, find_remedies(self.case)
        fits, sharding = self.plan.fits is True, self.choice.sharding
        return {
            **self.plan.to_dict(),
            "num_gpus": self.cluster.num_gpus,
            "num_nodes": self.cluster.num_nodes,
            "num_weight_parts": sharding.num_weight_parts,
            "num_decode_parts": sharding.num_decode_parts,
            "num_optimizer_parts": sharding.num_optimizer_parts,
            "sharding": self.choice.reason,
            "verdict": self.verdict,
            "why_tight": self.plan.why_tight,
            "expected": None if self.speed is None else vars(self.speed),
            "expected_step": None if step is None or not fits else {**vars(step), "seconds": step.seconds},
            "slower_kernels": None if self.slower is None else [fallback.line for fallback in self.slower],
            "remedies": [{"settings": r.settings, "peak_bytes": r.plan.peak_bytes} for r in remedies],
        }


def print_report(report: PlanReport, *, is_verbose: bool) -> None:
    """Print the verdict, the time of a step or what to set instead, and the arithmetic."""
    console = Console()
    styles = {"fits": "bold green", "fits tightly": "bold yellow", "does not fit": "bold red"}

    def say(lines: Iterable[str], style: str = "") -> None:
        for line in lines:
            text = Text(line.lstrip(" "), style)
            indent = len(line) - len(text)
            console.print(Padding(text, (0, 0, 0, indent), expand=False) if indent else text)

    say([_verdict_line(report)], styles.get(report.verdict, "bold"))
    say(_sharding_lines(report))
    say(_remedy_lines(report) if report.plan.fits is False else _time_lines(report))
    console.print()
    console.print(_short_table(report.plan))
    say(_decisions(report))
    say(f"Without a fast kernel: {fallback.line}" for fallback in report.slower or ())
    if report.config.max_prompt_length is None:
        say(
            [
                f"Computed for prompts of up to {ASSUMED_PROMPT_TOKENS} tokens; with max_prompt_length, for "
                "prompts of up to that."
            ]
        )
    if is_verbose:
        console.print()
        console.print(_table(report))
    else:
        say(["Every row of the arithmetic: --verbose."])


# ── Verdict ──────────────────────────────────────────────────────────────────────────────────────────────


def _verdict_line(report: PlanReport) -> str:
    plan, what = report.plan, f"{Path(report.model_name).name}, {report.method}"
    if plan.device_memory_bytes is None:
        return (
            f"No GPU here: {what}, takes {_shown(plan.peak_bytes)} on the CPU; how long a step takes there "
            "is not known. To plan for a GPU give --device_name (such as H100) or --device_memory_gib."
        )
    verdict, peak, size = (
        report.verdict.capitalize(),
        _shown(plan.peak_bytes),
        _shown(plan.device_memory_bytes),
    )
    device = _devices(report.cluster)
    if not plan.fits:
        return f"{verdict}: {what}, needs {peak}; {device} has {size}, {_shown(-plan.free_bytes)} too little."
    return f"{verdict}: {what}, takes {peak} of the {size} of {device}; {_free(plan)}."


def _devices(cluster: Cluster) -> str:
    if cluster.num_gpus == 1:
        return "the device" if cluster.gpu is None else f"one {cluster.gpu.name}"
    nodes = f" in {cluster.num_nodes} nodes" if cluster.num_nodes > 1 else ""
    return f"each of {cluster.num_gpus} {'devices' if cluster.gpu is None else cluster.gpu.name}{nodes}"


def _sharding_lines(report: PlanReport) -> Iterator[str]:
    """Lines about the GPUs that split the run, and what the planner has compared; none for one GPU."""
    if report.cluster.num_gpus > 1:
        yield f"Sharding: {_split(report.choice, report.case)}."
        if len(report.choice.considered) + len(report.choice.impossible) > 1:
            yield f"Compared, per GPU: {report.choice.reason}"


def _split(choice: ShardingChoice, case: Case) -> str:
    sharding, parts = choice.sharding, choice.sharding.num_weight_parts
    if not sharding.splits_optimizer:
        return "shard=none, every GPU holds all weights and all of the optimizer"
    weights = (
        "every GPU holds all weights" if parts == 1 else f"every {parts} GPUs share one copy of the weights"
    )
    what = "the adapters' moments" if case.shapes.has_adapters else "masters, moments and gradients"
    if sharding.gathers:
        weights += f" and gather parts for rollouts, in which {sharding.num_decode_parts} decode together"
    return f"shard={parts}, {weights}; {what} are split over all {sharding.num_ranks}"


def _free(plan: MemoryPlan) -> str:
    assert plan.device_memory_bytes is not None, "something is free of a device"
    return f"{_shown(plan.free_bytes)} ({plan.free_bytes / plan.device_memory_bytes:.1%}) stay free"


def _remedy_lines(report: PlanReport) -> Iterator[str]:
    remedies = find_remedies(report.case)
    yield f"Short of memory: {report.plan.shortage}."
    if remedies:
        yield "Set one of these, the smallest change first; the planner has found that each suffices:"
        for remedy in remedies:
            yield f"  {remedy.settings}"
            yield f"    {_result_of(report, remedy)}"
    else:
        yield "Nothing that can be set makes it fit, alone or together. It takes a larger device."
    yield from _larger_devices(report, is_only_way=not remedies)


def _result_of(report: PlanReport, remedy: Remedy) -> str:
    plan, step_s = remedy.plan, remedy.case.sharding_choice(report.cluster).chosen.step_s
    time = "" if step_s is None else f", about {duration(step_s)} a step"
    tight = "" if plan.why_tight is None else f"; tight: {plan.why_tight}"
    return f"{_shown(plan.peak_bytes)}, {_free(plan)}{time}{tight}"


def _larger_devices(report: PlanReport, *, is_only_way: bool) -> Iterator[str]:
    """The memory or GPUs that the run needs unchanged, or the memory with adapters if nothing helps."""
    shapes, ways, added = report.case.shapes, [("Unchanged, it", report.case)], ""
    if is_only_way and not shapes.has_adapters:
        added = "use_peft=True "
        ways.append((f"With {added}it", with_adapters(report.case, in_4bit=False)))
    if is_only_way and shapes.four_bit is None:
        ways.append((f"With {added}load_in_4bit=True it", with_adapters(report.case, in_4bit=True)))
    for what, case in ways:
        size = needed_bytes(case)
        if size is not None:
            larger = [gpu for gpu in GPUS if gpu.memory_gib * 2**30 >= size]
            example = "more than any GPU in the table has"
            if larger:
                one = "one" if report.cluster.num_gpus == 1 else "the"
                example = f"such as {one} {min(larger, key=lambda gpu: gpu.memory_gib).name}"
            devices = "a device" if report.cluster.num_gpus == 1 else f"{report.cluster.num_gpus} devices"
            yield f"{what} needs {devices} of {size / 2**30:.1f} GiB, {example}."
    more = enough_gpus(report.case)
    if more is not None:
        cluster, choice = more
        step_s = choice.chosen.step_s
        time = "" if step_s is None else f", about {duration(step_s)} a step"
        yield (
            f"Unchanged, with as many completions on each GPU, it fits --num_gpus {cluster.num_gpus}: "
            f"{_shown(choice.chosen.plan.peak_bytes)} each{time}; {_split(choice, report.case)}."
        )


# ── Time ─────────────────────────────────────────────────────────────────────────────────────────────────


def _time_lines(report: PlanReport) -> Iterator[str]:
    if report.plan.why_tight is not None:
        yield f"Tight: {report.plan.why_tight}."
    if report.plan.fits is None:
        return
    step, speed, load = report.step_time, report.speed, report.case.workload
    if step is None or speed is None:
        yield "Speed: unknown, as no GPU in the table is named."
        return
    rollout = "rollout on the server, not counted"
    if speed.rollout_tokens_per_s is not None:
        rollout = f"{duration(step.rollout_s)} rollout at {speed.rollout_tokens_per_s:,.0f} tokens/s"
    exchange, each = "", ""
    if report.cluster.num_gpus > 1:
        exchange, each = f", {duration(step.exchange_s)} exchange of gradients and weights", " a GPU"
    yield (
        f"About {duration(step.seconds)} a step: {rollout}{each}, {duration(step.train_s)} training at "
        f"{speed.train_tokens_per_s:,.0f} tokens/s{each}{exchange}, for {load.num_step_sequences:,} "
        f"completions of {load.completion_tokens:,} tokens{each}, the longest allowed."
    )
    if report.config.max_steps > 0:
        steps, total = report.config.max_steps, duration(step.seconds * report.config.max_steps)
        yield f"The run of max_steps={steps:,}: about {total}, without rewards and evaluation."


# ── Arithmetic ───────────────────────────────────────────────────────────────────────────────────────────


def _short_table(plan: MemoryPlan) -> Table:
    """Each phase with its largest rows."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for justify in ("left", "right", "left"):
        table.add_column(justify=justify, no_wrap=justify == "right")  # type: ignore[arg-type]
    for phase in get_args(Phase):
        rows = [row for row in plan.rows if row.phase == phase and row.moment in (None, plan.widest_moment)]
        largest = sorted(rows, key=lambda row: -row.size_bytes)[:_LARGEST_ROWS]
        named = ", ".join(f"{row.name} {_shown(row.size_bytes)}" for row in largest if row.size_bytes)
        table.add_row(phase, _shown(plan.phase_bytes(phase)), named and f"mostly {named}")
    table.add_row("peak", _shown(plan.peak_bytes), "resident + the larger of rollout and train")
    return table


def _decisions(report: PlanReport) -> Iterator[str]:
    """The choices for training and generation under the plan; if it does not fit, only for training."""
    result, config = report.plan, report.config
    plan, sequences = result.train_plan, config.per_device_train_batch_size
    tokens = (
        f"{plan.tokens_per_microbatch:,} tokens" if plan.tokens_per_microbatch else f"{sequences} sequences"
    )
    yield (
        f"Training: micro-batches of {tokens} (a step has up to {result.step_tokens:,}), "
        f"activation_policy={plan.activation_policy}, log-probs of {plan.logprob_chunk_size:,} tokens at a "
        f"time{' with their softmax kept for backward' if plan.keep_softmax else ''}; optimizer "
        f"{_place_of_optimizer(report) if plan.offload_optimizer else 'on the device'}."
    )
    if result.fits is False:
        return
    if result.repeated_prompts is not None:
        yield result.repeated_prompts
    yield _rollout_line(report)


def _place_of_optimizer(report: PlanReport) -> str:
    load, num_gpus = report.choice.chosen.workload, report.cluster.gpus_per_node
    if not load.sharding.is_split:
        return "on the host in rollout"
    size_bytes = total_bytes(optimizer_rows(report.case.shapes, load, "train"))
    return f"on the host but for its step, {num_gpus} × {_shown(size_bytes)} on each node"


def _rollout_line(report: PlanReport) -> str:
    plan, load, parts = report.plan, report.case.workload, report.choice.sharding.num_decode_parts
    if load.engine == "rollout_server":
        return "Rollout: on the devices of the rollout server; it takes nothing of this one."
    engine = ""
    if load.engine == "vllm":
        has = "the trainer's weights" if load.vllm.shares_weights else "a copy of the weights"
        engine = f" by {load.vllm.name} with {has}"
    elif report.config.engine == "transformers":
        engine = " by model.generate, planned as if by the native engine"
    if parts > 1:
        heads = report.case.shapes.num_kv_heads
        engine = f" by {parts} GPUs together, each with {heads // parts} of {heads} key-value heads"
    return (
        f"Rollout{engine}: the KV cache holds {plan.kv_cache_tokens:,} tokens, {plan.kv_cache_sequences:,} "
        "sequences of full length side by side."
    )


def _table(report: PlanReport) -> Table:
    """Every row of every phase; of the moments of training, only the rows of the largest one."""
    result = report.plan
    table = Table(title=f"Memory of one device: {report.model_name}", title_justify="left")
    for column in ("phase", "what", "memory", "how"):
        table.add_column(column, justify="right" if column == "memory" else "left", no_wrap=column != "how")
    for phase in get_args(Phase):
        for row in (row for row in result.rows if row.phase == phase):
            if row.size_bytes and row.moment in (None, result.widest_moment):
                table.add_row(phase, row.name, _shown(row.size_bytes), row.how)
        if phase == "train":
            others = [m for m in get_args(Moment) if m != result.widest_moment and result.moment_bytes(m)]
            sizes = ", ".join(f"{m} {_shown(result.moment_bytes(m))}" for m in others)
            table.add_row(phase, f"(peak in: {result.widest_moment})", "", f"the largest; rest: {sizes}")
        table.add_row(phase, "total", _shown(result.phase_bytes(phase)), "", style="bold", end_section=True)
    return table


def _shown(size_bytes: int) -> str:
    if not size_bytes:
        return "0"
    if size_bytes >= 2**28:
        return f"{size_bytes / 2**30:.2f} GiB"
    return f"{size_bytes / 2**20:.2f} MiB"
