"""The same training in three modes of rollout, three seeds each: writes `results/curves-<hardware>.json`.

    python -m benchmarks.curves.suite --hardware h200 [--modes native colocate server] [--limit-s 540]
    python -m benchmarks.curves.suite --hardware h200 --merge

The quickstart's task, from one warm start, with the same prompts in the same order for each seed. Engines
draw from other random numbers, so curves of one seed differ between modes as curves of two seeds do within a
mode: that noise is what their difference is held against. The raw difference of engine's and trainer's
log-probs stands beside the rewards.

Every run is a process that leaves a record in --records; one whose record is there is not repeated. The
server runs on the last GPU, with one GPU beside the trainer on it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

import torch

from benchmarks.common.results import committed, write_suite_result
from benchmarks.common.runner import ROOT, Record, Runner, read_records, visible_gpus
from benchmarks.common.vllm_server import vllm_server
from benchmarks.curves.run import MODES, VLLM_MEMORY

NUM_FINAL = 10
"""Rollouts at the end of a run whose mean reward is its final reward."""
RUN_S = 420.0
"""A run that takes longer has failed."""


class Suite(Runner):
    """Runs the trainings as processes."""

    def __init__(self, options: argparse.Namespace, commit: str) -> None:
        super().__init__(options.records, commit, extra_words=[], limit_s=options.limit_s)
        self._options = options
        self._start = options.records / "start"
        self._gpus = visible_gpus(max(1, torch.cuda.device_count()))

    def warm_start(self) -> None:
        """The model and the data that every run starts from."""
        if not (self._start / "data" / "test.jsonl").exists():  # written last
            script = ROOT / "examples/quickstart/warm_start.py"
            subprocess.run([sys.executable, script, "--output_dir", self._start], check=True)

    def measure(self, mode: str) -> None:
        """Run what is missing of a mode, as far as the time goes."""
        done = {record["seed"] for record in read_records(self.records) if record["mode"] == mode}
        missing = [seed for seed in range(self._options.seeds) if seed not in done]
        if not missing or self.time_is_up():
            return
        server = vllm_server(
            self._start / "model",
            *("--gpu-memory-utilization", str(VLLM_MEMORY)),
            # vLLM would round a float32 model, which the trainer keeps on a CPU, to bfloat16.
            *([] if torch.cuda.is_available() else ["--dtype", "float32", "--enforce-eager"]),
            gpu=self._gpus[-1],
            log=self.records / f"{time.time_ns()}-server.log",
            environment=self.environment,
        )
        with self.failure_noted(mode), server if mode == "server" else nullcontext() as url:
            for seed in missing:
                if not self.time_is_up():
                    self._train(mode, seed, url)

    def _train(self, mode: str, seed: int, url: str | None) -> None:
        self.run(
            "curves.run", "--mode", mode, "--seed", seed, "--steps", self._options.steps,
            "--start", self._start, "--out", self.out(f"{mode}-{seed}"),
            *(["--server-url", url] if url else []),
            timeout_s=RUN_S,
            CUDA_VISIBLE_DEVICES=self._gpus[0],
        )  # fmt: skip


# ── Claims ───────────────────────────────────────────────────────────────────────────────────────────────


def final_reward(record: Record) -> float:
    return statistics.fmean(record["reward"][-NUM_FINAL:])


def compute_claims(records: list[Record], num_seeds: int) -> dict[str, float | None]:
    """Every claim; None where a run is missing.

    - `final_reward_difference`: the largest between two modes, each the mean of its seeds' final rewards.
    - `final_reward_seed_std`: of one run's final reward over seeds, pooled over the modes.
    - `final_reward_difference_std`: what the noise of seeds alone makes of the difference of two such means.
    - `logprob_gap_<mode>`: median over rollouts of the mean |log π_trainer − log π_engine| of their tokens.
    """
    runs = {mode: [record for record in records if record["mode"] == mode] for mode in MODES}
    is_whole = num_seeds > 1 and all(
        {record["seed"] for record in of_mode} == set(range(num_seeds)) for of_mode in runs.values()
    )
    final = {mode: [final_reward(record) for record in of_mode] for mode, of_mode in runs.items()}
    difference = std = None
    if is_whole:
        means = [statistics.fmean(rewards) for rewards in final.values()]
        difference = max(abs(a - b) for a, b in itertools.combinations(means, 2))
        std = math.sqrt(statistics.fmean(statistics.variance(rewards) for rewards in final.values()))
    gaps = {mode: [gap for record in of_mode for gap in record["gap_mean"]] for mode, of_mode in runs.items()}
    return {
        "final_reward_difference": difference,
        "final_reward_seed_std": std,
        "final_reward_difference_std": None if std is None else std * math.sqrt(2 / num_seeds),
        **{
            f"logprob_gap_{mode}": statistics.median(of_mode) if of_mode else None
            for mode, of_mode in gaps.items()
        },
    }


def summary(records: list[Record]) -> dict[str, dict[str, float]]:
    """By mode: rewards at the beginning and the end, the log-probs' difference, and a run's time."""
    rows = {}
    for mode in MODES:
        runs = [record for record in records if record["mode"] == mode]
        if runs:
            rows[mode] = {
                "first_reward": statistics.fmean(record["reward"][0] for record in runs),
                "final_reward": statistics.fmean(map(final_reward, runs)),
                "gap_mean": statistics.median(gap for record in runs for gap in record["gap_mean"]),
                "gap_max": max(gap for record in runs for gap in record["gap_max"]),
                "total_s": statistics.median(record["total_s"] for record in runs),
            }
    return rows


def merge(options: argparse.Namespace) -> None:
    """Print the claims, and write the result if all are there."""
    records = read_records(options.records)
    claims, rows = compute_claims(records, options.seeds), summary(records)
    print(json.dumps({"summary": rows, "claims": claims}, indent=1))
    write_suite_result(
        "curves",
        options.hardware,
        claims,
        records,
        num_final_rollouts=NUM_FINAL,
        summary=rows,
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=120, help="optimizer steps, four to a rollout")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="begin no run after so long")
    parser.add_argument(
        "--records", type=Path, default=Path(tempfile.gettempdir()) / "colocate-curves-records"
    )
    parser.add_argument("--merge", action="store_true", help="measure nothing")
    parser.add_argument("--hardware", default="h200")
    return parser.parse_args()


def main() -> None:
    options = parse()
    # An end from outside must not leave a server on the GPU.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if not options.merge:
        suite = Suite(options, committed())
        suite.warm_start()
        for mode in options.modes:
            suite.measure(mode)
    merge(options)
    if not options.merge:
        suite.exit_if_failed()


if __name__ == "__main__":
    main()
