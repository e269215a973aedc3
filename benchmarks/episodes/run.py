"""GRPO steps with episodes by this library or by TRL: seconds, tokens and phases of every step.

    python -m benchmarks.episodes.run --framework colocate --tool-s 0 0.05 --steps 6 --out record.json
    python -m benchmarks.episodes.run --framework trl --tool-s 0 0.05 --steps 6 --micro-batch 8 --liger
        --no-gradient-checkpointing --out ...
    python -m benchmarks.episodes.run --framework colocate --single-turn --max-policy-lag 1 --out ...
    python -m benchmarks.episodes.run --framework colocate --single-turn --dull-share 0.5 --refill-rounds 8
        --out ...

Either library's own `GRPOTrainer` with `environment_factory`, on the same model of random weights: 64 prompts
x 8 episodes of 4 turns, of log-normal lengths that are the same for both, and between two turns an async
tool that sleeps and answers. A model of random weights calls no tool and does not stop, so each turn's
length is fixed, and its last tokens are put there (`forced.py`). With several `--tool-s` steps take turns.

A step is what lies between the ends of two steps, the device synchronised at both. The rollout is TRL's
`_generate`, in which it wakes vLLM, lets it have the weights, samples, and runs the tools; and our phase of
that name.

`--single-turn`, ours only: completions of log-normal lengths (median 300, at most 2,048 tokens), with
`--max-policy-lag`, or where a share of the groups has but one reward.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from benchmarks.common.device_watch import DeviceWatch
from benchmarks.common.results import origin
from benchmarks.episodes.cases import CASE, TINY_TURNS, Turns
from benchmarks.episodes.chat import CALL, make_chat_tokenizer, make_environment, rows
from benchmarks.episodes.forced import (
    ForcedTurns,
    force_engine,
    force_lengths,
    force_transformers,
    force_vllm,
)
from benchmarks.rollout.cases import TOKEN_RANGE, Case, model_directory
from benchmarks.step.cases import Work
from benchmarks.step.run import (
    StepClock,
    Stopwatch,
    assignment,
    from_metrics,
    load_tokenizer,
    prompts,
    reward,
    settings,
    trl_config,
)

Save = Callable[[dict[str, Any]], None]
"""Writes the record with what has been measured so far, in case that the run is cut short."""

TOKENS = ("num_prompt", "num_sampled", "num_given")
"""What the libraries must agree in: tokens of prompts, for each episode, of turns and between turns."""


@dataclasses.dataclass
class Scene:
    """What a run's episodes are played with."""

    work: Work
    turns: Turns
    tokenizer: PreTrainedTokenizerBase
    dataset: Dataset
    environment: type | None
    """None: completions have a single turn."""

    @property
    def forced(self) -> ForcedTurns:
        lengths = self.turns.lengths(self.work.num_completions)
        call_id, stop_id = self.tokenizer.convert_tokens_to_ids([CALL, "<eos>"])
        return ForcedTurns(lengths, call_id, stop_id, TOKEN_RANGE[self.work.model][0])


def make_scene(options: argparse.Namespace) -> Scene:
    """The work that the options ask for."""
    turns = TINY_TURNS if options.tiny else Turns()
    new_tokens = case_of(options).completion_tokens if options.single_turn else turns.max_tokens
    shape = "tiny" if options.tiny else options.shape
    work = Work(shape, options.prompts, options.generations, options.prompt_tokens, new_tokens)
    num_steps = options.warm_up + options.steps
    if options.single_turn:
        tokenizer = load_tokenizer(model_directory(options.model_dir, shape), work)
        # A rollout that is filled up, or that others are carried over from, takes more prompts.
        dataset = prompts(work, work.num_prompts * num_steps * 3)
        return Scene(work, turns, tokenizer, with_dull(dataset, options.dull_share), None)
    environment, chat = make_environment(shape, turns), make_chat_tokenizer(shape)
    return Scene(work, turns, chat, rows(work, chat, environment, work.num_prompts * num_steps), environment)


def case_of(options: argparse.Namespace) -> Case:
    """The lengths of completions of a single turn."""
    shape, most = ("tiny", 32) if options.tiny else (options.shape, CASE.completion_tokens)
    return dataclasses.replace(
        CASE,
        model=shape,
        num_prompts=options.prompts,
        num_generations=options.generations,
        completion_tokens=most,
    )


def with_dull(dataset: Dataset, share: float) -> Dataset:
    """Rows with a column `is_dull`, which is True for each with the probability `share`."""
    draw = random.Random(0).random
    return dataset.add_column("is_dull", [draw() < share for _ in range(len(dataset))])


def dull_reward(completions: list[str], is_dull: list[bool], **_: Any) -> list[float]:
    """Differs within every group, but for those that are dull."""
    return [0.0 if dull else float(number) for number, dull in enumerate(is_dull)]


def make_trainer(trainer_class: Any, args: Any, options: argparse.Namespace, scene: Scene) -> Any:
    """Either library's trainer of the scene, with a `clock` that notes when its steps end."""
    clock = StepClock()
    named = {} if scene.environment is None else {"environment_factory": scene.environment}
    trainer = trainer_class(
        str(model_directory(options.model_dir, scene.work.model)),
        dull_reward if scene.environment is None else reward,
        args,
        scene.dataset,
        processing_class=scene.tokenizer,
        callbacks=[clock],
        **named,
    )
    trainer.clock = clock
    return trainer


