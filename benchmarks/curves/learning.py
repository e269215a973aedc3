"""The quickstart's task with every filter, every loss at its defaults and every optimizer that is installed:
writes `results/learning-<hardware>.json`.

    python -m benchmarks.curves.learning --hardware h200 [--jobs 8] [--variants top_p vespo lion_32bit]

Every run is a process that starts from one warm start and takes `--steps` optimizer steps; the claim
`rise_<variant>` is the mean reward of its last rollouts less that of its first. What differs from the
quickstart's recipe is one option and, where steps are of another size, the learning rate: an optimizer whose
step has the gradient's sign or size needs another one than Adam.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.results import origin, write_suite_result
from benchmarks.common.runner import ROOT
from benchmarks.curves.run import curves
from colocate.cli import main as colocate

NUM_COMPARED = 4
"""Rollouts at the beginning and at the end of a run whose mean rewards are compared."""
RUN_S = 240.0
"""A run that takes longer has failed."""

FILTERS: dict[str, dict[str, Any]] = {
    "unfiltered": {},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.1},
    "repetition_penalty": {"repetition_penalty": 1.1},
    "top_k_top_p_temperature": {"top_k": 20, "top_p": 0.95, "temperature": 0.6},
}
LOSSES: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("dapo", "grpo", "bnpo", "dr_grpo", "luspo", "vespo")},
    # Neither clips at its defaults: the steps of the recipe, four to a rollout, are too large for them.
    "cispo": {"learning_rate": 1e-4},
    "sapo": {"learning_rate": 2e-4},
}
LEARNING_RATES = {
    "sgd": 0.3,
    "lion": 1e-4,
    "adagrad": 2e-3,
    "rmsprop": 3e-5,
    "ademamix": 3e-4,
    "adafactor": 2e-4,
}
"""By how an optimizer's name begins, after `paged_`; others take the recipe's."""
LOW_RANK = {"optim_target_modules": "all-linear"}


def optimizers() -> dict[str, dict[str, Any]]:
    from colocate.policy.optimizer_names import LOW_RANK as LOW_RANK_NAMES
    from colocate.policy.optimizer_names import OPTIMIZERS

    variants = {}
    for name in OPTIMIZERS:
        options: dict[str, Any] = {"optim": name}
        for beginning, learning_rate in LEARNING_RATES.items():
            if name.removeprefix("paged_").startswith(beginning):
                options["learning_rate"] = learning_rate
        variants[name] = options | (LOW_RANK if name in LOW_RANK_NAMES else {})
    return variants


def variants() -> dict[str, dict[str, Any]]:
    """The options of each run beside the recipe's."""
    return FILTERS | {name: {"loss_type": name, **other} for name, other in LOSSES.items()} | optimizers()


def train(options: argparse.Namespace) -> dict[str, Any]:
    """Raises RuntimeError if the run fails."""
    changed = variants()[options.variant]
    with tempfile.TemporaryDirectory() as directory:
        words = [
            "train", str(ROOT / "recipes/quickstart.yaml"),
            "--model_name_or_path", str(options.start / "model"),
            "--dataset_name", str(options.start / "data"),
            "--reward_funcs", f"{ROOT / 'examples/quickstart/addition.py'}:correct",
            "--output_dir", directory, "--max_steps", str(options.steps), "--logging_steps", "50",
            "--eval_on_start", "false", "--eval_strategy", "no",
            "--use_cpu", "false" if torch.cuda.is_available() else "true",
        ]  # fmt: skip
        for name, value in changed.items():
            words += [f"--{name}", str(value)]
        if code := colocate(words):
            raise RuntimeError(f"colocate {' '.join(words)} ended with {code}.")
        return {"options": changed, **curves(Path(directory) / "metrics.jsonl")}


def rise(record: dict[str, Any]) -> float:
    rewards = record["reward"]
    return statistics.fmean(rewards[-NUM_COMPARED:]) - statistics.fmean(rewards[:NUM_COMPARED])


def measure(options: argparse.Namespace, directory: Path) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The records of the runs that came to their end, and the last lines of the others."""
    environment = os.environ | {"COLOCATE_COMMIT": origin()["commit"], "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "benchmarks.curves.learning", "--steps", str(options.steps)]
    command += ["--start", str(directory / "start")]
    warm_start = ROOT / "examples/quickstart/warm_start.py"
    subprocess.run([sys.executable, warm_start, "--output_dir", directory / "start"], check=True)

    def run(variant: str) -> tuple[dict[str, Any] | None, str]:
        out = directory / f"{variant}.json"
        words = [*command, "--variant", variant, "--out", str(out)]
        try:
            done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=RUN_S)
        except subprocess.TimeoutExpired:
            return None, f"took longer than {RUN_S:.0f} s"
        if done.returncode:
            return None, done.stderr[-600:]
        record = json.loads(out.read_text())
        print(f"{variant:24} {rise(record):+.3f}", flush=True)
        return record, ""

    names = options.variants or list(variants())
    first, *others = names  # alone, so that it compiles the kernels for all
    results = [run(first)]
    with ThreadPoolExecutor(options.jobs) as pool:
        results += pool.map(run, others)
    failed = {name: text for name, (record, text) in zip(names, results, strict=True) if record is None}
    return [record for record, _ in results if record is not None], failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hardware", default="h200")
    parser.add_argument("--jobs", type=int, default=8, help="runs side by side")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps, four to a rollout")
    parser.add_argument("--variants", nargs="+")
    parser.add_argument("--variant", help="one run, in this process")
    parser.add_argument("--start", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.variant:
        record = {"variant": options.variant, "num_steps": options.steps, **origin(), **train(options)}
        options.out.write_text(json.dumps(record) + "\n")
        return
    with tempfile.TemporaryDirectory() as directory:
        records, failed = measure(options, Path(directory))
    claims: dict[str, float | None] = {f"rise_{record['variant']}": rise(record) for record in records}
    for name, text in failed.items():
        print(f"{name:24} FAILED: {text}")
    write_suite_result(
        "learning",
        options.hardware,
        claims,
        records,
        num_compared_rollouts=NUM_COMPARED,
        failed=sorted(failed),
    )


if __name__ == "__main__":
    main()
