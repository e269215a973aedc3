"""One training run of the quickstart's task in one mode of rollout, and its curves as a record.

    python -m benchmarks.curves.run --mode colocate --seed 0 --steps 120 --start DIRECTORY --out record.json

`--start` is what examples/quickstart/warm_start.py has written. `suite.py` runs it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.results import origin
from benchmarks.common.runner import ROOT
from colocate.cli import main as colocate

MODES = ("native", "colocate", "server")
VLLM_MEMORY = 0.2
"""Share of the GPU for vLLM: ample for a model of 0.2 million parameters."""
GAP = "sampling/sampling_logp_difference"


def engine_words(mode: str, server_url: str | None) -> list[str]:
    """The options in which the modes differ."""
    if mode == "native":
        return ["--engine", "native"]
    if mode == "server":
        return ["--engine", "vllm_server", "--vllm_server_base_url", str(server_url)]
    words = ["--engine", "vllm", "--vllm_gpu_memory_utilization", str(VLLM_MEMORY)]
    # On a CPU vLLM would compile C++ for minutes.
    return words if torch.cuda.is_available() else [*words, "--vllm_engine_kwargs", '{"enforce_eager": true}']


def train(options: argparse.Namespace, directory: str) -> None:
    """Raises RuntimeError if the run fails."""
    words = [
        "train", str(ROOT / "recipes/quickstart.yaml"),
        "--model_name_or_path", str(options.start / "model"), "--dataset_name", str(options.start / "data"),
        "--reward_funcs", f"{ROOT / 'examples/quickstart/addition.py'}:correct",
        "--output_dir", directory, "--max_steps", str(options.steps), "--seed", str(options.seed),
        "--eval_on_start", "false", "--eval_strategy", "no", "--logging_steps", "50",
        "--use_cpu", "false" if torch.cuda.is_available() else "true",
        *engine_words(options.mode, options.server_url),
    ]  # fmt: skip
    if code := colocate(words):
        raise RuntimeError(f"colocate {' '.join(words)} ended with {code}.")


def curves(metrics: Path) -> dict[str, list[float]]:
    """Of each rollout: the step that it came before, its reward, and |log π_trainer − log π_engine| there."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    # A rollout's own step is the one at which trainer and engine have the same weights.
    rollouts = [line for line in lines if "reward" in line and not line.get("eval")]
    names = {"step": "step", "reward": "reward", "gap_mean": f"{GAP}/mean", "gap_max": f"{GAP}/max"}
    return {name: [line[metric] for line in rollouts] for name, metric in names.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", choices=MODES, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True, help="optimizer steps, four to a rollout")
    parser.add_argument("--start", type=Path, required=True)
    parser.add_argument("--server-url", help="of mode server")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    record: dict[str, Any] = {
        "kind": "curve",
        "mode": options.mode,
        "seed": options.seed,
        "num_steps": options.steps,
        **origin(),
    }
    start_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        train(options, directory)
        record |= curves(Path(directory) / "metrics.jsonl")
    record["total_s"] = time.perf_counter() - start_s
    options.out.write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