class Tally:
    """What each step has counted."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.steps: list[dict[str, int]] = []
        self._names = names
        self._counts = dict.fromkeys(names, 0)

    def add(self, name: str, count: int) -> None:
        self._counts[name] += count

    def end_step(self) -> None:
        self.steps.append(self._counts)
        self._counts = dict.fromkeys(self._names, 0)


def tool_seconds(options: argparse.Namespace) -> list[float]:
    """What the tool takes in each step: the times take turns, and the steps that warm up have the first."""
    times = options.tool_s
    return [times[0]] * options.warm_up + [times[i % len(times)] for i in range(options.steps)]


def change_tools(scene: Scene, options: argparse.Namespace, num_done: int) -> None:
    """Let the tool take the time of the step that follows `num_done` others."""
    times = tool_seconds(options)
    if scene.environment is not None and num_done < len(times):
        scene.environment.tool_s = times[num_done]  # type: ignore[attr-defined]


def run_colocate(options: argparse.Namespace, scene: Scene, directory: str, _: Save) -> dict[str, Any]:
    from colocate import GRPOConfig, GRPOTrainer

    own: dict[str, Any] = {}
    if options.max_policy_lag:
        own["max_policy_lag"] = options.max_policy_lag
    if options.dull_share:
        own |= {"max_refill_rounds": options.refill_rounds, "shuffle_dataset": False}
    args = GRPOConfig(**(settings(options, scene.work, directory) | own))
    trainer, tally = make_trainer(GRPOTrainer, args, options, scene), Tally((*TOKENS, "num_trained"))
    player = trainer.run.player
    player.sampling = dataclasses.replace(player.sampling, stop_token_ids=())
    if scene.environment is None:
        force_lengths(trainer.engine, case_of(options))
    else:
        force_engine(trainer.engine, scene.forced)
    play, update = player.play, trainer.run.policy.update

    def counted_play(*arguments: Any, **named: Any) -> Any:
        episodes = play(*arguments, **named)
        for episode in episodes:
            first, *others = episode.nodes
            tally.add("num_prompt", len(first.given_ids))
            tally.add("num_sampled", sum(len(node.sampled_ids) for node in episode.nodes))
            tally.add("num_given", sum(len(node.given_ids) for node in others))
        return episodes

    def counted_update(samples: Any, *arguments: Any, **options: Any) -> Any:
        tally.add("num_trained", sum(int(sample.completion_mask.sum()) for sample in samples))
        return update(samples, *arguments, **options)

    player.play, trainer.run.policy.update = counted_play, counted_update

    def after_step() -> None:
        tally.end_step()
        change_tools(scene, options, len(tally.steps))

    trainer.clock.after_step = after_step
    change_tools(scene, options, 0)
    trainer.train()
    lines = (Path(directory) / "metrics.jsonl").read_text().splitlines()
    steps = [
        {"step_s": step_s, "rollout_s": record["phases"]["rollout"], **counts, **from_metrics(record)}
        for step_s, counts, record in zip(
            trainer.clock.step_s(), tally.steps, map(json.loads, lines), strict=True
        )
    ]
    return {"steps": steps, "engine": type(trainer.engine).__name__}


def run_trl(options: argparse.Namespace, scene: Scene, directory: str, save: Save) -> dict[str, Any]:
    from trl import GRPOTrainer

    turns, on_gpu = scene.turns, torch.cuda.is_available()
    has_vllm = on_gpu if options.vllm is None else options.vllm
    most = turns.most_tokens
    own: dict[str, Any] = {"generation_kwargs": {"min_new_tokens": most, "max_new_tokens": most}}
    if has_vllm:
        own = {
            "generation_kwargs": {"ignore_eos": True},
            "vllm_enable_sleep_mode": on_gpu and options.vllm_sleep,
        }
        if options.vllm_memory is not None:
            own["vllm_gpu_memory_utilization"] = options.vllm_memory
    args = trl_config(options, scene.work, directory, has_vllm=has_vllm, **own)
    trainer, tally, stopwatch = make_trainer(GRPOTrainer, args, options, scene), Tally(TOKENS), Stopwatch()
    if has_vllm:
        force_vllm(trainer.vllm_generation.llm, scene.forced)
        stopwatch.watch(trainer.vllm_generation, "sync_weights")
        stopwatch.watch(trainer.vllm_generation, "generate")
    else:
        force_transformers(trainer, scene.forced)
    generate = trainer._generate

    def counted_generate(*arguments: Any) -> Any:
        prompt_ids, completion_ids, tool_mask, *more = generate(*arguments)
        num_sampled = sum(map(sum, tool_mask))
        tally.add("num_prompt", sum(map(len, prompt_ids)))
        tally.add("num_sampled", num_sampled)
        tally.add("num_given", sum(map(len, completion_ids)) - num_sampled)
        return prompt_ids, completion_ids, tool_mask, *more

    trainer._generate = counted_generate
    stopwatch.watch(trainer, "_generate")
    stopwatch.watch(trainer, "_generate_and_score_completions")
    steps: list[dict[str, Any]] = []
    found = {
        "steps": steps,
        "liger": args.use_liger_kernel,
        "vllm_memory": args.vllm_gpu_memory_utilization if has_vllm else None,
        "vllm_sleep": args.vllm_enable_sleep_mode if has_vllm else None,
    }

    def after_step() -> None:
        tally.end_step()
        phases, step_s = stopwatch.take()["engine_s"], trainer.clock.step_s()[-1]
        rollout_s = sum(s for name, s in phases.items() if name != "_generate_and_score_completions")
        phases["train"] = step_s - sum(phases.values())
        steps.append({"step_s": step_s, "rollout_s": rollout_s, **tally.steps[-1], "phases_s": phases})
        save(found)
        change_tools(scene, options, len(steps))

    trainer.clock.after_step = after_step
    change_tools(scene, options, 0)
    trainer.train()
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--framework", choices=("colocate", "trl"), required=True)
    parser.add_argument("--shape", default=CASE.model)
    parser.add_argument("--prompts", type=int)
    parser.add_argument("--generations", type=int)
    parser.add_argument("--prompt-tokens", type=int, default=CASE.prompt_tokens)
    parser.add_argument("--tool-s", type=float, nargs="+", default=[0.0], help="seconds, in turns by step")
    parser.add_argument("--single-turn", action="store_true", help="ragged completions, no tool; ours only")
    parser.add_argument("--max-policy-lag", type=int, default=0, help="ours")
    parser.add_argument("--dull-share", type=float, default=0.0, help="groups with but one reward")
    parser.add_argument("--refill-rounds", type=int, default=8, help="ours, with --dull-share")
    parser.add_argument("--tiny", action="store_true", help="the work made tiny, to try the script")
    parser.add_argument("--model-dir", type=Path, default=Path(tempfile.gettempdir()) / "colocate-models")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--micro-batch", type=int, help="completions; default: 16, TRL's 8")
    parser.add_argument("--gradient-checkpointing", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--liger", action=argparse.BooleanOptionalAction, default=False, help="TRL's")
    parser.add_argument("--vllm", action=argparse.BooleanOptionalAction, help="TRL's; default: on a GPU")
    parser.add_argument("--vllm-sleep", action=argparse.BooleanOptionalAction, default=True, help="TRL's")
    parser.add_argument("--vllm-memory", type=float, help="TRL's share of the GPU for vLLM")
    parser.add_argument("--warm-up", type=int, default=1, help="steps before those that count")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--option", type=assignment, action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--label", default="", help="tells records of one case apart")
    options = parser.parse_args()
    options.option = dict(options.option)
    if options.framework == "trl" and options.single_turn:
        parser.error("--single-turn is for --framework colocate only")
    options.prompts = options.prompts or (2 if options.tiny else CASE.num_prompts)
    options.generations = options.generations or (4 if options.tiny else CASE.num_generations)
    num_completions = options.prompts * options.generations
    options.micro_batch = options.micro_batch or (16 if options.framework == "colocate" else 8)
    options.micro_batch = min(options.micro_batch, num_completions)
    if num_completions % options.micro_batch:
        parser.error(f"--micro-batch {options.micro_batch} does not divide {num_completions} episodes")
    return options


def main() -> None:
    options = parse()
    scene = make_scene(options)
    model_directory(options.model_dir, scene.work.model)  # not within the measurement
    record: dict[str, Any] = {
        "kind": "episodes",
        "framework": options.framework,
        "label": options.label,
        **origin(),
        "work": dataclasses.asdict(scene.work),
        "turns": None if options.single_turn else dataclasses.asdict(scene.turns),
        "num_warm_up": options.warm_up,
        "max_policy_lag": options.max_policy_lag,
        "dull_share": options.dull_share,
        "refill_rounds": options.refill_rounds if options.dull_share else 0,
        "micro_batch": options.micro_batch,
        "gradient_checkpointing": options.gradient_checkpointing,
        "options": options.option,
    }
    watch = DeviceWatch() if torch.cuda.is_available() else None
    start_s = time.perf_counter()
    run: Callable[..., dict[str, Any]] = run_colocate if options.framework == "colocate" else run_trl

    def save(found: dict[str, Any]) -> None:
        for tool_s, step in zip(tool_seconds(options), found["steps"], strict=False):
            step["tool_s"] = None if options.single_turn else tool_s
        total_s = time.perf_counter() - start_s
        options.out.write_text(json.dumps(record | found | {"total_s": total_s}, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as directory:
        found = run(options, scene, directory, save)
    if watch is not None:
        found["driver_peak_bytes"] = watch.peak_bytes()
        watch.close()
    save(found)
    for step in found["steps"]:
        phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in step["phases_s"].items())
        counts = ", ".join(f"{name} {step[name]}" for name in TOKENS)
        print(f"{step['step_s']:.2f} s, rollout {step['rollout_s']:.2f} s ({phases}), {counts}", flush=True)


if __name__ == "__main__":
    main()
