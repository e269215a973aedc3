"""One run of a recipe by this library or by TRL, and its curves as a record.

    python -m benchmarks.recipes.run --recipe addition --framework colocate --algorithm grpo --seed 0
        --start DIRECTORY --out record.json [--option max_steps=2]

`--start` is what the recipe's warm start has written. This library is called as a user calls it, `colocate
train` with the run file; TRL gets the same options, data, reward function and weights from that file. Each
evaluates by itself, on the same held-out rows.

Seconds are of training, without start and evaluations: the wall clock's, and the processor's of all threads.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.results import ROOT, Record, origin
from benchmarks.recipes.cases import ALGORITHMS, FRAMEWORKS, IMITATION, run_file
from benchmarks.recipes.clock import CoreClock
from benchmarks.step.run import assignment
from colocate.cli import main as colocate
from colocate.inference.statistics import wilson
from colocate.options.run_file import read_file

Event = dict[str, Any]
"""A line of a run's log: `time`, `step`, and `reward` or `eval_reward`, with what was logged beside it."""

OURS = {
    "max_num_seqs": "rows of the engine",
    "apply_chat_template": "done to the rows before TRL gets them",
}
"""Options of the run files that TRL does not have, and why its run is the same without them."""
VLLM_MEMORY = 0.3
"""Share of the GPU for TRL's vLLM, more than it uses with these models."""


def options_of(recipe: str, algorithm: str, seed: int, start: Path, directory: Path) -> dict[str, Any]:
    """The run file's options and the algorithm's, with other places for the run and for what it reads."""
    options = read_file(run_file(recipe))
    own = options["output_dir"]
    for name in ("model_name_or_path", "dataset_name"):
        options[name] = str(options[name]).replace(f"{own}/", f"{start}/", 1)
    return {**options, **ALGORITHMS[algorithm], "seed": seed, "output_dir": str(directory)}


# ── The contestants ──────────────────────────────────────────────────────────────────────────────────────


