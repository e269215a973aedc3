"""One training run of the quickstart's task with some options changed, and its curves as a record.

    python -m benchmarks.curves.run --steps 120 --start DIRECTORY --out record.json --label mode=native
        --option engine=native seed=1

`--start` is what examples/quickstart/warm_start.py has written; `--label` goes into the record.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.common.results import ROOT, Record, origin
from benchmarks.step.run import assignment
from colocate.cli import main as colocate

MODES = ("native", "colocate", "server")
VLLM_MEMORY = 0.2
"""Share of the GPU for vLLM: ample for a model of 0.2 million parameters."""
GAP = "sampling/sampling_logp_difference"


def warm_start(directory: Path) -> Path:
    """The directory with the model and the data that every run starts from, made if they are not there."""
    if not (directory / "data" / "test.jsonl").exists():  # written last
        script = ROOT / "examples/quickstart/warm_start.py"
        subprocess.run([sys.executable, script, "--output_dir", directory], check=True)
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


def train(start: Path, num_steps: int, changed: dict[str, str]) -> Record:
    """The curves of a run.

    Raises:
        RuntimeError: it fails.
    """
    with tempfile.TemporaryDirectory() as directory:
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
        return curves(Path(directory) / "metrics.jsonl")


def curves(metrics: Path) -> dict[str, list[float]]:
    """Lists over rollouts: the step that each came before, its reward, and |log π_trainer − log π_engine|."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    # A rollout's own step is the one at which trainer and engine have the same weights.
    rollouts = [line for line in lines if "reward" in line and not line.get("eval")]
    names = {"step": "step", "reward": "reward", "gap_mean": f"{GAP}/mean", "gap_max": f"{GAP}/max"}
    return {name: [line[metric] for line in rollouts] for name, metric in names.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, required=True, help="optimizer steps, four to a rollout")
    parser.add_argument("--start", type=Path, required=True)
    parser.add_argument("--label", type=assignment, nargs="+", default=[], metavar="NAME=VALUE")
    parser.add_argument("--option", nargs="+", default=[], metavar="NAME=VALUE")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    record: Record = {"kind": "curve", **dict(options.label), "num_steps": options.steps, **origin()}
    record["options"] = dict(map(assignment, options.option))
    start_s = time.perf_counter()
    record |= train(options.start, options.steps, dict(one.split("=", 1) for one in options.option))
    record["total_s"] = time.perf_counter() - start_s
    options.out.write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
