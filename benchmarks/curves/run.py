"""One training run of a task with some options changed, and its curves as a record.

    python -m benchmarks.curves.run --steps 120 --start DIRECTORY --out record.json --label mode=native
        --option engine=native seed=1 [--task calculator]

The task is the quickstart's or that of `tool_task.py`, and `--start` what its warm start has written;
`--label` goes into the record.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.results import ROOT, Record, origin
from benchmarks.curves import tool_task
from benchmarks.step.run import assignment
from colocate.cli import main as colocate

MODES = ("native", "colocate", "server")
VLLM_MEMORY = 0.2
"""Share of the GPU for vLLM: ample for a model of 0.2 million parameters."""
GAP = "sampling/sampling_logp_difference"
CURVES = {"step": "step", "reward": "reward", "gap_mean": f"{GAP}/mean", "gap_max": f"{GAP}/max"}
"""The metrics of which a record may have lists."""


def warm_start(directory: Path) -> Path:
    """The directory with the model and the data that every run starts from, made if they are not there."""
    if not (directory / "data" / "test.jsonl").exists():  # written last
        script = ROOT / "examples/quickstart/warm_start.py"
        # One thread: a matrix product of a model this small is shorter than waking a second one.
        one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, script, "--output_dir", directory], check=True, env=one_thread)
    return directory


def engine_options(mode: str, server_url: str | None) -> dict[str, str]:
    """The options in which the modes differ."""
    if mode == "native":
        return {"engine": "native"}
    if mode == "server":
        return {"engine": "vllm_server", "vllm_server_base_url": str(server_url)}
    options = {"engine": "vllm", "vllm_gpu_memory_utilization": str(VLLM_MEMORY)}
    # On a CPU vLLM would compile C++ for minutes.
    return (
        options if torch.cuda.is_available() else options | {"vllm_engine_kwargs": '{"enforce_eager": true}'}
    )


def train(start: Path, directory: Path, num_steps: int, changed: dict[str, str]) -> None:
    """Train on the quickstart's task and leave the metrics in a directory.

    Raises:
        RuntimeError: the run fails.
    """
    options = {
        "model_name_or_path": start / "model",
        "dataset_name": start / "data",
        "reward_funcs": f"{ROOT / 'examples/quickstart/addition.py'}:correct",
        "output_dir": directory,
        "max_steps": num_steps,
        "eval_on_start": "false",
        "eval_strategy": "no",
        "logging_steps": 50,
        "use_cpu": "false" if torch.cuda.is_available() else "true",
        **changed,
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    if code := colocate(["train", str(ROOT / "recipes/quickstart.yaml"), *words]):
        raise RuntimeError(f"colocate train {' '.join(words)} ended with {code}.")


TASKS = {"quickstart": train, "calculator": tool_task.train}


def rollouts(metrics: Path) -> list[dict[str, Any]]:
    """The lines of the rollouts; a rollout's own step is the one at which trainer and engine have the same
    weights."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [line for line in lines if "reward" in line and not line.get("eval")]


def curves(metrics: Path, names: Sequence[str] = tuple(CURVES)) -> dict[str, list[float]]:
    """Lists over rollouts: the step that each came before, its reward, and |log π_trainer − log π_engine|."""
    lines = rollouts(metrics)
    return {name: [line[CURVES[name]] for line in lines] for name in names}


def means(metrics: Path) -> dict[str, float]:
    """The means over rollouts of the log-probs' difference, and of all there is of lag and of refilling."""
    lines = rollouts(metrics)
    names = [name for name in lines[0] if name.startswith((f"{GAP}/mean", "policy_lag/", "refill/"))]
    return {name: statistics.fmean(line[name] for line in lines) for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", choices=TASKS, default="quickstart")
    parser.add_argument("--steps", type=int, required=True, help="optimizer steps")
    parser.add_argument("--start", type=Path, required=True)
    parser.add_argument("--label", type=assignment, nargs="+", default=[], metavar="NAME=VALUE")
    parser.add_argument("--option", nargs="+", default=[], metavar="NAME=VALUE")
    parser.add_argument("--curves", nargs="+", choices=CURVES, default=list(CURVES))
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    record: Record = {"kind": "curve", **dict(options.label), "num_steps": options.steps, **origin()}
    record["options"] = dict(map(assignment, options.option))
    start_s = time.perf_counter()
    changed = dict(one.split("=", 1) for one in options.option)
    with tempfile.TemporaryDirectory() as directory:
        TASKS[options.task](options.start, Path(directory), options.steps, changed)
        metrics = Path(directory) / "metrics.jsonl"
        record |= curves(metrics, options.curves) | {"means": means(metrics)}
        record["num_tokens"] = rollouts(metrics)[-1]["num_tokens"]
    record["total_s"] = time.perf_counter() - start_s
    options.out.write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