def run_colocate(recipe: str, options: dict[str, Any]) -> list[Event]:
    """Train by the run file, and return what metrics.jsonl has.

    Raises:
        RuntimeError: the run fails.
    """
    from_file = read_file(run_file(recipe))
    changed = {name: value for name, value in options.items() if from_file.get(name) != value}
    words = [word for name, value in changed.items() for word in (f"--{name}", _as_word(value))]
    if code := colocate(["train", str(run_file(recipe)), *words]):
        raise RuntimeError(f"colocate train {run_file(recipe)} {' '.join(words)} ended with {code}.")
    lines = (Path(options["output_dir"]) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def _as_word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def run_trl(recipe: str, options: dict[str, Any], *, has_vllm: bool = False) -> list[Event]:
    """Train with TRL's trainer, and return what it has logged."""
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOTrainer

    from colocate.config.grpo_config import GRPOConfig
    from colocate.config.run_config import parse_run
    from colocate.rewards import get_reward_function
    from colocate.run.data import RunData

    run, given = parse_run(options)
    train_rows, eval_rows = RunData(run, GRPOConfig(**given)).load()
    events: list[Event] = []

    class Log(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            events.append({**logs, "step": state.global_step, "time": time.time()})

    trainer = GRPOTrainer(
        model=str(run.model_name_or_path),
        reward_funcs=[get_reward_function(name) for name in run.reward_funcs],
        args=trl_config(given, has_vllm=has_vllm),
        train_dataset=train_rows,
        eval_dataset=eval_rows,
        processing_class=AutoTokenizer.from_pretrained(run.model_name_or_path),
        callbacks=[Log()],
    )
    trainer.train()
    return events


def trl_config(given: dict[str, Any], *, has_vllm: bool) -> Any:
    """TRL's configuration with the options of a run file, as fast as it goes.

    Raises:
        ValueError: TRL does not have an option, and not because it is one of `OURS`.
    """
    from dataclasses import fields

    from trl import GRPOConfig

    on_gpu = torch.cuda.is_available()
    shared = {name: value for name, value in given.items() if name not in OURS}
    known = {field.name for field in fields(GRPOConfig)}
    if unknown := sorted(set(shared) - known):
        raise ValueError(f"TRL has no option {', '.join(unknown)}, so its run would be another one.")
    vllm = dict(
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=VLLM_MEMORY,
        vllm_max_model_length=256,
    )
    fast = dict(bf16=on_gpu, use_cpu=not on_gpu, gradient_checkpointing=False, disable_tqdm=True)
    return GRPOConfig(**{**fast, **(vllm if has_vllm else {}), **shared, "report_to": "none"})


CONTESTANTS: dict[str, Callable[[str, dict[str, Any]], list[Event]]] = {
    "colocate": run_colocate,
    "trl": run_trl,
    "trl_vllm": partial(run_trl, has_vllm=True),
}
assert tuple(CONTESTANTS) == FRAMEWORKS


# ── The record ───────────────────────────────────────────────────────────────────────────────────────────


def curves(events: list[Event], clock: Callable[[float], float], num_evaluated: int) -> dict[str, Any]:
    """Rewards of rollouts and held-out accuracy, each with its step and the seconds trained until then.

    Args:
        events: in their order; the first evaluation is before the first step, and training begins at its end.
        clock: seconds at a `time.time()`.
        num_evaluated: rows of each evaluation, with one completion of each that is right or wrong.

    Raises:
        ValueError: the run was not evaluated before its first step.
    """
    evaluations = [event for event in events if "eval_reward" in event]
    if not evaluations or evaluations[0]["step"] != 0:
        raise ValueError("A recipe's run is evaluated before its first step: set eval_on_start.")
    start = evaluations[0]["time"]

    def trained_s(moment: float) -> float:
        later = [e for e in evaluations[1:] if e["time"] <= moment]
        evaluated_s = sum(clock(e["time"]) - clock(e["time"] - e["eval_runtime"]) for e in later)
        return clock(moment) - clock(start) - evaluated_s

    rollouts = [event for event in events if "reward" in event]
    accuracy = [asdict(wilson(event["eval_reward"], num_evaluated)) for event in evaluations]
    return {
        "rollouts": {
            "step": [event["step"] for event in rollouts],
            "reward": [event["reward"] for event in rollouts],
            "train_s": [trained_s(event["time"]) for event in rollouts],
        },
        "evaluations": {
            "step": [event["step"] for event in evaluations],
            "train_s": [trained_s(event["time"]) for event in evaluations],
            **{bound: [one[bound] for one in accuracy] for bound in ("value", "low", "high")},
        },
        "train_s": trained_s(events_of_steps(events)[-1]["time"]),
    }


def events_of_steps(events: list[Event]) -> list[Event]:
    """Those of optimizer steps, not of evaluations nor of the run's end."""
    return [event for event in events if "num_tokens" in event and "eval_reward" not in event]


def measure(
    framework: str, recipe: str, algorithm: str, seed: int, start: Path, changed: dict[str, Any]
) -> Record:
    """Train once, in a temporary directory and from the repository's root, as the run file's paths need."""
    os.chdir(ROOT)
    start_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory, CoreClock() as cores:
        options = options_of(recipe, algorithm, seed, start, Path(directory)) | changed
        num_evaluated = int(options["max_eval_rows"])
        events = CONTESTANTS[framework](recipe, options)
    wall, core = (curves(events, clock, num_evaluated) for clock in (float, cores.at))
    for part in ("rollouts", "evaluations"):
        wall[part]["core_s"] = core[part]["train_s"]
    train_s, num_tokens = wall["train_s"], events_of_steps(events)[-1]["num_tokens"]
    return {
        **{"kind": "recipe", "framework": framework, "recipe": recipe, "algorithm": algorithm, "seed": seed},
        "options": {name: value for name, value in options.items() if not _is_place(name)},
        "num_parameters": _num_parameters(start / "model/model.safetensors"),
        "imitation": json.loads((start / IMITATION).read_text()),
        "num_evaluated": num_evaluated,
        **wall,
        "num_tokens": num_tokens,
        "tokens_per_s": num_tokens / train_s,
        "core_s": core["train_s"],
        "total_s": time.perf_counter() - start_s,
    }


def _is_place(name: str) -> bool:
    return name in ("model_name_or_path", "dataset_name", "output_dir")


def _num_parameters(weights: Path) -> int:
    from safetensors import safe_open

    with safe_open(weights, "pt") as file:
        return sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", required=True)
    parser.add_argument("--framework", choices=FRAMEWORKS, required=True)
    parser.add_argument("--algorithm", choices=ALGORITHMS, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--start", type=Path, required=True)
    parser.add_argument("--option", type=assignment, nargs="+", default=[], metavar="NAME=VALUE")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    where = origin()
    start, out = options.start.resolve(), options.out.resolve()
    record = measure(
        options.framework, options.recipe, options.algorithm, options.seed, start, dict(options.option)
    )
    out.write_text(json.dumps(record | where) + "\n")


if __name__ == "__main__":
    main()
