"""The same training in three modes of rollout, three seeds each: writes `results/curves-<hardware>.json`.

    python -m benchmarks.curves.suite --hardware h200 [--parts native colocate vllm-server] [--limit-s 540]
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
import math
import statistics
import time
from contextlib import nullcontext
from typing import Any

import torch

from benchmarks.common.results import Record, read_records
from benchmarks.common.suite import Claims, Suite, visible_gpus
from benchmarks.common.vllm_server import vllm_server
from benchmarks.curves.run import MODES, VLLM_MEMORY, engine_options, warm_start

NUM_FINAL = 10
"""Rollouts at the end of a run whose mean reward is its final reward."""
RUN_S = 420.0
"""A run that takes longer has failed."""


class CurvesSuite(Suite):
    """The same training in three modes of rollout."""

    name = "curves"
    parts = MODES
    has_tiny = False

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--seeds", type=int, default=3)
        parser.add_argument("--steps", type=int, default=120, help="optimizer steps, four to a rollout")

    def measure(self, part: str) -> None:
        """Run what is missing of a mode, as far as the time goes."""
        done = {record["seed"] for record in read_records(self.records) if record["mode"] == part}
        missing = [seed for seed in range(self.options.seeds) if seed not in done]
        if not missing or self.time_is_up():
            return
        gpus, start = visible_gpus(max(1, torch.cuda.device_count())), warm_start(self.records / "start")
        server = vllm_server(
            start / "model",
            *("--gpu-memory-utilization", str(VLLM_MEMORY)),
            # vLLM would round a float32 model, which the trainer keeps on a CPU, to bfloat16.
            *([] if torch.cuda.is_available() else ["--dtype", "float32", "--enforce-eager"]),
            gpu=gpus[-1],
            log=self.records / f"{time.time_ns()}-server.log",
            environment=self.environment,
        )
        with self.failure_noted(part), server if part == "server" else nullcontext() as url:
            for seed in missing:
                if not self.time_is_up():
                    options = engine_options(part, url) | {"seed": str(seed)}
                    self.run(
                        "curves.run", "--label", f"mode={part}", f"seed={seed}", "--start", start,
                        "--steps", self.options.steps, "--out", self.out(f"{part}-{seed}"),
                        "--option", *(f"{name}={value}" for name, value in options.items()),
                        timeout_s=RUN_S,
                        CUDA_VISIBLE_DEVICES=gpus[0],
                    )  # fmt: skip

    def claims(self, records: list[Record]) -> Claims:
        return compute_claims(records, self.options.seeds)

    def setup(self, records: list[Record]) -> dict[str, Any]:
        return {"num_final_rollouts": NUM_FINAL, "summary": summary(records)}


# ── Claims ───────────────────────────────────────────────────────────────────────────────────────────────


def final_reward(record: Record) -> float:
    return statistics.fmean(record["reward"][-NUM_FINAL:])


def compute_claims(records: list[Record], num_seeds: int) -> Claims:
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
    """The modes' rewards at the beginning and the end, the log-probs' difference, and a run's time."""
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


if __name__ == "__main__":
    CurvesSuite.main()
