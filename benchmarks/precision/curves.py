"""Rewards of training on rollouts in 16 and in 8 bits: writes `results/precision-curves-<hardware>.json`.

    python -m benchmarks.precision.curves --hardware cpu [--jobs 16] [--seeds 3] [--steps 300]

The quickstart's task, from one warm start, at every precision with every seed, corrected token by token. A
run is a process with one thread on a CPU, whose engine rounds to e4m3 as kernels do. Seeds are paired: a
difference to bf16 is of two runs with the same prompts in the same order. A run that has left its record in
--records is not repeated.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import statistics
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.common.results import Record, read_records
from benchmarks.common.suite import Claims, Suite
from benchmarks.curves.run import warm_start
from benchmarks.curves.suite import NUM_FINAL, final_reward
from benchmarks.precision.cases import PRECISIONS

RUN_S = 1800.0
"""A run that takes longer has failed."""


class PrecisionCurvesSuite(Suite):
    """The same training on rollouts of each precision."""

    name = "precision-curves"
    parts = ("runs",)
    hardware = "cpu"
    has_tiny = False

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs side by side")
        parser.add_argument("--seeds", type=int, default=3)
        parser.add_argument("--steps", type=int, default=300, help="optimizer steps of every run")

    def measure(self, part: str) -> None:
        """Run what is missing, as far as the time goes."""
        done = {(record["precision"], record["seed"]) for record in read_records(self.records)}
        runs = [run for run in itertools.product(PRECISIONS, range(self.options.seeds)) if run not in done]
        start = warm_start(self.records / "start")
        with ThreadPoolExecutor(self.options.jobs) as pool:
            list(pool.map(lambda run: self._train(*run, start=start), runs))

    def _train(self, precision: str, seed: int, *, start: Path) -> None:
        if self.time_is_up():
            return
        self.run(
            "curves.run", "--start", start, "--steps", self.options.steps, "--curves", "reward", "gap_mean",
            "--label", f"precision={precision}", f"seed={seed}", "--option", f"seed={seed}",
            f"rollout_precision={precision}", "vllm_importance_sampling_mode=token_truncate",
            "--out", self.out(f"{precision}-{seed}"),
            timeout_s=RUN_S,
            OMP_NUM_THREADS="1",
            CUDA_VISIBLE_DEVICES="",
        )  # fmt: skip

    def claims(self, records: list[Record]) -> Claims:
        return compute_claims(records, self.options.seeds)

    def setup(self, records: list[Record]) -> dict[str, Any]:
        return {
            "num_final_steps": NUM_FINAL,
            "num_seeds": self.options.seeds,
            "num_steps": self.options.steps,
        }


def compute_claims(records: list[Record], num_seeds: int) -> Claims:
    """Every claim; None where a run is missing.

    - `final_reward_<precision>`: the mean over seeds.
    - `final_reward_difference_<precision>`: of it to that of bf16, and `…_error`: the standard error of the
      differences of runs of one seed.
    """
    claims: Claims = {}
    rewards = {(record["precision"], int(record["seed"])): final_reward(record) for record in records}
    for precision in PRECISIONS:
        values = [rewards[precision, seed] for seed in range(num_seeds) if (precision, seed) in rewards]
        is_whole = len(values) == num_seeds
        claims[f"final_reward_{precision}"] = statistics.fmean(values) if is_whole else None
        pairs = [(rewards.get((precision, seed)), rewards.get(("bf16", seed))) for seed in range(num_seeds)]
        differences = [value - base for value, base in pairs if value is not None and base is not None]
        if precision == "bf16" or len(differences) < num_seeds:
            continue
        claims[f"final_reward_difference_{precision}"] = statistics.fmean(differences)
        if num_seeds > 1:
            error = statistics.stdev(differences) / math.sqrt(num_seeds)
            claims[f"final_reward_difference_{precision}_error"] = error
    return claims


if __name__ == "__main__":
    PrecisionCurvesSuite.main()
